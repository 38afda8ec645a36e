//! Tracer of one thread that serves requests: decides which requests are recorded and batches
//! finished spans.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::context::{TRACEPARENT, TRACESTATE, TraceContext};
use super::export::SpanQueue;
use crate::http::Fields;
use crate::runtime;

/// Spans sent to the exporting thread together.
const BATCH: usize = 128;
/// Longest time that a finished span waits in an incomplete batch.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);

/// Trace context of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanContext {
    /// Context sent to the next hop: this program's own, or the caller's if the trace is not
    /// recorded.
    pub context: TraceContext,
    /// Id of the parent span.
    pub parent: Option<[u8; 8]>,
    origin: Origin,
}

/// How the request's trace fields are forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The trace is not recorded: its fields are forwarded unchanged.
    Passing,
    /// The trace began before and is recorded.
    Continued,
    /// The trace begins here.
    Begun,
    /// The parent is a span of this program.
    Inner,
}

impl SpanContext {
    /// Whether a span is recorded for the request.
    pub fn is_recorded(&self) -> bool {
        self.context.sampled
    }

    /// Whether the parent is a span of another program.
    pub(super) fn has_remote_parent(&self) -> bool {
        self.parent.is_some() && self.origin != Origin::Inner
    }

    /// Sets the trace fields of the forwarded request. Removes `tracestate` if the trace begins
    /// here.
    pub fn write_to(&self, headers: &mut Fields) {
        if self.origin == Origin::Passing {
            return;
        }
        headers.insert(TRACEPARENT, self.context.to_value());
        if self.origin == Origin::Begun {
            headers.remove(TRACESTATE);
        }
    }
}

/// Tracer of one thread.
pub struct Tracer<T> {
    sample_ratio: f64,
    random: RefCell<SmallRng>,
    finished: RefCell<Vec<T>>,
    queue: SpanQueue<T>,
}

impl<T> Tracer<T> {
    /// Creates a tracer that records `sample_ratio` of the traces that begin here.
    pub fn new(queue: SpanQueue<T>, sample_ratio: f64) -> Self {
        let mut seed = [0; 32];
        // The system's generator does not fail once the process has started. Ids must not repeat.
        if aws_lc_rs::rand::fill(&mut seed).is_err() {
            std::process::abort();
        }
        let random = RefCell::new(SmallRng::from_seed(seed));
        Self {
            sample_ratio,
            random,
            finished: RefCell::default(),
            queue,
        }
    }

    /// Returns the context of a request with these fields. The originator of its trace has decided
    /// whether it is recorded; traces that begin here are sampled at random.
    pub fn begin(&self, headers: &Fields) -> SpanContext {
        let mut random = self.random.borrow_mut();
        match TraceContext::of(headers) {
            Some(caller) if caller.sampled => {
                let context = caller.child(random.next_u64());
                SpanContext {
                    context,
                    parent: Some(caller.span_id),
                    origin: Origin::Continued,
                }
            }
            Some(caller) => SpanContext {
                context: caller,
                parent: None,
                origin: Origin::Passing,
            },
            None => {
                let random = [random.next_u64(), random.next_u64(), random.next_u64()];
                let context = TraceContext::root(random, is_sampled(random[1], self.sample_ratio));
                SpanContext {
                    context,
                    parent: None,
                    origin: Origin::Begun,
                }
            }
        }
    }

    /// Returns the context of a span within the span of `parent`.
    pub fn within(&self, parent: &SpanContext) -> SpanContext {
        let context = parent.context.child(self.random.borrow_mut().next_u64());
        SpanContext {
            context,
            parent: Some(parent.context.span_id),
            origin: Origin::Inner,
        }
    }

    /// Adds the finished span of a recorded request.
    pub fn end(&self, span: T) {
        let mut finished = self.finished.borrow_mut();
        finished.push(span);
        if finished.len() >= BATCH {
            self.queue.hand_over(std::mem::take(&mut finished));
        }
    }

    /// Sends all finished spans.
    pub fn flush(&self) {
        let finished = self.finished.take();
        if !finished.is_empty() {
            self.queue.hand_over(finished);
        }
    }
}

impl<T: 'static> Tracer<T> {
    /// Flushes every `FLUSH_INTERVAL`. Runs on the thread's reactor and never returns.
    pub async fn keep_flushing(self: Rc<Self>) {
        loop {
            runtime::sleep(FLUSH_INTERVAL).await;
            self.flush();
        }
    }
}

