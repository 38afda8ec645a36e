//! The process: start, signals, drain, listeners, takeover, `doctor`, `init`,
//! the commands on a region.

mod apex_nodes;
pub mod config_file;
mod control_plane;
pub mod doctor;
mod drain;
pub(crate) mod gateway;
pub mod init;
mod last_stop;
mod listen_advice;
mod listeners;
mod membership;
pub mod region;
mod replace;
pub(crate) mod signals;
mod spliced_tunnels;
pub(crate) mod takeover;
mod workers;
