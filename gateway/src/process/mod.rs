//! The process: start, signals, drain, listeners, takeover, self-examination.

pub mod doctor;
pub(crate) mod listeners;
pub(crate) mod server;
pub(crate) mod takeover;
