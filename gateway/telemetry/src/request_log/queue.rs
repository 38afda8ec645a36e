//! Bounded queue from the workers to the log thread. Workers never wait.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::limits;
use crossbeam_channel::{Receiver, Sender, bounded};
use gw_shared::http::Fields;
use gw_shared::telemetry::metrics::{Exposition, Kind};

use super::access_log::{AccessLogCounters, AccessLogStats};
use super::archive::ArchiveStats;
use super::record::{Batch, RecordedAttempt, RequestRecord};
use crate::shared_counters::shared_counters;

// The most records that can wait take less than all bytes that can wait: each of the two limits can
// be reached first.
const _: () = assert!(
    limits::LOG_QUEUE_RECORDS * (size_of::<RequestRecord>() + 64) <= limits::LOG_QUEUE_BYTES
);

/// Sending end of the queue. Clones send to the same log.
#[derive(Clone)]
pub struct LogQueue {
    sender: Sender<LogCommand>,
    counters: Arc<LogCounters>,
}

/// Command to the log thread.
pub(super) enum LogCommand {
    Write(Queued),
    /// Pass on to the access log only.
    PassOn(Queued),
    /// Write all batches queued before, then reply.
    Flush(Sender<()>),
    /// Write all batches queued before and end.
    Close,
}

/// Batch with the room that it occupies in the queue until it is written.
pub(super) struct Queued {
    pub(super) batch: Batch,
    pub(super) cost: Cost,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cost {
    pub(super) records: usize,
    pub(super) bytes: usize,
}

shared_counters! {
    /// Counters of the request log since it was opened, and the size of its queue.
    LogStats of LogCounters {
        written: u64 = Counter "gw_request_log_written_total",
            "Records written to the request log.";
        dropped: u64 = Counter "gw_request_log_dropped_total",
            "Records lost because the queue was full or a write failed.";
        captures_dropped: u64 = Counter "gw_request_log_captures_dropped_total",
            "Requests recorded without their captured messages, because the queue was full.";
        over_share: u64 = Counter "gw_request_log_over_share_total",
            "Records not written because their account had used its share of the day.";
        captures_over_share: u64 = Counter "gw_request_log_captures_over_share_total",
            "Requests recorded without captured messages: their account had used its share of the \
             day.";
        days_removed: u64 = Counter "gw_request_log_early_removals_total",
            "Days removed early, because the files were larger than request_log_max_bytes.";
        out_of_range: u64 = Counter "gw_request_log_out_of_range_total",
            "Records not written because their day has expired or is in the future.";
        damaged: u64 = Counter "gw_request_log_damaged_total",
            "Damaged blocks or files of the request log that readers skipped.";
        failing: bool = Gauge "gw_request_log_failing",
            "1 while the request log cannot be written, else 0. Alert on 1.";
        queued_records: u64 = Gauge "gw_request_log_queued_records",
            "Records in the queue of the request log.";
        queued_bytes: u64 = Gauge "gw_request_log_queued_bytes",
            "Memory of the records in the queue of the request log.";
    }
    LogStats beside {
        /// Counters of the archive.
        archive: ArchiveStats;
        /// Counters of the access log.
        access_log: AccessLogStats;
    }
    LogCounters beside {
        /// `None` without an access log.
        access_log: Option<Arc<AccessLogCounters>>;
    }
}

pub(super) fn queue(counters: Arc<LogCounters>) -> (LogQueue, Receiver<LogCommand>) {
    let (sender, receiver) = bounded(limits::LOG_QUEUE_BATCHES);
    (LogQueue { sender, counters }, receiver)
}

impl LogQueue {
    /// Creates a queue without a log, which drops all records. For benchmarks and fuzz targets.
    #[doc(hidden)]
    pub fn to_nowhere() -> Self {
        queue(Arc::default()).0
    }

    /// Creates a queue without a log, and its receiving end.
    #[cfg(feature = "simulation_support")]
    pub fn to_receiver() -> (Self, LogReceiver) {
        let counters = Arc::default();
        let (queue, receiver) = queue(Arc::clone(&counters));
        (queue, LogReceiver { receiver, counters })
    }

