//! Time series for the console's charts: counts of each service every ten seconds, kept for seven
//! days.
//!
//! A task of the control plane reads the workers' counters and adds the differences to a SQLite
//! file. During an upgrade two processes have the file open, and points of both for the same time
//! are added. If the file cannot be written, the latest points are kept in memory until it can.

mod counter_diff;
mod file;
mod totals;
mod usage;
mod usage_file;
mod view;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::limits;
use gw_base::clock::Timestamp;
use gw_base::process::background::Tasks;
use gw_shared::clock;
use gw_store::{Directory, label_of};
use tokio::time::sleep;

use self::counter_diff::CounterDiff;
pub use self::file::FileError;
use self::file::SeriesFile;
use self::totals::Totals;
pub use self::usage::{UnsentUsage, Usage};
pub use self::view::{Point, PointView, SeriesCounts, SeriesPlan, SeriesQuery, SeriesView};
use crate::counters::WorkerReport;

/// Seconds between points of the finest resolution.
const STEP: i64 = 10;
/// Label of the sum of all services. No service has an empty label.
const ALL: &str = "";

/// Time series of one gateway.
pub struct Series {
    path: PathBuf,
    state: Mutex<SeriesState>,
    usage: Usage,
}

struct SeriesState {
    counter_diff: CounterDiff,
    /// Open file; `None` while it cannot be opened.
    file: Option<SeriesFile>,
    /// Open the file again before the next write: the last one failed, and the file may have been
    /// replaced.
    reopen: bool,
    /// Points not written yet, by time and label.
    pending: BTreeMap<(i64, Arc<str>), Totals>,
    /// The last write failed and this was logged.
    failing: bool,
}

/// Reason why a query of the time series failed.
#[derive(Debug, thiserror::Error)]
pub enum SeriesError {
    /// A query parameter is invalid.
    #[error("{field}: {message}")]
    Invalid {
        /// Name of the parameter.
        field: &'static str,
        /// Why its value is invalid.
        message: String,
    },
    /// The file of the time series cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
}

/// Services whose points are selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// The sum of all services.
    All,
    /// Account id.
    Account(String),
    /// Label of a service: `{account}--{service}`.
    Service(String),
}

impl Selection {
    fn matches(&self, key: &str) -> bool {
        match self {
            Self::All => key == ALL,
            Self::Account(account) => key
                .strip_prefix(&**account)
                .is_some_and(|rest| rest.starts_with("--")),
            Self::Service(label) => label_of(key) == label,
        }
    }
}

impl Series {
    /// Opens or creates the file at `path`, and that of the usage beside it. If that fails, points
    /// are kept in memory and the file is tried again.
    pub fn open(path: &Path) -> Self {
        let state = SeriesState {
            counter_diff: CounterDiff::default(),
            file: None,
            reopen: false,
            pending: BTreeMap::new(),
            failing: false,
        };
        let series = Self {
            path: path.to_owned(),
            state: Mutex::new(state),
            usage: Usage::open(&path.with_file_name("usage.sqlite")),
        };
        series.state().save(&series.path, Timestamp::now());
        series
    }

    /// Adds the difference to the last reports as a point at `now`, and writes it.
    pub fn take(&self, reports: Vec<WorkerReport>, now: Timestamp) {
        let mut state = self.state();
        let at = now.0 - now.0.rem_euclid(STEP);
        let counted = state.counter_diff.advance(reports);
        let services = counted.iter().filter(|(label, _)| &***label != ALL);
        self.usage.add(services, now);
        for (label, totals) in counted {
            state.pending.entry((at, label)).or_default().add(&totals);
        }
        while state.pending.len() > limits::SERIES_PENDING {
            state.pending.pop_first();
        }
        state.save(&self.path, now);
    }

    /// Usage of each service by day.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Returns the counts of each step of `plan`, without those of earlier accounts and services
    /// than those of `directory`. The counts of several nodes can be added.
    pub fn counts(
        &self,
        plan: &SeriesPlan,
        directory: &Directory,
    ) -> Result<SeriesCounts, SeriesError> {
        let selection = plan.selection();
        let state = self.state();
        let mut counts = plan.zeros()?;
        if let Some(file) = &state.file {
            file.read(&selection, plan.since, plan.until, |label, at, totals| {
                if directory.shows_counts(label) {
                    plan.count(&mut counts, at, &totals);
                }
            })?;
        }
        for ((at, label), totals) in &state.pending {
            if selection.matches(label) && directory.shows_counts(label) {
                plan.count(&mut counts, *at, totals);
            }
        }
        Ok(counts)
    }

