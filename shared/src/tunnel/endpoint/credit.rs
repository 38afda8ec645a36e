//! Credit that an end grants to its peer, exact in bytes.

use super::stream::Stream;
use crate::tunnel::frame::StreamId;
use crate::tunnel::window;

/// Smallest CREDIT, in bytes. Bounds the number of CREDIT frames by the bytes of bodies.
pub(super) const GRANT_LEAST: usize = window::LEAST as usize / 4;

/// Grants of one end for all of its streams.
#[derive(Debug)]
pub(super) struct Credit {
    /// Bytes that a stream may be granted ahead of its reader.
    window: usize,
    /// Bytes that all streams together may be granted ahead of their readers, beyond the least
    /// window of each.
    budget: usize,
    /// Sum of [`Stream::committed`].
    committed: usize,
    /// The gateway's last WINDOW.
    pub(super) announced: Option<u32>,
}

impl Default for Credit {
    fn default() -> Self {
        Self {
            window: window::FIRST as usize,
            budget: window::TUNNEL_BUDGET,
            committed: 0,
            announced: None,
        }
    }
}

impl Credit {
    pub(super) fn set(&mut self, window: usize, budget: usize) {
        self.window = window.clamp(window::LEAST as usize, window::MOST as usize);
        self.budget = budget;
    }

    pub(super) fn window(&self) -> usize {
        self.window
    }

    pub(super) fn committed(&self) -> usize {
        self.committed
    }

    /// Bytes to grant to a new stream that wants `wanted`: at least the least window, and more
    /// while the budget lasts, at most `beyond_least`.
    pub(super) fn first(&self, wanted: usize, beyond_least: usize) -> usize {
        let least = window::LEAST as usize;
        let most = window::MOST as usize;
        wanted
            .min(self.budget.saturating_sub(self.committed))
            .clamp(least, most)
            .min(least + beyond_least)
    }

    /// Counts the credit of a new stream.
    pub(super) fn opened(&mut self, stream: &Stream) {
        self.committed += stream.committed();
    }

    fn commit(&mut self, stream: &mut Stream, bytes: usize) {
        stream.receive_credit += bytes;
        self.committed += bytes;
    }

    /// Records relayed bytes. Returns the bytes that are granted in their place, 0 while the peer
    /// has enough.
    pub(super) fn release(&mut self, stream: &mut Stream, bytes: usize) -> usize {
        stream.unread -= bytes;
        self.committed -= bytes;
        // What was relayed makes room for what is granted.
        stream.settle();
        if stream.received_end.is_some() || stream.discards || stream.sent_reset || stream.is_lost {
            return 0;
        }
        let grant = self.grant(stream);
        if grant > 0 {
            self.commit(stream, grant);
            stream.settle();
        }
        grant
    }

    /// Bytes to grant: up to the window while the budget of the tunnel and the share of the stream
    /// last, and up to the least window, which is charged already, beyond them.
    fn grant(&self, stream: &Stream) -> usize {
        let least = window::LEAST as usize;
        let ahead = stream.committed();
        let wanted = self.window.saturating_sub(ahead);
        let reserved = least.saturating_sub(ahead);
        let beyond = self
            .budget
            .saturating_sub(self.committed)
            .min(reserved + stream.share.left_beyond_least());
        let affordable = beyond.max(reserved);
        let grant = wanted.min(affordable);
        // Few large grants, but none so late that a peer runs out of credit.
        if grant >= self.window / 4 || ahead + GRANT_LEAST <= least {
            grant
        } else {
            0
        }
    }

    /// Forgets credit that the peer can no longer use.
    pub(super) fn forget_credit(&mut self, stream: &mut Stream) {
        let before = stream.committed();
        stream.receive_credit = 0;
        self.committed -= before - stream.committed();
        stream.settle();
    }

    /// Discards everything that a stream holds or may still receive.
    pub(super) fn discard(&mut self, stream: &mut Stream) {
        self.committed -= stream.committed();
        stream.discard_received();
        // A closed stream is about to be removed.
        if stream.id != StreamId::TUNNEL {
            stream.settle();
        }
    }
}
