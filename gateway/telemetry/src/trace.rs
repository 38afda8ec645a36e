//! The gateway's spans: of a request, from its head to the end of its response, and of each attempt
//! of a request that was sent to several agents.

use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gw_shared::http::Fields;
use gw_shared::id::{AgentId, RequestId};
use gw_shared::telemetry::mask::Masker;
use gw_shared::telemetry::trace::{
    self, Finished, KeyValue, Span, SpanContext, SpanKind, SpanQueue, Tracer,
};
use http::Method;
use http::uri::Authority;

use crate::outcome::AttemptFailure;
use crate::request_log::{Ended, Protocol, Timing};

/// Destination of a worker's spans, and the share of traces that begin here that is recorded.
#[derive(Clone)]
pub struct SpanDestination {
    /// Queue of the thread that exports spans.
    pub queue: SpanQueue<FinishedSpan>,
    /// Share of the traces beginning here that is recorded, from 0 to 1.
    pub sample_ratio: f64,
    /// Masks secrets in paths.
    pub masker: Masker,
}

/// Tracing on one worker. Without a collector it does nothing and trace fields are forwarded
/// unchanged.
#[derive(Default)]
pub struct Tracing(Option<Rc<Tracer<FinishedSpan>>>, Masker);

impl Tracing {
    /// Sends spans to `destination`; without one, records none.
    pub fn new(destination: Option<SpanDestination>) -> Self {
        let masker = destination
            .as_ref()
            .map(|to| to.masker.clone())
            .unwrap_or_default();
        Self(
            destination.map(|to| Rc::new(Tracer::new(to.queue, to.sample_ratio))),
            masker,
        )
    }

    /// Masks a request's path and cuts it to the length that spans keep.
    pub fn path(&self, path: &str) -> Box<str> {
        trace::masked_path(path, &self.1)
    }

    /// Returns the trace context of a request with these fields, which [`SpanContext::write_to`]
    /// forwards.
    pub fn begin(&self, headers: &Fields) -> Option<SpanContext> {
        self.0.as_ref().map(|tracer| tracer.begin(headers))
    }

    /// Adds the span of an ended request, and those of its attempts, if its trace is recorded.
    pub fn end(&self, span: GatewaySpan, attempts: Vec<EndedAttempt>) {
        let Some(tracer) = self.0.as_ref().filter(|_| span.context.is_recorded()) else {
            return;
        };
        for (attempt, number) in attempts.into_iter().zip(1..) {
            tracer.end(FinishedSpan::Attempt(AttemptSpan {
                context: tracer.within(&span.context),
                id: span.id,
                service: span.service.clone(),
                number,
                attempt,
            }));
        }
        tracer.end(FinishedSpan::Request(span));
    }

    /// Sends all finished spans to the exporting thread.
    pub fn flush(&self) {
        if let Some(tracer) = &self.0 {
            tracer.flush();
        }
    }

    /// Flushes finished spans periodically while the worker runs.
    pub fn keep_flushing(&self) -> Option<impl Future<Output = ()> + use<>> {
        self.0
            .as_ref()
            .map(|tracer| Rc::clone(tracer).keep_flushing())
    }
}

/// A finished span.
#[derive(Debug, Clone)]
pub enum FinishedSpan {
    /// Span of a whole request.
    Request(GatewaySpan),
    /// Span of an attempt, within that of its request.
    Attempt(AttemptSpan),
}

/// An attempt to send a request to an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedAttempt {
    /// `None` if the node with its tunnel was lost before it had named the agent.
    pub agent: Option<AgentId>,
    /// Time at which the attempt began.
    pub start: SystemTime,
    /// Time from then to its failure, or to the head of the response.
    pub took: Duration,
    /// Why it failed; `None` of the attempt that the response came from.
    pub failure: Option<AttemptFailure>,
}

/// Span of an attempt, within that of the request.
#[derive(Debug, Clone)]
pub struct AttemptSpan {
    context: SpanContext,
    id: RequestId,
    service: Option<Arc<str>>,
    /// 1 of the first attempt.
    number: i64,
    attempt: EndedAttempt,
}