    fn state(&self) -> MutexGuard<'_, SeriesState> {
        // A panic while the lock was held can only have lost points.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SeriesState {
    /// Writes pending points; keeps them on failure.
    fn save(&mut self, path: &Path, now: Timestamp) {
        match self.try_save(path, now) {
            Ok(()) if self.failing => {
                self.failing = false;
                tracing::warn!("time series: points are written again");
            }
            Ok(()) => {}
            Err(error) => {
                // The open file is still used for reading.
                self.reopen = true;
                if !self.failing {
                    self.failing = true;
                    tracing::error!(%error,
                        "time series: points cannot be written; the latest are kept in memory \
                         until they can");
                }
            }
        }
    }

    fn try_save(&mut self, path: &Path, now: Timestamp) -> Result<(), FileError> {
        if self.file.is_none() || self.reopen {
            self.file = Some(SeriesFile::open(path)?);
            self.reopen = false;
        }
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        if !self.pending.is_empty() {
            file.write(&self.pending)?;
            self.pending.clear();
        }
        file.make_coarser(now)
    }
}

/// Starts to take a point every `STEP` seconds. Takes a last one when `tasks` stop, for which the
/// workers must still answer. `reports` returns the counters of all workers that answer, those of
/// services included.
pub fn record(
    tasks: &Tasks,
    series: Arc<Series>,
    reports: impl Fn() -> Vec<WorkerReport> + Send + Sync + 'static,
) {
    let of_task = tasks.clone();
    let reports = Arc::new(reports);
    tasks.spawn("the time series", async move {
        loop {
            let until_next = sleep(until_next(clock::now()));
            let stopping = of_task.stopping();
            let is_last = stopping.run_until_cancelled(until_next).await.is_none();
            let series = Arc::clone(&series);
            let reports = Arc::clone(&reports);
            let take = move || series.take(reports(), Timestamp::now());
            of_task.blocking("a point of the time series", take).await;
            if is_last {
                return;
            }
        }
    });
}

/// Milliseconds before the end of its interval at which a point is taken, so that its counts belong
/// to that interval.
const BEFORE_MS: u128 = 500;

/// Time until the next point is taken.
fn until_next(now: SystemTime) -> Duration {
    let step = STEP.unsigned_abs() as u128 * 1000;
    Duration::from_millis(u64::try_from(step - early_ms(now) % step).unwrap_or(1))
}

/// Returns the end of the interval of the last point.
pub fn recorded_until(now: SystemTime) -> Timestamp {
    let seconds = i64::try_from(early_ms(now) / 1000).unwrap_or(i64::MAX);
    Timestamp(seconds - seconds % STEP)
}

fn early_ms(now: SystemTime) -> u128 {
    now.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis()
        + BEFORE_MS
}

#[cfg(test)]
mod tests {
    use gw_region::owners::ownership::WorkerId;

    use super::*;
    use crate::counters::services::{ServiceReport, ServiceStats};

    /// Report of one worker with this many requests of each service.
    fn report(worker: usize, services: &[(&str, u64)]) -> WorkerReport {
        let service = |(label, requests): &(&str, u64)| {
            let stats = ServiceStats {
                classes: [0, *requests, 0, 0, 0, 0],
                ..ServiceStats::default()
            };
            ServiceReport {
                label: (*label).into(),
                stats,
            }
        };
        WorkerReport {
            worker: WorkerId(worker),
            services: services.iter().map(service).collect(),
            ..WorkerReport::default()
        }
    }

    const NOW: Timestamp = Timestamp(1_800_000_000);

    fn later(seconds: i64) -> Timestamp {
        Timestamp(NOW.0 + seconds)
    }

    /// Requests of each point in the minute before `now`.
    fn requests(
        series: &Series,
        account: Option<&str>,
        service: Option<&str>,
        now: Timestamp,
    ) -> Vec<u64> {
        let query = SeriesQuery {
            account: account.map(str::to_owned),
            service: service.map(str::to_owned),
            since: Some(Timestamp(now.0 - 60).to_string()),
            until: Some(now.to_string()),
            step: Some(10),
            partial: None,
        };
        let plan = SeriesPlan::check(&query, now).unwrap();
        let counts = series.counts(&plan, &Directory::default()).unwrap();
        let points = plan.view(counts).points;
        points.iter().map(|point| point.requests).collect()
    }

