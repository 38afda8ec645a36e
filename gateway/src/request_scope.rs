//! One request on its way through the gateway: what is noted of it at each stage, and what is made of that when it ends.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use gw_shared::http::{RequestHead, UnreadHead, Version};
use gw_shared::id::RequestId;
use gw_shared::telemetry::trace::{SpanContext, TraceContext};
use gw_shared::tunnel::timing::micros;
use http::header::HeaderMap;
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};

use crate::auth::Principal;
use crate::error::Error;
use crate::relay::Outcome;
use crate::store::Service;
use crate::telemetry::counters::services::Sample;
use crate::telemetry::request_log::{APEX_LABEL, Capturing, METHOD_MAX, Protocol, Record, Timing};
use crate::telemetry::trace::GatewaySpan;
use crate::upstream::{Passage, ResponseHead};
use crate::worker::Core;

/// Longest target of a request to the apex that is kept, in bytes.
const APEX_TARGET_MAX: usize = 512;

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
    /// It is for the apex, and whether it authenticated there.
    apex: Cell<Option<bool>>,
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
    target: Target,
    authority: Option<Authority>,
    /// Of the trace that it came with, or that begins here.
    trace_id: Option<[u8; 16]>,
}

/// Path and query.
enum Target {
    Read(PathAndQuery),
    /// As it is to be kept.
    Text(Box<str>),
}

impl Target {
    fn as_str(&self) -> &str {
        match self {
            Self::Read(target) => target.as_str(),
            Self::Text(text) => text,
        }
    }
}

impl Journey {
    pub(crate) fn begin(core: &Rc<Core>, request: &RequestHead, client: IpAddr) -> Self {
        let journey = Self::new(core, &request.headers, protocol_of(request.version), client, None);
        if journey.is_traced() {
            journey.remember(request);
        }
        journey
    }

    /// A request that is refused because of its head.
    pub(crate) fn unread(core: &Rc<Core>, head: UnreadHead, client: IpAddr) -> Self {
        let journey = Self::new(core, &head.headers, protocol_of(head.version), client, None);
        let unknown = || Method::from_bytes(b"-").unwrap_or_default();
        let trace = journey.span.as_ref().map(|span| span.context);
        let _ = journey.asked.set(Asked {
            method: head.method.as_ref().map_or_else(unknown, shortened),
            target: Target::Text(head.target),
            authority: head.authority,
            trace_id: trace.or_else(|| TraceContext::of(&head.headers)).map(|context| context.trace_id),
        });
        journey
    }

    /// A request that nobody sends: one that was kept is to be relayed again.
    pub(crate) fn again(core: &Rc<Core>, request: &RequestHead, original: RequestId, client: IpAddr) -> Self {
        let journey = Self::new(core, &request.headers, Protocol::Replay, client, Some(original));
        if journey.is_traced() {
            journey.remember(request);
        }
        journey
    }

    fn new(
        core: &Rc<Core>,
        headers: &HeaderMap,
        protocol: Protocol,
        client: IpAddr,
        replayed_from: Option<RequestId>,
    ) -> Self {
        core.counters.requests.increment();
        core.journeys.set(core.journeys.get() + 1);
        Self {
            core: Rc::clone(core),
            id: core.ids.next_id(),
            client,
            protocol,
            replayed_from,
            began: Instant::now(),
            service: OnceCell::new(),
            asked: OnceCell::new(),
            apex: Cell::default(),
            span: core.tracing.begin(headers),
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
        }
    }

    fn is_traced(&self) -> bool {
        self.span.as_ref().is_some_and(SpanContext::is_recorded)
    }

