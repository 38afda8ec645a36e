//! Archive of the request log in S3-compatible object storage: copies of blocks and bodies, read
//! when the node that recorded them is gone.
//!
//! A thread copies what each commit wrote, within half a minute, in objects that are sealed with a
//! key derived from the region key. Objects of expired days are deleted. The files of the log do
//! not wait for the store.

mod audit_heads;
mod check;
mod lookup;
mod name;
mod outbox;
#[cfg(feature = "archive")]
mod s3;
#[cfg(not(feature = "archive"))]
#[path = "no_s3.rs"]
mod s3;
mod seal;
mod search;
mod segment;
mod settings;
mod stats;
mod uploader;

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use gw_base::clock::Timestamp;
use gw_base::page::Page;
use gw_region::{NodeSlot, RegionKeys};
use gw_shared::id::RequestId;
use lru::LruCache;

use self::audit_heads::ReadHead;
use self::name::{ObjectKind, ObjectName, day_folder};
use self::s3::S3Bucket;
use self::seal::ObjectSealing;
use self::search::ArchivedNode;
use self::stats::ArchiveCounters;
use super::captures::capture::StoredMessage;
use super::days::day::Now;
use super::names::Names;
use super::search::query::Criteria;
use super::search::{Search, WORK_MAX};
use super::view::{BodyView, SearchQuery, Side};
use super::{CapturedRequest, LogError, RequestView};

pub use self::check::{CheckStep, check};
pub use self::settings::ArchiveSettings;
pub use self::stats::ArchiveStats;
pub(super) use self::uploader::Uploading;

/// Most bytes of opened objects that are kept for further reads.
const CACHE_BYTES: usize = 32 << 20;
const CACHE_OBJECTS: NonZeroUsize = NonZeroUsize::new(64).unwrap();

/// Archived logs of all nodes of a region, for reading.
///
/// All functions that read block on the network. Memory per call is bounded by one object and one
/// page of results. Clones share counters and opened objects.
#[derive(Clone)]
pub struct Archive {
    bucket: S3Bucket,
    sealing: Arc<ObjectSealing>,
    /// Apex of the region: the first folder of all objects.
    region: String,
    now: Now,
    names: Names,
    counters: Arc<ArchiveCounters>,
    cache: Arc<Mutex<Cache>>,
    audit_head: Arc<OnceLock<ReadHead>>,
}

/// Opened objects with records, the latest used first.
struct Cache {
    objects: LruCache<ObjectName, Arc<Vec<u8>>>,
    bytes: usize,
}

/// Reason why an operation of the archive failed.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The store did not do what was asked.
    #[error("archive: cannot {action} {name}: {reason}")]
    Store {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// Name of the object or folder.
        name: String,
        /// Cause of the failure.
        reason: String,
    },
    /// An object is not what a node wrote.
    #[error(
        "archive: {0}: does not open with the region key: it was changed, or is of another region"
    )]
    Refused(String),
    /// An object opened, and its contents cannot be decoded.
    #[error("archive: {name}: {error}")]
    Damaged {
        /// Name of the object.
        name: String,
        /// Reason why it cannot be decoded.
        error: LogError,
    },
    /// An object of this name cannot be encrypted or its key cannot be derived.
    #[error("archive: cannot seal {0}")]
    Seal(String),
    /// A file of the local log cannot be read.
    #[error("archive: {name}: {error}")]
    File {
        /// Name of the file.
        name: String,
        /// Reason why it cannot be read.
        error: LogError,
    },
    /// For example, a field of a search is invalid.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A pass of the upload panicked.
    #[error("archive: the thread panicked; please report it")]
    Panicked,
    /// The process stops.
    #[error("archive: stopped before all records were archived")]
    Stopped,
}

impl Archive {
    /// Opens the archive of the region with this apex. Connects when it is first used.
    pub fn open(
        settings: &ArchiveSettings,
        keys: &RegionKeys,
        apex: &str,
    ) -> Result<Self, ArchiveError> {
        Self::open_at(settings, keys, apex, Timestamp::now)
    }

    /// Like [`Self::open`], with another clock.
    pub fn open_at(
        settings: &ArchiveSettings,
        keys: &RegionKeys,
        apex: &str,
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
    ) -> Result<Self, ArchiveError> {
        Self::with_clock(settings, keys, apex, Now(Arc::new(now)), Names::default())
    }

    pub(super) fn with_clock(
        settings: &ArchiveSettings,
        keys: &RegionKeys,
        apex: &str,
        now: Now,
        names: Names,
    ) -> Result<Self, ArchiveError> {
        Ok(Self {
            bucket: S3Bucket::new(settings)?,
            sealing: Arc::new(ObjectSealing::new(keys)),
            region: apex.to_owned(),
            now,
            names,
            counters: Arc::default(),
            cache: Arc::new(Mutex::new(Cache {
                objects: LruCache::new(CACHE_OBJECTS),
                bytes: 0,
            })),
            audit_head: Arc::default(),
        })
    }