/// Decides whether a trace is recorded. `random` is the second half of its id, so that the decision
/// depends on the id alone.
fn is_sampled(random: u64, ratio: f64) -> bool {
    const STEPS: f64 = (1_u64 << 53) as f64;
    ((random >> 11) as f64) / STEPS < ratio
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fields;

    const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn tracer(ratio: f64) -> (Tracer<u32>, crossbeam_channel::Receiver<Vec<u32>>) {
        let (queue, batches) = SpanQueue::bounded(1);
        (Tracer::new(queue, ratio), batches)
    }

    #[test]
    fn recorded_trace_is_continued() {
        let mut headers = fields(&[
            ("a", "1"),
            ("traceparent", CALLER),
            ("tracestate", "v=1"),
            ("b", "2"),
        ]);
        let (tracer, _batches) = tracer(0.0);
        let [first, second] = [tracer.begin(&headers), tracer.begin(&headers)];
        assert!(first.is_recorded() && first.context.span_id != second.context.span_id);
        let caller = TraceContext::parse(CALLER.as_bytes()).unwrap();
        assert_eq!(first.parent, Some(caller.span_id));
        first.write_to(&mut headers);
        let names: Vec<_> = headers.names().map(|name| name.as_str()).collect();
        assert_eq!(names, ["a", "traceparent", "tracestate", "b"]);
        assert_eq!(TraceContext::of(&headers), Some(first.context));
        assert_eq!(headers["tracestate"], "v=1");
        let traceparent = headers["traceparent"].to_str().unwrap();
        assert!(traceparent.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-"));
    }

    #[test]
    fn spans_within_a_span_continue_its_trace() {
        let (tracer, _batches) = tracer(1.0);
        let outer = tracer.begin(&fields(&[("traceparent", CALLER)]));
        let inner = [tracer.within(&outer), tracer.within(&outer)];
        for inner in inner {
            assert_eq!(inner.context.trace_id, outer.context.trace_id);
            assert_eq!(inner.parent, Some(outer.context.span_id));
            assert!(inner.is_recorded() && outer.has_remote_parent() && !inner.has_remote_parent());
        }
        assert!(inner[0].context.span_id != inner[1].context.span_id);
    }

    #[test]
    fn trace_that_is_not_recorded_is_forwarded_unchanged() {
        const VALUE: &str = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00-new";
        let before = fields(&[("traceparent", VALUE), ("tracestate", "v=1")]);
        let (tracer, _batches) = tracer(1.0);
        let context = tracer.begin(&before);
        let mut after = before.clone();
        context.write_to(&mut after);
        assert_eq!((context.is_recorded(), after), (false, before));
    }

    #[test]
    fn new_traces_are_sampled_at_the_configured_ratio() {
        let nothing = Fields::new();
        let (all, _batches) = tracer(1.0);
        let (none, _batches) = tracer(0.0);
        let (some, _batches) = tracer(0.25);
        let recorded = |tracer: &Tracer<u32>| {
            let traces = (0..10_000).map(|_| tracer.begin(&nothing));
            traces.filter(|trace| trace.is_recorded()).count()
        };
        assert_eq!((recorded(&all), recorded(&none)), (10_000, 0));
        // Ten standard deviations.
        assert!((2_067..2_933).contains(&recorded(&some)));
        assert!(is_sampled(u64::MAX, 1.0) && !is_sampled(0, 0.0));
    }

    #[test]
    fn invalid_trace_fields_are_replaced() {
        for list in [
            &[
                ("traceparent", CALLER),
                ("traceparent", CALLER),
                ("tracestate", "v=1"),
            ][..],
            &[("traceparent", "00-nonsense"), ("tracestate", "v=1")],
            &[("tracestate", "v=1")],
        ] {
            let mut headers = fields(list);
            let (tracer, _batches) = tracer(0.0);
            let context = tracer.begin(&headers);
            context.write_to(&mut headers);
            assert_eq!(headers.len(), 1);
            assert_eq!(TraceContext::of(&headers), Some(context.context));
            assert_eq!((context.parent, context.is_recorded()), (None, false));
        }
    }

    #[test]
    fn spans_are_sent_in_batches_and_dropped_spans_are_counted() {
        let (tracer, batches) = tracer(1.0);
        for span in 0..BATCH as u32 {
            assert!(batches.is_empty());
            tracer.end(span);
        }
        assert_eq!(batches.len(), 1);
        // The queue has room for one batch.
        tracer.end(1000);
        tracer.flush();
        assert!(batches.recv().unwrap().into_iter().eq(0..BATCH as u32));
        tracer.flush();
        assert!(batches.is_empty());
        assert_eq!(tracer.queue.counts().dropped(), 1);
        tracer.end(1);
        tracer.flush();
        assert_eq!(batches.recv().unwrap(), [1]);
        assert_eq!(tracer.queue.counts().dropped(), 1);
    }
}
