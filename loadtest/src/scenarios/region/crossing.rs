//! Cost of a request that crosses nodes, beside a request at the owner.

use super::{NODES, owner};
use crate::client::Target;
use crate::demo::Demo;
use crate::failure::{Failure, ensure};
use crate::load;
use crate::machine::procfs;
use crate::report::{median, say};

/// Rounds at the owner and at another node, in turns, so that noise of the machine affects both.
const ROUNDS: usize = 10;
const REQUESTS_PER_ROUND: usize = 20_000;
const CALLERS: u32 = 32;
/// Requests of one caller, one after another.
const SEQUENTIAL: usize = 2000;
const MORE_CPU_MAX: f64 = 35.0;
const MORE_TIME_MAX: f64 = 500.0;

/// Microseconds.
#[derive(Clone, Copy)]
struct Cost {
    cpu: f64,
    p50: f64,
}

pub(super) fn run(region: &Demo) -> Result<(), Failure> {
    let owner = owner(region)?;
    let targets = [owner, (owner + 1) % NODES];
    let targets = targets.map(|node| region.target.at_port(region.nodes[node].port));
    let mut costs = [Vec::new(), Vec::new()];
    for target in &targets {
        round(region, target)?;
    }
    for _ in 0..ROUNDS {
        for (target, costs) in targets.iter().zip(&mut costs) {
            costs.push(round(region, target)?);
        }
    }
    let [here, crossing] = costs.map(|costs| Cost {
        cpu: median(costs.iter().map(|cost| cost.cpu)),
        p50: median(costs.iter().map(|cost| cost.p50)),
    });
    let more_cpu = crossing.cpu - here.cpu;
    let more_time = crossing.p50 - here.p50;
    say(format_args!(
        "region: at the owner {:.1} µs of CPU per request, p50 {:.0} µs; at another node {:.1} µs \
         in both nodes ({more_cpu:+.1}), p50 {:.0} µs ({more_time:+.0}); medians of {ROUNDS} \
         rounds",
        here.cpu, here.p50, crossing.cpu, crossing.p50
    ));
    ensure(more_cpu <= MORE_CPU_MAX, || {
        format!("a crossing request costs {more_cpu:.1} µs of CPU more")
    })?;
    ensure(more_time <= MORE_TIME_MAX, || {
        format!("a crossing request takes {more_time:.0} µs more")
    })
}

fn round(region: &Demo, target: &Target) -> Result<Cost, Failure> {
    // Without agent, backend and PostgreSQL.
    let spent = || region.nodes.iter().map(|node| procfs::cpu(node.pid)).sum();
    let cpu = load::cpu_per_request(spent, target, CALLERS, REQUESTS_PER_ROUND)?;
    let (_, p50, _) = load::requests(target, 1, SEQUENTIAL)?.figures();
    Ok(Cost {
        cpu,
        p50: p50.as_secs_f64() * 1e6,
    })
}
