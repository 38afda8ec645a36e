//! Credit that an end grants to its peer, exact in bytes.

use super::stream::Stream;
use crate::tunnel::window;

/// Smallest CREDIT, in bytes. Bounds the number of CREDIT frames by the bytes of bodies.
pub(super) const GRANT_LEAST: usize = window::LEAST as usize / 4;

/// Grants of one end for all of its streams.
#[derive(Debug)]
pub(super) struct Credit {
    /// Bytes that a stream may be granted ahead of its reader.
    window: usize,
    /// Bytes that all streams together may be granted ahead of their readers, beyond the least window of each.
    budget: usize,
    /// Sum of [`Stream::committed`].
    committed: usize,
    /// The gateway's last WINDOW.
    pub(super) announced: Option<u32>,
}

impl Default for Credit {
    fn default() -> Self {
        Self { window: window::FIRST as usize, budget: window::TUNNEL_BUDGET, committed: 0, announced: None }
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

    /// Bytes to grant to a new stream that wants `wanted`: at least the least window, and more while the budget lasts.
    pub(super) fn first(&self, wanted: usize) -> usize {
        let (least, most) = (window::LEAST as usize, window::MOST as usize);
        wanted.min(self.budget.saturating_sub(self.committed)).clamp(least, most)
    }

    /// Grants `bytes` to a new stream.
    pub(super) fn commit(&mut self, stream: &mut Stream, bytes: usize) {
        stream.receive_credit += bytes;
        self.committed += bytes;
    }

    /// Records relayed bytes. Returns the bytes that are granted in their place, 0 while the peer has enough.
    pub(super) fn release(&mut self, stream: &mut Stream, bytes: usize) -> usize {
        let bytes = bytes.min(stream.unread);
        stream.unread -= bytes;
        self.committed -= bytes;
        if stream.received_end.is_some() || stream.discards || stream.sent_reset || stream.is_lost {
            return 0;
        }
        let grant = self.grant(stream);
        self.commit(stream, grant);
        grant
    }

    /// Bytes to grant: up to the window while the budget lasts, and up to the least window beyond it.
    fn grant(&self, stream: &Stream) -> usize {
        let least = window::LEAST as usize;
        let ahead = stream.committed();
        let wanted = self.window.saturating_sub(ahead);
        let affordable = self.budget.saturating_sub(self.committed).max(least.saturating_sub(ahead));
        let grant = wanted.min(affordable);
        // Few large grants, but none so late that a peer runs out of credit.
        if grant >= self.window / 4 || ahead + GRANT_LEAST <= least { grant } else { 0 }
    }

    /// Forgets credit that the peer can no longer use.
    pub(super) fn forget_credit(&mut self, stream: &mut Stream) {
        let before = stream.committed();
        stream.receive_credit = 0;
        self.committed -= before - stream.committed();
    }

    /// Discards everything that a stream holds or may still receive.
    pub(super) fn discard(&mut self, stream: &mut Stream) {
        self.committed -= stream.committed();
        stream.discard_received();
    }
}
