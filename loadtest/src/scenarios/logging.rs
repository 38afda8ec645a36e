//! CPU cost of the request log, and its completeness at full speed.

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure};
use crate::machine::procfs;
use crate::report::say;
use crate::{load, metrics};

const CALLERS: usize = 32;
/// Number of rounds with the log and of rounds without, in turns, so that noise of the machine
/// affects both.
const ROUNDS: usize = 10;
const REQUESTS_PER_ROUND: usize = 20_000;
/// Thread of the echo, whose CPU time is not counted.
const ECHO_THREAD: &str = "gw-echo";
/// Largest allowed increase of the CPU time per request with the log.
const MORE_MAX: f64 = 0.10;
/// Timeout for the write of all records.
const WRITTEN_WITHIN: Duration = Duration::from_secs(10);
/// Time after which a change is in force on every core.
const IN_FORCE_WITHIN: Duration = Duration::from_secs(1);
const PAGE: usize = 1000;
/// Number of requests that are looked up by id.
const LOOKED_UP: usize = 1000;

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    let demo = Demo::start(gateway, &Options::default())?;
    let api = Api::new(&demo);
    let mut with = Vec::new();
    let mut without = Vec::new();
    let mut ids = HashSet::new();
    round(&demo, REQUESTS_PER_ROUND)?;
    for _ in 0..ROUNDS {
        api.set_logging(false)?;
        without.push(round(&demo, REQUESTS_PER_ROUND)?.0);
        api.set_logging(true)?;
        let (cost, round_ids) = round(&demo, REQUESTS_PER_ROUND)?;
        with.push(cost);
        ids.extend(round_ids);
    }
    let requests = ROUNDS * REQUESTS_PER_ROUND;
    let with = median(&mut with);
    let without = median(&mut without);
    let more = with / without - 1.0;
    say(format_args!(
        "logging: {with:.1} µs of CPU per request with the log, {without:.1} without ({:+.1} %); \
         medians of {ROUNDS} rounds of {REQUESTS_PER_ROUND} requests, {CALLERS} callers",
        more * 100.0
    ));

    let deadline = Instant::now() + WRITTEN_WITHIN;
    while metrics::read(&demo.admin_url, "gw_request_log_queued_records")? > 0
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(100));
    }
    let dropped = metrics::read(&demo.admin_url, "gw_request_log_dropped_total")?;
    let found = api.all_ids()?;
    let missing = ids.iter().filter(|id| !found.contains(*id)).count();
    let began = Instant::now();
    for id in ids.iter().take(LOOKED_UP) {
        ensure(
            api.get(&format!("/requests/{id}"))?["id"] == json!(id),
            || format!("{id} is not found by its id"),
        )?;
    }
    say(format_args!(
        "logging: of {requests} requests {dropped} records were dropped and {missing} are missing; \
         {LOOKED_UP} lookups by id took {:.2} ms each, over HTTP",
        began.elapsed().as_secs_f64() * 1000.0 / LOOKED_UP as f64
    ));
    ensure(ids.len() == requests, || {
        format!("only {} ids were different", ids.len())
    })?;
    ensure(dropped == 0 && missing == 0, || {
        "records are missing".to_owned()
    })?;
    ensure(more <= MORE_MAX, || {
        format!("the log costs {:.1} %", more * 100.0)
    })?;
    demo.stop()
}

/// Runs one round; returns the CPU time per request in µs and the ids of the requests.
fn round(demo: &Demo, requests: usize) -> Result<(f64, Vec<String>), Failure> {
    let spent =
        || procfs::cpu(demo.pid()).saturating_sub(procfs::cpu_of_thread(demo.pid(), ECHO_THREAD));
    let before = spent();
    let run = load::requests(&demo.target, CALLERS, requests, "/hello")?;
    let cost = (spent() - before).as_secs_f64() * 1e6 / requests as f64;
    let mut ids = Vec::with_capacity(requests);
    for (answer, _) in run.answers {
        ensure(answer.head.status == 200, || {
            format!("a request got {}", answer.head.status)
        })?;
        ids.extend(answer.head.field("x-gw-request-id").map(str::to_owned));
    }
    Ok((cost, ids))
}

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// A client of the demo's administration API.
struct Api<'a> {
    demo: &'a Demo,
    http: ureq::Agent,
}

impl<'a> Api<'a> {
    fn new(demo: &'a Demo) -> Self {
        Self {
            demo,
            http: ureq::Agent::new_with_defaults(),
        }
    }

    fn set_logging(&self, on: bool) -> Result<(), Failure> {
        let url = format!("{}/api/v1/accounts/demo/services/echo", self.demo.admin_url);
        let request = self.http.patch(url).header("Authorization", self.bearer());
        let sent = request.send_json(json!({ "request_logging": on }));
        sent.map_err(|error| Failure::during("switching the log", error))?;
        std::thread::sleep(IN_FORCE_WITHIN);
        Ok(())
    }

    fn get(&self, path: &str) -> Result<Value, Failure> {
        let request = self
            .http
            .get(format!("{}/api/v1{path}", self.demo.admin_url));
        let answer = request.header("Authorization", self.bearer()).call();
        let read = answer
            .and_then(|mut answer| answer.body_mut().with_config().limit(64 << 20).read_json());
        read.map_err(|error| Failure::during(path, error))
    }

    /// Ids of all requests in the log.
    fn all_ids(&self) -> Result<HashSet<String>, Failure> {
        let mut ids = HashSet::new();
        let mut cursor = String::new();
        loop {
            let page = self.get(&format!(
                "/requests?account=demo&service=echo&limit={PAGE}{cursor}"
            ))?;
            let items = page["items"].as_array().into_iter().flatten();
            ids.extend(items.filter_map(|item| item["id"].as_str().map(str::to_owned)));
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return Ok(ids),
            }
        }
    }

    fn bearer(&self) -> String {
        format!("Bearer {}", self.demo.admin_token)
    }
}
