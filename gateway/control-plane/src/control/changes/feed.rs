//! Follows the changes that other nodes commit to PostgreSQL.
//!
//! A notification announces a change within milliseconds. Polling guarantees it, because a
//! connection can break without a sign. While PostgreSQL does not answer, the node works from
//! memory and refuses changes.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, mem};

use gw_base::clock::ClockWatch;
use gw_base::process::background;
use gw_base::process::background::Tasks;
use gw_base::process::freeze::AwaitedRead;
use gw_region::{RegionKeys, Roster};
use gw_shared::files;
use gw_shared::identity::secret::Secret;
use gw_store::{
    Position, PostgresSource, PostgresStore, Revision, Sealer, Snapshot, StoreError, StoreSource,
    StoredRecord,
};
use tokio::sync::watch;
use tokio::time::sleep;

use super::journal::{self, Journal};
use crate::control::{Control, ControlError};

/// Interval of polling.
const POLL: Duration = Duration::from_millis(250);
/// Pause after records that are not authentic were read: each attempt may read all of them.
const FORGED_PAUSE: Duration = Duration::from_secs(10);
/// Interval at which old changes are deleted.
const FORGET: Duration = Duration::from_secs(600);
/// Pause between two looks at all hosts for primaries.
const LOOK_FOR_PRIMARIES: Duration = Duration::from_secs(10);
/// Interval at which the clock of PostgreSQL is read.
const READ_CLOCK: Duration = Duration::from_secs(1);
/// File in the data folder with a copy of the records, for a start while PostgreSQL does not
/// answer.
pub(crate) const COPY_FILE: &str = "records.sealed";
/// Member of the copy: the database of these records had tags.
const HAS_TAGS: bool = true;
/// Shortest time between two copies.
const COPY_INTERVAL: Duration = Duration::from_millis(200);
/// Writing copies takes at most one part in this many of the time.
const COPY_SHARE: u32 = 20;

/// The state of the store, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreStatus {
    /// The revision that this node has applied.
    pub revision: Revision,
    /// How long PostgreSQL has not answered. Always `None` with SQLite.
    pub(crate) away_for: Option<Duration>,
    /// Records that are stored, and not used because they are not authentic.
    pub(crate) refused_records: usize,
    /// The records cannot be written to the data folder.
    pub(crate) is_copy_failing: bool,
}

/// Whether PostgreSQL answers, as far as this node knows.
#[derive(Default)]
pub(crate) struct EngineHealth(Mutex<Option<FeedFailure>>);

/// Why changes of other nodes cannot be followed.
struct FeedFailure {
    since: Instant,
    /// Rows that are not authentic; 0 if PostgreSQL does not answer.
    refused_rows: usize,
}

impl EngineHealth {
    fn lock(&self) -> MutexGuard<'_, Option<FeedFailure>> {
        // Every write is a single assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answered(&self, revision: Revision) {
        if let Some(FeedFailure { since, .. }) = self.lock().take() {
            tracing::info!(
                revision = revision.0,
                seconds = since.elapsed().as_secs(),
                "PostgreSQL answers again"
            );
        }
    }

    fn failed(&self, error: &StoreError) {
        let refused_rows = if let StoreError::Forged { count, .. } = error {
            *count
        } else {
            0
        };
        let mut failure = self.lock();
        let since = failure
            .as_ref()
            .map_or_else(Instant::now, |failure| failure.since);
        if failure
            .as_ref()
            .is_none_or(|failure| failure.refused_rows != refused_rows)
        {
            if refused_rows == 0 {
                tracing::error!(%error,
                    "relaying goes on from memory; changes are refused until PostgreSQL answers");
            } else {
                tracing::error!(%error, "records are not authentic: relaying goes on from memory");
            }
        }
        *failure = Some(FeedFailure {
            since,
            refused_rows,
        });
    }
}

impl Control {
    pub(crate) fn store_status(&self) -> StoreStatus {
        let (away_for, refused_rows) = self
            .engine_health
            .lock()
            .as_ref()
            .map_or((None, 0), |failure| {
                (Some(failure.since.elapsed()), failure.refused_rows)
            });
        let state = self.state();
        let refused_records = state.directory.refused_signing_keys() + refused_rows;
        let is_copy_failing = self.journal.as_ref().is_some_and(Journal::is_failing);
        StoreStatus {
            revision: state.position.revision,
            away_for,
            refused_records,
            is_copy_failing,
        }
    }

    /// The servers of PostgreSQL that take changes, and what to do; `None` if there is one at most.
    pub(crate) fn several_primaries(&self) -> Option<String> {
        self.postgres_source()?.settings.several_primaries()
    }

    /// Looks for changes of other nodes now. Does not wait.
    pub(crate) fn look_for_changes(&self) {
        self.look_for_changes.notify_one();
    }

    /// The read of the records that the workers wait for; `None` with SQLite.
    pub fn awaited_read(&self) -> Option<&Arc<AwaitedRead>> {
        self.postgres_source().map(|_| &self.awaited_read)
    }

