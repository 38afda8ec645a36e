//! All nodes are replaced, one after another, behind HAProxy and under load.

use std::path::Path;
use std::time::Duration;

use super::haproxy::Balancer;
use super::nodes::{NODES, Region};
use crate::backend::Received;
use crate::callers::{CALLERS, Callers};
use crate::failure::{Failure, ensure};
use crate::report::{millis, say};

const RATE: u32 = 1000;
const TICK: Duration = Duration::from_millis(50);

pub(super) fn run(gateway: &Path, requests: usize) -> Result<(), Failure> {
    let received = Received::default();
    let mut region = Region::start(gateway, Some(&received.start()?))?;
    // The demo's own processes cannot be replaced.
    for node in 0..NODES {
        region.kill(node)?;
        region.restart(node)?;
        region.wait_for_members(NODES)?;
    }
    region.owner()?;
    let balancer = Balancer::start(&region.addresses())?;
    let callers = Callers::start(&region.target_at(balancer.port), CALLERS, RATE);
    let wait_for = |share: usize| {
        while callers.sent() < requests * share / (NODES + 1) {
            std::thread::sleep(TICK);
        }
    };
    for node in 0..NODES {
        wait_for(node + 1);
        region.replace(node)?;
    }
    wait_for(NODES + 1);
    let outcome = callers.stop()?;
    drop(balancer);
    region.stop()?;
    let (slowest, p50, p99) = outcome.figures();
    say(format_args!(
        "region: {NODES} nodes replaced; of {} requests {} failed; p50 {:.2} ms, p99 {:.1} ms, \
         slowest {:.0} ms; {} sent again on a new connection; {} request ids twice at the backend",
        outcome.answered.len() + outcome.failed.len(),
        outcome.failed.len(),
        millis(p50),
        millis(p99),
        millis(slowest),
        outcome.sent_again,
        received.twice()
    ));
    for failed in outcome.failed.iter().take(10) {
        say(format_args!(
            "region: {} after {:.0} ms",
            failed.what,
            millis(failed.ended - failed.began)
        ));
    }
    ensure(outcome.failed.is_empty(), || "requests failed".to_owned())?;
    ensure(received.twice() == 0, || {
        "a request reached the backend twice".to_owned()
    })
}
