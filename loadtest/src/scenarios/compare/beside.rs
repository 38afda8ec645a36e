//! Latency of small requests beside downloads of the same service.

use std::path::Path;
use std::time::Duration;

use super::Bench;
use super::figures::{Case, Column, Sample, Work};
use super::peers::LARGE;
use super::programs::wrk;
use super::setups::{Kind, Setup};
use crate::failure::Failure;
use crate::latency::Latency;
use crate::report::millis;

const KINDS: [Kind; 7] = [
    Kind::Gw,
    Kind::Haproxy,
    Kind::Nginx,
    Kind::Rathole,
    Kind::RatholeNoise,
    Kind::Null,
    Kind::NullTls,
];
const DOWNLOADS: u32 = 8;
/// Time for the downloads to reach their speed.
const BUILDS_UP: Duration = Duration::from_millis(500);

pub(super) fn run(bench: &Bench<'_>) -> Result<Vec<Case>, Failure> {
    let wrk = wrk::find()?;
    let setups = bench.start_all(&KINDS)?;
    let length = Duration::from_secs(bench.options.seconds.into());
    let case = |name: &str| Case::new("beside", name, Work::Gigabyte, Column::P99);
    let alone = bench.compare(&setups, case("alone"), |setup| {
        small_requests(setup, length)
    })?;
    let name = format!("beside {DOWNLOADS} downloads");
    Ok(vec![
        alone,
        bench.compare(&setups, case(&name), |setup| {
            beside_downloads(&wrk, setup, bench.options.seconds)
        })?,
    ])
}

fn small_requests(setup: &Setup, length: Duration) -> Result<Sample, Failure> {
    let latency = Latency::measure(&setup.target, length)
        .map_err(|failure| Failure::during(setup.name, failure))?;
    Ok(Sample::default()
        .with(Column::P50, millis(latency.p50))
        .with(Column::P99, millis(latency.p99)))
}

/// The downloads leave the core of the load to callers and backend: latencies must not contain their time slices.
fn beside_downloads(wrk: &Path, setup: &Setup, seconds: u32) -> Result<Sample, Failure> {
    let length = Duration::from_secs(seconds.into());
    // Ends after the small requests.
    let downloads = wrk::Downloads::start(wrk, &setup.target, LARGE, DOWNLOADS, seconds + 2)?;
    std::thread::sleep(BUILDS_UP);
    let sample = small_requests(setup, length)?;
    let megabytes_per_second = downloads.finish()?;
    Ok(sample.with(Column::Rate, megabytes_per_second))
}
