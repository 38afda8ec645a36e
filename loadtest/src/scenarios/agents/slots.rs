//! Two agents, of which one has a single slot.

use std::time::Duration;

use super::site::{Plan, Site};
use super::table::Row;
use crate::backend::Received;
use crate::callers::Methods;
use crate::failure::Failure;

const SLOTS: [u32; 2] = [1, 128];
const CALLERS: [u32; 3] = [1, 8, 64];
const DELAY: Duration = Duration::from_millis(100);
const LENGTH: Duration = Duration::from_secs(4);

pub(super) fn run(site: &Site) -> Result<Vec<Row>, Failure> {
    CALLERS.iter().map(|callers| call(site, *callers)).collect()
}

fn call(site: &Site, callers: u32) -> Result<Row, Failure> {
    let received = Received::default();
    let backend = received.backend(DELAY, "ok")?;
    let pool = site.pool(
        SLOTS
            .map(|slots| Plan {
                slots,
                ..Plan::new(&backend.url)
            })
            .into(),
    )?;
    let calls = pool.call(callers, None, Methods::GetAndPost)?;
    std::thread::sleep(LENGTH);
    let outcome = calls.stop()?;
    let [one, many] = [pool.agents[0].requests()?, pool.agents[1].requests()?];
    Ok(Row::new(format!("slots, {callers} callers"), &outcome)
        .check_no_failure(&outcome)
        .note(format!(
            "agent with 1 slot {one} requests, with 128 slots {many}"
        )))
}
