//! What the console's charts show: every ten seconds what each service did, for seven days.
//!
//! A thread of the control plane asks the workers for their counts, takes the differences and writes them into a SQLite
//! file of its own. Two processes may have it open (an upgrade): rows of both for the same moment are added up. Where the
//! file cannot be written, the latest points are kept in memory until it can.

mod counter_diff;
mod file;
mod totals;
mod view;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{RecvTimeoutError, Sender};

use self::counter_diff::CounterDiff;
pub use self::file::FileError;
use self::file::SeriesFile;
use self::totals::Totals;
use self::view::Span;
pub use self::view::{Point, PointView, SeriesQuery, SeriesView};
use crate::clock::Timestamp;
use crate::limits;
use crate::telemetry::counters::WorkerReport;

/// Seconds that the finest points are apart.
const STEP: i64 = 10;
/// The label of all services together. No service is called that.
const ALL: &str = "";

/// The points of one gateway.
pub struct Series {
    path: PathBuf,
    state: Mutex<State>,
}

struct State {
    counter_diff: CounterDiff,
    /// `None` while it cannot be opened.
    file: Option<SeriesFile>,
    /// Open it anew before it is written: it may be another by then.
    reopen: bool,
    /// What waits to be written, by its time and label.
    pending: BTreeMap<(i64, Arc<str>), Totals>,
    /// The file cannot be written, and the log says so.
    failing: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum SeriesError {
    /// A query parameter is invalid.
    #[error("{field}: {message}")]
    Invalid { field: &'static str, message: String },
    #[error(transparent)]
    File(#[from] FileError),
}

/// Whose points.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    All,
    /// Account id.
    Account(String),
    /// Label of a service: `{account}--{service}`.
    Service(String),
}

impl Selection {
    fn takes(&self, label: &str) -> bool {
        match self {
            Self::All => label == ALL,
            Self::Account(account) => label.strip_prefix(&**account).is_some_and(|rest| rest.starts_with("--")),
            Self::Service(service) => label == service,
        }
    }
}

impl Series {
    /// Opens or creates the file at `path`. Never fails: without it there is the memory.
    pub fn open(path: &Path) -> Self {
        let state = State {
            counter_diff: CounterDiff::default(),
            file: None,
            reopen: false,
            pending: BTreeMap::new(),
            failing: false,
        };
        let series = Self { path: path.to_owned(), state: Mutex::new(state) };
        series.state().save(&series.path, Timestamp::now());
        series
    }

    /// Takes what has happened since the last time, as of `now`, and writes it.
    pub fn take(&self, reports: Vec<WorkerReport>, now: Timestamp) {
        let mut state = self.state();
        let at = now.0 - now.0.rem_euclid(STEP);
        for (label, totals) in state.counter_diff.advance(reports) {
            state.pending.entry((at, label)).or_default().add(&totals);
        }
        while state.pending.len() > limits::SERIES_PENDING {
            state.pending.pop_first();
        }
        state.save(&self.path, now);
    }

    /// Points as `query` wants them, at most some 500; `now` says how fine they can be.
    pub fn show(&self, query: &SeriesQuery, now: Timestamp) -> Result<SeriesView, SeriesError> {
        let (selection, span) = query.check(now)?;
        Ok(SeriesView::new(span, self.points(&selection, span)?))
    }

    /// Points from `since` until before `until`, without gaps: of `step_seconds`, unless that would be more than some
    /// 500, or finer than what is kept.
    pub fn read(
        &self,
        selection: &Selection,
        since: Timestamp,
        until: Timestamp,
        step_seconds: u32,
        now: Timestamp,
    ) -> Result<Vec<Point>, SeriesError> {
        self.points(selection, Span::new(since.0, until.0, step_seconds.into(), now))
    }

    fn points(&self, selection: &Selection, span: Span) -> Result<Vec<Point>, SeriesError> {
        let state = self.state();
        let mut points = span.points();
        if let Some(file) = &state.file {
            file.read(selection, span.since, span.until, |at, totals| points.add(at, &totals))?;
        }
        for ((at, label), totals) in &state.pending {
            if selection.takes(label) {
                points.add(*at, totals);
            }
        }
        Ok(points.into_vec())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while it was held lost points at worst.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Writes what waits. What cannot be written waits on.
    fn save(&mut self, path: &Path, now: Timestamp) {
        match self.try_save(path, now) {
            Ok(()) if self.failing => {
                self.failing = false;
                tracing::warn!("series for charts are written again");
            }
            Ok(()) => {}
            Err(error) => {
                // It can be read as far as it goes, but not be trusted with more.
                self.reopen = true;
                if !self.failing {
                    self.failing = true;
                    tracing::error!(%error, "series for charts cannot be written: the latest are kept in memory");
                }
            }
        }
    }

    fn try_save(&mut self, path: &Path, now: Timestamp) -> Result<(), FileError> {
        if self.file.is_none() || self.reopen {
            self.file = Some(SeriesFile::open(path)?);
            self.reopen = false;
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        if !self.pending.is_empty() {
            file.write(&self.pending)?;
            self.pending.clear();
        }
        file.make_coarser(now)
    }
}

/// Thread that takes a point every [`STEP`] seconds. It ends when this value is dropped.
pub(crate) struct Sampler {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Sampler {
    /// Starts the thread. `reports` returns the counters of all workers that answer, those of services included.
    pub(crate) fn start(
        series: Arc<Series>,
        reports: impl Fn() -> Vec<WorkerReport> + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = crossbeam_channel::bounded::<()>(1);
        let thread = Builder::new().name("gw-series".to_owned()).spawn(move || {
            loop {
                let ended = stopped.recv_timeout(until_next(SystemTime::now()));
                if ended != Err(RecvTimeoutError::Disconnected) {
                    series.take(reports(), Timestamp::now());
                }
                if ended != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Takes what there is while the workers still answer, and ends.
    pub(crate) fn stop(self) {
        // Fails only if it has ended already.
        let _ = self.stop.send(());
        if self.thread.join().is_err() {
            tracing::error!("the thread of the series panicked");
        }
    }
}

/// How long before it ends a point is taken, in milliseconds: what happened belongs to it, and not to the next.
const BEFORE_MS: u128 = 500;

/// Until shortly before the next point begins.
fn until_next(now: SystemTime) -> Duration {
    let step = STEP.unsigned_abs() as u128 * 1000;
    Duration::from_millis(u64::try_from(step - early_ms(now) % step).unwrap_or(1))
}

/// When the point ends that was taken last.
pub(crate) fn recorded_until(now: SystemTime) -> Timestamp {
    let seconds = i64::try_from(early_ms(now) / 1000).unwrap_or(i64::MAX);
    Timestamp(seconds - seconds % STEP)
}

fn early_ms(now: SystemTime) -> u128 {
    now.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() + BEFORE_MS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ownership::WorkerId;
    use crate::telemetry::counters::services::{ServiceReport, ServiceStats};

    /// A report of one worker that has counted so many requests of each service.
    fn report(worker: usize, services: &[(&str, u64)]) -> WorkerReport {
        let service = |(label, requests): &(&str, u64)| {
            let stats = ServiceStats { classes: [0, *requests, 0, 0, 0, 0], ..ServiceStats::default() };
            ServiceReport { label: (*label).into(), stats }
        };
        WorkerReport {
            worker: WorkerId(worker),
            totals: BTreeMap::new(),
            refusals: BTreeMap::new(),
            turned_away: BTreeMap::new(),
            ended_early: BTreeMap::new(),
            connections: 0,
            crossings_served: 0,
            socket_bytes: 0,
            socket_limit: 0,
            busy_per_mille: 0,
            tunnels: Vec::new(),
            services: services.iter().map(service).collect(),
        }
    }

    const NOW: Timestamp = Timestamp(1_800_000_000);

    fn later(seconds: i64) -> Timestamp {
        Timestamp(NOW.0 + seconds)
    }

    /// Requests of each point of the last minute before `now`.
    fn requests(series: &Series, account: Option<&str>, service: Option<&str>, now: Timestamp) -> Vec<u64> {
        let query = SeriesQuery {
            account: account.map(str::to_owned),
            service: service.map(str::to_owned),
            since: Some(Timestamp(now.0 - 60).to_string()),
            until: Some(now.to_string()),
            step: Some(10),
        };
        series.show(&query, now).unwrap().points.iter().map(|point| point.requests).collect()
    }

    #[test]
    fn points_have_what_came_in_their_ten_seconds() {
        let folder = tempfile::tempdir().unwrap();
        let series = Series::open(&folder.path().join("series.sqlite"));
        series.take(vec![report(0, &[("acme--api", 5)]), report(1, &[("acme--api", 1), ("bee--b", 2)])], later(9));
        series.take(vec![report(0, &[("acme--api", 9)]), report(1, &[("acme--api", 1), ("bee--b", 4)])], later(19));
        // One worker did not answer in time; the other began anew.
        series.take(vec![report(1, &[("acme--api", 3), ("bee--b", 1)])], later(29));
        series.take(vec![report(0, &[("acme--api", 10)]), report(1, &[("acme--api", 3), ("bee--b", 1)])], later(39));
        let now = later(60);
        assert_eq!(requests(&series, Some("acme"), Some("api"), now), [6, 4, 2, 1, 0, 0]);
        assert_eq!(requests(&series, Some("bee"), None, now), [2, 2, 1, 0, 0, 0]);
        assert_eq!(requests(&series, None, None, now), [8, 6, 3, 1, 0, 0]);
        assert_eq!(requests(&series, Some("acm"), None, now), [0; 6]);
    }

    #[test]
    fn points_survive_a_restart_and_two_processes_add_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("series.sqlite");
        let old = Series::open(&path);
        old.take(vec![report(0, &[("acme--api", 5)])], later(5));
        let new = Series::open(&path);
        new.take(vec![report(0, &[("acme--api", 3)])], later(6));
        old.take(vec![report(0, &[("acme--api", 6)])], later(7));
        drop((old, new));
        let series = Series::open(&path);
        assert_eq!(requests(&series, Some("acme"), Some("api"), later(60)), [9, 0, 0, 0, 0, 0]);
        series.take(vec![report(0, &[("acme--api", 1)])], later(15));
        assert_eq!(requests(&series, None, None, later(60)), [9, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn what_cannot_be_written_is_kept_until_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("series.sqlite");
        // Nothing can be opened where a folder is.
        std::fs::create_dir(&path).unwrap();
        let series = Series::open(&path);
        series.take(vec![report(0, &[("acme--api", 5)])], later(5));
        assert!(series.state().failing);
        assert_eq!(requests(&series, None, None, later(60)), [5, 0, 0, 0, 0, 0]);
        std::fs::remove_dir(&path).unwrap();
        series.take(vec![report(0, &[("acme--api", 7)])], later(15));
        assert!(!series.state().failing && series.state().pending.is_empty());
        // The disk is full.
        series.state().file.as_ref().unwrap().limit_size();
        let many: Vec<String> = (0..2000).map(|number| format!("acme--service{number}")).collect();
        let many: Vec<(&str, u64)> = many.iter().map(|label| (label.as_str(), 1)).collect();
        series.take(vec![report(0, &many)], later(25));
        assert!(series.state().failing && !series.state().pending.is_empty());
        assert_eq!(requests(&series, None, None, later(60)), [5, 2, 2000, 0, 0, 0]);
        series.take(vec![report(0, &many)], later(35));
        assert!(!series.state().failing);
        drop(series);
        assert_eq!(requests(&Series::open(&path), None, None, later(60)), [5, 2, 2000, 0, 0, 0]);
    }

    #[test]
    fn a_damaged_file_is_put_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("series.sqlite");
        std::fs::write(&path, "not a database, and long enough to be looked at as one".repeat(100)).unwrap();
        let series = Series::open(&path);
        series.take(vec![report(0, &[("acme--api", 5)])], later(5));
        assert!(!series.state().failing);
        assert!(folder.path().join("series.sqlite.damaged").exists());
    }

    #[test]
    fn memory_is_bounded_while_nothing_can_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let series = Series::open(&folder.path().join("no-folder").join("series.sqlite"));
        for turn in 0..3 {
            let labels: Vec<String> = (0..limits::SERIES_PENDING).map(|number| format!("acme--s{number}")).collect();
            let services: Vec<(&str, u64)> = labels.iter().map(|label| (label.as_str(), turn + 1)).collect();
            series.take(vec![report(0, &services)], later(10 * turn as i64));
        }
        assert_eq!(series.state().pending.len(), limits::SERIES_PENDING);
        assert_eq!(series.state().pending.first_key_value().unwrap().0.0, later(20).0);
    }

    #[test]
    fn the_thread_wakes_at_the_end_of_each_point() {
        let at = |ms: u64| until_next(UNIX_EPOCH + Duration::from_millis(ms)).as_millis();
        assert_eq!([at(1_800_000_000_000), at(1_800_000_009_499), at(1_800_000_009_500)], [9500, 1, 10_000]);
        let until = |ms: u64| recorded_until(UNIX_EPOCH + Duration::from_millis(ms)).0;
        let ends = [until(1_800_000_000_000), until(1_800_000_009_499), until(1_800_000_009_500)];
        assert_eq!(ends, [1_800_000_000, 1_800_000_000, 1_800_000_010]);
    }
}
