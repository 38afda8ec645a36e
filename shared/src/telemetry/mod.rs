//! Logs, masks of secrets, metrics and traces of both programs.

pub mod logging;
pub mod mask;
pub mod metrics;
pub mod trace;
