//! Task of the access log: encodes records and writes them in pieces of whole lines.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gw_base::process::background;
use gw_base::process::background::Tasks;
use gw_shared::telemetry::mask::Masker;
use gw_shared::text::escaped_json;
use tokio::sync::mpsc::Receiver;

use super::super::alarm::Alarm;
use super::super::record::RequestRecord;
use super::output::{LogOutput, Unwritten};
use super::{Accepted, AccessLogCounters};

/// Most batches that are written before the next look whether the file has to be opened again.
const BATCHES: usize = 64;

pub(super) struct LineWriter {
    output: LogOutput,
    masker: Masker,
    counters: Arc<AccessLogCounters>,
    alarm: Alarm,
    /// Whole lines that are not written yet, and their number.
    lines: Vec<u8>,
    count: usize,
}

impl LineWriter {
    pub(super) fn new(output: LogOutput, masker: Masker, counters: Arc<AccessLogCounters>) -> Self {
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
    pub(super) async fn run(mut self, tasks: Tasks, mut batches: Receiver<Accepted>) {
        loop {
            let mut accepted = Vec::new();
            let is_open = tokio::select! {
                biased;
                () = self.counters.reopen.notified() => true,
                count = batches.recv_many(&mut accepted, BATCHES) => count > 0,
            };
            if !is_open {
                return;
            }
            let work = move || {
                self.work(accepted);
                self
            };
            let Some(writer) = tasks.blocking("a write of the access log", work).await else {
                return;
            };
            self = writer;
        }
    }

    /// Writes the lines of batches; without any, opens the file again.
    fn work(&mut self, accepted: Vec<Accepted>) {
        if accepted.is_empty() {
            self.reopen();
        }
        for Accepted { batch, bytes } in accepted {
            background::contained("the access log", || {
                for (label, records) in &batch.services {
                    records.iter().for_each(|record| self.add(label, record));
                }
                self.flush();
            });
            self.counters
                .queued_bytes
                .fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    fn add(&mut self, label: &str, record: &RequestRecord) {
        let before = self.lines.len();
        if let Err(error) = append(record, label, &self.masker, &mut self.lines) {
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

    fn reopen(&mut self) {
        match self.output.reopen() {
            Ok(()) => tracing::info!(output = %self.output.target(), "access log reopened"),
            Err(error) => {
                let path = self.output.target();
                tracing::error!(%path, %error,
                    "access log: cannot open the file again: the old one stays in use");
            }
        }
    }
}

/// Appends the line of a request of the service `label`, with its line end.
fn append(
    record: &RequestRecord,
    label: &str,
    masker: &Masker,
    out: &mut Vec<u8>,
) -> Result<(), serde_json::Error> {
    let target = record.masked_target(masker);
    let line = serde_json::to_string(&record.columns(label, &target))?;
    // A path may have characters that a terminal obeys.
    out.extend_from_slice(escaped_json(&line).as_bytes());
    out.push(b'\n');
    Ok(())
}