    /// The archive for reads that end before `until`.
    pub fn until(&self, until: Instant) -> Self {
        let bucket = self.bucket.until(until);
        Self {
            bucket,
            ..self.clone()
        }
    }

    /// Returns the counters of the archive.
    pub fn stats(&self) -> ArchiveStats {
        self.counters.stats()
    }

    /// Returns the request with this id as `node` recorded it; `None` if it is not in the archive
    /// or has expired.
    pub fn show(&self, node: NodeSlot, id: RequestId) -> Result<Option<RequestView>, ArchiveError> {
        Ok(self.find(node, id)?.map(|(_, found)| found.view))
    }

    /// Returns a captured body; `None` if it was not captured.
    pub fn body(
        &self,
        node: NodeSlot,
        id: RequestId,
        side: Side,
    ) -> Result<Option<BodyView>, ArchiveError> {
        let Some((object, found)) = self.find(node, id)? else {
            return Ok(None);
        };
        let message = self.message(&object, &found, side)?;
        let body = message.map(StoredMessage::body).transpose();
        body.map_err(|error| self.damaged(&object, error))
    }

    /// Returns the request with this id and its captured message, as needed to replay it.
    pub fn captured(
        &self,
        node: NodeSlot,
        id: RequestId,
    ) -> Result<Option<CapturedRequest>, ArchiveError> {
        let Some((object, found)) = self.find(node, id)? else {
            return Ok(None);
        };
        let request = self.message(&object, &found, Side::Request)?;
        let captured = found.with_request(request).map(Some);
        captured.map_err(|error| self.damaged(&object, error))
    }

    /// Returns a page of the requests that `node` recorded and that match `query`, the newest
    /// first.
    ///
    /// The work of one search is bounded: a page may have fewer items than the limit, or none, and
    /// a `next_cursor` to continue. Objects that are refused are skipped, counted and logged.
    pub fn search(
        &self,
        node: NodeSlot,
        query: &SearchQuery,
    ) -> Result<Page<RequestView>, ArchiveError> {
        let node = ArchivedNode {
            archive: self,
            node,
        };
        let search = Search::new(Criteria::check(query)?, WORK_MAX, self.names.now());
        search.run(&node, &self.now.days())
    }

    /// Returns the nodes with records in the archive, in the order of their slots.
    pub fn nodes(&self) -> Result<Vec<NodeSlot>, ArchiveError> {
        let mut nodes = BTreeSet::new();
        for day in self.now.each_day() {
            let folders = self.bucket.folders(&day_folder(&self.region, day))?;
            nodes.extend(
                folders
                    .iter()
                    .filter_map(|slot| NodeSlot::new(slot.parse().ok()?)),
            );
        }
        Ok(nodes.into_iter().collect())
    }

    /// Reads and opens an object with records. `None` if it has expired since it was listed.
    fn records(&self, name: &ObjectName) -> Result<Option<Arc<Vec<u8>>>, ArchiveError> {
        if let Some(content) = self.cache().objects.get(name) {
            return Ok(Some(Arc::clone(content)));
        }
        let path = name.path(&self.region, ObjectKind::Blocks);
        let Some(sealed) = self.bucket.get(&path, None)? else {
            return Ok(None);
        };
        let content = Arc::new(self.opened(&path, 0, &sealed)?);
        self.cache().put(name.clone(), Arc::clone(&content));
        Ok(Some(content))
    }

    /// Reads and opens a body.
    fn stored_body(
        &self,
        name: &ObjectName,
        range: &Range<u64>,
    ) -> Result<Option<Vec<u8>>, ArchiveError> {
        let path = name.path(&self.region, ObjectKind::Bodies);
        let Some(sealed) = self.bucket.get(&path, Some(range))? else {
            return Ok(None);
        };
        self.opened(&path, range.start, &sealed).map(Some)
    }

    fn opened(&self, path: &str, offset: u64, sealed: &[u8]) -> Result<Vec<u8>, ArchiveError> {
        let opened = self.sealing.open(path, offset, sealed);
        if opened.is_err() {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
        }
        opened
    }

    fn damaged(&self, name: &ObjectName, error: LogError) -> ArchiveError {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        ArchiveError::Damaged {
            name: name.path(&self.region, ObjectKind::Blocks),
            error,
        }
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cache {
    fn put(&mut self, name: ObjectName, content: Arc<Vec<u8>>) {
        if content.len() > CACHE_BYTES / 2 {
            return;
        }
        self.bytes += content.len();
        if let Some((_, old)) = self.objects.push(name, content) {
            self.bytes -= old.len();
        }
        while self.bytes > CACHE_BYTES
            && let Some((_, old)) = self.objects.pop_lru()
        {
            self.bytes -= old.len();
        }
    }
}

impl ArchiveError {
    /// Whether the contents of an object cause the error, so that it persists.
    fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Damaged { .. })
    }
}

impl fmt::Debug for Archive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Archive")
            .field("place", &self.bucket.place())
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}
