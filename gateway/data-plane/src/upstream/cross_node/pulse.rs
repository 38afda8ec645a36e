//! PINGs on a link while it has requests, and the time without an answer. No I/O, no clock.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use crate::limits;

/// PINGs of one end of a link. Only an answer shows that both directions work: when packets of one
/// direction are lost, bytes of the other still arrive for a while.
#[derive(Debug)]
pub(super) struct Pulse {
    /// When the last PING was sent.
    pinged: Option<Instant>,
    /// When the first PING was sent that is not answered. The time since the last answer would say
    /// more than that: no answer was due until the next PING.
    unanswered: Option<Instant>,
    looked: Instant,
}

impl Pulse {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            pinged: None,
            unanswered: None,
            looked: now,
        }
    }

    /// Whether a PING is to be sent now. Called every [`limits::PING_CHECK`]: after a longer pause,
    /// an answer may have arrived and not been read.
    pub(super) fn look(&mut self, is_used: bool, now: Instant) -> bool {
        let was_late = now > self.looked + limits::PING_CHECK + limits::PING_CHECK_LATE;
        self.looked = now;
        if was_late {
            self.unanswered = self.unanswered.map(|_| now);
        }
        let was_pinged = self.pinged.is_some_and(|at| now < at + limits::LINK_PING);
        let is_due = is_used && !was_pinged;
        if is_due {
            self.pinged = Some(now);
            self.unanswered.get_or_insert(now);
        }
        is_due
    }

    pub(super) fn answered(&mut self) {
        self.unanswered = None;
    }

    /// Time without an answer; zero if the last PING is answered.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        self.unanswered
            .map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}
