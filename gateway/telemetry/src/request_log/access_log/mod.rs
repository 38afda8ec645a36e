//! Access log: every ended request as a line of JSON, in a file or on standard output, for programs
//! that ship logs.
//!
//! The log thread passes records on, and a task encodes and writes them: a pipe that is not read
//! must not hold up the request log. Nothing waits for it. Records without room are dropped and
//! counted.

mod output;
#[cfg(test)]
mod tests;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limits;
use gw_base::process::background::Tasks;
use gw_shared::config::Keys;
use gw_shared::telemetry::mask::Masker;
use gw_shared::telemetry::metrics::{Exposition, Kind};
use tokio::sync::{Notify, mpsc};

use self::output::LogOutput;
use self::writer::LineWriter;
use super::LogError;
use super::queue::Cost;
use super::record::Batch;
use crate::shared_counters::shared_counters;

/// Where the access log goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessLogTarget {
    /// Standard output of the process.
    Stdout,
    /// An absolute path.
    File(PathBuf),
}

shared_counters! {
    /// Counters of the access log since the process started. All are 0 without one.
    AccessLogStats of AccessLogCounters {
        written: u64 = Counter "gw_access_log_written_total",
            "Requests written to the access log.";
        dropped: u64 = Counter "gw_access_log_dropped_total",
            "Requests missing in the access log, because a queue was full or a write failed.";
        failing: bool = Gauge "gw_access_log_failing",
            "1 while the access log cannot be written, else 0. Alert on 1.";
    }
    AccessLogStats beside {}
    AccessLogCounters beside {
        queued_bytes: AtomicUsize;
        /// The file has to be opened again.
        reopen: Notify;
    }
}

/// The access log of this process. Its task ends after all [`AccessLogQueue`]s are dropped.
#[derive(Debug)]
pub(super) struct AccessLog {
    counters: Arc<AccessLogCounters>,
    tasks: Tasks,
}

/// Sending end of the access log, for the log thread.
pub(super) struct AccessLogQueue {
    sender: mpsc::Sender<Accepted>,
    counters: Arc<AccessLogCounters>,
}

/// Batch with the room that it occupies until it is written.
struct Accepted {
    batch: Batch,
    bytes: usize,
}

impl AccessLogTarget {
    /// Takes `access_log`; `None` if it is off.
    pub fn take(keys: &mut Keys<'_>) -> Option<Self> {
        const EXPECTED: &str =
            "\"off\", \"stdout\" or an absolute path such as \"/var/log/gw-gateway/access.jsonl\"";
        let target = keys.text("access_log", EXPECTED, |text| match text {
            "off" => Some(None),
            "stdout" => Some(Some(Self::Stdout)),
            path if path.starts_with('/') => Some(Some(Self::File(path.into()))),
            _ => None,
        });
        target.flatten()
    }
}

impl AccessLog {
    /// Opens the output and starts the task in `tasks`. `masker` masks secrets in lines.
    pub(super) fn start(
        target: &AccessLogTarget,
        masker: Masker,
        tasks: Tasks,
    ) -> Result<(Self, AccessLogQueue), LogError> {
        let output = LogOutput::open(target).map_err(|error| LogError::AccessLog {
            target: target.clone(),
            error,
        })?;
        let counters = Arc::<AccessLogCounters>::default();
        let (sender, receiver) = mpsc::channel(limits::LOG_QUEUE_BATCHES);
        let writer = LineWriter::new(output, masker, Arc::clone(&counters));
        tasks.spawn("the access log", writer.run(tasks.clone(), receiver));
        let queue = AccessLogQueue {
            sender,
            counters: Arc::clone(&counters),
        };
        Ok((Self { counters, tasks }, queue))
    }

    /// Makes the task open the file again, so that a renamed one is left alone.
    pub(super) fn reopen(&self) {
        self.counters.reopen.notify_one();
    }

    pub(super) fn counters(&self) -> &Arc<AccessLogCounters> {
        &self.counters
    }

    /// Waits until all lines are written, within a bound: the reader of a pipe may have stopped.
    /// The queue must have been dropped before.
    pub(super) fn close(&self) {
        if !self.tasks.stop(limits::ACCESS_LOG_END) {
            tracing::warn!(
                "access log: the last lines are not written: its reader does not take them"
            );
        }
    }
}

impl AccessLogQueue {
    /// Leaves `batch` to the task, without its captured messages, or drops and counts it.
    pub(super) fn push(&self, mut batch: Batch) {
        for record in batch.services.iter_mut().flat_map(|(_, records)| records) {
            record.capture = None;
        }
        let Cost { records, bytes } = Cost::of(&batch);
        let queued = self
            .counters
            .queued_bytes
            .fetch_add(bytes, Ordering::Relaxed)
            + bytes;
        let is_sent = queued <= limits::ACCESS_LOG_QUEUE_BYTES
            && self.sender.try_send(Accepted { batch, bytes }).is_ok();
        if !is_sent {
            self.counters
                .queued_bytes
                .fetch_sub(bytes, Ordering::Relaxed);
            self.counters.lost(records);
        }
    }
}

impl AccessLogCounters {
    /// Counts requests without a line.
    pub(super) fn lost(&self, records: usize) {
        self.dropped.fetch_add(records as u64, Ordering::Relaxed);
    }

    pub(super) fn stats(&self) -> AccessLogStats {
        self.counted()
    }
}

impl AccessLogStats {
    /// Writes the metrics of the access log.
    pub(super) fn write(&self, out: &mut Exposition) {
        self.write_counted(out);
    }
}

impl std::fmt::Display for AccessLogTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdout => f.write_str("standard output"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}
