//! The process: start, signals, drain, listeners, takeover, `doctor`.

mod control_plane;
pub mod doctor;
mod drain;
pub(crate) mod gateway;
mod listeners;
mod replace;
pub(crate) mod signals;
pub(crate) mod takeover;
mod threads;
