//! Request log: one record per request, and the access log of the same records. Workers send
//! batches of records to the log thread, which writes one file per day. Files are kept for seven
//! days; readers search them by id or by criteria.

mod access_log;
mod alarm;
pub mod archive;
mod block;
mod captures;
pub(crate) mod days;
mod names;
mod queue;
pub mod record;
mod recorder;
mod search;
#[cfg(test)]
mod tests;
mod timing;
pub mod view;
mod writer;
mod zone_map;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{fmt, io};

use crate::limits;
use gw_base::clock::Timestamp;
use gw_base::page::Page;
use gw_base::process::background::{Background, Tasks};
use gw_base::sqlite_file::SqliteOpenError;
use gw_region::{NodeSlot, RegionKeys};
use gw_shared::files;
use gw_shared::id::RequestId;
use gw_shared::telemetry::mask::Masker;
use http::Method;
use rusqlite::ErrorCode;

use self::access_log::AccessLog;
use self::archive::{Archive, ArchiveError, ArchiveSettings, Uploading};
use self::captures::capture::StoredMessage;
use self::days::day::{Day, Now};
use self::days::readers::{Reader, Readers};
use self::queue::{LogCommand, LogCounters};
use self::search::day_search::DayFiles;
use self::search::lookup::Found;
use self::search::query::Criteria;
use self::search::{Search, WORK_MAX};
use self::writer::Writer;

pub use access_log::{AccessLogStats, AccessLogTarget};
pub use captures::capturing::{CaptureBudget, Capturing};
pub use days::disk::LogDisk;
pub use names::Names;
#[cfg(feature = "simulation_support")]
pub use queue::LogReceiver;
pub use queue::{LogQueue, LogStats};
pub use record::{
    ATTEMPTS_MAX, Batch, BodyCapture, CallerId, Capture, Ended, METHOD_MAX, MessageCapture,
    Protocol, RecordedAttempt, RequestRecord, RequestView, Truncation,
};
pub use recorder::Recorder;
pub use timing::{Timing, TimingStage};
pub use view::{AttemptView, BodyView, CapturedView, RequestPage, SearchQuery, Side};

/// Label in records of requests to the apex, which have no service.
pub const APEX_LABEL: &str = "";
/// Time for which the clock must show the same day before files expire: a machine's clock may be
/// wrong by years until it is synchronised.
const SETTLES_WITHIN: Duration = Duration::from_mins(10);

/// Request log of one gateway process. During an upgrade another process has the same folder open.
///
/// All functions that read block on files.
pub struct RequestLog {
    folder: PathBuf,
    now: Now,
    names: Names,
    readers: Readers,
    queue: LogQueue,
    counters: Arc<LogCounters>,
    /// The thread of the log, `gw-log`.
    tasks: Tasks,
    archiving: OnceLock<Archiving>,
    access_log: Option<AccessLog>,
    is_closed: AtomicBool,
    /// Runtime of a log without a gateway.
    _background: Option<Background>,
}

/// Copies of the log in object storage.
#[derive(Debug)]
struct Archiving {
    archive: Arc<Archive>,
    uploading: Uploading,
}

/// Reason why the request log or the access log cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A field of a search is invalid.
    #[error("{field}: {message}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// Why its value is invalid.
        message: String,
    },
    /// SQLite reported an error.
    #[error("request log: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// A file or folder of the log cannot be used.
    #[error("request log: {0}")]
    Io(#[from] io::Error),
    /// Stored data cannot be decoded.
    #[error("request log: damaged: {0}")]
    Damaged(&'static str),
    /// The file of a day has a schema that this program does not know.
    #[error("request log: the file of a day was written by another version of the program")]
    OtherSchema,
    /// A record cannot be encoded.
    #[error("request log: cannot be encoded: {0}")]
    Encode(&'static str),
    /// The access log cannot be opened or appended to.
    #[error(
        "access_log: cannot append to {target}: {error}; name a file in an existing folder that \
         the user of the gateway may write to, or \"stdout\""
    )]
    AccessLog {
        /// Where the access log goes.
        target: AccessLogTarget,
        /// Cause of the failure.
        error: io::Error,
    },
}

/// Recorded request with its captured message, as needed to replay it.
#[derive(Debug, Clone)]
pub struct CapturedRequest {
    /// The request as the administration API shows it.
    pub view: RequestView,
    /// Method of the request.
    pub method: Method,
    /// Path and query as received, with the gateway's secrets masked.
    pub target: String,
    /// `None` if the request was not captured.
    pub request: Option<MessageCapture>,
}

impl RequestLog {
    /// Opens or creates the log in `folder` (mode 0700, files 0600) and starts its thread,
    /// `gw-log`.
    pub fn open(folder: &Path) -> Result<Self, LogError> {
        let background = Background::start()?;
        let names = Names::default();
        let log = Self::open_on(&background, folder, Masker::default(), None, None, names)?;
        Ok(log.keeping(background))
    }

