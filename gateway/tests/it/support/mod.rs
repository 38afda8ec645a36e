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
pub(crate) mod gateway;
pub(crate) mod limits;
pub(crate) mod lossy_disk;
pub(crate) mod metrics;
pub(crate) mod peers;
pub(crate) mod processes;
#[path = "../../../../shared/tests/programs/mod.rs"]
pub(crate) mod programs;
pub(crate) mod request_log;
pub(crate) mod scene;
pub(crate) mod small_disk;
pub(crate) mod stopwatch;
pub(crate) mod waiting_requests;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Timeout for events that normally take milliseconds. Only a failing test reaches it.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// The turn of a test that keeps all cores busy: others that do wait for theirs. Tests of the rest
/// run beside it.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
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
