//! Thread of the access log: encodes records and writes them in pieces of whole lines.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use gw_shared::telemetry::mask::Masker;

use super::super::alarm::Alarm;
use super::output::{Output, Unwritten};
use super::{Accepted, AccessLogCounters, line};

/// Interval at which a thread without records looks whether it has to open the file again.
const IDLE: Duration = Duration::from_millis(200);

pub(super) struct LineWriter {
    output: Output,
    masker: Masker,
    counters: Arc<AccessLogCounters>,
    alarm: Alarm,
    /// Whole lines that are not written yet, and their number.
    lines: Vec<u8>,
    count: usize,
}

impl LineWriter {
    pub(super) fn new(output: Output, masker: Masker, counters: Arc<AccessLogCounters>) -> Self {
        let alarm = Alarm::new(format!("access log {}", output.target()));
        Self {
            output,
            masker,
            counters,
            alarm,
            lines: Vec::new(),
            count: 0,
        }
    }

    /// Runs until all senders are dropped.
    pub(super) fn run(mut self, batches: &Receiver<Accepted>) {
        loop {
            match batches.recv_timeout(IDLE) {
                Ok(Accepted { batch, bytes }) => {
                    for (label, records) in &batch.services {
                        records.iter().for_each(|record| self.add(label, record));
                    }
                    self.flush();
                    self.counters
                        .queued_bytes
                        .fetch_sub(bytes, Ordering::Relaxed);
                }
                Err(RecvTimeoutError::Timeout) => self.reopen_if_asked(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn add(&mut self, label: &str, record: &super::super::RequestRecord) {
        let before = self.lines.len();
        if let Err(error) = line::append(record, label, &self.masker, &mut self.lines) {
            tracing::error!(%error, "access log: a record cannot be encoded");
            self.lines.truncate(before);
            return self.counters.lost(1);
        }
        if self.lines.len() > self.output.piece && before > 0 {
            let last = self.lines.split_off(before);
            self.flush();
            self.lines.extend_from_slice(&last);
        }
        self.count += 1;
    }

    fn flush(&mut self) {
        self.reopen_if_asked();
        let result = self.output.append(&self.lines);
        let written = result
            .as_ref()
            .map_or_else(|unwritten| unwritten.written, |()| self.count);
        let lost = self.count - written;
        self.counters
            .written
            .fetch_add(written as u64, Ordering::Relaxed);
        self.counters.lost(lost);
        self.counters
            .failing
            .store(result.is_err(), Ordering::Relaxed);
        self.alarm.note(
            result
                .as_ref()
                .map(drop)
                .map_err(|Unwritten { error, .. }| error),
            lost as u64,
        );
        self.lines.clear();
        self.count = 0;
    }

    fn reopen_if_asked(&mut self) {
        if !self.counters.reopen.swap(false, Ordering::Relaxed) {
            return;
        }
        match self.output.reopen() {
            Ok(()) => tracing::info!(target = %self.output.target(), "access log reopened"),
            Err(error) => {
                let path = self.output.target();
                tracing::error!(%path, %error, "access log: cannot open the file again: the old one stays in use");
            }
        }
    }
}
