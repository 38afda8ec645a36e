//! One request on its way through the gateway: what is noted of it at each stage, and what is made of that when it ends.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use gw_shared::http::{Framing, RequestHead, Version};
use gw_shared::id::RequestId;
use gw_shared::trace::{self, SpanContext, TraceContext};
use gw_shared::tunnel::timing::micros;
use http::header::HeaderMap;
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};

use crate::auth::Principal;
use crate::counters::services::Sample;
use crate::error::Error;
use crate::exchange::{Passage, ResponseHead};
use crate::relay::Outcome;
use crate::request_log::{Capturing, METHOD_MAX, Protocol, Record, Timing};
use crate::store::Service;
use crate::trace::GatewaySpan;
use crate::worker::Core;

/// Noted by whoever relays, in whatever order things happen; reported once, however the request ends, when dropped.
pub(crate) struct Journey {
    pub(crate) core: Rc<Core>,
    pub(crate) id: RequestId,
    /// By trusted proxies' word.
    pub(crate) client: IpAddr,
    protocol: Protocol,
    replayed_from: Option<RequestId>,
    began: Instant,
    /// Once it is known.
    service: OnceCell<Arc<Service>>,
    /// Of requests that are logged or traced.
    asked: OnceCell<Asked>,
    /// Its place in a trace; `None` where there is no collector of spans.
    span: Option<SpanContext>,
    by: OnceCell<Principal>,
    authenticated: Cell<Option<Instant>>,
    passage: RefCell<Passage>,
    answered: Cell<Option<Instant>>,
    status: Cell<Option<StatusCode>>,
    code: Cell<Option<&'static str>>,
    bytes_in: Cell<u64>,
    bytes_out: Cell<u64>,
    capturing: Capturing,
    outcome: Cell<Option<Outcome>>,
}

/// What was asked for.
struct Asked {
    method: Method,
    target: PathAndQuery,
    authority: Authority,
    /// Of the trace that it came with, or that begins here.
    trace_id: Option<[u8; 16]>,
}

impl Journey {
    pub(crate) fn begin(core: &Rc<Core>, request: &RequestHead, client: IpAddr) -> Self {
        let protocol = match request.version {
            Version::Http10 => Protocol::Http10,
            Version::Http11 => Protocol::Http11,
            Version::Http2 => Protocol::Http2,
        };
        Self::new(core, request, protocol, client, None)
    }

    /// A request that nobody sends: one that was kept is to be relayed again.
    pub(crate) fn again(core: &Rc<Core>, request: &RequestHead, original: RequestId, client: IpAddr) -> Self {
        Self::new(core, request, Protocol::Replay, client, Some(original))
    }

    fn new(
        core: &Rc<Core>,
        request: &RequestHead,
        protocol: Protocol,
        client: IpAddr,
        replayed_from: Option<RequestId>,
    ) -> Self {
        core.counters.requests.increment();
        core.journeys.set(core.journeys.get() + 1);
        let journey = Self {
            core: Rc::clone(core),
            id: core.ids.next_id(),
            client,
            protocol,
            replayed_from,
            began: Instant::now(),
            service: OnceCell::new(),
            asked: OnceCell::new(),
            span: core.tracing.begin(&request.headers),
            by: OnceCell::new(),
            authenticated: Cell::default(),
            passage: RefCell::default(),
            answered: Cell::default(),
            status: Cell::default(),
            code: Cell::default(),
            bytes_in: Cell::default(),
            bytes_out: Cell::default(),
            capturing: Capturing::default(),
            outcome: Cell::default(),
        };
        if journey.is_traced() {
            journey.remember(request);
        }
        journey
    }

    fn is_traced(&self) -> bool {
        self.span.as_ref().is_some_and(SpanContext::is_recorded)
    }

    fn remember(&self, request: &RequestHead) {
        // Of a traced request that is logged too, this is the second time.
        let trace = self.span.as_ref().map(|span| span.context);
        let _ = self.asked.set(Asked {
            method: shortened(&request.method),
            target: request.target.clone(),
            authority: request.authority.clone(),
            trace_id: trace.or_else(|| TraceContext::of(&request.headers)).map(|context| context.trace_id),
        });
    }

