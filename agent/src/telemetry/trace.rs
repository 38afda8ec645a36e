//! The agent's span of a request: around its exchange with the backend.

use std::rc::Rc;
use std::time::{Duration, SystemTime};

use gw_shared::http::RequestHead;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::id::AgentId;
use gw_shared::telemetry::trace::{
    self, Finished, KeyValue, Span, SpanContext, SpanKind, SpanQueue, Tracer,
};
use http::{Method, StatusCode};

/// Tracing on the agent's thread.
pub(crate) struct Tracing {
    tracer: Rc<Tracer<AgentSpan>>,
    agent_id: AgentId,
}

impl Tracing {
    pub(crate) fn new(queue: SpanQueue<AgentSpan>, sample_ratio: f64, agent_id: AgentId) -> Self {
        Self {
            tracer: Rc::new(Tracer::new(queue, sample_ratio)),
            agent_id,
        }
    }

    /// Adds the trace context to the request's fields and returns the recording if the trace is
    /// sampled.
    pub(crate) fn begin(&self, request: &mut RequestHead, slots_in_use: u32) -> Option<Recording> {
        let context = self.tracer.begin(&request.headers);
        context.write_to(&mut request.headers);
        context.is_recorded().then(|| Recording {
            tracer: Rc::clone(&self.tracer),
            span: AgentSpan::new(context, self.agent_id.clone(), request, slots_in_use),
        })
    }

    pub(crate) async fn keep_flushing(&self) {
        Rc::clone(&self.tracer).keep_flushing().await;
    }

    /// Hands the finished spans to the exporter.
    pub(crate) fn flush(&self) {
        self.tracer.flush();
    }
}

/// The span of a running request.
pub(crate) struct Recording {
    tracer: Rc<Tracer<AgentSpan>>,
    pub(crate) span: AgentSpan,
}

impl Recording {
    /// Queues the span for export.
    pub(crate) fn end(self) {
        self.tracer.end(self.span);
    }
}

/// The data of a request's span.
pub(crate) struct AgentSpan {
    pub(crate) context: SpanContext,
    agent_id: AgentId,
    request_id: Option<Box<str>>,
    /// Hostname of the service.
    service: Box<str>,
    method: Method,
    path: Box<str>,
    slots_in_use: u32,
    start: SystemTime,
    pub(crate) total: Duration,
    /// Time from the start until the request had its last backend connection.
    pub(crate) connect: Option<Duration>,
    pub(crate) connection: Option<BackendConnection>,
    /// Time from the start until the final response began.
    pub(crate) response_head: Option<Duration>,
    pub(crate) status: Option<StatusCode>,
    /// Error code, if the backend gave no complete response.
    pub(crate) error: Option<&'static str>,
    /// The complete response was relayed.
    pub(crate) is_complete: bool,
}

/// The backend connection of a request.
pub(crate) struct BackendConnection {
    /// Host name or address, or the path of a Unix socket.
    pub(crate) address: String,
    pub(crate) port: Option<u16>,
    pub(crate) is_reused: bool,
    pub(crate) is_http2: bool,
}

impl AgentSpan {
    fn new(
        context: SpanContext,
        agent_id: AgentId,
        request: &RequestHead,
        slots_in_use: u32,
    ) -> Self {
        let request_id = request.headers.get(X_GW_REQUEST_ID);
        Self {
            context,
            agent_id,
            // Copies: a span that waits for its export keeps no other bytes of the head.
            request_id: request_id.and_then(|id| id.to_str().ok()).map(Into::into),
            service: request.authority.host().into(),
            method: request.method.clone(),
            path: trace::path(request.target.path()),
            slots_in_use,
            start: SystemTime::now(),
            total: Duration::ZERO,
            connect: None,
            connection: None,
            response_head: None,
            status: None,
            error: None,
            is_complete: false,
        }
    }

    /// Reason why the request has failed, if it has.
    fn failure(&self) -> Option<String> {
        if let Some(code) = self.error {
            return Some(code.to_owned());
        }
        // For a client span, 4xx responses are failures too (OpenTelemetry HTTP conventions).
        let is_failure = |status: &StatusCode| status.is_client_error() || status.is_server_error();
        let status = self.status.filter(is_failure)?;
        Some(status.as_str().to_owned())
    }
}

impl Finished for AgentSpan {
    fn into_span(self) -> Span {
        let failure = self.failure();
        let mut attributes = Vec::with_capacity(20);
        let name = trace::http_method(&self.method, &mut attributes);
        let mut add =
            |name: &'static str, value: String| attributes.push(KeyValue::new(name, value));
        add("url.path", self.path.into());
        add("gw.agent_id", self.agent_id.to_string());
        if let Some(id) = self.request_id {
            add("gw.request_id", id.into());
        }
        let label = self.service.split('.').next();
        if let Some((account, service)) = label.and_then(|label| label.split_once("--")) {
            add("gw.account", account.to_owned());
            add("gw.service", service.to_owned());
        }
        let mut events = Vec::new();
        if let Some(connection) = self.connection {
            add("server.address", connection.address);
            add(
                "network.protocol.version",
                if connection.is_http2 { "2" } else { "1.1" }.to_owned(),
            );
            add(
                "gw.backend.connection",
                if connection.is_reused { "kept" } else { "new" }.to_owned(),
            );
            if let Some(port) = connection.port {
                attributes.push(KeyValue::new("server.port", i64::from(port)));
            }
        }
        let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        if let Some(connect) = self.connect {
            attributes.push(KeyValue::new("gw.connect_us", micros(connect)));
            events.push(("gw.connected", self.start + connect));
        }
        if let Some(head) = self.response_head {
            events.push(("gw.response_head", self.start + head));
        }
        attributes.push(KeyValue::new(
            "gw.slots_in_use",
            i64::from(self.slots_in_use),
        ));
        if let Some(status) = self.status {
            let status = i64::from(status.as_u16());
            attributes.push(KeyValue::new("http.response.status_code", status));
        }
        if self.error.is_none() && !self.is_complete {
            attributes.push(KeyValue::new("gw.ended", "caller_gone"));
        }
        if let Some(failure) = &failure {
            attributes.push(KeyValue::new("error.type", failure.clone()));
        }
        Span {
            context: self.context,
            kind: SpanKind::Client,
            name,
            start: self.start,
            end: self.start + self.total,
            attributes,
            events,
            failure,
        }
    }
}
