//! The thread that exports spans: takes batches from the queue, converts them to OpenTelemetry's types and sends them.
//! A slow or unreachable collector causes lost spans, but delays no request.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use opentelemetry::InstrumentationScope;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};

use super::collector::{self, CollectorState};
use super::settings::Settings;
use super::span::Finished;

/// Batches in the queue. With 128 spans in a batch, about 4 MiB with short paths and 8 MiB with long ones: the makers
/// of spans bound their texts.
const QUEUED_BATCHES: usize = 32;
/// Spans after which an export takes no further batch.
const EXPORT_SPANS: usize = 512;
/// Interval between log lines about lost spans.
const LOSS_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Identity of the exporting program.
#[derive(Debug, Clone)]
pub struct Identity {
    pub service_name: &'static str,
    /// Unique among running programs of the same name.
    pub instance_id: String,
    pub region: String,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("traces: {0}")]
    Exporter(String),
    #[error("traces: cannot start the exporting thread: {0}")]
    Thread(#[from] io::Error),
}

/// Counts of exported and lost spans.
#[derive(Debug, Default)]
pub struct SpanCounts {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl SpanCounts {
    /// Spans that the collector has accepted.
    pub fn exported(&self) -> u64 {
        self.exported.load(Ordering::Relaxed)
    }

    /// Lost spans: the queue was full, or the collector did not accept them.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn count(counter: &AtomicU64, spans: usize) {
        counter.fetch_add(spans as u64, Ordering::Relaxed);
    }
}

/// Sending end of the queue to the exporter. Each thread has a clone.
pub struct Queue<T> {
    batches: Sender<Vec<T>>,
    counts: Arc<SpanCounts>,
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self { batches: self.batches.clone(), counts: Arc::clone(&self.counts) }
    }
}

impl<T> Queue<T> {
    /// Creates a queue for `batches` batches, and its receiving end.
    pub fn bounded(batches: usize) -> (Self, Receiver<Vec<T>>) {
        let (sender, receiver) = bounded(batches);
        (Self { batches: sender, counts: Arc::default() }, receiver)
    }

    /// Queues a batch without waiting; drops it if the queue is full.
    pub(super) fn send(&self, batch: Vec<T>) {
        if let Err(refused) = self.batches.try_send(batch) {
            SpanCounts::count(&self.counts.dropped, refused.into_inner().len());
        }
    }

    pub fn counts(&self) -> &Arc<SpanCounts> {
        &self.counts
    }
}

/// Handle of the exporting thread, which sends the queued spans after the handle is dropped.
pub struct Exporter {
    /// Dropped to stop the thread; nothing is sent.
    stop: Sender<Infallible>,
    ended: Receiver<Infallible>,
    counts: Arc<SpanCounts>,
}

impl Exporter {
    /// Starts the thread. It connects to the collector when it sends the first spans.
    pub fn start<T: Finished>(settings: &Settings, identity: &Identity) -> Result<(Self, Queue<T>), StartError> {
        let (exporter, state) = collector::connect(&settings.endpoint, identity)?;
        let endpoint = settings.endpoint.to_string();
        tracing::info!(endpoint, sample_ratio = settings.sample_ratio, "traces");
        Self::start_with(exporter, identity.service_name, move || state.last())
    }

    fn start_with<T: Finished>(
        exporter: impl SpanExporter + 'static,
        scope: &'static str,
        collector_state: impl Fn() -> CollectorState + Send + 'static,
    ) -> Result<(Self, Queue<T>), StartError> {
        let (queue, batches) = Queue::bounded(QUEUED_BATCHES);
        let (stop, stopped) = bounded(0);
        let (alive, ended) = bounded(0);
        let counts = Arc::clone(&queue.counts);
        let thread = Thread {
            exporter,
            scope: InstrumentationScope::builder(scope).with_version(crate::version::VERSION).build(),
            collector_state,
            batches,
            stopped,
            counts: Arc::clone(&counts),
            losses: Losses::default(),
        };
        std::thread::Builder::new().name("gw-traces".to_owned()).spawn(move || {
            thread.run();
            drop(alive);
        })?;
        Ok((Self { stop, ended, counts }, queue))
    }

