//! Two agents of a service, of which one is 100 times slower.

use std::path::Path;
use std::time::Duration;

use crate::agents::{self, Plan};
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
    for round in 0..ROUNDS {
        let outcome = call(gateway, &demo, 2 * round, &[&healthy])?;
        alone.push(millis(outcome.figures().1));
        let before = slow.requests();
        let outcome = call(gateway, &demo, 2 * round + 1, &[&slow, &healthy])?;
        let of_slow = (slow.requests() - before) as f64;
        share = share.max(100.0 * of_slow / outcome.answered.len().max(1) as f64);
        beside.push(millis(outcome.figures().1));
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

/// Calls a new service whose agents have these backends.
fn call(
    gateway: &Path,
    demo: &Demo,
    number: usize,
    backends: &[&Backend],
) -> Result<Outcome, Failure> {
    let account = "demo";
    let service = [format!("service-{number}")];
    demo.api.create_service(account, &service[0])?;
    let key = demo.api.create_key(account, &service[0], &service)?;
    let connect = |backend: &&Backend| {
        let plan = Plan::new(&backend.url);
        agents::connect(gateway, demo, account, &service, plan)
    };
    let _agents = backends
        .iter()
        .map(connect)
        .collect::<Result<Vec<_>, _>>()?;
    let callers = Callers::send(&Load {
        targets: vec![demo.target_of(account, &service[0], &key.secret)?],
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
