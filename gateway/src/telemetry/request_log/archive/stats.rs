//! Counters of the archive.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use gw_shared::telemetry::metrics::{Exposition, Kind};

/// Counters of the archive since the process started. All are 0 without one.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ArchiveStats {
    /// Objects written to the store.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// Passes that did not upload all rows.
    pub failures: u64,
    /// The last passes failed.
    pub failing: bool,
    /// Time for which rows have waited to be uploaded; 0 if none do.
    pub lag_seconds: f64,
    /// Expired objects that were deleted.
    pub expired: u64,
    /// Objects refused because they do not open with the region key, or are damaged.
    pub refused: u64,
}

#[derive(Debug, Default)]
pub(super) struct ArchiveCounters {
    pub(super) objects: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) failing: AtomicBool,
    pub(super) expired: AtomicU64,
    pub(super) refused: AtomicU64,
    /// When the first row that is not uploaded was noticed.
    behind_since: Mutex<Option<Instant>>,
}

impl ArchiveCounters {
    /// Rows wait to be uploaded.
    pub(super) fn behind(&self) {
        self.behind_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_with(Instant::now);
    }

    /// All rows are uploaded.
    pub(super) fn caught_up(&self) {
        *self
            .behind_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(super) fn stats(&self) -> ArchiveStats {
        let behind_since = *self
            .behind_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        ArchiveStats {
            objects: self.objects.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            failing: self.failing.load(Ordering::Relaxed),
            lag_seconds: behind_since.map_or(0.0, |since| since.elapsed().as_secs_f64()),
            expired: self.expired.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

impl ArchiveStats {
    /// Writes the metrics of the archive.
    pub(crate) fn write(&self, out: &mut Exposition) {
        for (name, help, count) in [
            (
                "gw_archive_objects_total",
                "Objects written to the archive of the request log.",
                self.objects,
            ),
            (
                "gw_archive_bytes_total",
                "Bytes written to the archive of the request log.",
                self.bytes,
            ),
            (
                "gw_archive_failures_total",
                "Failed attempts to bring the archive up to date.",
                self.failures,
            ),
            (
                "gw_archive_expired_total",
                "Expired objects deleted from the archive.",
                self.expired,
            ),
            (
                "gw_archive_refused_total",
                "Objects of the archive that readers refused: changed, damaged, or sealed with another key.",
                self.refused,
            ),
        ] {
            out.single(name, Kind::Counter, help, count);
        }
        let failing = "1 while the archive cannot be brought up to date, else 0. Alert on 1.";
        out.single(
            "gw_archive_failing",
            Kind::Gauge,
            failing,
            u64::from(self.failing),
        );
        let lag = "Seconds for which records have waited to be archived; 0 if none do.";
        out.single("gw_archive_lag_seconds", Kind::Gauge, lag, self.lag_seconds);
    }
}
