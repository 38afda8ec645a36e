//! Two agents whose backends refuse connections, until one of them does not.

use std::time::{Duration, Instant};

use super::site::{Plan, Site};
use super::table::Row;
use crate::backend::{Received, Refusing};
use crate::callers::{Methods, What};
use crate::failure::Failure;
use crate::report::millis;

const CALLERS: u32 = 8;
const REQUESTS: usize = 10_000;
const AFTERWARDS: Duration = Duration::from_secs(4);
const TICK: Duration = Duration::from_millis(10);
/// Largest allowed number of attempts per request.
const ATTEMPTS_MAX: f64 = 1.25;
const REFUSED_WITHIN: Duration = Duration::from_secs(1);
const BACK_WITHIN: Duration = Duration::from_secs(1);

pub(super) fn run(site: &Site) -> Result<Vec<Row>, Failure> {
    let first = Refusing::new()?;
    let second = Refusing::new()?;
    let pool = site.pool(vec![Plan::new(first.url()), Plan::new(second.url())])?;
    let calls = pool.call(CALLERS, None, Methods::GetAndPost)?;
    while calls.sent() < REQUESTS {
        std::thread::sleep(TICK);
    }
    let mut attempts = 0;
    for agent in &pool.agents {
        attempts += agent.requests()?;
    }
    let attempts = attempts as f64 / calls.sent() as f64;
    let received = Received::default();
    let back = Instant::now();
    let _backend = first.listen(&received, Duration::ZERO, "ok")?;
    std::thread::sleep(AFTERWARDS);
    let outcome = calls.stop()?;
    let last_failure = outcome
        .failed
        .iter()
        .map(|failed| failed.began)
        .max()
        .unwrap_or(back);
    let recovered = last_failure.saturating_duration_since(back);
    let refused_after = outcome
        .failed
        .iter()
        .map(|failed| failed.ended - failed.began)
        .max()
        .unwrap_or_default();
    let by_gateway = outcome
        .failed
        .iter()
        .filter(|failed| matches!(failed.what, What::Status(_)))
        .count();
    Ok(vec![
        Row::new(format!("all-refuse, {CALLERS} callers"), &outcome)
            .check(
                attempts <= ATTEMPTS_MAX,
                format!("{attempts:.3} attempts per request"),
            )
            .check(
                by_gateway == outcome.failed.len(),
                format!("{by_gateway} errors of the gateway"),
            )
            .check(
                refused_after <= REFUSED_WITHIN,
                format!("slowest error {:.0} ms", millis(refused_after)),
            )
            .check(
                !outcome.answered.is_empty() && recovered <= BACK_WITHIN,
                format!("recovered after {:.0} ms", millis(recovered)),
            ),
    ])
}
