//! Thread that exports spans: takes batches from a bounded queue, converts them to OpenTelemetry
//! data and sends them to the collector. While the collector is slow or unreachable, spans are
//! dropped and requests are not delayed.
//!
//! `opentelemetry_sdk::trace::BatchSpanProcessor` (0.33) also has a bounded queue and one blocking
//! thread, and its shutdown has a time limit, but:
//! - It takes one finished `SpanData` per call, so that the worker would build it: some 20
//!   attributes, each with its own allocation, then a send on a channel that all workers share.
//!   This measures 1.8 µs per span on the worker. Here the worker moves plain data into a batch and
//!   sends 128 at a time, 0.1 µs per span; the exporting thread builds the `SpanData`.
//! - The number of spans that its full queue dropped is private. `gw_spans_dropped_total` and the
//!   log line about lost spans need it.
//! - A collector's `Retry-After` could only be obeyed by blocking in the exporter, which a shutdown
//!   then waits for.
//! - It panics if its thread cannot be started. Here the program reports the error.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use opentelemetry::InstrumentationScope;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};

use super::collector::{self, Answer};
use super::settings::CollectorSettings;
use super::span::Finished;

/// Batches that wait for the exporting thread, of 128 spans each: about 4 MiB with short paths and
/// at most 8 MiB, since the texts of a span are bounded where it is made.
const QUEUED_BATCHES: usize = 32;
/// Spans sent in one request to the collector, at least as many as one batch.
const EXPORTED_TOGETHER: usize = 512;
/// Shortest time between two log lines about lost spans.
const LOSS_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Identity of the running program, exported as resource attributes.
#[derive(Debug, Clone)]
pub struct ProgramIdentity {
    pub service_name: &'static str,
    /// Unique among running programs of this name.
    pub instance_id: String,
    pub region: String,
}

#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    #[error("traces: {0}")]
    Exporter(String),
    #[error("traces: cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}

/// Counts of finished spans.
#[derive(Debug, Default)]
pub struct SpanCounts {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl SpanCounts {
    /// Spans that the collector accepted.
    pub fn exported(&self) -> u64 {
        self.exported.load(Ordering::Relaxed)
    }

    /// Spans lost: the queue was full, or the collector did not accept them.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn count(counter: &AtomicU64, spans: usize) {
        counter.fetch_add(spans as u64, Ordering::Relaxed);
    }
}

/// Sending end of the queue to the exporting thread. Each thread has its own clone.
pub struct SpanQueue<T> {
    batches: Sender<Vec<T>>,
    counts: Arc<SpanCounts>,
}

impl<T> Clone for SpanQueue<T> {
    fn clone(&self) -> Self {
        Self {
            batches: self.batches.clone(),
            counts: Arc::clone(&self.counts),
        }
    }
}

impl<T> SpanQueue<T> {
    /// Creates a queue with room for `batches`, and its receiving end.
    pub fn bounded(batches: usize) -> (Self, Receiver<Vec<T>>) {
        let (sender, receiver) = bounded(batches);
        (
            Self {
                batches: sender,
                counts: Arc::default(),
            },
            receiver,
        )
    }

    /// Sends `batch` without waiting. Drops and counts it if the queue is full.
    pub(super) fn hand_over(&self, batch: Vec<T>) {
        if let Err(refused) = self.batches.try_send(batch) {
            SpanCounts::count(&self.counts.dropped, refused.into_inner().len());
        }
    }

    pub fn counts(&self) -> &Arc<SpanCounts> {
        &self.counts
    }
}

/// Handle of the exporting thread. If it is dropped, the thread still sends the queued spans while
/// the process runs.
pub struct Exporter {
    /// Dropped to stop the thread; nothing is sent on it.
    stop: Sender<Infallible>,
    ended: Receiver<Infallible>,
    counts: Arc<SpanCounts>,
}

impl Exporter {
    /// Starts the thread. It connects to the collector when the first spans are sent.
    pub fn start<T: Finished>(
        settings: &CollectorSettings,
        identity: &ProgramIdentity,
    ) -> Result<(Self, SpanQueue<T>), ExporterError> {
        let (exporter, answers) = collector::connect(&settings.endpoint, identity)?;
        let endpoint = settings.endpoint.to_string();
        tracing::info!(endpoint, sample_ratio = settings.sample_ratio, "traces");
        Self::start_with(exporter, identity.service_name, move || answers.last())
    }

    fn start_with<T: Finished>(
        exporter: impl SpanExporter + 'static,
        scope: &'static str,
        last_answer: impl Fn() -> Answer + Send + 'static,
    ) -> Result<(Self, SpanQueue<T>), ExporterError> {
        let (queue, batches) = SpanQueue::bounded(QUEUED_BATCHES);
        let (stop, stopped) = bounded(0);
        let (alive, ended) = bounded(0);
        let counts = Arc::clone(&queue.counts);
        let thread = Thread {
            exporter,
            scope: InstrumentationScope::builder(scope)
                .with_version(crate::version::VERSION)
                .build(),
            last_answer,
            batches,
            stopped,
            counts: Arc::clone(&counts),
            losses: Losses::default(),
        };
        std::thread::Builder::new()
            .name("gw-traces".to_owned())
            .spawn(move || {
                thread.run();
                drop(alive);
            })?;
        Ok((
            Self {
                stop,
                ended,
                counts,
            },
            queue,
        ))
    }