    fn is_logged(&self) -> bool {
        self.service.get().is_some_and(|service| service.request_logging)
    }

    /// It is for `service`.
    pub(crate) fn is_for(&self, service: &Arc<Service>, request: &RequestHead) {
        // Told once: a request is for one service.
        let _ = self.service.set(Arc::clone(service));
        if service.request_logging {
            self.remember(request);
        }
    }

    /// Whether the caller was found to be somebody or not, it is decided now.
    pub(crate) fn authenticated(&self, by: Option<&Principal>) {
        self.authenticated.set(Some(Instant::now()));
        if let Some(by) = by
            && self.is_logged()
        {
            let _ = self.by.set(by.clone());
        }
    }

    /// It is to go to the agent.
    pub(crate) fn sets_out(&self, request: &RequestHead) {
        if let Some(service) = self.service.get()
            && self.is_logged()
        {
            self.capturing.begin(service.captures, &self.core.capture_budget, &request.headers);
            if request.framing == Framing::None {
                self.capturing.request_ends();
            }
        }
    }

    /// Tells the next hop of the trace.
    pub(crate) fn write_to(&self, headers: &mut HeaderMap) {
        if let Some(span) = &self.span {
            span.write_to(headers);
        }
    }

    /// Its stream on the tunnel is open, or an agent has answered on it.
    pub(crate) fn passed(&self, passage: Passage) {
        self.passage.replace(passage);
    }

    /// A piece of its body has come, the last one or not.
    pub(crate) fn received(&self, data: &Bytes, last: bool) {
        self.bytes_in.set(self.bytes_in.get() + data.len() as u64);
        self.capturing.request_data(data);
        if last {
            self.received_whole();
        }
    }

    /// Its body has come whole.
    pub(crate) fn received_whole(&self) {
        self.capturing.request_ends();
    }

    /// The backend has answered.
    pub(crate) fn answered(&self, head: &ResponseHead) {
        self.answered.set(Some(Instant::now()));
        self.status.set(Some(head.status));
        if head.upgrade.is_none() {
            return self.capturing.response_head(&head.headers);
        }
        // Of another protocol nothing is kept: it has no messages with bodies.
        self.capturing.abandon();
        if self.protocol != Protocol::Http2 {
            // So is the caller told (RFC 9110 §15.2.2); RFC 8441 §4 has 200.
            self.status.set(Some(StatusCode::SWITCHING_PROTOCOLS));
        }
    }

    /// A piece of the response goes to the caller.
    pub(crate) fn passing_on(&self, data: &Bytes) {
        self.bytes_out.set(self.bytes_out.get() + data.len() as u64);
        self.capturing.response_data(data);
    }

    /// The response has come whole.
    pub(crate) fn passed_on_whole(&self) {
        self.capturing.response_ends();
    }

    /// It gets a response of ours, with a body of so many bytes.
    pub(crate) fn answered_here(&self, status: StatusCode, body: usize) {
        self.status.set(Some(status));
        self.bytes_out.set(self.bytes_out.get() + body as u64);
    }

    /// It is refused.
    pub(crate) fn refused(&self, error: &Error) {
        let (_, _, code, _) = error.outcome();
        self.has_code(code);
        if !error.may_have_reached_backend() {
            self.capturing.request_not_relayed();
        }
        self.core.counters.refused(error);
    }

    /// It is refused with this code.
    pub(crate) fn has_code(&self, code: &'static str) {
        self.code.set(Some(code));
    }

    /// It is over. Told once; a request whose task is dropped lost its caller.
    pub(crate) fn ends(&self, outcome: Outcome) {
        self.outcome.set(Some(outcome));
    }

