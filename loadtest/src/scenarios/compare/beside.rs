//! Latency of small requests beside downloads of the same service, and beside new connections.

use std::path::Path;
use std::time::{Duration, Instant};

use super::Bench;
use super::figures::{Case, Column, Sample, Work};
use super::peers::LARGE;
use super::programs::wrk;
use super::setups::{Kind, Setup};
use crate::callers::{Callers, Load, Methods};
use crate::failure::Failure;
use crate::load::Latency;
use crate::report::millis;

const DOWNLOADS: u32 = 8;
/// New connections per second.
const CONNECTIONS: u32 = 500;
/// Callers that make them in turns.
const CONNECTORS: u32 = 10;
/// Time for the downloads to reach their speed.
const BUILDS_UP: Duration = Duration::from_millis(500);

pub(super) fn run(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let wrk = wrk::find()?;
    let setups = bench.start_all(&Kind::HTTP1)?;
    let length = Duration::from_secs(bench.options.seconds.into());
    let case = |name: &str, work| Case::new("beside", name, work, Column::P99);
    let alone = bench.compare(&setups, case("alone", Work::Gigabyte), |setup| {
        small_requests(setup, length)
    })?;
    let name = format!("beside {CONNECTIONS} new connections/s");
    let connections = bench.compare(&setups, case(&name, Work::Connection), |setup| {
        beside_connections(setup, length)
    })?;
    let name = format!("beside {DOWNLOADS} downloads");
    let downloads = bench.compare(&setups, case(&name, Work::Gigabyte), |setup| {
        beside_downloads(&wrk, setup, bench.options.seconds)
    })?;
    Ok(vec![alone, connections, downloads])
}

fn small_requests(setup: &Setup, length: Duration) -> Result<Sample, Failure> {
    let latency = Latency::measure(&setup.target, length)
        .map_err(|failure| Failure::during(&setup.name, failure))?;
    Ok(Sample::default()
        .with(Column::P50, millis(latency.p50))
        .with(Column::P99, millis(latency.p99)))
}

/// The downloads leave the core of the load to callers and backend: latencies must not contain
/// their time slices.
fn beside_downloads(wrk: &Path, setup: &Setup, seconds: u32) -> Result<Sample, Failure> {
    let length = Duration::from_secs(seconds.into());
    // Ends after the small requests.
    let downloads = wrk::Downloads::start(wrk, &setup.target, LARGE, DOWNLOADS, seconds + 2)?;
    std::thread::sleep(BUILDS_UP);
    let sample = small_requests(setup, length)?;
    let megabytes_per_second = downloads.finish()?;
    Ok(sample.with(Column::Rate, megabytes_per_second))
}

fn beside_connections(setup: &Setup, length: Duration) -> Result<Sample, Failure> {
    let begin = Instant::now();
    let callers = Callers::send(&Load {
        targets: vec![setup.target.clone()],
        callers: CONNECTORS,
        rate: Some(CONNECTIONS),
        methods: Methods::Get,
        per_connection: 1,
    });
    let sample = small_requests(setup, length);
    let outcome = callers.stop()?;
    if let Some(failed) = outcome.failed.first() {
        let what = format!("{}: a new connection: {}", setup.name, failed.what);
        return Err(Failure::new(what));
    }
    let per_second = outcome.answered.len() as f64 / begin.elapsed().as_secs_f64();
    Ok(sample?.with(Column::Rate, per_second))
}
