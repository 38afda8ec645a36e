//! Two agents of a service, of which one is 100 times slower.

use std::path::Path;
use std::time::Duration;

use crate::agents::{Plan, Pool};
use crate::backend::{Backend, Received};
use crate::callers::{Callers, Load, Methods, Outcome, PER_CONNECTION};
use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure};
use crate::report::{median, millis, say};

const DELAY: Duration = Duration::from_millis(5);
const SLOWER: u32 = 100;
const CALLERS: u32 = 8;
const LENGTH: Duration = Duration::from_secs(5);
const ROUNDS: usize = 3;
/// Largest allowed share of the slow agent, in percent.
const SHARE_MAX: f64 = 3.0;
/// Largest allowed ratio of the median to the one without the slow agent.
const P50_MAX: f64 = 1.2;

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    let demo = Demo::start(gateway, &Options::default())?;
    let received = Received::default();
    let healthy = received.backend(DELAY, "ok")?;
    let slow = received.backend(DELAY * SLOWER, "ok")?;
    let mut alone = Vec::new();
    let mut beside = Vec::new();
    let mut share = 0.0_f64;
    for _ in 0..ROUNDS {
        alone.push(p50(&call(gateway, &demo, &[&healthy])?));
        let before = slow.requests();
        let outcome = call(gateway, &demo, &[&slow, &healthy])?;
        let of_slow = (slow.requests() - before) as f64;
        share = share.max(100.0 * of_slow / outcome.answered.len().max(1) as f64);
        beside.push(p50(&outcome));
    }
    let [alone, beside] = [alone, beside].map(median);
    say(format_args!(
        "slow-agent: {CALLERS} callers: p50 {beside:.2} ms beside the slow agent, {alone:.2} ms \
         without it; it gets at most {share:.2} % of the requests"
    ));
    ensure(share <= SHARE_MAX, || {
        "the slow agent gets too many requests".to_owned()
    })?;
    ensure(beside <= P50_MAX * alone, || {
        "requests are slower beside the slow agent".to_owned()
    })?;
    demo.stop()
}

fn call(gateway: &Path, demo: &Demo, backends: &[&Backend]) -> Result<Outcome, Failure> {
    let plans = backends.iter().map(|backend| Plan::new(&backend.url));
    let pool = Pool::start(gateway, demo, plans.collect())?;
    let callers = Callers::send(&Load {
        targets: vec![pool.target],
        callers: CALLERS,
        rate: None,
        methods: Methods::GetAndPost,
        per_connection: PER_CONNECTION,
    });
    std::thread::sleep(LENGTH);
    let outcome = callers.stop()?;
    let failed = outcome.failed.len() + outcome.sent_again;
    ensure(failed == 0, || format!("{failed} requests failed"))?;
    Ok(outcome)
}

fn p50(outcome: &Outcome) -> f64 {
    millis(outcome.figures().1)
}
