//! Expiry of a day of the request log does not slow down callers.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use crate::demo::{Demo, Options};
use crate::failure::{Failure, ensure, wait_until};
use crate::load::Latency;
use crate::report::{millis, say};

/// Noise only increases latencies, so both sides use the best of several attempts.
const ATTEMPTS: usize = 3;
const LENGTH: Duration = Duration::from_secs(5);
/// A day beyond every retention, marked as expired. A starting gateway continues its removal.
const OLD_DAY: &str = "2020-01-01.sqlite.expired";
/// Size of the day: about 45 million records.
const DAY_BYTES: usize = 4 << 30;
const GONE_WITHIN: Duration = Duration::from_secs(120);
/// Largest allowed ratio of the p99 during expiry to the p99 afterwards.
const SLOWER_MAX: f64 = 2.0;

pub(crate) fn run(gateway: &Path) -> Result<(), Failure> {
    let mut quiet = Latency::MAX;
    let mut beside_it = Latency::MAX;
    for _ in 0..ATTEMPTS {
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        let log = folder.path().join("requests");
        fill(&log)?;
        let demo = Demo::start_in(folder, gateway, &Options::default())?;
        // Warm-up: fills pools and pages in code.
        Latency::measure(&demo.target, LENGTH / 5)?;
        let before = left(&log)?;
        let measured = Latency::measure(&demo.target, LENGTH)?;
        let after = left(&log)?;
        ensure(after > 0 && after < before, || {
            format!("the expiry did not run meanwhile: {before} bytes before, {after} after")
        })?;
        say(format_args!(
            "expiry: p50 {:.2} ms, p99 {:.2} ms while {} MiB went",
            millis(measured.p50),
            millis(measured.p99),
            (before - after) >> 20
        ));
        beside_it = beside_it.min(measured);
        let stays = || "the expired day was not removed".to_owned();
        wait_until(GONE_WITHIN, stays, || Ok(left(&log)? == 0))?;
        quiet = quiet.min(Latency::measure(&demo.target, LENGTH)?);
        demo.stop()?;
    }
    let ratio = beside_it.p99_over(quiet);
    say(format_args!(
        "expiry: best p99 {:.2} ms quiet, {:.2} ms during the expiry ({ratio:.2} times)",
        millis(quiet.p99),
        millis(beside_it.p99)
    ));
    ensure(ratio <= SLOWER_MAX, || {
        format!("p99 during the expiry is {ratio:.1} times the p99 afterwards")
    })
}

/// Writes an old day with allocated blocks; a sparse file would be removed at once.
fn fill(log: &Path) -> Result<(), Failure> {
    fs::create_dir_all(log)?;
    let mut file = File::create(log.join(OLD_DAY))?;
    let piece = vec![b'x'; 1 << 20];
    for _ in 0..DAY_BYTES / piece.len() {
        file.write_all(&piece)?;
    }
    Ok(file.sync_all()?)
}

/// Remaining bytes of the old day.
fn left(log: &Path) -> Result<u64, Failure> {
    let entries = fs::read_dir(log)?.flatten();
    let old = entries.filter(|entry| entry.file_name().to_string_lossy().contains(OLD_DAY));
    // A file removed after the listing counts as 0.
    let sizes = old.filter_map(|entry| entry.metadata().ok());
    Ok(sizes.map(|metadata| metadata.len()).sum())
}
