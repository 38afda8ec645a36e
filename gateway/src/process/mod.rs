//! The process: start, signals, drain, listeners, takeover, `doctor`, `init`,
//! the commands on a region.

mod apex_nodes;
pub mod config_file;
mod control_plane;
pub mod doctor;
pub(crate) mod gateway;
pub mod init;
mod membership;
pub mod region;
mod replace;
pub(crate) mod signals;
mod sockets;
mod spliced_tunnels;
mod stop;
pub(crate) mod takeover;
mod workers;
