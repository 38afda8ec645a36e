//! The process: start, signals, drain, listeners, takeover, `doctor`, the
//! commands on a region.

mod control_plane;
pub mod doctor;
mod drain;
pub(crate) mod gateway;
mod listeners;
mod membership;
pub mod region;
mod replace;
pub(crate) mod signals;
mod spliced_tunnels;
pub(crate) mod takeover;
mod threads;
