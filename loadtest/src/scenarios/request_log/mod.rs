//! The request log alone: CPU time of writes, and duration of searches in a week of records.

mod traffic;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use gw_base::clock::Timestamp;
use gw_shared::id::RequestId;
use gw_telemetry::request_log::{RequestLog, SearchQuery};
use rustix::fs::{Advice, fadvise};

use self::traffic::Traffic;
use crate::failure::{Failure, ensure};
use crate::machine::procfs::cpu_of_threads;
use crate::report::{mebibytes, millis, per_mille, say};

/// Limits of the checks.
const LOOKUP_MAX: Duration = Duration::from_millis(5);
const HOUR_SEARCH_MAX: Duration = Duration::from_millis(300);
const MICROS_PER_RECORD_MAX: f64 = 1.0;

const DAYS: u64 = 7;
const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// 2026-11-21T00:00:00Z, the day after the filled ones.
const TODAY_MS: u64 = 1_795_219_200_000;
const LOOKUPS: usize = 200;

#[derive(Args)]
pub(crate) struct Options {
    /// Total number of records, over seven days.
    #[arg(long, default_value_t = 50_000_000)]
    records: u64,
    #[arg(long, default_value_t = 200)]
    services: usize,
    /// Interval of commits, in milliseconds.
    #[arg(long, default_value_t = 250)]
    flush_ms: u64,
    /// Folder of the week of records, kept and reused; a temporary folder if not given
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Measures only writes.
    #[arg(long)]
    only_writing: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let temporary = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
    for (services, per_second) in [(1, 20_000), (50, 20_000), (1000, 20_000), (1000, 4_000)] {
        let folder = temporary
            .path()
            .join(format!("writing-{services}-{per_second}"));
        let micros = writing(&folder, services, per_second)?;
        // With many services and few requests each, every record is its own row, and the load is
        // far below that of the limit.
        ensure(services > 10 || micros <= MICROS_PER_RECORD_MAX, || {
            format!("{micros:.2} µs per record")
        })?;
        fs::remove_dir_all(&folder)?;
    }
    if options.only_writing {
        return Ok(());
    }
    let folder = options
        .folder
        .clone()
        .unwrap_or_else(|| temporary.path().join("week"));
    let clock = Clock::default();
    let log = clock.open(&folder)?;
    if size_of(&folder)? < 1 << 20 {
        fill(&log, &clock, options)?;
    }
    drop(log);
    say(format_args!(
        "log: {:.0} MiB in {}",
        mebibytes(size_of(&folder)?),
        folder.display()
    ));
    clock.set(TODAY_MS);
    finding(&clock, &folder)
}

/// CPU time of the log's thread per record, at full speed.
fn writing(folder: &Path, services: usize, per_second: u64) -> Result<f64, Failure> {
    const FLUSH_MS: u64 = 250;
    const RECORDS: u64 = 2_000_000;
    let clock = Clock::default();
    clock.set(TODAY_MS);
    let log = clock.open(folder)?;
    let mut traffic = Traffic::new(services);
    let count = per_second * FLUSH_MS / 1000;
    for flush in 0..RECORDS / count {
        let now_ms = TODAY_MS + flush * FLUSH_MS;
        clock.set(now_ms);
        for batch in traffic.batches(now_ms, FLUSH_MS, count as usize) {
            log.queue().push(batch);
        }
        log.flush();
    }
    let cpu = cpu_of_threads(std::process::id(), "gw-log");
    let stats = log.stats();
    ensure(
        stats.written == RECORDS / count * count && stats.dropped == 0,
        || format!("{stats:?}"),
    )?;
    drop(log);
    let micros = cpu.as_secs_f64() * 1e6 / stats.written as f64;
    say(format_args!(
        "log: {services} services, {per_second}/s: {micros:.2} µs CPU and {:.0} bytes per record",
        size_of(folder)? as f64 / stats.written as f64
    ));
    Ok(micros)
}

