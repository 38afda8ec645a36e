//! Telemetry of one request: its id, its timing, its span.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::RequestHead;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::tunnel::timing::AgentTiming;
use http::{HeaderValue, StatusCode};
use tracing::field::{DisplayValue, display};

use crate::telemetry::counts::Counts;
use crate::telemetry::trace::{AgentSpan, BackendConnection, Recording, Tracing};

/// A running request, from its arrival at the agent. Dropping it ends the span.
pub(crate) struct RequestScope {
    began: Instant,
    connected: Cell<Option<Instant>>,
    request_id: Option<HeaderValue>,
    /// Counters of the request's service.
    pub(crate) counts: Rc<Counts>,
    /// Boxed because most requests are not recorded.
    recording: Option<Box<RefCell<Recording>>>,
}

impl RequestScope {
    pub(crate) fn begin(
        tracing: Option<&Tracing>,
        counts: &Rc<Counts>,
        slots_in_use: u32,
        request: &mut RequestHead,
    ) -> Self {
        counts.arrived();
        let began = Instant::now();
        let request_id = request.headers.get(X_GW_REQUEST_ID).cloned();
        let recording = tracing.and_then(|tracing| tracing.begin(request, slots_in_use));
        let recording = recording.map(|recording| Box::new(RefCell::new(recording)));
        Self {
            began,
            connected: Cell::default(),
            request_id,
            counts: Rc::clone(counts),
            recording,
        }
    }

    /// The request id, for log lines.
    pub(crate) fn request_id(&self) -> Option<&str> {
        self.request_id.as_ref()?.to_str().ok()
    }

    /// The trace id of a recorded request, for log lines.
    pub(crate) fn trace_id(&self) -> Option<DisplayValue<impl std::fmt::Display + use<>>> {
        let recording = self.recording.as_ref()?.borrow();
        Some(display(recording.span.context.context.trace()))
    }

    /// Records that the request has a backend connection. If the request is sent again, the last
    /// connection counts.
    pub(crate) fn connected(&self, connection: impl FnOnce() -> BackendConnection) {
        let now = Instant::now();
        self.connected.set(Some(now));
        self.record(|span| {
            span.connect = Some(now - self.began);
            span.connection = Some(connection());
        });
    }

    /// Records that the backend's final response has begun. Returns the timing of the response.
    pub(crate) fn responded(&self, status: StatusCode) -> AgentTiming {
        let now = Instant::now();
        let connected = self.connected.get().unwrap_or(now);
        self.counts.responded(now - connected);
        self.record(|span| {
            span.response_head = Some(now - self.began);
            span.status = Some(status);
        });
        AgentTiming::new(connected - self.began, Some(now - connected))
    }

    /// Records that the backend gave no response. Returns the timing of the refusal.
    pub(crate) fn failed(&self, code: AgentErrorCode) -> AgentTiming {
        let connected = self.connected.get().unwrap_or_else(Instant::now);
        self.counts.failed(code.as_str());
        self.record(|span| span.error = Some(code.as_str()));
        AgentTiming::new(connected - self.began, None)
    }

    /// Records that the response ended before it was complete.
    pub(crate) fn cut(&self, code: AgentErrorCode) {
        self.counts.failed(code.as_str());
        self.record(|span| span.error = Some(code.as_str()));
    }

    /// Records that the complete response was relayed.
    pub(crate) fn complete(&self) {
        self.record(|span| span.is_complete = true);
    }

    fn record(&self, change: impl FnOnce(&mut AgentSpan)) {
        if let Some(recording) = &self.recording {
            change(&mut recording.borrow_mut().span);
        }
    }
}

impl Drop for RequestScope {
    fn drop(&mut self) {
        if let Some(recording) = self.recording.take() {
            let mut recording = recording.into_inner();
            recording.span.total = self.began.elapsed();
            recording.end();
        }
    }
}
