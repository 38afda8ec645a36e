//! Incomplete request heads of one worker. A further one ends the connection with the oldest: an
//! honest caller finishes a head within a round trip or two.

use std::rc::Rc;

use gw_interface::rate_limit::Claimant;
use gw_shared::net::Closer;

use super::Connections;
use super::handshakes::{HandshakeGuard, Handshakes};

/// Counts the incomplete heads of one connection, each until its guard is dropped.
pub(crate) struct UnfinishedHeads {
    pub(super) connections: Rc<Connections>,
    pub(super) closer: Closer,
    pub(super) claimant: Claimant,
}

impl UnfinishedHeads {
    /// Counts a head of HTTP/1.1.
    pub(super) fn begin(&self) -> HandshakeGuard {
        self.count(&self.connections.unfinished_heads)
    }

    /// Counts a header block of HTTP/2.
    pub(crate) fn begin_block(&self) -> HandshakeGuard {
        self.count(&self.connections.unfinished_blocks)
    }

    fn count(&self, places: &Rc<Handshakes>) -> HandshakeGuard {
        let (counted, has_ended_older) = places.begin(self.claimant, self.closer.clone());
        if has_ended_older {
            self.connections.ended_unfinished.increment();
        }
        counted
    }
}
