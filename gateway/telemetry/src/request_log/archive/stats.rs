//! Counters of the archive.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use gw_shared::telemetry::metrics::{Exposition, Kind};

use crate::shared_counters::shared_counters;

shared_counters! {
    /// Counters of the archive since the process started. All are 0 without one.
    ArchiveStats of ArchiveCounters {
        objects: u64 = Counter "gw_archive_objects_total",
            "Objects written to the archive of the request log.";
        bytes: u64 = Counter "gw_archive_bytes_total",
            "Bytes written to the archive of the request log.";
        failures: u64 = Counter "gw_archive_failures_total",
            "Failed attempts to bring the archive up to date.";
        expired: u64 = Counter "gw_archive_expired_total",
            "Expired objects deleted from the archive.";
        refused: u64 = Counter "gw_archive_refused_total",
            "Objects of the archive that readers refused: changed, damaged, or sealed with another \
             key.";
        failing: bool = Gauge "gw_archive_failing",
            "1 while the archive cannot be brought up to date, else 0. Alert on 1.";
    }
    ArchiveStats beside {
        /// Time for which rows have waited to be uploaded; 0 if none do.
        lag_seconds: f64;
    }
    ArchiveCounters beside {
        /// When the first row that is not uploaded was noticed.
        behind_since: Mutex<Option<Instant>>;
    }
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
            lag_seconds: behind_since.map_or(0.0, |since| since.elapsed().as_secs_f64()),
            ..self.counted()
        }
    }
}

impl ArchiveStats {
    /// Writes the metrics of the archive.
    pub(in super::super) fn write(&self, out: &mut Exposition) {
        self.write_counted(out);
        let lag = "Seconds for which records have waited to be archived; 0 if none do.";
        out.single("gw_archive_lag_seconds", Kind::Gauge, lag, self.lag_seconds);
    }
}
