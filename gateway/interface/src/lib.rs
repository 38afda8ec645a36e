//! What the data plane and the control plane share, and all that they know of each other.
//!
//! Down go the directory, the view of the region ([`workers::Workers`]) and replays ([`replay`]).
//! Up go the jobs of agents ([`control_plane`]) and connections of other nodes
//! ([`node_connections`]). Both planes use the configuration, the rate limits and the checks of
//! credentials.

#![warn(missing_docs)]

pub mod auth;
pub mod config;
pub mod control_plane;
pub mod limits;
pub mod node_connections;
pub mod rate_limit;
pub mod replay;
pub mod workers;
