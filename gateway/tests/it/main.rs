//! The product over real sockets: TLS callers, gateway, tunnel, agent, backends.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests stop at the first surprise")]

mod abuse;
mod admin;
mod agent_abuse;
mod agent_responses;
mod apex;
mod backend;
mod backends;
mod bucket;
mod caller;
mod caller2;
mod certificates;
#[path = "../../../shared/tests/collector/mod.rs"]
mod collector;
mod commands;
mod console;
mod doctor;
mod durability;
mod enrollment;
mod failures;
mod frames;
mod framing;
mod header_lists;
mod http;
mod http2;
mod interim;
mod intermediary;
mod metrics;
mod modified_agent;
mod process;
mod processes;
mod proxies;
mod records;
mod refusals;
mod relaying;
mod request_log;
mod requests;
mod setup;
mod stopping;
mod succession;
mod takeover;
mod targets;
mod tiny_frames;
mod tokens;
mod traces;
mod tunnels;
mod upgrades;
mod windows;
mod workers;

use std::time::{Duration, Instant};

use gw_gateway::demo::{Demo, Options};
use gw_gateway::limit::Rate;
use gw_gateway::telemetry::counters::{TunnelReport, WorkerReport};

/// Longest wait for something that happens in milliseconds; only a failing test waits so long.
const SOON: Duration = Duration::from_secs(30);

fn options(backend: Option<String>) -> Options {
    Options { backend, workers: 2, rate: Rate::new(1_000_000, 1_000_000).unwrap(), ..Options::default() }
}

/// A whole product in this process, in front of `backend` or the built-in echo.
fn demo(backend: Option<String>) -> Demo {
    Demo::start(&options(backend)).unwrap()
}

/// Looks again and again until `look` finds something.
fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "still not: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asserts that what `attempt` measures takes less than a second. A busy machine delays some attempts, a fault all.
fn within_a_second(what: &str, mut attempt: impl FnMut() -> Duration) {
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= Duration::from_secs(1)) {
        assert!(took.len() < 5, "{what} took {took:?}");
        took.push(attempt());
    }
}

/// What every worker reports. One that a busy machine holds up for seconds is missing at first.
fn reports(demo: &Demo) -> Vec<WorkerReport> {
    let control = demo.gateway().control();
    eventually("all workers report", || Some(control.reports()).filter(|reports| reports.len() == control.workers()))
}

fn tunnels(demo: &Demo) -> Vec<TunnelReport> {
    reports(demo).into_iter().flat_map(|report| report.tunnels).collect()
}

/// Waits until no request is on any tunnel, as gateway and agent see it.
fn wait_until_slots_are_free(demo: &Demo) {
    eventually("all slots free", || {
        let free = |tunnel: &TunnelReport| tunnel.in_flight == 0 && tunnel.slots_in_use == Some(0);
        tunnels(demo).iter().all(free).then_some(())
    });
}
