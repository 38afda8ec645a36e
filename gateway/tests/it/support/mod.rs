//! Helpers of the tests: callers, backends, agents, processes, and a complete gateway and agent in
//! this process.

pub(crate) mod acme_front;
#[path = "../../../acme/tests/servers/mod.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
pub(crate) mod acme_servers;
pub(crate) mod admin_api;
pub(crate) mod agents;
pub(crate) mod apex;
pub(crate) mod doctor;
pub(crate) mod forms;
pub(crate) mod kept_connection;
pub(crate) mod lossy_disk;
pub(crate) mod peers;
pub(crate) mod processes;
#[path = "../../../../shared/tests/programs/mod.rs"]
pub(crate) mod programs;
pub(crate) mod request_log;
pub(crate) mod setup;
pub(crate) mod small_disk;
pub(crate) mod stopwatch;
pub(crate) mod waiting_requests;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gw_base::service::rate::Rate;
use gw_telemetry::counters::{TunnelReport, WorkerReport};

use gw_gateway::Gateway;
use gw_gateway::demo::{Demo, Options};

/// Timeout for events that normally take milliseconds. Only a failing test reaches it.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// The turn of a test that keeps all cores busy: others that do wait for theirs. Tests of the rest
/// run beside it.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn options(backend: Option<String>) -> Options {
    Options {
        backend,
        workers: 2,
        rate: Rate::new(1_000_000, 1_000_000).unwrap(),
        ..Options::default()
    }
}

/// A gateway and an agent in this process, in front of `backend` or the built-in echo.
pub(crate) fn demo(backend: Option<String>) -> Demo {
    Demo::start(&options(backend)).unwrap()
}

/// Moves a folder of another file system into `into`, and leaves a link in its place.
fn move_to(folder: &Path, into: &Path) {
    let copied = Command::new("cp")
        .arg("--archive")
        .args([folder, into])
        .status();
    assert!(copied.unwrap().success());
    fs::remove_dir_all(folder).unwrap();
    symlink(into.join(folder.file_name().unwrap()), folder).unwrap();
}

/// Bytes that the file system has allocated for a file or folder.
pub(crate) fn on_disk(path: &Path) -> u64 {
    let output = Command::new("du")
        .args(["--summarize", "--block-size=1"])
        .arg(path)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

/// Calls `look` repeatedly until it returns a value; panics with `what` after [`SOON`].
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        let waited = began.elapsed();
        assert!(waited < SOON, "timed out waiting for: {what}");
        // A look often costs more than what it waits for: after a while, they are further apart.
        let pause = (waited / 20).clamp(Duration::from_millis(5), Duration::from_millis(20));
        std::thread::sleep(pause);
    }
}

/// The reports of all workers. On a busy machine the report of a worker can be missing at first.
///
/// A worker reports after it has put in force what was published before, such as a change of the
/// records.
pub(crate) fn reports(demo: &Demo) -> Vec<WorkerReport> {
    all_reports(demo.gateway())
}

/// As [`reports`], of a gateway.
pub(crate) fn all_reports(gateway: &Gateway) -> Vec<WorkerReport> {
    let control = gateway.control();
    eventually("all workers report", || {
        Some(control.reports()).filter(|reports| reports.len() == control.workers())
    })
}

pub(crate) fn tunnels(demo: &Demo) -> Vec<TunnelReport> {
    reports(demo)
        .into_iter()
        .flat_map(|report| report.tunnels)
        .collect()
}

/// Number of tunnels that have ended, by reason.
pub(crate) fn tunnels_ended(demo: &Demo) -> BTreeMap<&'static str, u64> {
    let mut ended = BTreeMap::new();
    for (reason, count) in reports(demo)
        .into_iter()
        .flat_map(|report| report.by_reason.tunnels_ended)
    {
        *ended.entry(reason).or_default() += count;
    }
    ended
}

/// Waits until both the gateway and the agent count no request on any tunnel.
pub(crate) fn wait_until_slots_are_free(demo: &Demo) {
    eventually("all slots free", || {
        let free = |tunnel: &TunnelReport| tunnel.in_flight == 0 && tunnel.slots_in_use == Some(0);
        tunnels(demo).iter().all(free).then_some(())
    });
}
