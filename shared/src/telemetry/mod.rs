//! Logs, metrics, traces and masking of secrets, for both programs.

pub mod logging;
pub mod mask;
pub mod metrics;
pub mod trace;
