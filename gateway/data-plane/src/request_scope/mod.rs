//! The record of one request on its way through the gateway: stages are noted as they happen;
//! counters, time series, request log and trace are fed from it once, when the request ends.

mod report;
mod response;
mod unauthenticated;

use std::cell::{Cell, OnceCell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use gw_base::error::Error;
use gw_base::principal::Principal;
use gw_shared::http::{Fields, HttpVersion, InvalidHeadParts, RequestHead};
use gw_shared::id::{RequestId, RequestIds};
use gw_shared::telemetry::trace::{SpanContext, TraceContext};
use gw_store::Service;
use gw_telemetry::counters::Counters;
use gw_telemetry::request_log::{CaptureBudget, Capturing, METHOD_MAX, Protocol, Recorder};
use gw_telemetry::trace::Tracing;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderValue, Method, StatusCode};

pub(crate) use self::response::{refuse, respond};
pub(crate) use self::unauthenticated::UnauthenticatedRecords;
use crate::http_message::{AttemptFailure, FailedAttempt, Outcome, Progress, RelayedHead};
use crate::lifecycle::Lifecycle;

/// The observers of one worker's requests.
pub(crate) struct Observers {
    pub(crate) ids: Rc<RequestIds>,
    pub(crate) counters: Rc<Counters>,
    pub(crate) recorder: RefCell<Recorder>,
    /// There is an access log, which has every request.
    pub(crate) records_all: bool,
    pub(crate) capture_budget: Rc<CaptureBudget>,
    pub(crate) unauthenticated: RefCell<UnauthenticatedRecords>,
    pub(crate) tracing: Tracing,
    pub(crate) requests_in_flight: Cell<usize>,
    pub(crate) lifecycle: Rc<Lifecycle>,
}

/// One request. Reported once: by [`Self::report`], or when dropped because its task was cancelled
/// or panicked.
pub(crate) struct RequestScope {
    pub(crate) observers: Rc<Observers>,
    pub(crate) id: RequestId,
    /// Address of the client, as trusted proxies name it.
    pub(crate) client: IpAddr,
    protocol: Protocol,
    replayed_from: Option<RequestId>,
    began: Instant,
    pub(crate) service: OnceCell<Arc<Service>>,
    /// Set for requests that are logged or traced.
    summary: OnceCell<RequestSummary>,
    apex: Cell<Option<ApexRequest>>,
    /// Place in a trace; `None` without a collector of spans.
    span: Option<SpanContext>,
    by: Cell<Option<Principal>>,
    authenticated: Cell<Option<Instant>>,
    progress: RefCell<Progress>,
    answered: Cell<Option<Instant>>,
    status: Cell<Option<StatusCode>>,
    code: Cell<Option<&'static str>>,
    bytes_in: Cell<u64>,
    /// Bytes of the request body that the backend took, as the agent reports it.
    bytes_taken: Cell<Option<u64>>,
    bytes_out: Cell<u64>,
    /// Responses have no body (RFC 9110 §9.3.2).
    is_head: bool,
    capturing: Capturing,
    reported: Cell<bool>,
}

/// A request to the apex.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ApexRequest {
    Anonymous,
    Authenticated,
}

/// Request line and trace of a request.
struct RequestSummary {
    method: Method,
    target: Target,
    authority: Option<Authority>,
    /// The received trace, or the one that begins here.
    trace_id: Option<[u8; 16]>,
}

/// Path and query.
enum Target {
    Parsed(PathAndQuery),
    /// From an invalid head.
    Text(Box<str>),
}

impl Target {
    fn as_str(&self) -> &str {
        match self {
            Self::Parsed(target) => target.as_str(),
            Self::Text(text) => text,
        }
    }
}

