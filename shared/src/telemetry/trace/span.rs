//! Finished spans as OpenTelemetry data, built on the exporting thread.

use std::borrow::Cow;
use std::time::SystemTime;

use http::Method;
use http::uri::Authority;
use opentelemetry::trace::{
    self, Event, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::tracer::SpanContext;
use crate::telemetry::mask::Masker;

/// Plain data of a finished span, cheap to build on a thread that serves requests and to move to
/// the exporting thread.
pub trait Finished: Send + 'static {
    /// Converts it to a span with the attributes of OpenTelemetry's semantic conventions.
    fn into_span(self) -> Span;
}

/// A span that follows OpenTelemetry's semantic conventions.
#[derive(Debug)]
pub struct Span {
    pub context: SpanContext,
    pub kind: SpanKind,
    pub name: Cow<'static, str>,
    pub start: SystemTime,
    pub end: SystemTime,
    pub attributes: Vec<KeyValue>,
    /// Name and time of each event.
    pub events: Vec<(&'static str, SystemTime)>,
    /// Error description if the span failed.
    pub failure: Option<String>,
}

impl Span {
    pub(super) fn into_data(self, scope: &InstrumentationScope) -> SpanData {
        let has_remote_parent = self.context.has_remote_parent();
        let SpanContext {
            context, parent, ..
        } = self.context;
        let flags = if context.sampled {
            TraceFlags::SAMPLED
        } else {
            TraceFlags::NOT_SAMPLED
        };
        let trace_id = TraceId::from_bytes(context.trace_id);
        let span_id = SpanId::from_bytes(context.span_id);
        let mut events = SpanEvents::default();
        events.events = self
            .events
            .into_iter()
            .map(|(name, at)| Event::new(name, at, Vec::new(), 0))
            .collect();
        SpanData {
            span_context: trace::SpanContext::new(
                trace_id,
                span_id,
                flags,
                false,
                TraceState::NONE,
            ),
            parent_span_id: parent.map_or(SpanId::INVALID, SpanId::from_bytes),
            parent_span_is_remote: has_remote_parent,
            span_kind: self.kind,
            name: self.name,
            start_time: self.start,
            end_time: self.end,
            attributes: self.attributes,
            dropped_attributes_count: 0,
            events,
            links: SpanLinks::default(),
            status: self.failure.map_or(Status::Unset, Status::error),
            instrumentation_scope: scope.clone(),
        }
    }
}

/// Returns the name of a span for a request with this method and appends the attributes of the
/// method. A method that is neither in RFC 9110 nor PATCH does not become a name, which keeps the
/// number of names bounded.
pub fn http_method(method: &Method, attributes: &mut Vec<KeyValue>) -> Cow<'static, str> {
    const KNOWN: [Method; 9] = [
        Method::GET,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::HEAD,
        Method::OPTIONS,
        Method::PATCH,
        Method::TRACE,
        Method::CONNECT,
    ];
    if KNOWN.contains(method) {
        attributes.push(KeyValue::new(
            "http.request.method",
            method.as_str().to_owned(),
        ));
        return Cow::Owned(method.as_str().to_owned());
    }
    attributes.push(KeyValue::new("http.request.method", "_OTHER"));
    attributes.push(KeyValue::new(
        "http.request.method_original",
        method.as_str().to_owned(),
    ));
    Cow::Borrowed("HTTP")
}

/// Longest path kept in a span, in bytes.
const PATH_MAX: usize = 1024;

/// Masks the gateway's secrets in a request's path and cuts it to `PATH_MAX`.
pub fn path(path: &str) -> Box<str> {
    masked_path(path, &Masker::default())
}

/// Like [`path`], and also masks the secrets known to `masker`.
pub fn masked_path(path: &str, masker: &Masker) -> Box<str> {
    let cut = |path: &str| path[..path.floor_char_boundary(PATH_MAX)].into();
    // Masked before it is cut: a part of a secret would not be recognised.
    masker.mask(path.as_bytes()).map_or_else(
        || cut(path),
        |masked| cut(&String::from_utf8_lossy(&masked)),
    )
}

/// Appends the attributes of the server that a request was sent to.
pub fn server(authority: &Authority, attributes: &mut Vec<KeyValue>) {
    attributes.push(KeyValue::new("server.address", authority.host().to_owned()));
    if let Some(port) = authority.port_u16() {
        attributes.push(KeyValue::new("server.port", i64::from(port)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::secret::Secret;

    #[test]
    fn paths_are_masked_and_cut_between_characters() {
        let masker = Masker::new([&Secret::new("0123456789".to_owned())]);
        let long = path(&format!("/{}", "\u{e4}".repeat(1000))).len();
        assert_eq!(long, PATH_MAX - 1);
        // The limit falls within the secret.
        let before = format!("/{}", "a".repeat(PATH_MAX - 6));
        for (text, expected) in [
            ("/a/gw_sk_b.c/d/0123456789", "/a/gw_sk_b.***/d/gw_admin.***"),
            (&format!("{before}0123456789"), &format!("{before}gw_ad")),
        ] {
            assert_eq!(&*masked_path(text, &masker), expected);
        }
    }
}
