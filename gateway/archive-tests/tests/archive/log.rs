//! A node with its request log, and records for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;
use gw_base::clock::Timestamp;
use gw_base::page::Page;
use gw_region::{NodeSlot, RegionKey, RegionKeys};
use gw_shared::http::Fields;
use gw_shared::id::RequestId;
use gw_telemetry::request_log::archive::{Archive, ArchiveError, ArchiveSettings};
use gw_telemetry::request_log::{
    Batch, BodyCapture, Capture, MessageCapture, RequestLog, RequestRecord, RequestView,
    SearchQuery,
};
use http::{HeaderName, HeaderValue};

pub(crate) const APEX: &str = "eu1.example.com";
pub(crate) const LABEL: &str = "acme--api";
/// 2026-11-21T04:15:32Z, far from the boundary of a day and of an hour.
pub(crate) const MORNING_MS: u64 = 1_795_234_532_000;
pub(crate) const HOUR_MS: u64 = 60 * 60 * 1000;
pub(crate) const DAY_MS: u64 = 24 * HOUR_MS;

pub(crate) fn key() -> RegionKeys {
    RegionKey::new([7; 32]).into()
}

pub(crate) fn slot(number: u16) -> NodeSlot {
    NodeSlot::new(number).unwrap()
}

/// Clock set by the test.
#[derive(Clone)]
pub(crate) struct Clock(Arc<AtomicI64>);

impl Clock {
    pub(crate) fn at(unix_ms: u64) -> Self {
        Self(Arc::new(AtomicI64::new((unix_ms / 1000) as i64)))
    }

    pub(crate) fn set(&self, unix_ms: u64) {
        self.0.store((unix_ms / 1000) as i64, Ordering::SeqCst);
    }

    fn now(&self) -> impl Fn() -> Timestamp + Send + Sync + 'static {
        let seconds = Arc::clone(&self.0);
        move || Timestamp(seconds.load(Ordering::SeqCst))
    }

    /// Opens the archive as a node that has no log of its own.
    pub(crate) fn archive(&self, settings: &ArchiveSettings, keys: &RegionKeys) -> Archive {
        Archive::open_at(settings, keys, APEX, self.now()).unwrap()
    }
}

/// Data folder of a node, and its log while it runs.
pub(crate) struct Node {
    folder: tempfile::TempDir,
    clock: Clock,
    slot: NodeSlot,
    pub(crate) log: RequestLog,
}

impl Node {
    pub(crate) fn start(clock: &Clock, slot: NodeSlot, settings: &ArchiveSettings) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = RequestLog::open_at(&folder.path().join("requests"), clock.now()).unwrap();
        log.archive_to(settings, &key(), APEX, slot).unwrap();
        Self {
            folder,
            clock: clock.clone(),
            slot,
            log,
        }
    }

    /// Stops the node and starts it again with the same folder.
    pub(crate) fn restart(&mut self, settings: &ArchiveSettings) {
        self.log.close();
        self.log = self.successor(self.slot, settings);
    }

    /// The log in another process with the same folder.
    pub(crate) fn successor(&self, slot: NodeSlot, settings: &ArchiveSettings) -> RequestLog {
        let log =
            RequestLog::open_at(&self.folder.path().join("requests"), self.clock.now()).unwrap();
        log.archive_to(settings, &key(), APEX, slot).unwrap();
        log
    }

    pub(crate) fn write(&self, label: &str, records: Vec<RequestRecord>) {
        write(&self.log, label, records);
    }
}

pub(crate) fn write(log: &RequestLog, label: &str, records: Vec<RequestRecord>) {
    log.queue().push(Batch {
        services: vec![(label.into(), records)],
    });
    log.flush();
}

pub(crate) fn id(unix_ms: u64, number: u64) -> RequestId {
    let first = u128::from_be_bytes(*RequestId::first_of_ms(unix_ms).as_bytes());
    RequestId::from_bytes((first + u128::from(number)).to_be_bytes()).unwrap()
}

pub(crate) fn record(id: RequestId) -> RequestRecord {
    RequestRecord {
        target: "/a/b?c".into(),
        bytes_in: 1,
        bytes_out: 2,
        ..RequestRecord::example(id)
    }
}

pub(crate) fn captured(id: RequestId, request: &[u8], response: &[u8]) -> RequestRecord {
    let message = |fields: &[(&'static str, &'static str)], body: &[u8]| {
        let mut headers = Fields::new();
        for (name, value) in fields {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        let body = BodyCapture {
            bytes: Bytes::copy_from_slice(body),
            ..BodyCapture::default()
        };
        Some(MessageCapture { headers, body })
    };
    let request = message(
        &[("content-type", "text/plain"), ("x-a", "1"), ("x-a", "2")],
        request,
    );
    let response = message(&[("content-encoding", "gzip")], response);
    RequestRecord {
        capture: Some(Box::new(Capture { request, response })),
        ..record(id)
    }
}

/// All pages of a search.
pub(crate) fn all(
    query: &SearchQuery,
    search: impl Fn(&SearchQuery) -> Result<Page<RequestView>, ArchiveError>,
) -> Vec<RequestView> {
    let mut found = Vec::new();
    let mut query = query.clone();
    loop {
        let page = search(&query).unwrap();
        found.extend(page.items);
        match page.next_cursor {
            Some(cursor) => query.cursor = Some(cursor),
            None => return found,
        }
    }
}
