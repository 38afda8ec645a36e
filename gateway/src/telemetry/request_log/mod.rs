//! What became of each request: records that workers make and hand over in batches, a thread of its own that writes
//! them, one file a day for seven days, and the readers that find them again.

mod block;
mod capture;
mod capturing;
mod day;
mod day_file;
mod expiry;
mod lookup;
mod query;
mod queue;
mod readers;
pub mod record;
mod recorder;
mod search;
#[cfg(test)]
mod tests;
pub mod view;
mod writer;
mod zone_map;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use gw_shared::files;
use gw_shared::id::RequestId;
use gw_shared::telemetry::mask::Masker;
use http::Method;
use rusqlite::ErrorCode;

use self::day::{Day, Now};
use self::lookup::{Found, Reader};
use self::query::Criteria;
use self::queue::{Command, Counters};
use self::readers::Readers;
use self::search::{Search, WORK_MAX};
use self::writer::Writer;
use crate::clock::Timestamp;
use crate::control::Page;

pub(crate) use capturing::{CaptureBudget, Capturing};
pub use queue::{LogQueue, LogStats};
pub(crate) use record::METHOD_MAX;
pub use record::{
    Batch, CallerId, Capture, CapturedBody, CapturedMessage, Ended, Protocol, Record, Timing, Truncation,
};
pub(crate) use recorder::Recorder;
pub use view::{BodyView, CapturedView, DurationsView, RequestView, SearchQuery, Side, Stage};

/// Stands for the label of a service in records of requests to the apex.
pub(crate) const APEX_LABEL: &str = "";
/// Nothing expires before it has been the same day for this long: a machine's clock may be wrong by years until it has
/// heard from a time server.
const SETTLES_WITHIN: Duration = Duration::from_mins(10);

