//! A worker's end of the log: records gathered into batches, so that one handover is many requests'.

use std::collections::HashMap;
use std::sync::Arc;

use super::queue::LogQueue;
use super::record::{Batch, Record};

/// Records after which a batch is handed over without waiting for [`Recorder::flush`].
const BATCH: usize = 512;
/// The same for bytes of captured bodies.
const BATCH_BYTES: usize = 4 * 1024 * 1024;

/// Gathers the records of one worker.
pub(crate) struct Recorder {
    queue: LogQueue,
    /// By label of the service.
    gathered: HashMap<Arc<str>, Vec<Record>>,
    records: usize,
    bytes: usize,
}

impl Recorder {
    pub(crate) fn new(queue: LogQueue) -> Self {
        Self { queue, gathered: HashMap::new(), records: 0, bytes: 0 }
    }

    /// Adds the record of a request of the service called `label`.
    pub(crate) fn add(&mut self, label: &Arc<str>, record: Record) {
        self.records += 1;
        self.bytes += record.capture.as_ref().map_or(0, |capture| capture.bytes());
        match self.gathered.get_mut(label) {
            Some(records) => records.push(record),
            None => drop(self.gathered.insert(Arc::clone(label), vec![record])),
        }
        if self.records >= BATCH || self.bytes >= BATCH_BYTES {
            self.flush();
        }
    }

    /// Hands over what there is.
    pub(crate) fn flush(&mut self) {
        if self.records > 0 {
            (self.records, self.bytes) = (0, 0);
            self.queue.push(Batch { services: self.gathered.drain().collect() });
        }
    }
}
