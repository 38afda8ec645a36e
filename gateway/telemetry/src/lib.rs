//! Counters, time series, traces and request log.

#![warn(missing_docs)]

pub mod counters;
pub mod limits;
pub mod outcome;
pub mod request_log;
mod shared_counters;
pub mod timeseries;
pub mod trace;
