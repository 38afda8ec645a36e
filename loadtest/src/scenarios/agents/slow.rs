//! Two agents, of which one is 100 times slower.

use std::time::Duration;

use super::site::{Plan, Site};
use super::table::{Row, percent};
use crate::backend::{Backend, Received};
use crate::callers::{Methods, Outcome};
use crate::failure::Failure;
use crate::report::{median, millis};

const DELAY: Duration = Duration::from_millis(5);
const SLOWER: u32 = 100;
const CALLERS: u32 = 8;
const LENGTH: Duration = Duration::from_secs(5);
const ROUNDS: usize = 3;
/// Largest allowed share of the slow agent, in percent.
const SHARE_MAX: f64 = 3.0;
/// Largest allowed ratio of the median to the one without the slow agent.
const P50_MAX: f64 = 1.2;

pub(super) fn run(site: &Site) -> Result<Vec<Row>, Failure> {
    let received = Received::default();
    let [healthy, slow] = [
        received.backend(DELAY, "ok")?,
        received.backend(DELAY * SLOWER, "ok")?,
    ];
    let mut alone = Vec::new();
    let mut beside = Vec::new();
    let mut share = 0.0_f64;
    let mut last = None;
    for _ in 0..ROUNDS {
        alone.push(p50(&call(site, &[&healthy])?));
        let before = slow.requests();
        let outcome = call(site, &[&slow, &healthy])?;
        share = share.max(percent(
            (slow.requests() - before) as u64,
            outcome.answered.len() as u64,
        ));
        beside.push(p50(&outcome));
        last = Some(outcome);
    }
    let alone = median(alone);
    let beside = median(beside);
    let outcome = last.unwrap_or_default();
    Ok(vec![
        Row::new(format!("slow, {CALLERS} callers"), &outcome)
            .check_no_failure(&outcome)
            .check(
                share <= SHARE_MAX,
                format!("slow agent at most {share:.2} % of {ROUNDS} rounds"),
            )
            .check(
                beside <= P50_MAX * alone,
                format!("p50 {beside:.2} ms, healthy alone {alone:.2} ms"),
            ),
    ])
}

fn call(site: &Site, backends: &[&Backend]) -> Result<Outcome, Failure> {
    let pool = site.pool(
        backends
            .iter()
            .map(|backend| Plan::new(&backend.url))
            .collect(),
    )?;
    let calls = pool.call(CALLERS, None, Methods::GetAndPost)?;
    std::thread::sleep(LENGTH);
    calls.stop()
}

fn p50(outcome: &Outcome) -> f64 {
    millis(outcome.figures().1)
}
