//! Effect of the ring's setup flags: the same echo on rings with different flags, and on epoll.

use gw_shared::runtime::{Driver, RingFlags};

use crate::echo::{Style, cost_per_message};
use crate::load::Load;
use crate::measure::{self, median, micros};

const ROUNDS: usize = 9;
/// Steps that take about 4 µs.
const WORK: u32 = 4000;
const LOADS: [Load; 3] = [
    Load {
        connections: 64,
        message: 100,
        messages: 50_000,
        work: 0,
    },
    Load {
        connections: 64,
        message: 100,
        messages: 50_000,
        work: WORK,
    },
    Load {
        connections: 1,
        message: 100,
        messages: 6_000,
        work: 0,
    },
];

pub(crate) fn probe() {
    measure::print_machine();
    println!(
        "CPU of the server's thread per echo of 100 bytes, µs: median of {ROUNDS} (least–most); \
         ratio to the first"
    );
    for load in LOADS {
        println!(
            "\n{} connections, {} steps of work for each message",
            load.connections, load.work
        );
        // All drivers in each round, so that noise of the machine affects all.
        let mut costs = vec![Vec::new(); drivers().len()];
        for _ in 0..ROUNDS {
            for (driver, costs) in drivers().into_iter().zip(&mut costs) {
                costs.push(micros(cost_per_message(driver, Style::Readiness, load).cpu));
            }
        }
        let first = median(costs[0].clone());
        for (driver, costs) in drivers().iter().zip(costs) {
            println!(
                "  {driver:45} {}  ×{:.2}",
                measure::spread(&costs),
                median(costs.clone()) / first
            );
        }
    }
}

fn drivers() -> Vec<Driver> {
    let ring = |coop_taskrun, single_issuer| {
        Driver::IoUring(RingFlags {
            coop_taskrun,
            single_issuer,
        })
    };
    vec![
        ring(false, false),
        ring(true, false),
        ring(true, true),
        Driver::Epoll {
            reason: "for comparison".into(),
        },
    ]
}