    fn remember(&self, request: &RequestHead) {
        // Of a traced request that is logged too, this is the second time.
        let trace = self.span.as_ref().map(|span| span.context);
        let _ = self.asked.set(Asked {
            method: shortened(&request.method),
            target: Target::Read(request.target.clone()),
            authority: Some(request.authority.clone()),
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

    /// The head that is refused names `service`.
    pub(crate) fn names(&self, service: &Arc<Service>) {
        let _ = self.service.set(Arc::clone(service));
    }

    /// It is for the apex.
    pub(crate) fn asks_apex(&self, request: &RequestHead) {
        self.remember(request);
        self.is_for_apex();
    }

    /// Marks a refused head as one for the apex.
    pub(crate) fn is_for_apex(&self) {
        self.apex.set(Some(false));
    }

    /// Marks an apex request as authenticated.
    pub(crate) fn authenticated_at_apex(&self) {
        self.apex.set(Some(true));
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
            if !request.framing.has_body() {
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
        self.has_code(code.as_str());
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

fn protocol_of(version: Version) -> Protocol {
    match version {
        Version::Http10 => Protocol::Http10,
        Version::Http11 => Protocol::Http11,
        Version::Http2 => Protocol::Http2,
    }
}

/// Nobody's methods are longer than is kept of them, and what waits to be written or exported is to be small.
fn shortened(method: &Method) -> Method {
    let kept = &method.as_str()[..method.as_str().len().min(METHOD_MAX)];
    if kept.len() == method.as_str().len() { method.clone() } else { kept.parse().unwrap_or_default() }
}

fn path_of(target: &str) -> &str {
    target.split_once('?').map_or(target, |(path, _)| path)
}

/// Path, and names of the query without their values, of a request to the apex: what the apex takes elsewhere are
/// secrets, which may have no form to know them by.
fn without_values(target: &str) -> Box<str> {
    const KEPT: &str = "enrollment_id";
    let target = if target.len() > APEX_TARGET_MAX {
        // Secrets are masked when the record is written: the word at the cut may be a part that is not recognised.
        let is_word = |char: char| char.is_ascii() && !"/?&=".contains(char);
        target[..target.floor_char_boundary(APEX_TARGET_MAX)].trim_end_matches(is_word)
    } else {
        target
    };
    let Some((path, query)) = target.split_once('?') else { return target.into() };
    let parameters = query.split('&').map(|parameter| match parameter.split_once('=') {
        Some((KEPT, _)) => parameter.to_owned(),
        Some((name, _)) => format!("{name}=***"),
        None if parameter.is_empty() => String::new(),
        None => "***".to_owned(),
    });
    format!("{path}?{}", parameters.collect::<Vec<_>>().join("&")).into()
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
        let is_kept = self.is_logged() || self.apex_is_kept();
        if !self.is_traced() && !is_kept {
            return;
        }
        let timing = self.timing(total);
        if self.is_traced() {
            self.end_span(timing, outcome);
        }
        if is_kept {
            self.record(timing, outcome);
        }
    }
}

impl Journey {
    /// Whether it is for the apex and recorded: those of strangers up to a rate, so that they do not fill the log.
    fn apex_is_kept(&self) -> bool {
        let Some(authenticated) = self.apex.get() else { return false };
        let is_kept = authenticated || self.core.apex_records.borrow_mut().take(Instant::now()).is_ok();
        if !is_kept {
            self.core.counters.apex_records_left_out.increment();
        }
        is_kept
    }

    fn end_span(&self, timing: Timing, outcome: Outcome) {
        let (Some(context), Some(asked)) = (&self.span, self.asked.get()) else { return };
        let now = SystemTime::now();
        self.core.tracing.end(GatewaySpan {
            context: *context,
            start: now.checked_sub(Duration::from_micros(timing.total)).unwrap_or(now),
            timing,
            id: self.id,
            method: asked.method.clone(),
            path: self.core.tracing.path(path_of(asked.target.as_str())),
            authority: asked.authority.as_ref().and_then(owned),
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
        let label = self.service.get().map(|service| Arc::clone(&service.label));
        let target = if label.is_some() { target.as_str().into() } else { without_values(target.as_str()) };
        let passage = self.passage.take();
        let opened = passage.opened();
        let record = Record {
            id: self.id,
            method,
            target,
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
        self.core.recorder.borrow_mut().add(&label.unwrap_or_else(|| APEX_LABEL.into()), record);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_query_of_the_apex_names_are_kept() {
        for (target, kept) in [
            ("/oauth/token", "/oauth/token"),
            ("/enroll/status?enrollment_id=en_1&x=", "/enroll/status?enrollment_id=en_1&x=***"),
            ("/oauth/token?client_secret=a=b&c&&d?e=f", "/oauth/token?client_secret=***&***&&d?e=***"),
            ("*", "*"),
            ("", ""),
        ] {
            assert_eq!(&*without_values(target), kept);
        }
        assert_eq!(without_values(&format!("/{}", "\u{e4}".repeat(400))).len(), APEX_TARGET_MAX - 1);
        // A part of a word, which may be of a secret, is left out.
        let before = format!("/{}/", "a".repeat(APEX_TARGET_MAX - 6));
        assert_eq!(*without_values(&format!("{before}0123456789")), before);
    }
}