    #[test]
    fn points_count_the_requests_of_their_interval() {
        let folder = tempfile::tempdir().unwrap();
        let series = Series::open(&folder.path().join("series.sqlite"));
        series.take(
            vec![
                report(0, &[("acme--api@1", 5)]),
                report(1, &[("acme--api@1", 1), ("bee--b@1", 2)]),
            ],
            later(9),
        );
        series.take(
            vec![
                report(0, &[("acme--api@1", 9)]),
                report(1, &[("acme--api@1", 1), ("bee--b@1", 4)]),
            ],
            later(19),
        );
        // Worker 0 does not answer in time; the counters of worker 1 have restarted.
        series.take(
            vec![report(1, &[("acme--api@1", 3), ("bee--b@1", 1)])],
            later(29),
        );
        series.take(
            vec![
                report(0, &[("acme--api@1", 10)]),
                report(1, &[("acme--api@1", 3), ("bee--b@1", 1)]),
            ],
            later(39),
        );
        let now = later(60);
        assert_eq!(
            requests(&series, Some("acme"), Some("api"), now),
            [6, 4, 2, 1, 0, 0]
        );
        assert_eq!(
            requests(&series, Some("bee"), None, now),
            [2, 2, 1, 0, 0, 0]
        );
        assert_eq!(requests(&series, None, None, now), [8, 6, 3, 1, 0, 0]);
        assert_eq!(requests(&series, Some("acm"), None, now), [0; 6]);
    }

    #[test]
    fn points_survive_a_restart_and_points_of_two_processes_are_added() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("series.sqlite");
        let old = Series::open(&path);
        old.take(vec![report(0, &[("acme--api@1", 5)])], later(5));
        let new = Series::open(&path);
        new.take(vec![report(0, &[("acme--api@1", 3)])], later(6));
        old.take(vec![report(0, &[("acme--api@1", 6)])], later(7));
        drop((old, new));
        let series = Series::open(&path);
        assert_eq!(
            requests(&series, Some("acme"), Some("api"), later(60)),
            [9, 0, 0, 0, 0, 0]
        );
        series.take(vec![report(0, &[("acme--api@1", 1)])], later(15));
        assert_eq!(requests(&series, None, None, later(60)), [9, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn points_are_kept_in_memory_while_writing_fails() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("series.sqlite");
        // A folder at this path cannot be opened as a file.
        std::fs::create_dir(&path).unwrap();
        let series = Series::open(&path);
        series.take(vec![report(0, &[("acme--api@1", 5)])], later(5));
        assert!(series.state().failing);
        assert_eq!(requests(&series, None, None, later(60)), [5, 0, 0, 0, 0, 0]);
        std::fs::remove_dir(&path).unwrap();
        series.take(vec![report(0, &[("acme--api@1", 7)])], later(15));
        assert!(!series.state().failing && series.state().pending.is_empty());
        // The disk is full.
        series.state().file.as_ref().unwrap().limit_size();
        let many: Vec<String> = (0..2000)
            .map(|number| format!("acme--service{number}@1"))
            .collect();
        let many: Vec<(&str, u64)> = many.iter().map(|label| (label.as_str(), 1)).collect();
        series.take(vec![report(0, &many)], later(25));
        assert!(series.state().failing && !series.state().pending.is_empty());
        assert_eq!(
            requests(&series, None, None, later(60)),
            [5, 2, 2000, 0, 0, 0]
        );
        series.take(vec![report(0, &many)], later(35));
        assert!(!series.state().failing);
        drop(series);
        assert_eq!(
            requests(&Series::open(&path), None, None, later(60)),
            [5, 2, 2000, 0, 0, 0]
        );
    }

    #[test]
    fn damaged_file_is_renamed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("series.sqlite");
        std::fs::write(
            &path,
            "not a database, and long enough to be looked at as one".repeat(100),
        )
        .unwrap();
        let series = Series::open(&path);
        series.take(vec![report(0, &[("acme--api@1", 5)])], later(5));
        assert!(!series.state().failing);
        assert!(folder.path().join("series.sqlite.damaged").exists());
    }

    #[test]
    fn pending_points_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let series = Series::open(&folder.path().join("no-folder").join("series.sqlite"));
        for turn in 0..3 {
            let labels: Vec<String> = (0..limits::SERIES_PENDING)
                .map(|number| format!("acme--s{number}@1"))
                .collect();
            let services: Vec<(&str, u64)> = labels
                .iter()
                .map(|label| (label.as_str(), turn + 1))
                .collect();
            series.take(vec![report(0, &services)], later(10 * turn as i64));
        }
        assert_eq!(series.state().pending.len(), limits::SERIES_PENDING);
        assert_eq!(
            series.state().pending.first_key_value().unwrap().0.0,
            later(20).0
        );
    }

    #[test]
    fn points_are_taken_shortly_before_their_interval_ends() {
        let at = |ms: u64| until_next(UNIX_EPOCH + Duration::from_millis(ms)).as_millis();
        assert_eq!(
            [
                at(1_800_000_000_000),
                at(1_800_000_009_499),
                at(1_800_000_009_500)
            ],
            [9500, 1, 10_000]
        );
        let until = |ms: u64| recorded_until(UNIX_EPOCH + Duration::from_millis(ms)).0;
        let ends = [
            until(1_800_000_000_000),
            until(1_800_000_009_499),
            until(1_800_000_009_500),
        ];
        assert_eq!(ends, [1_800_000_000, 1_800_000_000, 1_800_000_010]);
    }
}