    /// Sends `batch` without waiting. If the queue has no room, first the captured messages are
    /// dropped and counted, then the records.
    pub fn push(&self, mut batch: Batch) {
        let mut cost = Cost::of(&batch);
        if cost.records == 0 {
            return;
        }
        if !self.counters.reserve(cost, 1) {
            let captures = drop_captures(&mut batch);
            cost = Cost::of(&batch);
            if captures == 0 || !self.counters.reserve(cost, 1) {
                return self.counters.lost(cost.records);
            }
            self.counters
                .captures_dropped
                .fetch_add(captures, Ordering::Relaxed);
        }
        if self
            .sender
            .try_send(LogCommand::Write(Queued { batch, cost }))
            .is_err()
        {
            self.counters.release(cost);
            self.counters.lost(cost.records);
        }
    }

    /// Whether there is an access log, which has also requests that are not in the request log.
    pub fn has_access_log(&self) -> bool {
        self.counters.access_log.is_some()
    }

    /// As [`Self::push`], for records that only the access log has.
    pub fn push_past_log(&self, batch: Batch) {
        let cost = Cost::of(&batch);
        let counters = &self.counters;
        // Anyone can send such requests: half of the queue is left to the request log.
        let is_sent = counters.reserve(cost, 2) && {
            let sent = self
                .sender
                .try_send(LogCommand::PassOn(Queued { batch, cost }))
                .is_ok();
            if !sent {
                counters.release(cost);
            }
            sent
        };
        if !is_sent {
            counters.not_passed_on(cost.records);
        }
    }

    /// Sends a command and waits for room in the queue. Not for workers. Fails if the log thread
    /// has ended.
    pub(super) fn send(&self, command: LogCommand) -> Result<(), ()> {
        self.sender.send(command).map_err(drop)
    }
}

/// Receiving end of a queue without a log.
#[cfg(feature = "simulation_support")]
pub struct LogReceiver {
    receiver: Receiver<LogCommand>,
    counters: Arc<LogCounters>,
}

#[cfg(feature = "simulation_support")]
impl LogReceiver {
    /// The next batch of the request log; `None` if none waits.
    pub fn try_next(&self) -> Option<Batch> {
        self.receiver.try_iter().find_map(|command| match command {
            LogCommand::Write(Queued { batch, cost }) => {
                self.counters.release(cost);
                Some(batch)
            }
            LogCommand::PassOn(Queued { cost, .. }) => {
                self.counters.release(cost);
                None
            }
            LogCommand::Flush(_) | LogCommand::Close => None,
        })
    }

    /// Counters of the queue.
    pub fn stats(&self) -> LogStats {
        self.counters.stats()
    }
}

impl Cost {
    pub(super) fn of(batch: &Batch) -> Self {
        let mut cost = Self::default();
        for (_, records) in &batch.services {
            cost.records += records.len();
            cost.bytes += records.iter().map(bytes_of).sum::<usize>();
        }
        cost
    }
}

/// Approximate memory of `record`. The allocator's rounding and shared ids are not counted.
fn bytes_of(record: &RequestRecord) -> usize {
    let captured = record.capture.as_ref().map_or(0, |capture| {
        let sides = [&capture.request, &capture.response].into_iter().flatten();
        sides
            .map(|message| message.body.bytes.len() + bytes_of_headers(&message.headers))
            .sum()
    });
    let attempts = record.attempts.len() * size_of::<RecordedAttempt>();
    size_of::<RequestRecord>() + record.target.len() + attempts + captured
}

/// Approximate memory of names and values, with the map's cost per field and in total.
fn bytes_of_headers(headers: &Fields) -> usize {
    const EACH: usize = 128;
    const MAP: usize = 256;
    headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + EACH)
        .sum::<usize>()
        + MAP
}

fn drop_captures(batch: &mut Batch) -> u64 {
    let records = batch.services.iter_mut().flat_map(|(_, records)| records);
    records
        .map(|record| u64::from(mem::take(&mut record.capture).is_some()))
        .sum()
}

impl LogCounters {
    /// Counters of a request log whose records are also in the access log.
    pub(super) fn beside(access_log: Option<Arc<AccessLogCounters>>) -> Self {
        Self {
            access_log,
            ..Self::default()
        }
    }

    /// Counts records that neither the request log nor the access log will have.
    fn lost(&self, records: usize) {
        self.dropped.fetch_add(records as u64, Ordering::Relaxed);
        self.not_passed_on(records);
    }

    fn not_passed_on(&self, records: usize) {
        if let Some(access_log) = &self.access_log {
            access_log.lost(records);
        }
    }