    pub fn counts(&self) -> &Arc<SpanCounts> {
        &self.counts
    }

    /// Sends all queued spans and stops the thread. Waits at most `within`.
    pub fn stop(self, within: Duration) {
        drop(self.stop);
        if self.ended.recv_timeout(within) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("traces: queued spans were not exported before the time limit");
        }
    }
}

struct Thread<T, E, A> {
    exporter: E,
    scope: InstrumentationScope,
    last_answer: A,
    batches: Receiver<Vec<T>>,
    stopped: Receiver<Infallible>,
    counts: Arc<SpanCounts>,
    losses: Losses,
}

impl<T: Finished, E: SpanExporter, A: Fn() -> Answer> Thread<T, E, A> {
    fn run(mut self) {
        loop {
            crossbeam_channel::select! {
                recv(self.batches) -> batch => match batch {
                    Ok(batch) => self.export(batch),
                    Err(_) => return,
                },
                recv(self.stopped) -> _ => break,
            }
            if let Some(until) = (self.last_answer)().hold_until {
                // A stop ends the pause; the select above sees it. Meanwhile spans are queued while
                // there is room.
                let _ = self.stopped.recv_deadline(until);
            }
        }
        while let Ok(batch) = self.batches.try_recv() {
            self.export(batch);
        }
    }

    fn export(&mut self, mut spans: Vec<T>) {
        while spans.len() < EXPORTED_TOGETHER
            && let Ok(more) = self.batches.try_recv()
        {
            spans.extend(more);
        }
        let count = spans.len();
        let spans: Vec<SpanData> = spans
            .into_iter()
            .map(|span| span.into_span().into_data(&self.scope))
            .collect();
        // The future blocks this thread: HTTP client and delays between retries.
        let exported: OTelSdkResult = futures_executor::block_on(self.exporter.export(spans));
        let counter = if exported.is_ok() {
            &self.counts.exported
        } else {
            &self.counts.dropped
        };
        SpanCounts::count(counter, count);
        if let Some(lost) = self.losses.due(self.counts.dropped(), Instant::now()) {
            let failure = exported.err().map(|error| {
                (self.last_answer)()
                    .failure
                    .unwrap_or_else(|| error.to_string())
            });
            let reason = failure.unwrap_or_else(|| {
                "the queue is full: the collector is slower than spans are recorded".to_owned()
            });
            tracing::warn!(lost, reason, "traces: spans are lost");
        }
    }
}

/// State of the log line about lost spans.
#[derive(Default)]
struct Losses {
    logged: u64,
    last: Option<Instant>,
}

impl Losses {
    /// Returns the number of lost spans to log now, if any.
    fn due(&mut self, dropped: u64, now: Instant) -> Option<u64> {
        let is_time = self
            .last
            .is_none_or(|last| now.duration_since(last) >= LOSS_LOG_INTERVAL);
        let lost = dropped - self.logged;
        (lost > 0 && is_time).then(|| {
            (self.logged, self.last) = (dropped, Some(now));
            lost
        })
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::SpanKind;
    use opentelemetry_sdk::error::OTelSdkError;

    use super::*;
    use crate::telemetry::trace::context::TraceContext;
    use crate::telemetry::trace::span::Span;
    use crate::telemetry::trace::tracer::Tracer;

    const SOON: Duration = Duration::from_secs(20);

    /// Span with this name.
    struct Named(String);

    impl Finished for Named {
        fn into_span(self) -> Span {
            let (queue, _) = SpanQueue::<()>::bounded(1);
            let context = Tracer::new(queue, 1.0).begin(&crate::http::Fields::new());
            Span {
                context,
                kind: SpanKind::Server,
                name: self.0.into(),
                start: std::time::UNIX_EPOCH,
                end: std::time::UNIX_EPOCH,
                attributes: Vec::new(),
                events: Vec::new(),
                failure: None,
            }
        }
    }

    /// Exporter that blocks at each batch until the test sends a verdict.
    #[derive(Debug)]
    struct Scripted {
        seen: Sender<Vec<String>>,
        verdicts: Receiver<bool>,
    }

    impl SpanExporter for Scripted {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            let names = batch.into_iter().map(|span| span.name.into_owned());
            self.seen.send(names.collect()).unwrap();
            match self.verdicts.recv_timeout(SOON).unwrap() {
                true => Ok(()),
                false => Err(OTelSdkError::InternalFailure("no".to_owned())),
            }
        }
    }