    fn timing(&self, total: Duration) -> Timing {
        let passage = self.passage.borrow();
        let between = |from: Instant, to: Instant| micros(to.saturating_duration_since(from));
        let authenticated = self.authenticated.get();
        let agent = passage.timing;
        Timing {
            authenticate: authenticated.map_or(0, |at| between(self.began, at)),
            wait: authenticated.zip(passage.opened()).map(|(from, opened)| between(from, opened.at)),
            agent: agent.map(|timing| timing.agent_us),
            backend_first_byte: agent.and_then(|timing| timing.backend_first_byte_us),
            response_head: self.answered.get().map(|at| between(self.began, at)),
            total: u64::try_from(total.as_micros()).unwrap_or(u64::MAX),
        }
    }
}

/// Nobody's methods are longer than is kept of them, and what waits to be written or exported is to be small.
fn shortened(method: &Method) -> Method {
    let kept = &method.as_str()[..method.as_str().len().min(METHOD_MAX)];
    if kept.len() == method.as_str().len() { method.clone() } else { kept.parse().unwrap_or_default() }
}

/// A copy that does not keep all that was received with it; `None` of what is longer than a host name and a port can be.
fn owned(authority: &Authority) -> Option<Authority> {
    const MAX: usize = 255 + ":65535".len();
    let text = authority.as_str();
    if text.len() <= MAX { text.parse().ok() } else { None }
}

impl Drop for Journey {
    fn drop(&mut self) {
        self.core.journeys.set(self.core.journeys.get() - 1);
        // A task that is dropped has lost its caller; one that panics takes the response with it, as we do at our end.
        let is_ours = std::thread::panicking() || self.core.is_ending();
        let lost = if is_ours { Outcome::Cut } else { Outcome::CallerGone };
        let outcome = self.outcome.get().unwrap_or(lost);
        self.core.counters.ended(outcome);
        let total = self.began.elapsed();
        if let Some(service) = self.service.get() {
            let response_head = self.answered.get().map(|at| at.saturating_duration_since(self.began));
            let sample = Sample {
                status: self.status.get().map(|status| status.as_u16()),
                code: self.code.get(),
                bytes_in: self.bytes_in.get(),
                bytes_out: self.bytes_out.get(),
                total,
                response_head,
            };
            self.core.counters.services.ended(&service.label, sample);
        }
        if !self.is_traced() && !self.is_logged() {
            return;
        }
        let timing = self.timing(total);
        if self.is_traced() {
            self.end_span(timing, outcome);
        }
        if self.is_logged() {
            self.record(timing, outcome);
        }
    }
}

impl Journey {
    fn end_span(&self, timing: Timing, outcome: Outcome) {
        let (Some(context), Some(asked)) = (&self.span, self.asked.get()) else { return };
        let now = SystemTime::now();
        self.core.tracing.end(GatewaySpan {
            context: *context,
            start: now.checked_sub(Duration::from_micros(timing.total)).unwrap_or(now),
            timing,
            id: self.id,
            method: asked.method.clone(),
            path: trace::path(asked.target.path()),
            authority: owned(&asked.authority),
            client: self.client,
            protocol: self.protocol,
            service: self.service.get().map(|service| Arc::clone(&service.label)),
            agent: self.passage.borrow().opened().map(|opened| opened.agent.clone()),
            status: self.status.get().map(|status| status.as_u16()),
            code: self.code.get(),
            ended: outcome.into(),
        });
    }

    fn record(&mut self, timing: Timing, outcome: Outcome) {
        let Some(Asked { method, target, trace_id, .. }) = self.asked.take() else { return };
        let Some(service) = self.service.get() else { return };
        let passage = self.passage.take();
        let opened = passage.opened();
        let record = Record {
            id: self.id,
            method,
            target: target.as_str().into(),
            caller: self.client,
            protocol: self.protocol,
            by: self.by.take(),
            status: self.status.get().map(|status| status.as_u16()),
            code: self.code.get(),
            ended: outcome.into(),
            bytes_in: self.bytes_in.get(),
            bytes_out: self.bytes_out.get(),
            timing,
            agent: opened.map(|opened| opened.agent.clone()),
            replayed_from: self.replayed_from,
            trace_id,
            capture: self.capturing.finish(self.answered.get().is_some()).filter(|_| opened.is_some()),
        };
        self.core.recorder.borrow_mut().add(&service.label, record);
    }
}