/// Writes seven days of records, evenly distributed.
fn fill(log: &RequestLog, clock: &Clock, options: &Options) -> Result<(), Failure> {
    let began = Instant::now();
    let mut traffic = Traffic::new(options.services);
    let flushes = DAYS * DAY_MS / options.flush_ms;
    let mut made = 0;
    for flush in 0..flushes {
        let now_ms = TODAY_MS - DAYS * DAY_MS + flush * options.flush_ms;
        clock.set(now_ms);
        let due = options.records * (flush + 1) / flushes;
        for batch in traffic.batches(now_ms, options.flush_ms, (due - made) as usize) {
            log.queue().push(batch);
        }
        made = due;
        log.flush();
    }
    let stats = log.stats();
    ensure(
        stats.written == options.records && stats.dropped == 0,
        || format!("{stats:?}"),
    )?;
    let cpu = cpu_of_threads(std::process::id(), "gw-log");
    say(format_args!(
        "log: {made} records of {} services in {flushes} flushes: {:.0} s, {:.2} µs CPU per \
         record, {:.0} µs per flush",
        options.services,
        began.elapsed().as_secs_f64(),
        cpu.as_secs_f64() * 1e6 / made as f64,
        cpu.as_secs_f64() * 1e6 / flushes as f64,
    ));
    Ok(())
}

/// The query for all requests of a service.
fn of(service: &str) -> SearchQuery {
    SearchQuery {
        account: Some("acme".to_owned()),
        service: Some(service.to_owned()),
        ..SearchQuery::default()
    }
}

