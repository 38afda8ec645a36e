//! A region whose nodes fail, stop or lose contact.

// Once, slow:
mod partitions;
mod suspended;
mod two_primaries;

// On each driver, slow:
mod failover;
mod freezes;
mod isolation;
pub(crate) mod load;
mod lost_nodes;
