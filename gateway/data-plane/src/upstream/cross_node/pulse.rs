//! PINGs on a link while it has requests, and the time without an answer. No I/O, no clock.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use crate::limits;

/// PINGs of one end of a link. Only an answer shows that both directions work: when packets of one direction are lost, bytes of
/// the other still arrive for a while.
#[derive(Debug)]
pub(super) struct Pulse {
    /// When the last PING was sent.
    pinged: Option<Instant>,
    /// When the last answer arrived, or since when one is missing.
    heard: Instant,
    looked: Instant,
}

impl Pulse {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            pinged: None,
            heard: now,
            looked: now,
        }
    }

    /// Whether a PING is to be sent now. Called every [`limits::PING_CHECK`]: after a longer pause, an answer may have arrived and
    /// not been read.
    pub(super) fn look(&mut self, is_used: bool, now: Instant) -> bool {
        let was_late = now > self.looked + limits::PING_CHECK + limits::PING_CHECK_LATE;
        self.looked = now;
        let was_pinged = self.pinged.is_some_and(|at| now < at + limits::PING_EVERY);
        let is_due = is_used && !was_pinged;
        let has_paused = now > self.heard + limits::PING_EVERY + limits::PING_CHECK;
        if was_late || is_due && has_paused && self.silence(now).is_zero() {
            self.heard = now;
        }
        if is_due {
            self.pinged = Some(now);
        }
        is_due
    }

    pub(super) fn answered(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Time without an answer; zero if the last PING is answered.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        match self.pinged {
            Some(pinged) if pinged >= self.heard => now.saturating_duration_since(self.heard),
            _ => Duration::ZERO,
        }
    }
}
