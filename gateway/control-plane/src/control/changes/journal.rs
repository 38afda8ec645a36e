//! The journal in the data folder: the changes since the copy of the records. A node acknowledges a
//! change when it is synced here, so that a start without PostgreSQL knows it.
//!
//! Each line is an entry, sealed with the region key: a change with the positions before and after
//! it. The entries that follow the position of the copy, without a gap, belong to it. A crash can
//! leave an incomplete entry at the end, which no acknowledgment depends on.
//!
//! Changes wait in a queue. The first caller of [`Journal::flush`] writes all of them and syncs
//! once; callers that come meanwhile wait for it, and find their changes on the disk or write
//! theirs together.

#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::limits;
use gw_base::process::reserve::Reserve;
use gw_shared::files;
use gw_shared::identity::secret::Secret;
use gw_store::{Position, Sealer, Step, StoreError};
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::control::{ControlError, data_folder};

/// Name of the file in the data folder, and of its entries for the sealer.
const FILE: &str = "records.journal";

pub(crate) struct Journal {
    path: PathBuf,
    sealer: Sealer,
    reserve: Reserve,
    /// Changes that wait. Locked after `owns_files`, the records and `file`.
    queue: Mutex<JournalQueue>,
    /// Open once the first copy is written.
    file: Mutex<Option<JournalFile>>,
    /// Whether this process writes the files: it has the store. Locked while a copy is written,
    /// before the others.
    owns_files: Mutex<bool>,
    is_failing: AtomicBool,
    /// Held by the task that waits for a flush.
    turn: Arc<AsyncMutex<()>>,
}

/// Changes that are not written yet.
#[derive(Default)]
struct JournalQueue {
    entries: Vec<JournalEntry>,
    /// Number of their steps, and of the changes themselves.
    steps: usize,
    base: Base,
    /// A change that takes access away is not on the disk yet.
    has_revocation: bool,
}

/// What the changes in the queue follow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Base {
    /// Nothing on the disk: changes are not kept before the next copy begins.
    #[default]
    Missing,
    /// A copy that is being written.
    Copying,
    /// The last entry of the journal, or the copy.
    Stored,
}

struct JournalFile {
    file: File,
    /// Length in bytes.
    length: usize,
}

/// A change, as a line has it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct JournalEntry {
    before: Position,
    pub(crate) after: Position,
    pub(crate) steps: Vec<Step>,
}

/// Not all changes are on the disk. The next copy of the records writes them.
#[derive(Debug)]
pub(crate) struct NotStored;

impl JournalQueue {
    fn push(&mut self, entry: JournalEntry) {
        self.steps += 1 + entry.steps.len();
        if self.steps > limits::JOURNAL_STEPS {
            return self.break_off();
        }
        self.entries.push(entry);
    }

    fn break_off(&mut self) {
        *self = Self {
            has_revocation: self.has_revocation,
            ..Self::default()
        };
    }

    /// Takes the entries, and whether one of them takes access away.
    fn take(&mut self) -> Result<(Vec<JournalEntry>, bool), NotStored> {
        if self.base != Base::Stored {
            return Err(NotStored);
        }
        self.steps = 0;
        Ok((
            mem::take(&mut self.entries),
            mem::take(&mut self.has_revocation),
        ))
    }
}

impl Journal {
    pub(crate) fn new(data_dir: &Path, sealer: Sealer, reserve: Reserve) -> Self {
        Self {
            path: data_dir.join(FILE),
            sealer,
            reserve,
            // The records at a start may lack on this disk what took access away.
            queue: Mutex::new(JournalQueue {
                has_revocation: true,
                ..JournalQueue::default()
            }),
            file: Mutex::default(),
            owns_files: Mutex::new(true),
            is_failing: AtomicBool::default(),
            turn: Arc::default(),
        }
    }