    pub fn counts(&self) -> &Arc<SpanCounts> {
        &self.counts
    }

    /// Stops the thread after it has sent the queued spans; waits for at most `within`.
    pub fn stop(self, within: Duration) {
        drop(self.stop);
        if self.ended.recv_timeout(within) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the last spans were not exported in time");
        }
    }
}

struct Thread<T, E, A> {
    exporter: E,
    scope: InstrumentationScope,
    collector_state: A,
    batches: Receiver<Vec<T>>,
    stopped: Receiver<Infallible>,
    counts: Arc<SpanCounts>,
    losses: Losses,
}

impl<T: Finished, E: SpanExporter, A: Fn() -> CollectorState> Thread<T, E, A> {
    fn run(mut self) {
        loop {
            crossbeam_channel::select! {
                recv(self.batches) -> batch => match batch {
                    Ok(batch) => self.export(batch),
                    Err(_) => return,
                },
                recv(self.stopped) -> _ => break,
            }
            if let Some(until) = (self.collector_state)().paused_until {
                // A stop ends the pause; the next turn of the loop handles it. Meanwhile spans wait in the queue.
                let _ = self.stopped.recv_deadline(until);
            }
        }
        while let Ok(batch) = self.batches.try_recv() {
            self.export(batch);
        }
    }

    fn export(&mut self, mut spans: Vec<T>) {
        while spans.len() < EXPORT_SPANS
            && let Ok(more) = self.batches.try_recv()
        {
            spans.extend(more);
        }
        let count = spans.len();
        let spans: Vec<SpanData> = spans.into_iter().map(|span| span.into_span().into_data(&self.scope)).collect();
        // The exporter blocks.
        let exported: OTelSdkResult = futures_executor::block_on(self.exporter.export(spans));
        let counter = if exported.is_ok() { &self.counts.exported } else { &self.counts.dropped };
        SpanCounts::count(counter, count);
        if let Some(lost) = self.losses.due(self.counts.dropped(), Instant::now()) {
            let failure =
                exported.err().map(|error| (self.collector_state)().failure.unwrap_or_else(|| error.to_string()));
            let reason = failure.unwrap_or_else(|| "the queue was full: the collector is too slow".to_owned());
            tracing::warn!(lost, reason, "spans were lost");
        }
    }
}

/// Lost spans that have been logged.
#[derive(Default)]
struct Losses {
    logged: u64,
    last: Option<Instant>,
}