/// The request log of one gateway process. Another process may have the same folder open (an upgrade).
///
/// Readers block: they are for threads that may wait.
pub struct RequestLog {
    folder: PathBuf,
    now: Now,
    readers: Readers,
    queue: LogQueue,
    counters: Arc<Counters>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// What is wrong with a value of a search, by the name of its field.
    #[error("{field}: {message}")]
    Invalid { field: &'static str, message: String },
    #[error("request log: {0}")]
    Sqlite(#[from] rusqlite::Error),
    #[error("request log: {0}")]
    Io(#[from] io::Error),
    /// What was written cannot be read.
    #[error("request log: damaged: {0}")]
    Damaged(&'static str),
    #[error("request log: a day's file is of another version of the program")]
    OtherSchema,
    /// A record cannot be written as it is.
    #[error("request log: cannot be encoded: {0}")]
    Encode(&'static str),
}

/// One request with what was captured of it, as needed to send it again.
#[derive(Debug, Clone)]
pub struct CapturedRequest {
    pub view: RequestView,
    pub method: Method,
    /// Path and query as received; secrets of ours in it are masked.
    pub target: String,
    /// Nothing if the request was not captured.
    pub request: Option<CapturedMessage>,
}

impl RequestLog {
    /// Opens or creates the log in `folder` (mode 0700, files 0600) and starts its thread, `gw-log`.
    pub fn open(folder: &Path) -> Result<Self, LogError> {
        Self::open_masking(folder, Masker::default())
    }

    /// As [`Self::open`]; `masker` knows the secrets that are not written.
    pub fn open_masking(folder: &Path, masker: Masker) -> Result<Self, LogError> {
        Self::with_clock(folder, Timestamp::now, SETTLES_WITHIN, masker)
    }

    /// As [`Self::open`], with another clock, which is believed at once.
    pub fn open_at(folder: &Path, now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Result<Self, LogError> {
        Self::with_clock(folder, now, Duration::ZERO, Masker::default())
    }

    fn with_clock(
        folder: &Path,
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
        settles_within: Duration,
        masker: Masker,
    ) -> Result<Self, LogError> {
        files::create_private_dir(folder)?;
        let counters = Arc::new(Counters::default());
        let (queue, receiver) = queue::queue(Arc::clone(&counters));
        let now = Now(Arc::new(now));
        let writer = Writer::new(folder.to_owned(), now.clone(), Arc::clone(&counters), settles_within, masker)?;
        let thread = Builder::new().name("gw-log".to_owned()).spawn(move || writer.run(&receiver))?;
        let readers = Readers::new(folder.to_owned());
        Ok(Self { folder: folder.to_owned(), now, readers, queue, counters, thread: Mutex::new(Some(thread)) })
    }

    /// For a worker: cheap to clone.
    pub fn queue(&self) -> LogQueue {
        self.queue.clone()
    }

    pub fn stats(&self) -> LogStats {
        self.counters.stats()
    }

    /// Waits until all that was pushed before is committed, or counted as dropped.
    pub fn flush(&self) {
        let (done, wait) = crossbeam_channel::bounded(1);
        if self.queue.send(Command::Flush(done)).is_ok() {
            // Fails if the thread ended meanwhile: then all is written.
            let _ = wait.recv();
        }
    }

    /// Writes what waits and ends the thread; readers go on. What is pushed afterwards is dropped and counted.
    pub fn close(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = self.queue.send(Command::Close);
            if thread.join().is_err() {
                tracing::error!("the request log's thread panicked");
            }
        }
    }

    /// The request of this id; `None` if there is no record of it, or no more.
    pub fn show(&self, id: RequestId) -> Result<Option<RequestView>, LogError> {
        self.with_found(id, |_, found| Ok(Some(found.view)))
    }

    /// A page of the requests that `query` is for, the newest first.
    ///
    /// A search that has looked at much and found little ends early: a page may have fewer items than asked for, even
    /// none, and a `next_cursor` to go on from. What is damaged is left out, counted and logged.
    pub fn search(&self, query: &SearchQuery) -> Result<Page<RequestView>, LogError> {
        self.search_within(query, WORK_MAX)
    }

    fn search_within(&self, query: &SearchQuery, work: u64) -> Result<Page<RequestView>, LogError> {
        let criteria = Criteria::check(query)?;
        Search { readers: &self.readers, now: &self.now, counters: &self.counters, criteria, work }.run()
    }

    /// What was captured of a body; `None` if nothing was.
    pub fn body(&self, id: RequestId, side: Side) -> Result<Option<BodyView>, LogError> {
        self.with_found(id, |reader, found| found.capture.map_or(Ok(None), |key| reader.body(key, side)))
    }

    /// The request of this id with what was captured of it; `None` if there is no record of it, or no more.
    pub fn captured(&self, id: RequestId) -> Result<Option<CapturedRequest>, LogError> {
        self.with_found(id, |reader, found| reader.captured_request(found).map(Some))
    }

    fn with_found<T>(
        &self,
        id: RequestId,
        read: impl FnOnce(&Reader, Found) -> Result<Option<T>, LogError>,
    ) -> Result<Option<T>, LogError> {
        let (day, kept) = (Day::of_ms(id.unix_ms()), self.now.days());
        if !kept.contains(&day) {
            return Ok(None);
        }
        let result = self.readers.take(day).and_then(|open| {
            let Some(mut open) = open else { return Ok(None) };
            let found = open.reader.find(id)?;
            let result = found.map_or(Ok(None), |found| read(&open.reader, found));
            self.readers.put(open, &kept);
            result
        });
        // It may have expired under way.
        if result.is_err() && !self.readers.has(day) { Ok(None) } else { result }
    }
}

/// Reads `data` as a block of records and shows all of them, as readers do with what they find in a file.
#[cfg(any(test, feature = "fuzz_support"))]
pub(crate) fn show_block(data: &[u8]) -> Result<Vec<RequestView>, LogError> {
    let raw = block::Unpacker::new()?.unpack(data)?;
    let block = block::Block::read(&raw, |_| true)?;
    Ok(block.rows.iter().map(|(_, row)| block.view(row, "acme--api")).collect())
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for RequestLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestLog").field("folder", &self.folder).field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl LogError {
    /// Whether this is about what is in a file, which will not change.
    fn is_damage(&self) -> bool {
        match self {
            Self::Damaged(_) | Self::OtherSchema => true,
            Self::Sqlite(error) => {
                matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
            }
            Self::Invalid { .. } | Self::Io(_) | Self::Encode(_) => false,
        }
    }
}
