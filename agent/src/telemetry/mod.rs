//! Observation of an agent: metrics, health, spans.

pub(crate) mod observe;
pub(crate) mod request_scope;
pub(crate) mod trace;
