//! Incomplete request heads of one worker, and heads of HTTP/2 that announced an empty body and whose stream has not ended. One
//! beyond a limit ends the connection with the oldest: an honest caller finishes its head within a round trip or two.

use std::rc::Rc;

use gw_interface::rate_limit::Claimant;
use gw_shared::net::Closer;

use super::Connections;
use super::handshakes::HandshakeGuard;

/// Counts the incomplete heads of one connection.
pub(crate) struct UnfinishedHeads {
    pub(super) connections: Rc<Connections>,
    pub(super) closer: Closer,
    pub(super) claimant: Claimant,
}

impl UnfinishedHeads {
    /// Counts a head until the guard is dropped.
    pub(crate) fn begin(&self) -> HandshakeGuard {
        let places = &self.connections.unfinished_heads;
        let (counted, has_ended_older) = places.begin(self.claimant, self.closer.clone());
        if has_ended_older {
            self.connections.ended_unfinished.increment();
        }
        counted
    }
}
