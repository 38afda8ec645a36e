//! Nodes are killed one after another, behind HAProxy and under load.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::backend::Received;

use super::haproxy::Balancer;
use super::nodes::{NODES, Region};
use crate::callers::{CALLERS, Callers, Failed};
use crate::failure::{Failure, ensure};
use crate::report::{millis, say};

const EVERY: Duration = Duration::from_secs(5);
const RATE: u32 = 300;
/// Sockets of a killed process close a moment after its end, and HAProxy notices its end at the
/// next check.
const MOMENT: Duration = Duration::from_millis(200);
const P99_MAX: Duration = Duration::from_secs(1);

pub(super) fn run(gateway: &Path, length: Duration) -> Result<(), Failure> {
    let received = Received::default();
    let mut region = Region::start(gateway, Some(&received.start()?))?;
    region.owner()?;
    let balancer = Balancer::start(&region.addresses())?;
    let callers = Callers::start(&region.target_at(balancer.port), CALLERS, RATE);
    let began = Instant::now();
    let mut kills: Vec<Instant> = Vec::new();
    while began.elapsed() < length {
        let due = Instant::now() + EVERY;
        let node = kills.len() % NODES;
        kills.push(Instant::now());
        region.kill(node)?;
        region.restart(node)?;
        region.wait_for_members(NODES)?;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    let outcome = callers.stop()?;
    drop(balancer);
    region.stop()?;
    let in_flight = |failed: &Failed| {
        kills
            .iter()
            .any(|kill| failed.began <= *kill + MOMENT && failed.ended >= *kill)
    };
    let others: Vec<&Failed> = outcome
        .failed
        .iter()
        .filter(|failed| !in_flight(failed))
        .collect();
    let (slowest, p50, p99) = outcome.figures();
    say(format_args!(
        "region: {} nodes killed in {:.0} s; {} requests answered, {} in flight at a killed node \
         failed, {} others failed; p50 {:.2} ms, p99 {:.1} ms, slowest {:.0} ms; {} sent again on \
         a new connection; {} request ids twice at the backend",
        kills.len(),
        began.elapsed().as_secs_f64(),
        outcome.answered.len(),
        outcome.failed.len() - others.len(),
        others.len(),
        millis(p50),
        millis(p99),
        millis(slowest),
        outcome.sent_again,
        received.twice()
    ));
    for failed in others.iter().take(10) {
        let after = kills
            .iter()
            .filter(|kill| **kill <= failed.ended)
            .map(|kill| failed.began.saturating_duration_since(*kill));
        let after = after.min().unwrap_or_default();
        say(format_args!(
            "region: {} after {:.0} ms, began {:.0} ms after a kill",
            failed.what,
            millis(failed.ended - failed.began),
            millis(after)
        ));
    }
    ensure(others.is_empty(), || {
        "requests failed that were not in flight at a killed node".to_owned()
    })?;
    ensure(p99 <= P99_MAX, || format!("p99 is above {P99_MAX:?}"))?;
    ensure(received.twice() == 0, || {
        "a request reached the backend twice".to_owned()
    })
}