    /// Waits for the turn to flush. The turn ends when the returned guard is dropped.
    pub(crate) async fn turn(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.turn).lock_owned().await
    }

    /// Queues a change. The caller holds the lock of the records, so that changes arrive in their
    /// order.
    pub(crate) fn push(
        &self,
        before: &Position,
        after: &Position,
        steps: &[Step],
        is_revocation: bool,
    ) {
        let mut queue = lock(&self.queue);
        queue.has_revocation |= is_revocation;
        if queue.base != Base::Missing {
            queue.push(JournalEntry {
                before: before.clone(),
                after: after.clone(),
                steps: steps.to_vec(),
            });
        }
    }

    /// Notes that the records have changed in another way than by a change, which may have taken
    /// access away. The caller holds the lock of the records.
    pub(crate) fn break_off(&self) {
        let mut queue = lock(&self.queue);
        queue.has_revocation = true;
        queue.break_off();
    }

    /// Writes and syncs all changes that wait. On success, every change that was queued before the
    /// call is durable.
    pub(crate) fn flush(&self) -> Result<(), NotStored> {
        self.write_queue(lock(&self.file))
    }

    /// As [`Self::flush`], unless another thread writes now: the reading of changes does not wait
    /// for a slow disk. A copy is due after a failure.
    pub(crate) fn flush_unless_busy(&self) {
        let file = match self.file.try_lock() {
            Ok(file) => file,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let _ = self.write_queue(file);
    }

    fn write_queue(&self, mut file: MutexGuard<'_, Option<JournalFile>>) -> Result<(), NotStored> {
        let (entries, is_revocation) = lock(&self.queue).take()?;
        if entries.is_empty() {
            return Ok(());
        }
        let append = || self.append(&mut file, &entries);
        match self.with_room(is_revocation, append) {
            Ok(true) => return Ok(()),
            // Too long: the next copy has them.
            Ok(false) => {}
            Err(error) => self.failed(&self.path, &error),
        }
        // After a failed write or sync the end of the file is unknown.
        let mut queue = lock(&self.queue);
        queue.has_revocation |= is_revocation;
        queue.break_off();
        Err(NotStored)
    }

    /// Whether a change that takes access away waits to be written.
    pub(crate) fn has_revocation(&self) -> bool {
        lock(&self.queue).has_revocation
    }

    /// Runs `write`, which may use the reserve if it writes a change that takes access away.
    pub(crate) fn with_room<T>(
        &self,
        is_revocation: bool,
        write: impl FnMut() -> Result<T, ControlError>,
    ) -> Result<T, ControlError> {
        let kind = |error: &ControlError| data_folder::kind(error).filter(|_| is_revocation);
        self.reserve.lend(write, kind)
    }

    /// Returns whether there was room.
    fn append(
        &self,
        file: &mut Option<JournalFile>,
        entries: &[JournalEntry],
    ) -> Result<bool, ControlError> {
        let Some(JournalFile { file, length }) = file else {
            return Ok(false);
        };
        let mut lines = Vec::new();
        for entry in entries {
            let text = Secret::new(serde_json::to_string(entry).map_err(io::Error::other)?);
            lines.extend(
                self.sealer
                    .seal(FILE, text.reveal().as_bytes())?
                    .into_bytes(),
            );
            lines.push(b'\n');
        }
        if *length + lines.len() > limits::JOURNAL {
            return Ok(false);
        }
        // Without a part of a line that an attempt on a full disk has left.
        file.set_len(*length as u64)?;
        file.write_all(&lines)?;
        file.sync_data()?;
        *length += lines.len();
        Ok(true)
    }

    /// Whether a copy of the records is due: changes are not kept, or the file is half full.
    pub(crate) fn needs_copy(&self) -> bool {
        let is_long = lock(&self.file)
            .as_ref()
            .is_some_and(|file| file.length > limits::JOURNAL / 2);
        is_long || lock(&self.queue).base == Base::Missing
    }

    /// The right to write a copy of the records; `None` if another process has the data folder.
    pub(crate) fn copy(&self) -> Option<Copying<'_>> {
        let owns_files = lock(&self.owns_files);
        owns_files.then_some(Copying {
            journal: self,
            keeps_entries: false,
            _owns_files: owns_files,
        })
    }

    /// Ends all writes, so that another process can use the data folder. Every change so far is
    /// written, if it can be.
    pub(crate) fn hand_over(&self) {
        let mut owns_files = lock(&self.owns_files);
        // A failure is logged, and the changes are in the database.
        let _ = self.flush();
        self.break_off();
        // Waits for a flush that has begun.
        *lock(&self.file) = None;
        *owns_files = false;
    }

    /// Continues after [`Self::hand_over`]: no other process uses the data folder any more.
    pub(crate) fn take_back(&self) {
        *lock(&self.owns_files) = true;
    }

    pub(crate) fn is_failing(&self) -> bool {
        self.is_failing.load(Ordering::Relaxed)
    }

    /// Logs that a file cannot be written, once.
    pub(crate) fn failed(&self, path: &Path, error: &ControlError) {
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            tracing::error!(
                %error,
                path = %path.display(),
                "cannot write the records to the data folder: a start without PostgreSQL would \
                 lack the latest changes, so X-Gw-Pending-Nodes names this node; check the free \
                 space and the owner of data_dir"
            );
        }
    }

    /// Notes that a copy was written.
    pub(crate) fn succeeded(&self) {
        if self.is_failing.swap(false, Ordering::Relaxed) {
            tracing::info!("the records are written to the data folder again");
        }
    }

    /// Begins the file again after a copy of `position`, with the entries after it if they are to
    /// be kept.
    fn rotate(&self, position: &Position, keeps_entries: bool) -> Result<(), ControlError> {
        let mut file = lock(&self.file);
        let stored = if keeps_entries {
            read_file(&self.path)?
        } else {
            Vec::new()
        };
        let kept: Vec<u8> = chain(&self.sealer, &stored, position)
            .into_iter()
            .flat_map(|(line, _)| line)
            .copied()
            .collect();
        files::write_private(&self.path, &kept)?;
        let opened = OpenOptions::new().append(true).open(&self.path)?;
        *file = Some(JournalFile {
            file: opened,
            length: kept.len(),
        });
        Ok(())
    }
}