/// A stage of a request.
pub(crate) enum Stage<'a> {
    /// The request is for `service`.
    Service {
        service: &'a Arc<Service>,
        request: &'a RequestHead,
    },
    /// The invalid head names a service.
    InvalidHeadNames(&'a Arc<Service>),
    /// The request is for the apex.
    Apex(&'a RequestHead),
    /// The invalid head names the apex.
    InvalidHeadNamesApex,
    /// The apex answered a request that proved its identity.
    ApexAuthenticated,
    /// Authentication has decided; `None` if it failed.
    Authenticated(Option<&'a Principal>),
    /// The request is about to be opened on a tunnel.
    Opening(&'a RequestHead),
    /// Progress upstream: the stream is open, or the agent has answered.
    Upstream(Progress),
    /// The node that owned the service was lost with the request.
    NodeLost(FailedAttempt),
    /// A piece of the request body was received.
    RequestData { data: &'a Bytes, last: bool },
    /// The request body was received whole.
    RequestEnd,
    /// The backend has answered.
    ResponseHead(&'a RelayedHead),
    /// A piece of the response body goes to the caller.
    ResponseData(&'a Bytes),
    /// The response was received whole.
    ResponseEnd,
    /// The upload has ended: bytes of the request body that the backend took, if known.
    Uploaded(Option<u64>),
    /// The gateway refuses the request.
    Refused(&'a Error),
    /// The apex refuses the request with an OAuth error code (RFC 6749 §5.2).
    RefusedWithCode(&'static str),
    /// The gateway answers itself, with a body of `bytes` bytes, which the response to HEAD leaves
    /// out.
    GatewayResponse { status: StatusCode, bytes: usize },
}

impl RequestScope {
    pub(crate) fn begin(observers: &Rc<Observers>, request: &RequestHead, client: IpAddr) -> Self {
        let mut scope = Self::new(
            observers,
            &request.headers,
            protocol_of(request.version),
            client,
            None,
        );
        scope.is_head = request.method == Method::HEAD;
        if scope.is_traced() || observers.records_all {
            scope.summarize(request);
        }
        scope
    }

    /// A request with an invalid head, which is refused.
    pub(crate) fn begin_invalid(
        observers: &Rc<Observers>,
        head: InvalidHeadParts,
        client: IpAddr,
    ) -> Self {
        let mut scope = Self::new(
            observers,
            &head.headers,
            protocol_of(head.version),
            client,
            None,
        );
        scope.is_head = head.method == Some(Method::HEAD);
        let unknown = || Method::from_bytes(b"-").unwrap_or_default();
        let trace = scope.span.as_ref().map(|span| span.context);
        let _ = scope.summary.set(RequestSummary {
            method: head.method.as_ref().map_or_else(unknown, shortened),
            target: Target::Text(head.target),
            authority: head.authority,
            trace_id: trace
                .or_else(|| TraceContext::of(&head.headers))
                .map(|context| context.trace_id),
        });
        scope
    }

    /// A captured request that is relayed again for an administrator.
    pub(crate) fn begin_replay(
        observers: &Rc<Observers>,
        request: &RequestHead,
        original: RequestId,
        client: IpAddr,
    ) -> Self {
        let scope = Self::new(
            observers,
            &request.headers,
            Protocol::Replay,
            client,
            Some(original),
        );
        if scope.is_traced() || observers.records_all {
            scope.summarize(request);
        }
        scope
    }

    fn new(
        observers: &Rc<Observers>,
        headers: &Fields,
        protocol: Protocol,
        client: IpAddr,
        replayed_from: Option<RequestId>,
    ) -> Self {
        observers.counters.requests.increment();
        observers
            .requests_in_flight
            .set(observers.requests_in_flight.get() + 1);
        Self {
            observers: Rc::clone(observers),
            id: observers.ids.next_id(),
            client,
            protocol,
            replayed_from,
            began: Instant::now(),
            service: OnceCell::new(),
            summary: OnceCell::new(),
            apex: Cell::default(),
            span: observers.tracing.begin(headers),
            by: Cell::default(),
            authenticated: Cell::default(),
            progress: RefCell::default(),
            answered: Cell::default(),
            status: Cell::default(),
            code: Cell::default(),
            bytes_in: Cell::default(),
            bytes_taken: Cell::default(),
            bytes_out: Cell::default(),
            is_head: false,
            capturing: Capturing::default(),
            reported: Cell::default(),
        }
    }

    /// When the head of the request had arrived.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// `Strict-Transport-Security` of responses of the service (RFC 6797 §6.1); `None` if its
    /// settings have none.
    pub(crate) fn transport_security(&self) -> Option<HeaderValue> {
        match self.service.get()?.settings.hsts_max_age_seconds {
            0 => None,
            max_age => HeaderValue::try_from(format!("max-age={max_age}")).ok(),
        }
    }

    /// Notes that the request has reached `stage`, for all observers.
    pub(crate) fn note(&self, stage: Stage<'_>) {
        match stage {
            Stage::Service { service, request } => {
                // Set once: a request is for one service.
                let _ = self.service.set(Arc::clone(service));
                if service.settings.request_logging {
                    self.summarize(request);
                }
            }
            Stage::InvalidHeadNames(service) => {
                let _ = self.service.set(Arc::clone(service));
            }
            Stage::Apex(request) => {
                self.summarize(request);
                self.apex.set(Some(ApexRequest::Anonymous));
            }
            Stage::InvalidHeadNamesApex => self.apex.set(Some(ApexRequest::Anonymous)),
            Stage::ApexAuthenticated => self.apex.set(Some(ApexRequest::Authenticated)),
            Stage::Authenticated(by) => self.note_authenticated(by),
            Stage::Opening(request) => self.begin_capture(request),
            Stage::Upstream(progress) => self.note_progress(progress),
            Stage::NodeLost(failed) => {
                let mut progress = self.progress.borrow_mut();
                let failed_attempts = std::mem::take(&mut progress.failed_attempts);
                progress.failed_attempts = failed_attempts.into_iter().chain([failed]).collect();
            }
            Stage::RequestData { data, last } => {
                self.bytes_in.set(self.bytes_in.get() + data.len() as u64);
                self.capturing.request_data(data);
                if last {
                    self.capturing.request_ends();
                }
            }
            Stage::RequestEnd => self.capturing.request_ends(),
            Stage::ResponseHead(head) => self.note_response_head(head),
            Stage::ResponseData(data) => {
                self.bytes_out.set(self.bytes_out.get() + data.len() as u64);
                self.capturing.response_data(data);
            }
            Stage::ResponseEnd => self.capturing.response_ends(),
            Stage::Uploaded(taken) => self.bytes_taken.set(taken),
            Stage::Refused(error) => self.note_refused(error),
            Stage::RefusedWithCode(code) => self.code.set(Some(code)),
            Stage::GatewayResponse { status, bytes } => {
                self.status.set(Some(status));
                if !self.is_head {
                    self.bytes_out.set(self.bytes_out.get() + bytes as u64);
                }
            }
        }
    }

    /// Reports the request to counters, time series, request log and trace.
    pub(crate) fn report(&self, outcome: Outcome) {
        if !self.reported.replace(true) {
            self.observe(outcome);
        }
    }

    /// Writes the trace context for the next hop (W3C Trace Context §2).
    pub(crate) fn write_trace_context(&self, headers: &mut Fields) {
        if let Some(span) = &self.span {
            span.write_to(headers);
        }
    }

    fn note_progress(&self, mut progress: Progress) {
        let mut before = self.progress.borrow_mut();
        // The next owner knows of its own attempts only.
        if before.failed_attempts.iter().any(is_of_lost_node) {
            let lost = std::mem::take(&mut before.failed_attempts)
                .into_iter()
                .filter(is_of_lost_node);
            let later = std::mem::take(&mut progress.failed_attempts);
            progress.failed_attempts = lost.chain(later).collect();
        }
        *before = progress;
    }

    fn note_authenticated(&self, by: Option<&Principal>) {
        self.authenticated.set(Some(Instant::now()));
        if let Some(by) = by
            && (self.is_logged() || self.observers.records_all)
        {
            self.by.set(Some(by.clone()));
        }
    }

    fn begin_capture(&self, request: &RequestHead) {
        if let Some(service) = self.service.get()
            && self.is_logged()
        {
            self.capturing.begin(
                service.captures,
                &self.observers.capture_budget,
                &request.headers,
            );
            if !request.framing.has_body() {
                self.capturing.request_ends();
            }
        }
    }

    fn note_response_head(&self, head: &RelayedHead) {
        self.answered.set(Some(Instant::now()));
        self.status.set(Some(head.status));
        if head.upgrade.is_none() {
            return self.capturing.response_head(&head.headers);
        }
        // The bytes after an upgrade are not HTTP messages: they are not captured.
        self.capturing.abandon();
        if self.protocol != Protocol::Http2 {
            // HTTP/1.1 callers get 101 (RFC 9110 §15.2.2), HTTP/2 callers 200 (RFC 8441 §4).
            self.status.set(Some(StatusCode::SWITCHING_PROTOCOLS));
        }
    }

    fn note_refused(&self, error: &Error) {
        let (_, _, code, _) = error.outcome();
        self.code.set(Some(code.as_str()));
        if !error.may_have_reached_backend() {
            self.capturing.request_not_relayed();
        }
        self.observers.counters.refused(error);
    }

    fn is_traced(&self) -> bool {
        self.span.as_ref().is_some_and(SpanContext::is_recorded)
    }

    fn is_logged(&self) -> bool {
        self.service
            .get()
            .is_some_and(|service| service.settings.request_logging)
    }

    /// Keeps the request line. The second call, for a request that is both traced and logged, has
    /// no effect.
    fn summarize(&self, request: &RequestHead) {
        let trace = self.span.as_ref().map(|span| span.context);
        let _ = self.summary.set(RequestSummary {
            method: shortened(&request.method),
            target: Target::Parsed(request.target.clone()),
            authority: Some(request.authority.clone()),
            trace_id: trace
                .or_else(|| TraceContext::of(&request.headers))
                .map(|context| context.trace_id),
        });
    }
}

impl Drop for RequestScope {
    fn drop(&mut self) {
        self.observers
            .requests_in_flight
            .set(self.observers.requests_in_flight.get() - 1);
        // A task that is cancelled has lost its caller. A panic or the end of the worker cuts the
        // response.
        let cut_here = std::thread::panicking() || self.observers.lifecycle.is_ending();
        self.report(if cut_here {
            Outcome::Cut
        } else {
            Outcome::CallerGone
        });
    }
}

fn is_of_lost_node(attempt: &FailedAttempt) -> bool {
    attempt.reason == AttemptFailure::NodeLost
}

fn protocol_of(version: HttpVersion) -> Protocol {
    match version {
        HttpVersion::Http10 => Protocol::Http10,
        HttpVersion::Http11 => Protocol::Http11,
        HttpVersion::Http2 => Protocol::Http2,
    }
}

/// At most the first [`METHOD_MAX`] bytes of a method, which bounds the size of records and spans.
fn shortened(method: &Method) -> Method {
    let kept = &method.as_str()[..method.as_str().len().min(METHOD_MAX)];
    if kept.len() == method.as_str().len() {
        method.clone()
    } else {
        kept.parse().unwrap_or_default()
    }
}
