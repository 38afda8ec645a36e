//! HTTP between the control planes of the region's nodes.
//!
//! The listener for other nodes also takes connections with ALPN `gw-control/1`. A worker reads the
//! ClientHello and hands the connection to a thread of the control plane, which does the handshake
//! and serves HTTP/1.1. Both ends show a certificate of the region's authority with slot and
//! session of their process.

mod client;
mod local_node;
mod server;
#[cfg(test)]
mod tests;
mod transport;

use std::fmt;

pub(crate) use self::client::NodeCallError;
pub use self::client::NodeClient;
pub(crate) use self::local_node::LocalNode;
pub use self::server::ServerLimits;
pub use self::server::{for_nodes, serve};

/// A node of the region that is needed for an answer and does not give it.
#[derive(Debug)]
pub struct UnavailableNode {
    /// Slot of the node.
    pub slot: u16,
    /// The rest of a sentence that begins with the node.
    pub reason: String,
}

impl fmt::Display for UnavailableNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} {}", self.slot, self.reason)
    }
}
