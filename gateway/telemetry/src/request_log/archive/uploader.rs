//! Task that copies the log to the archive, and deletes expired objects there.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use gw_base::clock::Timestamp;
use gw_base::process::background;
use gw_base::process::background::Tasks;
use gw_region::NodeSlot;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::audit_heads::WrittenHead;
use super::name::{ObjectKind, ObjectName, day_folder};
use super::outbox::{Claim, Outbox};
use super::segment::{Draft, Encoded};
use super::{Archive, ArchiveError};
use crate::request_log::days::day::{Day, Now};

/// Interval of passes. A lost node loses the records of at most this time, and those that the store
/// has not taken.
const INTERVAL: Duration = Duration::from_secs(30);
/// Wait after the first failed pass; it doubles with each further one.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Failed passes from which the archive counts as failing. A storage refuses single requests now
/// and then.
const FAILING_FROM: u32 = 2;
/// About the content of one upload. It is in memory twice, with that of one more commit.
const UPLOAD_BYTES: usize = 8 << 20;
/// Interval of looking for expired objects.
const EXPIRY: Duration = Duration::from_hours(1);
/// Most objects deleted before the next upload.
const DELETED_MAX: usize = 500;
/// Longest time for the records of the last seconds when the process stops.
const STOPS_WITHIN: Duration = Duration::from_secs(5);

/// Running uploader. It ends when this is dropped.
#[derive(Debug)]
pub(in super::super) struct Uploading {
    commands: mpsc::Sender<PassRequest>,
    tasks: Tasks,
}

/// Do a pass now, then reply with its result.
type PassRequest = Sender<Result<(), ArchiveError>>;

pub(super) struct Uploader {
    folder: PathBuf,
    pub(super) slot: NodeSlot,
    pub(super) now: Now,
    pub(super) archive: Arc<Archive>,
    bytes_per_second: u64,
    tasks: Tasks,
    /// End of the last pass of a process that stops.
    deadline: Option<Instant>,
    /// Passes that failed since the last successful one.
    failures: u32,
    /// When expired objects were last looked for.
    expired_at: Option<Instant>,
    pub(super) audit_head: Option<WrittenHead>,
}

impl Uploading {
    pub(in super::super) fn start(
        folder: PathBuf,
        slot: NodeSlot,
        archive: Arc<Archive>,
        bytes_per_second: u64,
        tasks: Tasks,
    ) -> Self {
        let (commands, commanded) = mpsc::channel(1);
        let uploader = Uploader {
            folder,
            slot,
            now: archive.now.clone(),
            archive,
            bytes_per_second,
            tasks: tasks.clone(),
            deadline: None,
            failures: 0,
            expired_at: None,
            audit_head: None,
        };
        tasks.spawn("the archive", uploader.run(commanded));
        Self { commands, tasks }
    }

    /// Uploads all rows of the files now. Blocks.
    pub(in super::super) fn flush(&self) -> Result<(), ArchiveError> {
        let (done, wait) = bounded(1);
        self.commands
            .blocking_send(done)
            .map_err(|_| ArchiveError::Stopped)?;
        wait.recv().unwrap_or(Err(ArchiveError::Stopped))
    }

    /// Uploads the last rows within a few seconds and ends the task. A request that lasts longer is
    /// abandoned with the process.
    pub(in super::super) fn stop(&self) {
        if !self.tasks.stop(2 * STOPS_WITHIN) {
            tracing::warn!(
                "archive: the store does not answer; the last records are archived at the next \
                 start"
            );
        }
    }
}

impl Uploader {
    async fn run(mut self, mut commands: mpsc::Receiver<PassRequest>) {
        let mut wait = Duration::ZERO;
        let tasks = self.tasks.clone();
        loop {
            let command = tokio::select! {
                biased;
                () = tasks.stopping().cancelled() => {
                    self.deadline = Some(Instant::now() + STOPS_WITHIN);
                    None
                }
                Some(command) = commands.recv() => Some(command),
                () = sleep(wait) => None,
            };
            let pass = move || {
                let result = background::contained("the archive", || self.pass());
                (self, result.unwrap_or(Err(ArchiveError::Panicked)))
            };
            let Some((uploader, result)) = tasks.blocking("a pass of the archive", pass).await
            else {
                return;
            };
            self = uploader;
            self.note(result.as_ref().err());
            if let Some(done) = command {
                // The waiting thread may have ended.
                let _ = done.send(result);
            }
            if self.deadline.is_some() {
                return;
            }
            wait = match self.failures {
                0 => INTERVAL,
                failures => RETRY_FIRST
                    .saturating_mul(1 << (failures - 1).min(6))
                    .min(RETRY_MAX),
            };
        }
    }

    /// Uploads all rows that are not archived, the oldest day first. Then deletes expired objects.
    fn pass(&mut self) -> Result<(), ArchiveError> {
        let mut unreadable = None;
        for day in self.now.each_day() {
            match self.day(day) {
                // Other days can be archived all the same.
                Err(ArchiveError::Log(error)) => {
                    unreadable = Some(ArchiveError::File {
                        name: day.file_name(),
                        error,
                    });
                }
                result => result?,
            }
        }
        if unreadable.is_none() {
            self.archive.counters.caught_up();
        }
        self.write_audit_head()?;
        if self.deadline.is_none()
            && self.expired_at.is_none_or(|at| at.elapsed() >= EXPIRY)
            && !self.expire()?
        {
            self.expired_at = Some(Instant::now());
        }
        unreadable.map_or(Ok(()), Err)
    }

