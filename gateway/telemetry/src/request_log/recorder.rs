//! Batches the records of one worker, so that one send covers many requests.

use std::collections::HashMap;
use std::sync::Arc;

use super::queue::LogQueue;
use super::record::{Batch, RequestRecord};

/// Records at which a batch is sent without waiting for [`Recorder::flush`].
const BATCH: usize = 512;
/// Bytes of captured bodies at which a batch is sent.
const BATCH_BYTES: usize = 4 * 1024 * 1024;

/// Current batch of one worker.
pub struct Recorder {
    queue: LogQueue,
    /// Records by label of their service.
    gathered: HashMap<Arc<str>, Vec<RequestRecord>>,
    /// As `gathered`, of requests that only the access log has.
    past_log: HashMap<Arc<str>, Vec<RequestRecord>>,
    records: usize,
    bytes: usize,
}

impl Recorder {
    /// Creates a recorder that sends its batches to `queue`.
    pub fn new(queue: LogQueue) -> Self {
        Self {
            queue,
            gathered: HashMap::new(),
            past_log: HashMap::new(),
            records: 0,
            bytes: 0,
        }
    }

    /// Whether every request has to be added, for the access log.
    pub fn wants_all(&self) -> bool {
        self.queue.has_access_log()
    }

    /// Adds the record of a request to the service `label`: to the request log, or with the access
    /// log only.
    pub fn add(&mut self, label: &Arc<str>, record: RequestRecord, in_log: bool) {
        self.records += 1;
        self.bytes += record.capture.as_ref().map_or(0, |capture| capture.bytes());
        let gathered = if in_log {
            &mut self.gathered
        } else {
            &mut self.past_log
        };
        match gathered.get_mut(label) {
            Some(records) => records.push(record),
            None => drop(gathered.insert(Arc::clone(label), vec![record])),
        }
        if self.records >= BATCH || self.bytes >= BATCH_BYTES {
            self.flush();
        }
    }

    /// Sends the current batch.
    pub fn flush(&mut self) {
        if self.records > 0 {
            (self.records, self.bytes) = (0, 0);
            self.queue.push(Batch {
                services: self.gathered.drain().collect(),
            });
            if !self.past_log.is_empty() {
                self.queue.push_past_log(Batch {
                    services: self.past_log.drain().collect(),
                });
            }
        }
    }
}

/// A worker that panics drops its recorder after the requests that the panic has cut.
impl Drop for Recorder {
    fn drop(&mut self) {
        self.flush();
    }
}