impl Finished for FinishedSpan {
    fn into_span(self) -> Span {
        match self {
            Self::Request(span) => span.into_span(),
            Self::Attempt(span) => span.into_span(),
        }
    }
}

impl AttemptSpan {
    fn into_span(self) -> Span {
        let EndedAttempt {
            agent,
            start,
            took,
            failure,
        } = self.attempt;
        let failure = failure.map(AttemptFailure::as_str);
        let mut attributes = Vec::with_capacity(6);
        attributes.push(KeyValue::new("gw.request_id", self.id.to_string()));
        service(self.service.as_deref(), &mut attributes);
        attributes.extend(agent.map(|agent| KeyValue::new("gw.agent_id", agent.to_string())));
        attributes.push(KeyValue::new("gw.attempt", self.number));
        attributes.extend(failure.map(|reason| KeyValue::new("error.type", reason)));
        Span {
            context: self.context,
            kind: SpanKind::Client,
            name: "attempt".into(),
            start,
            end: start + took,
            attributes,
            events: Vec::new(),
            failure: failure.map(str::to_owned),
        }
    }
}

/// Appends the attributes of the service with this label.
fn service(label: Option<&str>, attributes: &mut Vec<KeyValue>) {
    if let Some((account, service)) = label.and_then(|label| label.split_once("--")) {
        attributes.push(KeyValue::new("gw.account", account.to_owned()));
        attributes.push(KeyValue::new("gw.service", service.to_owned()));
    }
}

/// Data of an ended request. The query is left out: it may contain secrets.
#[derive(Debug, Clone)]
pub struct GatewaySpan {
    /// Trace context from [`Tracing::begin`].
    pub context: SpanContext,
    /// Time at which the request's head had been read.
    pub start: SystemTime,
    /// Durations of the stages of the request.
    pub timing: Timing,
    /// Id of the request, as in the request log.
    pub id: RequestId,
    /// Method of the request.
    pub method: Method,
    /// Result of [`Tracing::path`].
    pub path: Box<str>,
    /// `Host` or `:authority`; `None` if it is longer than a host name can be.
    pub authority: Option<Authority>,
    /// Address of the client.
    pub client: IpAddr,
    /// Protocol of the client.
    pub protocol: Protocol,
    /// Label of the service, `{account}--{service}`; `None` if the service does not exist.
    pub service: Option<Arc<str>>,
    /// Agent of the last stream that was opened for the request; `None` if no stream was opened.
    pub agent: Option<AgentId>,
    /// Status of the final response; `None` if there was none.
    pub status: Option<u16>,
    /// Code of the gateway's error.
    pub code: Option<&'static str>,
    /// How the request ended.
    pub ended: Ended,
}

impl GatewaySpan {
    fn into_span(self) -> Span {
        let mut attributes = Vec::with_capacity(24);
        let name = trace::http_method(&self.method, &mut attributes);
        if let Some(authority) = &self.authority {
            trace::server(authority, &mut attributes);
        }
        let mut add =
            |name: &'static str, value: String| attributes.push(KeyValue::new(name, value));
        add("url.scheme", "https".to_owned());
        add("url.path", self.path.into());
        add("client.address", self.client.to_canonical().to_string());
        add("gw.request_id", self.id.to_string());
        let version = match self.protocol {
            Protocol::Http10 => Some("1.0"),
            Protocol::Http11 => Some("1.1"),
            Protocol::Http2 => Some("2"),
            Protocol::Replay => None,
        };
        if let Some(version) = version {
            add("network.protocol.version", version.to_owned());
        }
        if let Some(agent) = &self.agent {
            add("gw.agent_id", agent.to_string());
        }
        match self.ended {
            Ended::Complete => {}
            Ended::Cut => add("gw.ended", "cut".to_owned()),
            Ended::CallerGone => add("gw.ended", "caller_gone".to_owned()),
        }
        service(self.service.as_deref(), &mut attributes);
        if self.protocol == Protocol::Replay {
            attributes.push(KeyValue::new("gw.replay", true));
        }
        if let Some(status) = self.status {
            attributes.push(KeyValue::new(
                "http.response.status_code",
                i64::from(status),
            ));
        }
        let failure = failure(self.status, self.code, self.ended);
        if let Some(error) = self.code.map(str::to_owned).or_else(|| failure.clone()) {
            attributes.push(KeyValue::new("error.type", error));
        }
        let stages = [
            ("gw.authenticate_us", Some(self.timing.authenticate)),
            ("gw.wait_us", self.timing.wait),
            ("gw.agent_us", self.timing.agent),
            ("gw.backend_first_byte_us", self.timing.backend_first_byte),
        ];
        let stages = stages
            .into_iter()
            .filter_map(|(name, micros)| Some(KeyValue::new(name, i64::from(micros?))));
        attributes.extend(stages);
        Span {
            context: self.context,
            kind: SpanKind::Server,
            name,
            start: self.start,
            end: self.start + Duration::from_micros(self.timing.total),
            attributes,
            events: events(self.start, &self.timing),
            failure,
        }
    }
}