/// A copy of the records that is being written. A drop before [`Self::finish`] gives it up.
pub(crate) struct Copying<'a> {
    journal: &'a Journal,
    /// The entries after the copy are on the disk.
    keeps_entries: bool,
    _owns_files: MutexGuard<'a, bool>,
}

impl Copying<'_> {
    /// Marks the position of the copy. The caller holds the lock of the records that it copies.
    pub(crate) fn begin(&mut self) {
        let mut queue = lock(&self.journal.queue);
        self.keeps_entries = queue.base == Base::Stored;
        if queue.base == Base::Missing {
            queue.base = Base::Copying;
        }
    }

    /// Removes the entries up to `position` after the copy of it is durable.
    pub(crate) fn finish(self, position: &Position) -> Result<(), ControlError> {
        let rotated = self.journal.rotate(position, self.keeps_entries);
        let mut queue = lock(&self.journal.queue);
        match &rotated {
            Ok(()) if queue.base == Base::Copying => queue.base = Base::Stored,
            Ok(()) => {}
            // The file may not be the one that is open.
            Err(_) => queue.break_off(),
        }
        rotated
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.journal.queue);
        if queue.base == Base::Copying {
            queue.break_off();
        }
    }
}

/// Reads the file in a data folder; empty if there is none. A caller that also reads the copy reads
/// it afterwards: a copy that is written meanwhile is newer than these entries, or one that they
/// follow.
pub(crate) fn read(data_dir: &Path) -> io::Result<Vec<u8>> {
    read_file(&data_dir.join(FILE))
}

/// The changes that follow `position` in a file.
pub(crate) fn changes_after(
    sealer: &Sealer,
    stored: &[u8],
    position: &Position,
) -> Vec<JournalEntry> {
    chain(sealer, stored, position)
        .into_iter()
        .map(|(_, entry)| entry)
        .collect()
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut stored = Vec::new();
    let read = File::open(path)
        .and_then(|file| file.take(limits::JOURNAL as u64).read_to_end(&mut stored));
    match read {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io::Error::new(
            error.kind(),
            format!("{}: {error}", path.display()),
        )),
        _ => Ok(stored),
    }
}

/// The entries that follow `position` without a gap, with their lines. Ends at the first line that
/// is no entry: a crash has left it, or something else than a gateway of this region.
fn chain<'a>(
    sealer: &Sealer,
    stored: &'a [u8],
    position: &Position,
) -> Vec<(&'a [u8], JournalEntry)> {
    let mut chain = Vec::new();
    let mut at = position.clone();
    for line in stored.split_inclusive(|byte| *byte == b'\n') {
        let Ok(entry) = open(sealer, line) else {
            tracing::warn!(
                file = FILE,
                bytes = line.len(),
                "the journal ends with an incomplete entry, which is not used"
            );
            break;
        };
        if entry.before == at {
            at = entry.after.clone();
            chain.push((line, entry));
        } else if !chain.is_empty() {
            break;
        }
    }
    chain
}

fn open(sealer: &Sealer, line: &[u8]) -> Result<JournalEntry, StoreError> {
    let sealed = line
        .strip_suffix(b"\n")
        .and_then(|line| str::from_utf8(line).ok());
    let sealed =
        sealed.ok_or_else(|| StoreError::Corrupt(format!("{FILE} has an incomplete line")))?;
    serde_json::from_slice(&sealer.open(FILE, sealed)?)
        .map_err(|error| StoreError::Corrupt(error.to_string()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks panics: it reads and writes files, and text of its own making.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
