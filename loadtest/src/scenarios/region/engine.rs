//! PostgreSQL does not answer for a while, and one node restarts meanwhile.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::haproxy::Balancer;
use super::nodes::{NODES, Region};
use crate::callers::{CALLERS, Callers};
use crate::failure::{Failure, ensure};
use crate::report::{millis, per_mille, say};

const RATE: u32 = 300;
const SERVICE: &str = "/accounts/demo/services/echo";
const REFUSED_WITHIN: Duration = Duration::from_secs(2);
const IN_STEP_WITHIN: Duration = Duration::from_secs(2);
/// Time around the restart whose requests are not compared: those in flight at the killed node
/// fail.
const RESTART: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(20);

pub(super) fn run(gateway: &Path, length: Duration) -> Result<(), Failure> {
    let mut region = Region::start(gateway, None)?;
    let owner = region.owner()?;
    let balancer = Balancer::start(&region.addresses())?;
    let epoch = region.status(owner)?["epoch"].clone();
    let callers = Callers::start(&region.target_at(balancer.port), CALLERS, RATE);
    let began = Instant::now();
    std::thread::sleep(length / 3);

    let away = Instant::now();
    region.signal_engine(Signal::STOP)?;
    std::thread::sleep(length / 2);
    let asked = Instant::now();
    let (status, _) =
        region.administer(owner, "PATCH", SERVICE, &json!({ "burst": 1_000_000_001 }))?;
    let refused = asked.elapsed();
    let killed = Instant::now();
    let restarted = (owner + 1) % NODES;
    region.kill(restarted)?;
    region.restart(restarted)?;
    std::thread::sleep((length / 2).max(2 * RESTART));
    region.signal_engine(Signal::CONT)?;

    let back = Instant::now();
    let in_step = time_until_in_step(&region, owner, back)?;
    region.wait_for_members(NODES)?;
    let same_epoch = region.status(owner)?["epoch"] == epoch;
    let outcome = callers.stop()?;
    drop(balancer);
    region.stop()?;
    let is_other = |began: Instant, ended: Instant| ended < killed || began > killed + RESTART;
    let failed = outcome
        .failed
        .iter()
        .filter(|failed| is_other(failed.began, failed.ended))
        .count();
    let [before, during] = [
        outcome.durations(began, away),
        outcome.durations(away, killed),
    ]
    .map(|all| per_mille(&all, 990));
    let after = per_mille(&outcome.durations(killed + RESTART, back), 990);
    say(format_args!(
        "region: PostgreSQL silent for {:.0} s: p99 {:.2} ms before, {:.2} ms during, {:.2} ms \
         after the restart of a node; of {} requests {failed} failed, and {} in flight at the \
         restarted node; a change got {status} after {:.0} ms; in step {:.0} ms after its return; \
         members {}",
        (back - away).as_secs_f64(),
        millis(before),
        millis(during),
        millis(after),
        outcome.answered.len() + outcome.failed.len(),
        outcome.failed.len() - failed,
        millis(refused),
        millis(in_step),
        if same_epoch { "unchanged" } else { "changed" }
    ));
    ensure(failed == 0, || "requests failed".to_owned())?;
    ensure(status == 503 && refused <= REFUSED_WITHIN, || {
        "a change was not refused in time".to_owned()
    })?;
    ensure(in_step <= IN_STEP_WITHIN, || {
        "the nodes were not in step in time".to_owned()
    })?;
    ensure(same_epoch, || "a node was declared dead".to_owned())
}

/// Changes a setting until all nodes have it. Returns the time since `back`.
fn time_until_in_step(region: &Region, owner: usize, back: Instant) -> Result<Duration, Failure> {
    loop {
        let (status, _) =
            region.administer(owner, "PATCH", SERVICE, &json!({ "burst": 1_000_000_002 }))?;
        let is_current = |node: usize| {
            region
                .administer(node, "GET", SERVICE, &json!(null))
                .is_ok_and(|(_, view)| view["burst"] == 1_000_000_002)
        };
        if status == 200 && (0..NODES).all(is_current) {
            return Ok(back.elapsed());
        }
        ensure(back.elapsed() < Duration::from_secs(60), || {
            format!("no change succeeds: {status}")
        })?;
        std::thread::sleep(TICK);
    }
}