    /// Reserves room for `cost` in one of `part` parts of the queue. Returns whether there was
    /// room.
    fn reserve(&self, cost: Cost, part: u64) -> bool {
        let [records, bytes] = [cost.records as u64, cost.bytes as u64];
        let queued_records = self.queued_records.fetch_add(records, Ordering::Relaxed);
        let queued_bytes = self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let fits = queued_records + records <= limits::LOG_QUEUE_RECORDS as u64 / part
            && queued_bytes + bytes <= limits::LOG_QUEUE_BYTES as u64 / part;
        if !fits {
            self.release(cost);
        }
        fits
    }

    /// Releases room taken by [`Self::reserve`].
    pub(super) fn release(&self, cost: Cost) {
        self.queued_records
            .fetch_sub(cost.records as u64, Ordering::Relaxed);
        self.queued_bytes
            .fetch_sub(cost.bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn stats(&self) -> LogStats {
        let access_log = self.access_log.as_ref();
        LogStats {
            access_log: access_log.map(|log| log.stats()).unwrap_or_default(),
            ..self.counted()
        }
    }
}

impl LogStats {
    /// Writes the metrics of the request log, of its archive and of the access log.
    pub fn write(&self, out: &mut Exposition) {
        self.write_counted(out);
        self.archive.write(out);
        self.access_log.write(out);
    }
}

#[cfg(test)]
mod tests {
    use gw_shared::id::RequestIds;

    use super::super::record::{BodyCapture, Capture, MessageCapture};
    use super::*;

    fn batch(records: usize, captured: usize) -> Batch {
        let ids = RequestIds::new();
        let body = BodyCapture {
            bytes: vec![0; captured].into(),
            ..BodyCapture::default()
        };
        let capture = Capture {
            request: Some(MessageCapture {
                body,
                ..MessageCapture::default()
            }),
            response: None,
        };
        let capture = || (captured > 0).then(|| Box::new(capture.clone()));
        let record = || RequestRecord {
            capture: capture(),
            ..RequestRecord::example(ids.next_id())
        };
        Batch {
            services: vec![("a--b".into(), (0..records).map(|_| record()).collect())],
        }
    }

    #[test]
    fn records_of_the_access_log_alone_leave_half_of_the_queue() {
        let counters = LogCounters::beside(Some(Arc::default()));
        let (queue, _receiver) = queue(Arc::new(counters));
        let mib = 1024 * 1024;
        for _ in 0..40 {
            queue.push_past_log(batch(1, mib - 2048));
        }
        let stats = queue.counters.stats();
        assert_eq!((stats.queued_records, stats.access_log.dropped), (32, 8));
        queue.push(batch(1, 30 * mib));
        let stats = queue.counters.stats();
        assert_eq!((stats.queued_records, stats.dropped), (33, 0));
    }

    #[test]
    fn full_queue_drops_captures_first_then_batches_and_counts_both() {
        let (queue, receiver) = queue(Arc::default());
        queue.push(batch(0, 0));
        assert_eq!(queue.counters.stats(), LogStats::default());

        // Limit of bytes: 63 MiB fit, then only records without bodies.
        for _ in 0..63 {
            queue.push(batch(1, 1024 * 1024 - 2048));
        }
        let stats = queue.counters.stats();
        assert_eq!(
            (stats.queued_records, stats.captures_dropped, stats.dropped),
            (63, 0, 0)
        );
        queue.push(batch(2, 1024 * 1024));
        let stats = queue.counters.stats();
        assert_eq!(
            (stats.queued_records, stats.captures_dropped, stats.dropped),
            (65, 2, 0)
        );

        // Limit of records.
        queue.push(batch(limits::LOG_QUEUE_RECORDS - 64, 0));
        let stats = queue.counters.stats();
        assert_eq!(
            (stats.queued_records, stats.dropped),
            (65, (limits::LOG_QUEUE_RECORDS - 64) as u64)
        );

        for command in receiver.try_iter() {
            let LogCommand::Write(queued) = command else {
                panic!("nothing else was sent")
            };
            assert_eq!(queued.cost, Cost::of(&queued.batch));
            queue.counters.release(queued.cost);
        }
        let stats = queue.counters.stats();
        assert_eq!((stats.queued_records, stats.queued_bytes), (0, 0));

        // Limit of batches, then a queue without a receiver.
        let before = stats.dropped;
        let one = 1;
        for _ in 0..limits::LOG_QUEUE_BATCHES + one {
            queue.push(batch(1, 0));
        }
        assert_eq!(queue.counters.stats().dropped, before + one as u64);
        drop(receiver);
        queue.push(batch(1, 0));
        assert_eq!(queue.counters.stats().dropped, before + one as u64 + 1);
    }
}
