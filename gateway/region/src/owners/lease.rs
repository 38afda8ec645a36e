//! Until when a node may admit requests for the services that it owns.

use std::time::{Duration, Instant};

use crate::timing::{BEAT, CALL_TIMEOUT, LEASE};

/// What an owner does that reaches neither the engine nor all of the other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Isolation {
    /// Goes on serving what it owned.
    #[default]
    Serve,
    /// Refuses requests after some time without contact.
    Refuse {
        /// Time without contact from which the owner refuses.
        max_staleness: Duration,
    },
}

/// Evidence that a node still owns what it owned.
///
/// Other nodes declare a node dead once they saw no beat for `DEAD_AFTER`. A beat sent at `t` is
/// seen at `t` or later, so the node cannot be declared dead before `t` + `DEAD_AFTER` on the clock
/// of the observer. Up to `t` + `LEASE` on its own clock it therefore admits safely. A beat counts
/// once a tick has followed it, since a failover can lose it before.
///
/// A node whose calls fail cannot know more. It goes on while the calls fail, so that an outage of
/// the engine does not stop the region. A process that was paused has neither a recent beat nor a
/// recent failure: it admits only after a call that started after the pause.
#[derive(Debug)]
pub(crate) struct OwnerLease {
    isolation: Isolation,
    /// Start of the last successful beat.
    beat: Option<Instant>,
    /// Start of the last beat that a tick has followed: the engine cannot lose it any more.
    contact: Option<Instant>,
    /// Start of the last call that failed, if the failure was seen in time.
    failed: Option<Instant>,
}

impl OwnerLease {
    pub(crate) fn new(isolation: Isolation) -> Self {
        Self {
            isolation,
            beat: None,
            contact: None,
            failed: None,
        }
    }

    /// Forgets the beats of an earlier session.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.isolation);
    }

    /// Continues the lease of an earlier process of the same session. Without an answer of the
    /// engine it holds as soon as a call has failed.
    pub(crate) fn resume(&mut self, now: Instant) {
        self.contact = now.checked_sub(LEASE);
    }

    pub(crate) fn beat(&mut self, sent: Instant) {
        self.beat = Some(sent);
    }

    /// A tick succeeded. Its synchronous commit includes the beat before it.
    pub(crate) fn tick(&mut self) {
        self.contact = self.beat;
    }

    /// A call that was sent at `sent` failed.
    pub(crate) fn failed(&mut self, sent: Instant, now: Instant) {
        // Seen late, the failure says that this process was paused, not that the engine is away.
        if now.saturating_duration_since(sent) <= CALL_TIMEOUT + BEAT / 2 {
            self.failed = Some(sent);
        }
    }

    /// Start of the last contact with the engine.
    pub(crate) fn contact(&self) -> Option<Instant> {
        self.contact
    }

    /// Whether the node refuses requests because its contact is too long ago. Not while it only
    /// waits for its first call after a pause. `peers` as in [`Self::until`].
    pub(crate) fn is_stale(&self, peers: Option<Instant>, now: Instant) -> bool {
        let (Isolation::Refuse { max_staleness }, Some(contact)) = (self.isolation, self.contact)
        else {
            return false;
        };
        let contact = peers.map_or(contact, |peers| peers.max(contact));
        self.failed.is_some_and(|failed| now < failed + LEASE) && now >= contact + max_staleness
    }

    /// End of the time to admit. `peers` is the time since which all other owners were heard. With
    /// `is_outdated` a later epoch exists, so failures of the engine extend nothing.
    pub(crate) fn until(&self, peers: Option<Instant>, is_outdated: bool) -> Option<Instant> {
        let contact = self.contact?;
        let lease = contact + LEASE;
        let Some(isolated) = self
            .failed
            .filter(|_| !is_outdated)
            .map(|failed| failed + LEASE)
        else {
            return Some(lease);
        };
        let isolated = match self.isolation {
            Isolation::Serve => isolated,
            Isolation::Refuse { max_staleness } => {
                let contact = peers.map_or(contact, |peers| peers.max(contact));
                isolated.min(contact + max_staleness)
            }
        };
        Some(lease.max(isolated))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn isolated(isolation: Isolation, start: Instant) -> OwnerLease {
        let mut lease = OwnerLease::new(isolation);
        lease.beat(start);
        lease.tick();
        lease
    }

    #[test]
    fn a_node_that_refuses_is_stale_once_the_last_contact_is_too_long_ago() {
        let start = Instant::now();
        let mut lease = isolated(
            Isolation::Refuse {
                max_staleness: 10 * SECOND,
            },
            start,
        );
        lease.failed(start + 9 * SECOND, start + 10 * SECOND);
        assert!(
            !lease.is_stale(None, start + 9 * SECOND) && lease.is_stale(None, start + 10 * SECOND)
        );
        assert!(
            !lease.is_stale(Some(start + SECOND), start + 10 * SECOND),
            "the other owners were heard later"
        );
        assert!(lease.is_stale(Some(start + SECOND), start + 11 * SECOND));
        // The call before the pause says nothing about the engine now.
        assert!(
            !lease.is_stale(None, start + 60 * SECOND),
            "the process was paused, and has not called yet"
        );
        lease.beat(start + 61 * SECOND);
        lease.tick();
        lease.failed(start + 62 * SECOND, start + 63 * SECOND);
        assert!(
            !lease.is_stale(None, start + 63 * SECOND),
            "it was in contact again"
        );
    }

    #[test]
    fn a_node_that_serves_on_is_never_stale() {
        let start = Instant::now();
        let mut lease = isolated(Isolation::Serve, start);
        lease.failed(start + 999 * SECOND, start + 1000 * SECOND);
        assert!(!lease.is_stale(None, start + 1000 * SECOND));
        assert!(
            !OwnerLease::new(Isolation::Refuse {
                max_staleness: SECOND
            })
            .is_stale(None, start),
            "it owns nothing yet"
        );
    }
}