    fn day(&mut self, day: Day) -> Result<(), ArchiveError> {
        let Some(mut outbox) = Outbox::open(&self.folder, day, self.slot)? else {
            return Ok(());
        };
        while let Some(mut claim) = outbox.claim(UPLOAD_BYTES)? {
            self.archive.counters.behind();
            self.go_on()?;
            if claim.damaged > 0 {
                tracing::warn!(%day, blocks = claim.damaged,
                    "archive: damaged blocks of the request log are left out");
            }
            for (_, draft) in std::mem::take(&mut claim.drafts) {
                self.upload(day, &claim, draft)?;
            }
            outbox.uploaded(&claim)?;
        }
        Ok(())
    }

    fn upload(&mut self, day: Day, claim: &Claim, draft: Draft) -> Result<(), ArchiveError> {
        let Some(Encoded {
            first,
            last,
            digest,
            content,
            bodies,
        }) = draft.encode()?
        else {
            return Ok(());
        };
        let name = ObjectName {
            day,
            slot: claim.slot,
            first,
            last,
            digest,
        };
        let seal = |kind, parts: Vec<(u64, Vec<u8>)>| {
            let path = name.path(&self.archive.region, kind);
            let key = self.archive.sealing.object(&path)?;
            let mut sealed = Vec::new();
            parts
                .into_iter()
                .try_for_each(|(offset, part)| key.seal(offset, part, &mut sealed))?;
            Ok::<_, ArchiveError>((path, sealed))
        };
        // Bodies first: readers find them by the other object.
        if !bodies.is_empty() {
            let (path, sealed) = seal(ObjectKind::Bodies, bodies)?;
            self.put(&path, &sealed)?;
        }
        let (path, sealed) = seal(ObjectKind::Blocks, vec![(0, content)])?;
        self.put(&path, &sealed)
    }

    /// Writes an object, then waits so that no more bytes are written in a second than configured.
    pub(super) fn put(&self, path: &str, content: &[u8]) -> Result<(), ArchiveError> {
        self.go_on()?;
        let began = Instant::now();
        let bytes = content.len() as u64;
        self.archive.bucket.put(path, content)?;
        self.archive
            .counters
            .objects
            .fetch_add(1, Ordering::Relaxed);
        self.archive
            .counters
            .bytes
            .fetch_add(bytes, Ordering::Relaxed);
        let pause = Duration::from_micros(bytes.saturating_mul(1_000_000) / self.bytes_per_second);
        let pause = pause.saturating_sub(began.elapsed());
        if self.deadline.is_none() {
            self.tasks.pause(pause);
        }
        Ok(())
    }

    /// Fails when the time for the last pass is over.
    fn go_on(&self) -> Result<(), ArchiveError> {
        let is_over = self
            .deadline
            .is_some_and(|deadline| Instant::now() >= deadline);
        if is_over {
            Err(ArchiveError::Stopped)
        } else {
            Ok(())
        }
    }

    /// Deletes objects of all nodes of days that are expired by this clock and by that of the
    /// store: a wrong clock must not delete what other nodes archived. Returns whether there is
    /// more to delete.
    fn expire(&self) -> Result<bool, ArchiveError> {
        let Archive {
            bucket,
            region,
            counters,
            ..
        } = &*self.archive;
        let clock = format!("{region}/clock/{:04}", self.slot.get());
        bucket.put(&clock, b"Shows the time of the store.")?;
        let store_now = bucket.written_at(&clock)?.unwrap_or(Timestamp(0));
        let store_days = Now(Arc::new(move || store_now)).days();
        let oldest = *self.now.days().start().min(store_days.start());
        let folders = bucket.folders(region)?;
        let days = folders
            .iter()
            .filter_map(|name| Day::of_file_name(&format!("{name}.")));
        for day in days.filter(|day| *day < oldest) {
            let names = bucket.objects(&day_folder(region, day), DELETED_MAX)?;
            for name in &names {
                bucket.delete(name)?;
                counters.expired.fetch_add(1, Ordering::Relaxed);
            }
            if !names.is_empty() {
                tracing::info!(%day, objects = names.len(), "archive: expired objects deleted");
            }
            if names.len() == DELETED_MAX {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Counts and logs changes between success and failure.
    fn note(&mut self, error: Option<&ArchiveError>) {
        let counters = &self.archive.counters;
        match error {
            Some(ArchiveError::Stopped) => {
                tracing::warn!("archive: the last records are archived at the next start");
            }
            Some(error) => {
                self.failures = self.failures.saturating_add(1);
                counters.failures.fetch_add(1, Ordering::Relaxed);
                if self.failures == FAILING_FROM {
                    let place = self.archive.bucket.place();
                    tracing::warn!(%error, place,
                        "archive: cannot be brought up to date; tried again until it succeeds");
                }
            }
            None => {
                if self.failures >= FAILING_FROM {
                    tracing::info!(attempts = self.failures, "archive: up to date again");
                }
                self.failures = 0;
            }
        }
        counters
            .failing
            .store(self.failures >= FAILING_FROM, Ordering::Relaxed);
    }
}