impl Losses {
    /// Returns the number of lost spans to log now, if any.
    fn due(&mut self, dropped: u64, now: Instant) -> Option<u64> {
        let is_time = self.last.is_none_or(|last| now.duration_since(last) >= LOSS_LOG_INTERVAL);
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

    /// A finished span with this name.
    struct Named(String);

    impl Finished for Named {
        fn into_span(self) -> Span {
            let (queue, _) = Queue::<()>::bounded(1);
            let context = Tracer::new(queue, 1.0).begin(&http::HeaderMap::new());
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

    /// Exporter that waits at each export for the test's verdict.
    #[derive(Debug)]
    struct Controlled {
        seen: Sender<Vec<String>>,
        verdicts: Receiver<bool>,
    }

    impl SpanExporter for Controlled {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            self.seen.send(batch.into_iter().map(|span| span.name.into_owned()).collect()).unwrap();
            let taken = self.verdicts.recv_timeout(SOON).unwrap();
            if taken { Ok(()) } else { Err(OTelSdkError::InternalFailure("no".to_owned())) }
        }
    }

    fn controlled() -> (Controlled, Receiver<Vec<String>>, Sender<bool>) {
        let (seen, sees) = crossbeam_channel::unbounded();
        let (decide, verdicts) = crossbeam_channel::unbounded();
        (Controlled { seen, verdicts }, sees, decide)
    }

    fn named(names: &[&str]) -> Vec<Named> {
        names.iter().map(|name| Named((*name).to_owned())).collect()
    }

    #[test]
    fn spans_that_the_collector_refuses_are_counted() {
        let (exporter, sees, decide) = controlled();
        let (exporter, queue) = Exporter::start_with(exporter, "test", CollectorState::default).unwrap();
        queue.send(named(&["a", "b"]));
        assert_eq!(sees.recv_timeout(SOON).unwrap(), ["a", "b"]);
        // Batches that are queued during an export are sent together.
        queue.send(named(&["c"]));
        queue.send(named(&["d"]));
        decide.send(false).unwrap();
        assert_eq!(sees.recv_timeout(SOON).unwrap(), ["c", "d"]);
        decide.send(true).unwrap();
        exporter.stop(SOON);
        assert_eq!((queue.counts().exported(), queue.counts().dropped()), (2, 2));
    }

    #[test]
    fn a_full_queue_drops_spans_without_waiting() {
        let (exporter, sees, decide) = controlled();
        let (exporter, queue) = Exporter::start_with(exporter, "test", CollectorState::default).unwrap();
        queue.send(named(&["first"]));
        sees.recv_timeout(SOON).unwrap();
        for _ in 0..QUEUED_BATCHES + 3 {
            queue.send(named(&["x", "y"]));
        }
        assert_eq!(queue.counts().dropped(), 6);
        for _ in 0..2 {
            decide.send(true).unwrap();
        }
        exporter.stop(SOON);
        assert_eq!(queue.counts().exported(), 1 + 2 * QUEUED_BATCHES as u64);
    }

    #[test]
    fn a_stop_sends_queued_spans_within_its_time_limit() {
        let (exporter, sees, decide) = controlled();
        let (exporter, queue) = Exporter::start_with(exporter, "test", CollectorState::default).unwrap();
        queue.send(named(&["stuck"]));
        sees.recv_timeout(SOON).unwrap();
        queue.send(named(&["late"]));
        exporter.stop(Duration::from_millis(1));
        decide.send(true).unwrap();
        assert_eq!(sees.recv_timeout(SOON).unwrap(), ["late"]);
        decide.send(true).unwrap();
    }

    #[test]
    fn a_stop_ends_the_pause_that_a_collector_asked_for() {
        let (exporter, sees, decide) = controlled();
        let (asks, asked) = bounded(1);
        let state = move || {
            // The thread reads the state after an export.
            let _ = asks.try_send(());
            CollectorState { failure: None, paused_until: Some(Instant::now() + Duration::from_secs(3600)) }
        };
        let (exporter, queue) = Exporter::start_with(exporter, "test", state).unwrap();
        queue.send(named(&["throttled"]));
        sees.recv_timeout(SOON).unwrap();
        decide.send(true).unwrap();
        asked.recv_timeout(SOON).unwrap();
        queue.send(named(&["waits"]));
        decide.send(true).unwrap();
        exporter.stop(SOON);
        assert_eq!(sees.try_recv().unwrap(), ["waits"]);
        assert_eq!(queue.counts().exported(), 2);
    }

    #[test]
    fn losses_are_logged_once_a_minute() {
        let (mut losses, start) = (Losses::default(), Instant::now());
        assert_eq!(losses.due(0, start), None);
        assert_eq!(losses.due(3, start), Some(3));
        assert_eq!(losses.due(9, start + LOSS_LOG_INTERVAL / 2), None);
        assert_eq!(losses.due(10, start + LOSS_LOG_INTERVAL), Some(7));
        assert_eq!(losses.due(10, start + 3 * LOSS_LOG_INTERVAL), None);
    }

    #[test]
    fn span_data_has_trace_parent_and_status() {
        let (queue, _) = Queue::<()>::bounded(1);
        let mut headers = http::HeaderMap::new();
        let caller = TraceContext::root([1, 2, 3], true);
        headers.insert("traceparent", caller.to_value());
        let context = Tracer::new(queue, 0.0).begin(&headers);
        let span = Span { context, failure: Some("GW_X".to_owned()), ..Named("GET".to_owned()).into_span() };
        let data = span.into_data(&InstrumentationScope::builder("test").build());
        assert_eq!(data.span_context.trace_id().to_bytes(), caller.trace_id);
        assert_eq!(data.parent_span_id.to_bytes(), caller.span_id);
        assert!(data.parent_span_is_remote && data.span_context.is_sampled());
        assert_eq!(data.status, opentelemetry::trace::Status::error("GW_X"));
    }
}
