//! Counters, time series, traces and request log.

pub mod counters;
pub mod request_log;
mod shared_counters;
pub mod timeseries;
pub(crate) mod trace;
