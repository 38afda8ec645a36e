//! CPU cost of the request log, and its completeness at full speed.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure, wait_until};
use crate::report::{median, say};
use crate::{load, metrics};

const CALLERS: u32 = 32;
/// Number of rounds with the log and of rounds without, in turns, so that noise of the machine
/// affects both.
const ROUNDS: usize = 10;
const REQUESTS_PER_ROUND: usize = 20_000;
/// Largest allowed increase of the CPU time per request with the log.
const MORE_MAX: f64 = 0.10;
/// Timeout for the write of all records.
const WRITTEN_WITHIN: Duration = Duration::from_secs(10);
const PAGE: usize = 1000;

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    let demo = Demo::start(gateway, &Options::default())?;
    // Warm-up.
    round(&demo, false)?;
    let mut with = Vec::new();
    let mut without = Vec::new();
    for _ in 0..ROUNDS {
        without.push(round(&demo, false)?);
        with.push(round(&demo, true)?);
    }
    let [with, without] = [with, without].map(median);
    let more = with / without - 1.0;
    say(format_args!(
        "logging: {with:.1} µs of CPU per request with the log, {without:.1} without ({:+.1} %); \
         medians of {ROUNDS} rounds of {REQUESTS_PER_ROUND} requests, {CALLERS} callers",
        more * 100.0
    ));
    let queued = || "records are not written".to_owned();
    wait_until(WRITTEN_WITHIN, queued, || {
        Ok(metrics::read(&demo.admin_url, "gw_request_log_queued_records")? == 0)
    })?;
    let requests = ROUNDS * REQUESTS_PER_ROUND;
    let dropped = metrics::read(&demo.admin_url, "gw_request_log_dropped_total")?;
    let found = records(&demo)?;
    say(format_args!(
        "logging: of {requests} requests {dropped} records were dropped, {found} are in the log"
    ));
    ensure(dropped == 0 && found == requests, || {
        "records are missing".to_owned()
    })?;
    ensure(more <= MORE_MAX, || {
        format!("the log costs {:.1} %", more * 100.0)
    })?;
    demo.stop()
}

/// CPU time per request in microseconds, with or without the log.
fn round(demo: &Demo, with_log: bool) -> Result<f64, Failure> {
    let setting = json!({ "request_logging": with_log });
    let path = "/accounts/demo/services/echo";
    demo.api.change("PATCH", path, &setting)?;
    load::cpu_per_request(
        || demo.cpu_without_echo(),
        &demo.target,
        CALLERS,
        REQUESTS_PER_ROUND,
    )
}

/// The number of requests in the log.
fn records(demo: &Demo) -> Result<usize, Failure> {
    let mut count = 0;
    let mut cursor = String::new();
    loop {
        let path = format!("/requests?account=demo&service=echo&limit={PAGE}{cursor}");
        let page = demo.api.change("GET", &path, &json!(null))?;
        count += page["items"].as_array().map_or(0, Vec::len);
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return Ok(count),
        }
    }
}
