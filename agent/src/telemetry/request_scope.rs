//! What is known of one request while it passes through the agent: its id, where its time goes, its span.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use gw_shared::error_code::AgentErrorCode;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::tunnel::timing::AgentTiming;
use http::{HeaderValue, Request, StatusCode};
use tracing::field::{DisplayValue, display};

use crate::backend::Lease;
use crate::telemetry::observe::Counts;
use crate::telemetry::trace::{AgentSpan, Recording, Tracing};

/// A request under way, from when the agent has it. However it ends, its span ends with it.
pub(crate) struct Passage {
    began: Instant,
    connected: Cell<Option<Instant>>,
    request_id: Option<HeaderValue>,
    /// Of its service.
    pub(crate) counts: Rc<Counts>,
    /// In a box: few requests are recorded.
    recording: Option<Box<RefCell<Recording>>>,
}

impl Passage {
    pub(crate) fn begin<B>(
        tracing: Option<&Tracing>,
        counts: &Rc<Counts>,
        slots_in_use: u32,
        request: &mut Request<B>,
    ) -> Self {
        counts.arrived();
        let began = Instant::now();
        let request_id = request.headers().get(X_GW_REQUEST_ID).cloned();
        let recording = tracing.and_then(|tracing| tracing.begin(request, slots_in_use));
        let recording = recording.map(|recording| Box::new(RefCell::new(recording)));
        Self { began, connected: Cell::default(), request_id, counts: Rc::clone(counts), recording }
    }

    /// For lines of the log.
    pub(crate) fn request_id(&self) -> Option<&str> {
        self.request_id.as_ref()?.to_str().ok()
    }

    /// For lines of the log, where the trace is recorded.
    pub(crate) fn trace_id(&self) -> Option<DisplayValue<impl std::fmt::Display + use<>>> {
        let recording = self.recording.as_ref()?.borrow();
        Some(display(recording.span.context.context.trace()))
    }

    /// A connection to the backend is had. The last one counts, where the request has to be sent again.
    pub(crate) fn connected(&self, lease: &Lease<'_>) {
        let now = Instant::now();
        self.connected.set(Some(now));
        self.record(|span| {
            span.connect = Some(now - self.began);
            span.connection = Some(lease.describe());
        });
    }

    /// The backend's final response begins: where the time went until now.
    pub(crate) fn responded(&self, status: StatusCode) -> HeaderValue {
        let now = Instant::now();
        let connected = self.connected.get().unwrap_or(now);
        self.counts.responded(now - connected);
        self.record(|span| {
            span.response_head = Some(now - self.began);
            span.status = Some(status);
        });
        AgentTiming::new(connected - self.began, Some(now - connected)).to_value()
    }

    /// There will be no response of the backend: where the time went as far as it got.
    pub(crate) fn failed(&self, code: AgentErrorCode) -> HeaderValue {
        let connected = self.connected.get().unwrap_or_else(Instant::now);
        self.counts.failed(code.as_str());
        self.record(|span| span.error = Some(code.as_str()));
        AgentTiming::new(connected - self.began, None).to_value()
    }

    /// The response broke off.
    pub(crate) fn cut(&self, code: AgentErrorCode) {
        self.counts.failed(code.as_str());
        self.record(|span| span.error = Some(code.as_str()));
    }

    /// The response was relayed to its end.
    pub(crate) fn complete(&self) {
        self.record(|span| span.is_over = true);
    }

    fn record(&self, change: impl FnOnce(&mut AgentSpan)) {
        if let Some(recording) = &self.recording {
            change(&mut recording.borrow_mut().span);
        }
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if let Some(recording) = self.recording.take() {
            let mut recording = recording.into_inner();
            recording.span.total = self.began.elapsed();
            recording.end();
        }
    }
}