/// Name and query of each search. Those of an hour of one service have a limit.
fn searches() -> [(&'static str, SearchQuery); 10] {
    let [busiest, quiet] = ["service-0", "service-150"].map(of);
    let all = SearchQuery::default();
    let hour = |query: &SearchQuery| SearchQuery {
        since: Some("2026-11-18T11:00:00Z".to_owned()),
        until: Some("2026-11-18T12:00:00Z".to_owned()),
        ..query.clone()
    };
    let status = |status: &str, query: &SearchQuery| SearchQuery {
        status: Some(status.to_owned()),
        ..query.clone()
    };
    let path = |query: &SearchQuery| SearchQuery {
        path_prefix: Some("/api/v1/items/4711".to_owned()),
        ..query.clone()
    };
    let slow = SearchQuery {
        min_ms: Some(40),
        ..quiet.clone()
    };
    [
        (
            "hour, the newest 100 of the busiest service",
            hour(&busiest),
        ),
        (
            "hour, a path, of the busiest service",
            path(&hour(&busiest)),
        ),
        (
            "hour, 502, of the busiest service",
            status("502", &hour(&busiest)),
        ),
        ("hour, a path, of a quiet service", path(&hour(&quiet))),
        ("hour, 503, of all services", status("503", &hour(&all))),
        ("week, 503, of the busiest service", status("503", &busiest)),
        ("week, 503, of a quiet service", status("503", &quiet)),
        ("week, a path, of the busiest service", path(&busiest)),
        ("week, over 40 ms, of a quiet service", slow),
        ("week, 503, of all services", status("503", &all)),
    ]
}

/// Ids of `LOOKUPS` requests, spread over the week.
fn ids_of_the_week(log: &RequestLog) -> Result<Vec<RequestId>, Failure> {
    let mut ids = Vec::new();
    for step in 0..LOOKUPS as u64 {
        let until_ms = TODAY_MS - DAYS * DAY_MS * step / LOOKUPS as u64;
        let query = SearchQuery {
            limit: Some(1),
            cursor: Some(RequestId::first_of_ms(until_ms).to_string()),
            ..SearchQuery::default()
        };
        let page = log
            .search(&query)
            .map_err(|error| Failure::during("search", error))?;
        ids.extend(
            page.items
                .iter()
                .filter_map(|item| item.id.parse::<RequestId>().ok()),
        );
    }
    ensure(ids.len() == LOOKUPS, || format!("{} ids", ids.len()))?;
    Ok(ids)
}

fn finding(clock: &Clock, folder: &Path) -> Result<(), Failure> {
    let mut log = clock.open(folder)?;
    let ids = ids_of_the_week(&log)?;

    for cold in [true, false] {
        let name = if cold { "cold" } else { "warm" };
        let reopen = || cold.then(|| clock.open_cold(folder)).transpose();
        look_up(&mut log, &ids, name, reopen)?;
        for (what, query) in searches() {
            if cold {
                log = clock.open_cold(folder)?;
            }
            let has_limit = query.since.is_some() && query.service.is_some();
            let took = searching(&log, &format!("{name}: {what}"), query)?;
            ensure(!has_limit || took <= HOUR_SEARCH_MAX, || {
                format!("{what}: too long")
            })?;
        }
    }
    Ok(())
}

/// Looks up each id. `reopen` is called before each lookup; the log that it returns replaces `log`.
fn look_up(
    log: &mut RequestLog,
    ids: &[RequestId],
    name: &str,
    reopen: impl Fn() -> Result<Option<RequestLog>, Failure>,
) -> Result<(), Failure> {
    let mut times = Vec::new();
    for id in ids {
        if let Some(reopened) = reopen()? {
            *log = reopened;
        }
        let began = Instant::now();
        let found = log
            .show(*id)
            .map_err(|error| Failure::during("show", error))?;
        times.push(began.elapsed());
        ensure(
            found.is_some_and(|found| found.id == id.to_string()),
            || format!("{id} was not found"),
        )?;
    }
    times.sort();
    let p50 = per_mille(&times, 500);
    let p99 = per_mille(&times, 990);
    say(format_args!(
        "log: {name}: an id: p50 {:.2} ms, p99 {:.2} ms",
        millis(p50),
        millis(p99)
    ));
    ensure(p99 <= LOOKUP_MAX, || {
        "looking up an id takes too long".to_owned()
    })
}

/// Searches to the end with pages of 1000, or only the first 100. Returns how long that took.
fn searching(log: &RequestLog, what: &str, mut query: SearchQuery) -> Result<Duration, Failure> {
    let all = query.status.is_some() || query.path_prefix.is_some();
    query.limit = all.then_some(1000);
    let mut found = 0;
    let mut pages = 0;
    let mut longest = Duration::ZERO;
    let began = Instant::now();
    loop {
        let asked = Instant::now();
        let page = log
            .search(&query)
            .map_err(|error| Failure::during(what, error))?;
        longest = longest.max(asked.elapsed());
        found += page.items.len();
        pages += 1;
        query.cursor = page.next_cursor;
        if query.cursor.is_none() || !all {
            break;
        }
    }
    let took = began.elapsed();
    say(format_args!(
        "log: {what}: {found} found in {:.1} ms, {pages} pages, the longest {:.1} ms",
        millis(took),
        millis(longest)
    ));
    Ok(took)
}

/// Drops the log from the page cache.
fn forget(folder: &Path) -> Result<(), Failure> {
    for entry in fs::read_dir(folder)? {
        let file = File::open(entry?.path())?;
        fadvise(&file, 0, None, Advice::DontNeed)
            .map_err(|error| Failure::during("fadvise", error))?;
    }
    Ok(())
}

fn size_of(folder: &Path) -> Result<u64, Failure> {
    let mut size = 0;
    for entry in fs::read_dir(folder)? {
        size += entry?.metadata()?.len();
    }
    Ok(size)
}

/// Clock of the log, set by the test.
#[derive(Clone, Default)]
struct Clock(Arc<AtomicI64>);

impl Clock {
    fn set(&self, unix_ms: u64) {
        self.0.store((unix_ms / 1000) as i64, Ordering::Relaxed);
    }

    /// Opens the log with nothing cached, in this process or in the kernel.
    fn open_cold(&self, folder: &Path) -> Result<RequestLog, Failure> {
        forget(folder)?;
        self.open(folder)
    }

    fn open(&self, folder: &Path) -> Result<RequestLog, Failure> {
        let clock = Arc::clone(&self.0);
        RequestLog::open_at(folder, move || Timestamp(clock.load(Ordering::Relaxed)))
            .map_err(|error| Failure::during(folder.display(), error))
    }
}