    fn scripted() -> (Scripted, Receiver<Vec<String>>, Sender<bool>) {
        let (seen, sees) = crossbeam_channel::unbounded();
        let (decide, verdicts) = crossbeam_channel::unbounded();
        (Scripted { seen, verdicts }, sees, decide)
    }

    fn named(names: &[&str]) -> Vec<Named> {
        names.iter().map(|name| Named((*name).to_owned())).collect()
    }

    #[test]
    fn rejected_spans_are_counted_and_later_ones_are_exported() {
        let (exporter, sees, decide) = scripted();
        let (exporter, queue) = Exporter::start_with(exporter, "test", Answer::default).unwrap();
        queue.hand_over(named(&["a", "b"]));
        assert_eq!(sees.recv_timeout(SOON).unwrap(), ["a", "b"]);
        // Batches queued during an export are exported together.
        queue.hand_over(named(&["c"]));
        queue.hand_over(named(&["d"]));
        decide.send(false).unwrap();
        assert_eq!(sees.recv_timeout(SOON).unwrap(), ["c", "d"]);
        decide.send(true).unwrap();
        exporter.stop(SOON);
        assert_eq!(queue.counts().exported(), 2);
        assert_eq!(queue.counts().dropped(), 2);
    }

    #[test]
    fn full_queue_drops_without_waiting() {
        let (exporter, sees, decide) = scripted();
        let (exporter, queue) = Exporter::start_with(exporter, "test", Answer::default).unwrap();
        queue.hand_over(named(&["first"]));
        sees.recv_timeout(SOON).unwrap();
        for _ in 0..QUEUED_BATCHES + 3 {
            queue.hand_over(named(&["x", "y"]));
        }
        assert_eq!(queue.counts().dropped(), 6);
        for _ in 0..2 {
            decide.send(true).unwrap();
        }
        exporter.stop(SOON);
        assert_eq!(queue.counts().exported(), 1 + 2 * QUEUED_BATCHES as u64);
    }

    #[test]
    fn stop_sends_queued_spans_and_waits_no_longer_than_its_limit() {
        let (exporter, sees, decide) = scripted();
        let (exporter, queue) = Exporter::start_with(exporter, "test", Answer::default).unwrap();
        queue.hand_over(named(&["stuck"]));
        sees.recv_timeout(SOON).unwrap();
        queue.hand_over(named(&["late"]));
        exporter.stop(Duration::from_millis(1));
        decide.send(true).unwrap();
        assert_eq!(sees.recv_timeout(SOON).unwrap(), ["late"]);
        decide.send(true).unwrap();
    }

    #[test]
    fn stop_ends_a_pause_that_the_collector_asked_for() {
        let (exporter, sees, decide) = scripted();
        let (asks, asked) = bounded(1);
        let answer = move || {
            // The thread asks after it has finished the batch.
            let _ = asks.try_send(());
            Answer {
                failure: None,
                hold_until: Some(Instant::now() + Duration::from_secs(3600)),
            }
        };
        let (exporter, queue) = Exporter::start_with(exporter, "test", answer).unwrap();
        queue.hand_over(named(&["throttled"]));
        sees.recv_timeout(SOON).unwrap();
        decide.send(true).unwrap();
        asked.recv_timeout(SOON).unwrap();
        queue.hand_over(named(&["waits"]));
        decide.send(true).unwrap();
        exporter.stop(SOON);
        assert_eq!(sees.try_recv().unwrap(), ["waits"]);
        assert_eq!(queue.counts().exported(), 2);
    }

    #[test]
    fn losses_are_logged_once_a_minute() {
        let mut losses = Losses::default();
        let start = Instant::now();
        assert_eq!(losses.due(0, start), None);
        assert_eq!(losses.due(3, start), Some(3));
        assert_eq!(losses.due(9, start + LOSS_LOG_INTERVAL / 2), None);
        assert_eq!(losses.due(10, start + LOSS_LOG_INTERVAL), Some(7));
        assert_eq!(losses.due(10, start + 3 * LOSS_LOG_INTERVAL), None);
    }

    #[test]
    fn span_data_keeps_trace_and_parent() {
        let (queue, _) = SpanQueue::<()>::bounded(1);
        let mut headers = crate::http::Fields::new();
        let caller = TraceContext::root([1, 2, 3], true);
        let name = http::HeaderName::from_static("traceparent");
        headers.insert(name, caller.to_value());
        let context = Tracer::new(queue, 0.0).begin(&headers);
        let span = Span {
            context,
            failure: Some("GW_X".to_owned()),
            ..Named("GET".to_owned()).into_span()
        };
        let data = span.into_data(&InstrumentationScope::builder("test").build());
        assert_eq!(data.span_context.trace_id().to_bytes(), caller.trace_id);
        assert_eq!(data.parent_span_id.to_bytes(), caller.span_id);
        assert!(data.parent_span_is_remote && data.span_context.is_sampled());
        assert_eq!(data.status, opentelemetry::trace::Status::error("GW_X"));
    }
}
