//! Runs the seeds below the first argument in order, until one fails, and prints it: seed, invariant and what was found, separated
//! by tabs. Prints nothing if none fails. tests/mutants runs it with faults in the product.

use std::error::Error;
use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use gw_simulation::run;
use gw_simulation::scenario::Scenario;
use gw_simulation::world::Violation;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<(), Box<dyn Error>> {
    let seeds: u64 = std::env::args()
        .nth(1)
        .ok_or("the number of seeds is missing")?
        .parse()?;
    let next = AtomicU64::new(0);
    // The first seed that does not run.
    let end = AtomicU64::new(seeds);
    let first: Mutex<Option<(u64, Violation)>> = Mutex::default();
    let run_seeds = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end.load(Ordering::Relaxed) {
                return;
            }
            let Some(violation) = run::run(&Scenario::new(seed), false).report.violation else {
                continue;
            };
            // Those below have begun, and end.
            end.fetch_min(seed, Ordering::Relaxed);
            let mut first = first
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            if first.as_ref().is_none_or(|(known, _)| seed < *known) {
                *first = Some((seed, violation));
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(run_seeds);
        }
    });
    if let Some((seed, Violation { invariant, found })) = first.into_inner()? {
        writeln!(io::stdout(), "{seed}\t{invariant}\t{found}")?;
    }
    Ok(())
}
