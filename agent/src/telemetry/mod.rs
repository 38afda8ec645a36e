//! Telemetry of requests: counters per service, the record of one request, its trace span.

pub(crate) mod counts;
pub(crate) mod request_scope;
pub(crate) mod trace;
