//! Counters of the requests of one service.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use gw_shared::telemetry::metrics::Histogram;

/// Counters since the agent began to serve the service. Used by the agent's thread only.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    requests: Cell<u64>,
    /// Failed requests by error code. The set of codes is small and closed.
    failures: RefCell<Vec<(&'static str, u64)>>,
    request_bytes: Cell<u64>,
    response_bytes: Cell<u64>,
    first_byte: RefCell<Histogram>,
}

impl Counts {
    pub(crate) fn requests(&self) -> u64 {
        self.requests.get()
    }

    pub(crate) fn failures(&self) -> Vec<(&'static str, u64)> {
        self.failures.borrow().clone()
    }

    pub(crate) fn request_bytes(&self) -> u64 {
        self.request_bytes.get()
    }

    pub(crate) fn response_bytes(&self) -> u64 {
        self.response_bytes.get()
    }

    pub(crate) fn first_byte(&self) -> Histogram {
        self.first_byte.borrow().clone()
    }

    /// Counts a received request.
    pub(crate) fn arrived(&self) {
        self.requests.set(self.requests.get() + 1);
    }

    /// Counts a request without a complete response.
    pub(crate) fn failed(&self, code: &'static str) {
        let mut failures = self.failures.borrow_mut();
        match failures.iter_mut().find(|(known, _)| *known == code) {
            Some((_, count)) => *count += 1,
            None => failures.push((code, 1)),
        }
    }

    /// Adds bytes of a request body sent to the backend.
    pub(crate) fn sent(&self, bytes: usize) {
        self.request_bytes
            .set(self.request_bytes.get() + bytes as u64);
    }

    /// Adds bytes of a response body received from the backend.
    pub(crate) fn received(&self, bytes: usize) {
        self.response_bytes
            .set(self.response_bytes.get() + bytes as u64);
    }

    /// Adds the time from the connection to the backend to the head of its response.
    pub(crate) fn responded(&self, after: Duration) {
        self.first_byte.borrow_mut().observe(after);
    }
}
