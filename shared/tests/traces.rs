//! Export of spans to a collector over real sockets, and the handling of failures.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod collector;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use collector::{Collector, TAKEN};
use gw_shared::http::Fields;
use gw_shared::telemetry::trace::{
    CollectorSettings, CollectorUrl, Exporter, Finished, ProgramIdentity, Span, SpanContext,
    SpanCounts, SpanKind, SpanQueue, Tracer,
};

const SOON: Duration = Duration::from_secs(30);

struct Named(&'static str, SpanContext);

impl Finished for Named {
    fn into_span(self) -> Span {
        let now = SystemTime::now();
        Span {
            context: self.1,
            kind: SpanKind::Server,
            name: self.0.into(),
            start: now,
            end: now,
            attributes: Vec::new(),
            events: Vec::new(),
            failure: None,
        }
    }
}

fn exporter(url: &str) -> (Exporter, SpanQueue<Named>) {
    let settings = CollectorSettings {
        endpoint: CollectorUrl::below(url).unwrap(),
        sample_ratio: 1.0,
    };
    let identity = ProgramIdentity {
        service_name: "gw-test",
        instance_id: "instance".to_owned(),
        region: "eu1".to_owned(),
    };
    Exporter::start(&settings, &identity).unwrap()
}

/// Queues a span of this name and waits until it is exported alone.
fn send(queue: &SpanQueue<Named>, name: &'static str) {
    let tracer = Tracer::new(queue.clone(), 1.0);
    tracer.end(Named(name, tracer.begin(&Fields::new())));
    tracer.flush();
}

fn names(collector: &Collector) -> Vec<String> {
    let spans = collector.export().spans.into_iter();
    spans.map(|span| span.span.name).collect()
}

/// Waits until this many spans are counted as exported or lost.
fn settled(counts: &Arc<SpanCounts>, spans: u64) -> (u64, u64) {
    let deadline = Instant::now() + SOON;
    while counts.exported() + counts.dropped() < spans {
        assert!(Instant::now() < deadline, "{counts:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    (counts.exported(), counts.dropped())
}

#[test]
fn exported_spans_name_their_service() {
    let collector = collector::start();
    let (exporter, queue) = exporter(&collector.url());
    send(&queue, "GET");
    let export = collector.export();
    assert_eq!(export.head[0], "POST /v1/traces HTTP/1.1");
    let content_type = "content-type: application/x-protobuf".to_owned();
    assert!(export.head.contains(&content_type), "{:?}", export.head);
    let [received] = &export.spans[..] else {
        panic!("{export:?}")
    };
    assert_eq!(received.span.name, "GET");
    for (name, expected) in [
        ("service.name", "gw-test"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", "instance"),
        ("gw.region", "eu1"),
    ] {
        assert_eq!(received.resource[name], expected, "{name}");
    }
    exporter.stop(SOON);
    assert_eq!(settled(queue.counts(), 1), (1, 0));
}

#[test]
fn retryable_failures_are_retried() {
    let refusals = ["429 Too Many", "502 Bad Gateway", "503 Unavailable"];
    let collector = collector::answering(move |number| match refusals.get(number) {
        Some(refusal) => format!("HTTP/1.1 {refusal}\r\nContent-Length: 0\r\n\r\n"),
        None => TAKEN.to_owned(),
    });
    let (exporter, queue) = exporter(&collector.url());
    send(&queue, "again");
    for _ in 0..4 {
        assert_eq!(names(&collector), ["again"]);
    }
    exporter.stop(SOON);
    assert_eq!(settled(queue.counts(), 1), (1, 0));
}

#[test]
fn spans_of_final_failures_are_lost_and_counted() {
    let collector = collector::answering(|number| match number {
        0 => "HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n".to_owned(),
        _ => TAKEN.to_owned(),
    });
    let (exporter, queue) = exporter(&collector.url());
    send(&queue, "refused");
    assert_eq!(settled(queue.counts(), 1), (0, 1));
    send(&queue, "taken");
    for name in ["refused", "taken"] {
        assert_eq!(names(&collector), [name]);
    }
    exporter.stop(SOON);
    assert_eq!(settled(queue.counts(), 2), (1, 1));
}

#[test]
fn retry_after_of_a_collector_is_respected() {
    let collector = collector::answering(|number| match number {
        0 => "HTTP/1.1 429 Too Many\r\nRetry-After: 300\r\nContent-Length: 0\r\n\r\n".to_owned(),
        _ => TAKEN.to_owned(),
    });
    let (exporter, queue) = exporter(&collector.url());
    send(&queue, "throttled");
    assert_eq!(settled(queue.counts(), 1), (0, 1));
    assert_eq!(names(&collector), ["throttled"]);
    send(&queue, "waits");
    assert!(!collector.has_more());
    // The last attempt.
    exporter.stop(SOON);
    assert_eq!(names(&collector), ["waits"]);
    assert_eq!(settled(queue.counts(), 2), (1, 1));
}

#[test]
fn spans_for_an_unreachable_collector_are_lost_and_counted() {
    // Bound but not listening: connections are refused, and no other program gets the port.
    let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any_port = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    closed.bind(&any_port.into()).unwrap();
    let address = closed.local_addr().unwrap().as_socket().unwrap();
    let (exporter, queue) = exporter(&format!("http://{address}"));
    send(&queue, "lost");
    assert_eq!(settled(queue.counts(), 1), (0, 1));
    exporter.stop(SOON);
}

#[test]
fn a_collector_that_never_answers_does_not_block() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let (exporter, queue) = exporter(&format!("http://{}", silent.local_addr().unwrap()));
    send(&queue, "stuck");
    let _connection = silent.accept().unwrap();
    // The queue accepts some of them, and the others are dropped without waiting.
    for _ in 0..100 {
        send(&queue, "more");
    }
    assert!(queue.counts().dropped() > 0);
    exporter.stop(Duration::from_millis(1));
}