    /// Like [`Self::open`], on a runtime that is there, and masks the secrets known to `masker` in
    /// records. With `access_log`, also starts that log. The files may take `max_bytes`, by default
    /// a quarter of the disk. Shows no records of earlier accounts and services than those of
    /// `names`.
    pub fn open_on(
        background: &Background,
        folder: &Path,
        masker: Masker,
        access_log: Option<&AccessLogTarget>,
        max_bytes: Option<u64>,
        names: Names,
    ) -> Result<Self, LogError> {
        let tasks = background.tasks();
        let now = Timestamp::now;
        let mut log = Self::with_clock(
            tasks,
            folder,
            now,
            SETTLES_WITHIN,
            masker,
            access_log,
            max_bytes,
        )?;
        log.names = names;
        Ok(log)
    }

    /// Like [`Self::open`], with another clock, which is trusted at once.
    pub fn open_at(
        folder: &Path,
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
    ) -> Result<Self, LogError> {
        let background = Background::start()?;
        let tasks = background.tasks();
        let masker = Masker::default();
        let log = Self::with_clock(tasks, folder, now, Duration::ZERO, masker, None, None)?;
        Ok(log.keeping(background))
    }

    fn keeping(mut self, background: Background) -> Self {
        self._background = Some(background);
        self
    }

    fn with_clock(
        tasks: Tasks,
        folder: &Path,
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
        settles_within: Duration,
        masker: Masker,
        access_log: Option<&AccessLogTarget>,
        max_bytes: Option<u64>,
    ) -> Result<Self, LogError> {
        files::create_private_dir(folder)?;
        let access_log = access_log
            .map(|target| AccessLog::start(target, masker.clone(), tasks.sibling()))
            .transpose()?;
        let (access_log, access_queue) = access_log.unzip();
        let access_counters = access_log.as_ref().map(|log| Arc::clone(log.counters()));
        let counters = Arc::new(LogCounters::beside(access_counters));
        let (queue, receiver) = queue::queue(Arc::clone(&counters));
        let now = Now(Arc::new(now));
        let writer = Writer::new(
            folder.to_owned(),
            now.clone(),
            Arc::clone(&counters),
            settles_within,
            masker,
            access_queue,
            max_bytes,
        )?;
        // A thread of its own: requests to the admin listener, which wait for it, may use up those
        // for blocking work.
        tasks.thread("gw-log", move || writer.run(&receiver))?;
        let readers = Readers::new(folder.to_owned());
        Ok(Self {
            folder: folder.to_owned(),
            now,
            names: Names::default(),
            readers,
            queue,
            counters,
            tasks,
            archiving: OnceLock::new(),
            access_log,
            is_closed: AtomicBool::default(),
            _background: None,
        })
    }

    /// Returns the queue for a worker. It is cheap to clone.
    pub fn queue(&self) -> LogQueue {
        self.queue.clone()
    }

    /// Values of the counters of the request log.
    pub fn stats(&self) -> LogStats {
        let archive = self
            .archive()
            .map(|archive| archive.stats())
            .unwrap_or_default();
        LogStats {
            archive,
            ..self.counters.stats()
        }
    }

    /// Starts to copy the log to the archive of the region with this apex. `node` is the slot in
    /// the ids that this process makes. Has no effect if it was called before.
    pub fn archive_to(
        &self,
        settings: &ArchiveSettings,
        keys: &RegionKeys,
        apex: &str,
        node: NodeSlot,
    ) -> Result<(), ArchiveError> {
        if self.archiving.get().is_none() {
            let archive = Arc::new(Archive::with_clock(
                settings,
                keys,
                apex,
                self.now.clone(),
                self.names.clone(),
            )?);
            let folder = self.folder.clone();
            let rate = settings.bytes_per_second;
            let tasks = self.tasks.sibling();
            let uploading = Uploading::start(folder, node, Arc::clone(&archive), rate, tasks);
            // Called by one thread at a time.
            let _ = self.archiving.set(Archiving { archive, uploading });
        }
        Ok(())
    }

    /// Archived logs of the region, for requests of nodes that are gone; `None` if no archive is
    /// configured.
    pub fn archive(&self) -> Option<&Arc<Archive>> {
        self.archiving.get().map(|archiving| &archiving.archive)
    }

    /// Waits until all records pushed before are in the archive. Has no effect without one.
    pub fn flush_archive(&self) -> Result<(), ArchiveError> {
        self.flush();
        let Some(archiving) = self.archiving.get() else {
            return Ok(());
        };
        archiving.uploading.flush()
    }

    /// Makes the access log open its file again, after the file was renamed. Has no effect without
    /// one.
    pub fn reopen_access_log(&self) {
        if let Some(access_log) = &self.access_log {
            access_log.reopen();
        }
    }

