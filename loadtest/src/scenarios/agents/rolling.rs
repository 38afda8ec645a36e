//! The agents of a service are restarted in turn.

use std::time::{Duration, Instant};

use super::site::{Plan, Site};
use super::table::{Row, seconds};
use crate::backend::Received;
use crate::callers::Methods;
use crate::failure::Failure;

const CALLERS: u32 = 32;
const RATE: u32 = 300;
/// Duration of each request, so that some are in flight.
const DELAY: Duration = Duration::from_millis(20);

pub(super) fn run(site: &Site, agents: usize) -> Result<Vec<Row>, Failure> {
    let received = Received::default();
    let backend = received.backend(DELAY, "ok")?;
    let mut pool = site.pool((0..agents).map(|_| Plan::new(&backend.url)).collect())?;
    let calls = pool.call(CALLERS, Some(RATE), Methods::GetAndPost)?;
    let began = Instant::now();
    for number in 0..agents {
        pool.agents[number].stop()?;
        pool.agents[number].start()?;
        pool.wait_for_tunnels(agents)?;
    }
    let took = began.elapsed();
    let outcome = calls.stop()?;
    let (posts, twice) = received.posts();
    Ok(vec![
        Row::new(
            format!("rolling, {agents} agents, {RATE} requests/s"),
            &outcome,
        )
        .check_no_failure(&outcome)
        .check(
            posts == outcome.posts && twice == 0,
            format!(
                "{} POSTs, {posts} at backends, {twice} twice",
                outcome.posts
            ),
        )
        .note(format!("all restarted after {:.0} s", seconds(took))),
    ])
}