    /// The revision that the workers use. Also sent when a copy of the records was written.
    pub fn applied_revision(&self) -> watch::Receiver<Revision> {
        self.applied.subscribe()
    }

    /// Waits until the workers use the change that made `position`, also those of a predecessor
    /// that drains, and a start without PostgreSQL would know it.
    pub(crate) async fn keeps(self: &Arc<Self>, position: &Position) {
        let mut progress = self.applied_revision();
        loop {
            // The history may be replaced meanwhile.
            if self.includes(position) && self.flush_journal().await && self.includes(position) {
                return self.followed_to(position.revision).await;
            }
            if progress.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    fn includes(&self, position: &Position) -> bool {
        self.state().includes(position)
    }

    /// Returns whether all changes so far are durable.
    async fn flush_journal(self: &Arc<Self>) -> bool {
        let Some(journal) = &self.journal else {
            return true;
        };
        // One thread at a time waits for the disk, however many changes wait.
        let turn = journal.turn().await;
        let control = Arc::clone(self);
        let flush = move || {
            let _turn = turn;
            control
                .journal
                .as_ref()
                .is_none_or(|journal| journal.flush().is_ok())
        };
        tokio::task::spawn_blocking(flush).await.unwrap_or(false)
    }

    /// The nodes of the region as PostgreSQL has them now; `None` with SQLite, and if it does not
    /// answer.
    pub(crate) fn nodes_now(&self) -> Option<Roster> {
        self.store().as_mut()?.nodes().ok().flatten()
    }

    /// The revision of the records.
    pub fn revision(&self) -> Revision {
        self.state().position.revision
    }

    /// The position of the records in the history of the store.
    pub fn position(&self) -> Position {
        self.state().position.clone()
    }
}

/// Starts to follow, unless the store is SQLite, which no other process changes. On a thread of its
/// own, because it waits for PostgreSQL all the time.
pub fn follow(control: &Arc<Control>, data_dir: &Path, tasks: &Tasks) -> io::Result<()> {
    let StoreSource::Postgres(source) = &control.store_source else {
        return Ok(());
    };
    let follower = Follower {
        tasks: tasks.clone(),
        control: Arc::clone(control),
        copy: RecordsCopy::new(data_dir, source),
        source: source.clone(),
        next_forget: Instant::now() + FORGET,
        clock: ClockWatch::default(),
        next_clock: Instant::now(),
        read_began: Instant::now(),
        paused_until: Instant::now(),
    };
    let (source, blocking) = (source.clone(), tasks.clone());
    tasks.spawn_until_stopped("looks for primaries", async move {
        loop {
            let source = source.clone();
            let look = move || source.settings.look_for_primaries(&source.node);
            blocking.blocking("a look for primaries", look).await;
            sleep(LOOK_FOR_PRIMARIES).await;
        }
    });
    tasks.thread("gw-feed", move || follower.run())
}

struct Follower {
    tasks: Tasks,
    control: Arc<Control>,
    source: PostgresSource,
    copy: RecordsCopy,
    next_forget: Instant,
    clock: ClockWatch,
    next_clock: Instant,
    /// Start of the last read of changes.
    read_began: Instant,
    /// No attempt is made before this time.
    paused_until: Instant,
}

impl Follower {
    fn run(mut self) {
        let mut store = match PostgresStore::new(&self.source) {
            Ok(store) => store,
            Err(error) => return tracing::error!(%error, "cannot follow changes of other nodes"),
        };
        self.keep_records();
        while !self.tasks.stopping().is_cancelled() {
            let began = Instant::now();
            if began < self.paused_until {
                self.keep_records();
                std::thread::sleep(POLL);
                continue;
            }
            self.read_began = began;
            let had_connection = store.is_connected();
            // A panic here must not end the thread: nothing else would notice that changes are not
            // followed.
            let follow = || self.follow(&mut store);
            let followed =
                background::contained("a read of changes", follow).unwrap_or_else(|| {
                    let error = "a row made the reader panic";
                    Err(StoreError::Corrupt(error.to_owned()))
                });
            self.tell_workers(&followed, had_connection);
            match followed {
                Ok(()) => self.control.engine_health.answered(self.control.revision()),
                Err(error) => {
                    self.control.engine_health.failed(&error);
                    if matches!(error, StoreError::Forged { .. }) {
                        self.paused_until = Instant::now() + FORGED_PAUSE;
                    }
                    std::thread::sleep(POLL.saturating_sub(began.elapsed()));
                }
            }
            self.keep_records();
        }
    }

    /// Writes the changes of this round to the data folder, and a copy of the records if it is due.
    fn keep_records(&mut self) {
        let Some(journal) = &self.control.journal else {
            return;
        };
        journal.flush_unless_busy();
        self.copy.write_if_due(&self.control, journal);
    }

    fn follow(&mut self, store: &mut PostgresStore) -> Result<(), StoreError> {
        store.wait_for_changes(POLL, &self.control.look_for_changes)?;
        self.read_began = Instant::now();
        while self.control.follow_changes(store)? {}
        if Instant::now() >= self.next_clock {
            self.clock.note(&store.read_clock()?);
            self.next_clock = Instant::now() + READ_CLOCK;
        }
        if Instant::now() >= self.next_forget {
            store.forget_changes()?;
            self.next_forget = Instant::now() + FORGET;
        }
        Ok(())
    }

    /// Tells the workers about a read that they wait for.
    fn tell_workers(&self, followed: &Result<(), StoreError>, had_connection: bool) {
        // An earlier connection may have broken while the process was frozen: the next attempt
        // makes another one.
        let is_over = !had_connection || !matches!(followed, Err(StoreError::Unavailable(_)));
        if is_over && self.control.awaited_read.is_answered_by(self.read_began) {
            tracing::warn!(
                "this process did not run for a second or longer: requests waited until the \
                 records were read again"
            );
            self.control.workers.publish_read(self.read_began);
        }
    }
}

/// The copy of the records in the data folder.
struct RecordsCopy {
    path: PathBuf,
    keys: RegionKeys,
    sealer: Result<Sealer, StoreError>,
    /// With the index of the region key that seals it.
    written: Option<(Position, usize)>,
    /// The last attempt has failed, and whether it might use the reserve.
    failed: Option<bool>,
    next: Instant,
}

impl RecordsCopy {
    fn new(data_dir: &Path, source: &PostgresSource) -> Self {
        let path = data_dir.join(COPY_FILE);
        let keys = source.keys.clone();
        let sealer = Sealer::new(&source.keys);
        Self {
            path,
            keys,
            sealer,
            written: None,
            failed: None,
            next: Instant::now(),
        }
    }

    fn write_if_due(&mut self, control: &Control, journal: &Journal) {
        let needs_copy = journal.needs_copy();
        let key = self.keys.in_use();
        let is_due = needs_copy || self.written != Some((control.position(), key));
        let is_revocation = journal.has_revocation();
        let has_failed = self.failed.is_some_and(|had| had >= is_revocation);
        if !is_due || ((has_failed || !needs_copy) && Instant::now() < self.next) {
            return;
        }
        let began = Instant::now();
        let written = journal.with_room(is_revocation, || self.write(control, journal, key));
        self.failed = written.is_err().then_some(is_revocation);
        match written {
            Ok(Some(position)) => {
                self.written = Some((position, key));
                journal.succeeded();
                // Changes can be durable now.
                control.applied.send_modify(|_| ());
            }
            Ok(None) => {}
            Err(error) => journal.failed(&self.path, &error),
        }
        self.next = Instant::now() + COPY_INTERVAL.max(began.elapsed() * COPY_SHARE);
    }

    /// Returns the position of the copy; `None` if another process has the data folder.
    fn write(
        &self,
        control: &Control,
        journal: &Journal,
        key: usize,
    ) -> Result<Option<Position>, ControlError> {
        let Some(mut copying) = journal.copy() else {
            return Ok(None);
        };
        let (position, records) = {
            let state = control.state();
            if self
                .written
                .as_ref()
                .is_some_and(|(_, of_copy)| *of_copy != key)
            {
                // Its entries are sealed with the earlier region key.
                journal.break_off();
            }
            copying.begin();
            (state.position.clone(), state.records.clone())
        };
        let text = serde_json::to_string(&(&position, records.into_vec(), HAS_TAGS))
            .map_err(io::Error::other)?;
        let text = Secret::new(text);
        let sealer = self
            .sealer
            .as_ref()
            .map_err(|error| io::Error::other(error.to_string()))?;
        files::write_private(
            &self.path,
            sealer.seal(COPY_FILE, text.reveal().as_bytes())?.as_bytes(),
        )?;
        copying.finish(&position)?;
        Ok(Some(position))
    }
}

/// Reads the copy of the records and applies the changes of the journal; `None` if there is no
/// copy. A copy of a database with tags makes `source` expect them.
pub fn read_copy(
    data_dir: &Path,
    source: &PostgresSource,
) -> Result<Option<Snapshot>, ControlError> {
    let path = data_dir.join(COPY_FILE);
    if !path.exists() {
        return Ok(None);
    }
    let sealer = Sealer::new(&source.keys)?;
    let changes = journal::read(data_dir)?;
    let opened = sealer.open(COPY_FILE, &files::read_text(&path)?)?;
    // Earlier versions wrote two members.
    let read =
        serde_json::from_slice::<(Position, Vec<StoredRecord>, bool)>(&opened).or_else(|_| {
            serde_json::from_slice(&opened).map(|(position, records)| (position, records, false))
        });
    let (position, records, has_tags) = read.map_err(io::Error::other)?;
    if has_tags {
        source.known.expect_tags();
    }
    let mut snapshot = Snapshot {
        position,
        records: records.into_iter().collect(),
        recent: Vec::new(),
    };
    for entry in journal::changes_after(&sealer, &changes, &snapshot.position) {
        entry
            .steps
            .into_iter()
            .for_each(|step| snapshot.records.apply(step));
        snapshot
            .recent
            .push(mem::replace(&mut snapshot.position, entry.after));
    }
    Ok(Some(snapshot))
}