    /// Waits until all records pushed before are committed or counted as dropped.
    pub fn flush(&self) {
        let (done, wait) = crossbeam_channel::bounded(1);
        if self.queue.send(LogCommand::Flush(done)).is_ok() {
            // Fails if the thread has ended, after it wrote all records.
            let _ = wait.recv();
        }
    }

    /// Writes all queued records, archives them within a few seconds if possible, and ends the
    /// tasks, each within a time. Reading stays possible. Records pushed later are dropped and
    /// counted.
    pub fn close(&self) {
        if self.is_closed.swap(true, Ordering::Relaxed) {
            return;
        }
        // The thread does not look whether its tasks stop, but writes what was queued before this.
        let _ = self.queue.send(LogCommand::Close);
        self.tasks.stop(limits::REQUEST_LOG_END);
        if let Some(access_log) = &self.access_log {
            access_log.close();
        }
        // After all records are in the files.
        if let Some(archiving) = self.archiving.get() {
            archiving.uploading.stop();
        }
    }

    /// Returns the request with this id; `None` if it is not in the log or has expired.
    pub fn show(&self, id: RequestId) -> Result<Option<RequestView>, LogError> {
        self.with_found(id, |_, found| Ok(Some(found.view)))
    }

    /// Whether a request with this id may be in the log; otherwise it is too old, or of the future.
    pub fn keeps(&self, id: RequestId) -> bool {
        self.now.days().contains(&Day::of_ms(id.unix_ms()))
    }

    /// Returns a page of the requests that match `query`, the newest first.
    ///
    /// The work of one search is bounded: a page may have fewer items than the limit, or none, and
    /// a `next_cursor` to continue. Damaged data is skipped, counted and logged.
    pub fn search(&self, query: &SearchQuery) -> Result<Page<RequestView>, LogError> {
        self.search_within(query, WORK_MAX)
    }

    fn search_within(&self, query: &SearchQuery, work: u64) -> Result<Page<RequestView>, LogError> {
        let kept = self.now.days();
        let files = DayFiles {
            readers: &self.readers,
            kept: kept.clone(),
            counters: &self.counters,
        };
        Search::new(Criteria::check(query)?, work, self.names.now()).run(&files, &kept)
    }

    /// Returns a captured body; `None` if it was not captured.
    pub fn body(&self, id: RequestId, side: Side) -> Result<Option<BodyView>, LogError> {
        self.with_found(id, |reader, found| {
            let message = read_message(reader, &found, side)?;
            message.map(StoredMessage::body).transpose()
        })
    }

    /// Returns the request with this id and its captured message; `None` if it is not in the log or
    /// has expired.
    pub fn captured(&self, id: RequestId) -> Result<Option<CapturedRequest>, LogError> {
        self.with_found(id, |reader, found| {
            let request = read_message(reader, &found, Side::Request)?;
            found.with_request(request).map(Some)
        })
    }

    fn with_found<T>(
        &self,
        id: RequestId,
        read: impl FnOnce(&Reader, Found) -> Result<Option<T>, LogError>,
    ) -> Result<Option<T>, LogError> {
        let day = Day::of_ms(id.unix_ms());
        let kept = self.now.days();
        if !kept.contains(&day) {
            return Ok(None);
        }
        let found = self.readers.read(day, &kept, |reader| {
            let found = reader.find(id, &self.names.now())?;
            found.map_or(Ok(None), |found| read(reader, found))
        })?;
        Ok(found.flatten())
    }
}

fn read_message(
    reader: &Reader,
    found: &Found,
    side: Side,
) -> Result<Option<StoredMessage>, LogError> {
    found
        .capture
        .map_or(Ok(None), |key| reader.message(key, side))
}

/// Decodes `data` as a block of a file and returns all its records. For fuzz targets.
#[doc(hidden)]
pub fn show_block(data: &[u8]) -> Result<Vec<RequestView>, LogError> {
    let raw = block::Unpacker::new()?.unpack(data)?;
    let block = block::DecodedBlock::read(&raw, |_| true)?;
    Ok(block
        .rows
        .iter()
        .map(|(_, row)| block.columns(row, "acme--api").view())
        .collect())
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for RequestLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestLog")
            .field("folder", &self.folder)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl From<SqliteOpenError> for LogError {
    fn from(error: SqliteOpenError) -> Self {
        match error {
            SqliteOpenError::Sqlite(error) => Self::Sqlite(error),
            SqliteOpenError::Io(error) => Self::Io(error),
            SqliteOpenError::NewerSchema { .. } | SqliteOpenError::OlderSchema { .. } => {
                Self::OtherSchema
            }
        }
    }
}

impl LogError {
    /// Whether the contents of a file cause the error, so that it persists.
    fn is_damage(&self) -> bool {
        match self {
            Self::Damaged(_) | Self::OtherSchema => true,
            Self::Sqlite(error) => {
                matches!(
                    error.sqlite_error_code(),
                    Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
                )
            }
            Self::Invalid { .. } | Self::Io(_) | Self::Encode(_) | Self::AccessLog { .. } => false,
        }
    }
}