/// Events of the span, in order.
fn events(start: SystemTime, timing: &Timing) -> Vec<(&'static str, SystemTime)> {
    let after = |micros: u32| start + Duration::from_micros(micros.into());
    let authenticated = ("gw.authenticated", after(timing.authenticate));
    let opened = timing
        .wait
        .map(|wait| ("gw.opened", after(timing.authenticate.saturating_add(wait))));
    let responded = timing
        .response_head
        .map(|micros| ("gw.response_head", after(micros)));
    [Some(authenticated), opened, responded]
        .into_iter()
        .flatten()
        .collect()
}

/// Error description if the span failed. A caller's mistake (4xx) is no failure of a server's span.
fn failure(status: Option<u16>, code: Option<&'static str>, ended: Ended) -> Option<String> {
    let status = status
        .filter(|status| *status >= 500)
        .map(|status| status.to_string());
    let cut = (ended == Ended::Cut).then(|| "cut".to_owned());
    cut.or(status)
        .map(|failure| code.map_or(failure, str::to_owned))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::UNIX_EPOCH;

    use gw_shared::id::RequestIds;
    use gw_shared::telemetry::trace::TraceContext;

    use super::*;

    fn span(status: Option<u16>, code: Option<&'static str>, ended: Ended) -> GatewaySpan {
        let mut headers = Fields::new();
        headers.insert(
            http::HeaderName::from_static("traceparent"),
            TraceContext::root([1, 2, 3], true).to_value(),
        );
        let (queue, _) = SpanQueue::bounded(1);
        let tracing = Tracing::new(Some(SpanDestination {
            queue,
            sample_ratio: 0.0,
            masker: Masker::default(),
        }));
        GatewaySpan {
            context: tracing.begin(&headers).unwrap(),
            start: UNIX_EPOCH,
            timing: Timing {
                authenticate: 10,
                wait: Some(5),
                agent: Some(7),
                backend_first_byte: Some(100),
                response_head: Some(150),
                total: 200,
            },
            id: RequestIds::new().next_id(),
            method: Method::GET,
            path: trace::path("/a"),
            authority: "acme--api.eu1.example.com:8443".parse().ok(),
            client: "::ffff:192.0.2.1".parse().unwrap(),
            protocol: Protocol::Http2,
            service: Some("acme--api".into()),
            agent: None,
            status,
            code,
            ended,
        }
    }

    fn attributes(span: &Span) -> BTreeMap<String, String> {
        span.attributes
            .iter()
            .map(|it| (it.key.to_string(), it.value.to_string()))
            .collect()
    }

    #[test]
    fn span_has_the_attributes_of_the_semantic_conventions() {
        let finished = span(Some(200), None, Ended::Complete);
        let id = finished.id.to_string();
        let span = finished.into_span();
        assert_eq!((&*span.name, &span.failure), ("GET", &None));
        let expected = [
            ("client.address", "192.0.2.1"),
            ("gw.account", "acme"),
            ("gw.agent_us", "7"),
            ("gw.authenticate_us", "10"),
            ("gw.backend_first_byte_us", "100"),
            ("gw.request_id", id.as_str()),
            ("gw.service", "api"),
            ("gw.wait_us", "5"),
            ("http.request.method", "GET"),
            ("http.response.status_code", "200"),
            ("network.protocol.version", "2"),
            ("server.address", "acme--api.eu1.example.com"),
            ("server.port", "8443"),
            ("url.path", "/a"),
            ("url.scheme", "https"),
        ];
        let expected: BTreeMap<_, _> = expected
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        assert_eq!(attributes(&span), expected);
        let at = |micros| UNIX_EPOCH + Duration::from_micros(micros);
        assert_eq!(
            span.events,
            [
                ("gw.authenticated", at(10)),
                ("gw.opened", at(15)),
                ("gw.response_head", at(150))
            ]
        );
        assert_eq!(span.end, at(200));
    }

    #[test]
    fn attempts_have_spans_within_the_span_of_the_request() {
        let (queue, batches) = SpanQueue::bounded(1);
        let tracing = Tracing::new(Some(SpanDestination {
            queue,
            sample_ratio: 0.0,
            masker: Masker::default(),
        }));
        let request = span(Some(200), None, Ended::Complete);
        let id = request.id.to_string();
        let outer = request.context;
        let attempt = |failure| EndedAttempt {
            agent: Some(AgentId::new("ag_00000000000000000000").unwrap()),
            start: UNIX_EPOCH,
            took: Duration::from_micros(9),
            failure,
        };
        tracing.end(
            request,
            vec![attempt(Some(AttemptFailure::BackendTls)), attempt(None)],
        );
        tracing.flush();
        let spans: Vec<Span> = batches
            .recv()
            .unwrap()
            .into_iter()
            .map(Finished::into_span)
            .collect();
        let names: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
        assert_eq!(names, ["attempt", "attempt", "GET"]);
        let expected = [
            ("error.type", "backend_tls"),
            ("gw.account", "acme"),
            ("gw.agent_id", "ag_00000000000000000000"),
            ("gw.attempt", "1"),
            ("gw.request_id", id.as_str()),
            ("gw.service", "api"),
        ];
        let expected: BTreeMap<_, _> = expected
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        assert_eq!(attributes(&spans[0]), expected);
        assert_eq!(
            (spans[0].failure.as_deref(), spans[0].end),
            (Some("backend_tls"), UNIX_EPOCH + Duration::from_micros(9))
        );
        assert_eq!(
            (
                spans[1].failure.as_deref(),
                attributes(&spans[1]).get("error.type")
            ),
            (None, None)
        );
        for attempt in &spans[..2] {
            assert_eq!(
                (attempt.context.parent, attempt.kind.clone()),
                (Some(outer.context.span_id), SpanKind::Client)
            );
            assert_eq!(attempt.context.context.trace_id, outer.context.trace_id);
        }
    }

    #[test]
    fn callers_mistakes_are_no_failure() {
        for (status, code, ended, failure, error) in [
            (Some(404), None, Ended::Complete, None, None),
            (Some(429), Some("GW_X"), Ended::Complete, None, Some("GW_X")),
            (Some(500), None, Ended::Complete, Some("500"), Some("500")),
            (
                Some(502),
                Some("GW_X"),
                Ended::Complete,
                Some("GW_X"),
                Some("GW_X"),
            ),
            (Some(200), None, Ended::Cut, Some("cut"), Some("cut")),
            (None, None, Ended::CallerGone, None, None),
        ] {
            let span = span(status, code, ended).into_span();
            assert_eq!(
                span.failure.as_deref(),
                failure,
                "{status:?} {code:?} {ended:?}"
            );
            assert_eq!(
                attributes(&span).get("error.type").map(String::as_str),
                error,
                "{status:?} {code:?} {ended:?}"
            );
        }
    }

    #[test]
    fn nothing_is_recorded_without_a_collector() {
        assert_eq!(Tracing::default().begin(&Fields::new()), None);
        Tracing::default().end(span(None, None, Ended::Complete), Vec::new());
    }
}
