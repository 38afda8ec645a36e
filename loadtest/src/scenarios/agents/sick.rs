//! Two agents, of which one cannot reach its backend.

use std::time::{Duration, Instant};

use super::Options;
use super::site::{Plan, Site};
use super::table::{Row, percent};
use crate::backend::{BlackHole, Received, Refusing};
use crate::callers::Methods;
use crate::failure::Failure;

/// Time in which the gateway learns that the agent is sick.
const LEARNED_WITHIN: Duration = Duration::from_secs(1);
const LENGTH: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(10);
/// Largest allowed share of the sick agent, in percent.
const SHARE_MAX: f64 = 1.0;

#[derive(Debug, Clone, Copy)]
pub(super) enum Sickness {
    /// The backend refuses connections.
    Refuses,
    /// The backend does not answer a connect.
    DoesNotAnswer,
    /// The backend does not speak TLS.
    FailsTls,
}

pub(super) fn run(site: &Site, sickness: Sickness, options: &Options) -> Result<Vec<Row>, Failure> {
    options
        .callers
        .iter()
        .map(|callers| call(site, sickness, *callers, options.requests))
        .collect()
}

fn call(site: &Site, sickness: Sickness, callers: u32, requests: usize) -> Result<Row, Failure> {
    let received = Received::default();
    let healthy = received.backend(Duration::ZERO, "healthy")?;
    let refusing = Refusing::new()?;
    let hole = BlackHole::new()?;
    let sick = match sickness {
        Sickness::Refuses => refusing.url(),
        Sickness::DoesNotAnswer => hole.url(),
        Sickness::FailsTls => received
            .backend(Duration::ZERO, "plain")?
            .url
            .replace("http:", "https:"),
    };
    let pool = site.pool(vec![Plan::new(sick), Plan::new(&healthy.url)])?;
    let sick = &pool.agents[0];
    let calls = pool.call(callers, None, Methods::GetAndPost)?;
    let began = Instant::now();
    std::thread::sleep(LEARNED_WITHIN);
    let sick_first = sick.requests()?;
    let all_first = calls.sent();
    while calls.sent() < requests || began.elapsed() < LENGTH {
        std::thread::sleep(TICK);
    }
    let sick_all = sick.requests()?;
    let all = calls.sent();
    let outcome = calls.stop()?;
    let share = percent(sick_all - sick_first, (all - all_first) as u64);
    let (posts, twice) = received.posts();
    let name = match sickness {
        Sickness::Refuses => "refuse",
        Sickness::DoesNotAnswer => "blackhole",
        Sickness::FailsTls => "tls",
    };
    Ok(Row::new(format!("{name}, {callers} callers"), &outcome)
        .check_no_failure(&outcome)
        .check(
            posts == outcome.posts && twice == 0,
            format!(
                "{} POSTs, {posts} at backends, {twice} twice",
                outcome.posts
            ),
        )
        .check(
            share <= SHARE_MAX,
            format!(
                "sick agent {share:.2} % after the first second ({sick_first} requests before)"
            ),
        ))
}
