//! `gw-simulation --seeds 1000`
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    let from: u64 = std::env::args()
        .nth(1)
        .and_then(|s| s.parse().ok())
        .unwrap_or(0);
    let count: u64 = std::env::args()
        .nth(2)
        .and_then(|s| s.parse().ok())
        .unwrap_or(1);
    let trace = std::env::args().nth(3).is_some();
    let began = std::time::Instant::now();
    let (mut requests, mut relayed) = (0, 0);
    for seed in from..from + count {
        let scenario = gw_simulation::scenario::Scenario::new(seed);
        let outcome = gw_simulation::run::run(&scenario, trace);
        if let Some(text) = &outcome.trace {
            eprintln!("{text}");
        }
        if trace {
            eprintln!("{scenario}");
        }
        requests += outcome.report.requests;
        relayed += outcome.report.relayed;
        if let Some(violation) = &outcome.report.violation {
            eprintln!("seed {seed}: {violation:?}");
        }
        if count == 1 {
            eprintln!(
                "seed {seed} fingerprint {:016x} {:?}",
                outcome.fingerprint, outcome.report
            );
        }
    }
    eprintln!(
        "{requests} requests, {relayed} relayed, {:?}",
        began.elapsed()
    );
}
