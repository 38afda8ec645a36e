//! A fake collector of spans: accepts OTLP/HTTP, decodes it with OpenTelemetry's types, and gives
//! scripted answers.

#![allow(dead_code, reason = "each test binary uses only some of it")]

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use gw_bed::http1::Head;
use gw_bed::threads::{Peer, listen};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

/// Timeout for events that normally take milliseconds. Only a failing test reaches it.
const SOON: Duration = Duration::from_secs(30);

pub(crate) const TAKEN: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n";

/// A collector on loopback.
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    exports: Receiver<Export>,
    /// Received spans that no call has returned yet.
    early: Vec<Received>,
}

/// One export request.
#[derive(Debug)]
pub(crate) struct Export {
    /// Request line and fields, with names in lower case.
    pub(crate) head: Vec<String>,
    pub(crate) spans: Vec<Received>,
}

/// A received span with its resource.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) resource: BTreeMap<String, String>,
    pub(crate) attributes: BTreeMap<String, String>,
    pub(crate) span: Span,
}

impl Received {
    /// Value of the resource attribute `service.name`.
    pub(crate) fn service(&self) -> &str {
        &self.resource["service.name"]
    }

    pub(crate) fn attribute(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }
}

/// Starts a collector that accepts all spans.
pub(crate) fn start() -> Collector {
    start_with(|stream| stream, |_| TAKEN.to_owned())
}

/// Starts a collector that answers each request, by its number, with `answer`.
pub(crate) fn answering(answer: impl Fn(usize) -> String + Send + Sync + 'static) -> Collector {
    start_with(|stream| stream, answer)
}

/// Starts a collector whose streams `accept` creates from connections.
pub(crate) fn start_with<S: Read + Write>(
    accept: impl Fn(TcpStream) -> S + Send + Sync + 'static,
    answer: impl Fn(usize) -> String + Send + Sync + 'static,
) -> Collector {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, exports) = mpsc::channel();
    let requests = AtomicUsize::new(0);
    listen(listener, move |connection| {
        let mut peer = Peer::new(accept(connection));
        while let Ok(export) = read_export(&mut peer) {
            // Fails when the test has ended.
            let _ = sender.send(export);
            let answer = answer(requests.fetch_add(1, Ordering::SeqCst));
            if peer.try_send(answer).is_err() {
                return;
            }
        }
    });
    Collector {
        address,
        exports,
        early: Vec::new(),
    }
}

impl Collector {
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Waits for the next request.
    pub(crate) fn export(&self) -> Export {
        self.exports.recv_timeout(SOON).expect("an export")
    }

    /// Whether a request is left that no call has returned.
    pub(crate) fn has_more(&self) -> bool {
        self.exports.try_recv().is_ok()
    }

    /// All received spans that no call has returned.
    pub(crate) fn rest(self) -> Vec<Received> {
        let later = self.exports.try_iter().flat_map(|export| export.spans);
        self.early.into_iter().chain(later).collect()
    }

    /// Waits for the first span that `pick` accepts.
    pub(crate) fn span(&mut self, pick: impl Fn(&Received) -> bool) -> Received {
        loop {
            if let Some(at) = self.early.iter().position(&pick) {
                return self.early.remove(at);
            }
            let export = self.export();
            self.early.extend(export.spans);
        }
    }
}

fn read_export<S: Read + Write>(peer: &mut Peer<S>) -> io::Result<Export> {
    let head = peer.raw_head()?;
    let length = Head::request(&head)?.content_length()?.unwrap_or(0);
    let body = peer.bytes(length as usize)?;
    let request = ExportTraceServiceRequest::decode(&body[..]).unwrap();
    let head = String::from_utf8(head.to_vec()).unwrap();
    let head = head.trim_end().lines().map(|line| {
        let lower = line
            .split_once(": ")
            .map(|(name, value)| format!("{}: {value}", name.to_ascii_lowercase()));
        lower.unwrap_or_else(|| line.to_owned())
    });
    let spans = request.resource_spans.into_iter().flat_map(|group| {
        let resource = texts(&group.resource.unwrap().attributes);
        let spans = group.scope_spans.into_iter().flat_map(|scope| scope.spans);
        spans
            .map(move |span| Received {
                resource: resource.clone(),
                attributes: texts(&span.attributes),
                span,
            })
            .collect::<Vec<_>>()
    });
    Ok(Export {
        spans: spans.collect(),
        head: head.collect(),
    })
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |attribute: &KeyValue| match attribute
        .value
        .as_ref()
        .and_then(|value| value.value.as_ref())
    {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    attributes
        .iter()
        .map(|attribute| (attribute.key.clone(), text(attribute)))
        .collect()
}
