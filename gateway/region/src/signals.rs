//! What the membership and the workers tell each other without messages.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use tokio::sync::Notify;

/// Until when this node may admit requests for the services that it owns, and what the workers have
/// learned from other nodes. Shared by all threads.
#[derive(Debug)]
pub struct RegionSignals {
    base: Instant,
    /// Nanoseconds after `base`; 0 before the first lease.
    until: AtomicU64,
    /// This node is suspended: agents are to connect to other nodes.
    suspended: AtomicBool,
    /// Latest epoch that another node has named.
    named_epoch: AtomicU64,
    /// Notified when a link to another node has broken.
    link_broken: Notify,
}

impl RegionSignals {
    /// Without a lease.
    pub fn new(now: Instant) -> Self {
        Self {
            base: now,
            until: AtomicU64::new(0),
            suspended: AtomicBool::new(false),
            named_epoch: AtomicU64::new(0),
            link_broken: Notify::new(),
        }
    }

    /// Replaces the end of the lease; `None` ends it.
    pub fn set(&self, until: Option<Instant>) {
        let since = until.map_or(0, |until| {
            until.saturating_duration_since(self.base).as_nanos()
        });
        self.until
            .store(u64::try_from(since).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Replaces the end of the lease by none.
    pub fn set_endless(&self) {
        self.until.store(u64::MAX, Ordering::Relaxed);
    }

    /// Sets whether this node refuses requests because its last contact is too long ago.
    pub fn set_suspended(&self, is_suspended: bool) {
        self.suspended.store(is_suspended, Ordering::Relaxed);
    }

    /// Returns whether this node refuses requests because its last contact is too long ago.
    pub fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Relaxed)
    }

    /// Another node has refused a request because it knows this epoch.
    pub fn name_epoch(&self, epoch: u64) {
        self.named_epoch.fetch_max(epoch, Ordering::Relaxed);
    }

    /// The latest epoch that another node has named.
    pub fn named_epoch(&self) -> u64 {
        self.named_epoch.load(Ordering::Relaxed)
    }

    /// A link to another node has broken, or cannot be opened: the node may have ended.
    pub fn link_broke(&self) {
        self.link_broken.notify_one();
    }

    /// Resolves when a link has broken since the last time.
    pub async fn broken_link(&self) {
        self.link_broken.notified().await;
    }

    /// Returns whether the lease lasts beyond `now`, so that this node may admit.
    pub fn holds(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.base).as_nanos()
            < u128::from(self.until.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn holds_until_its_end() {
        let now = Instant::now();
        let signals = RegionSignals::new(now);
        assert!(!signals.holds(now));
        signals.set(Some(now + Duration::from_secs(4)));
        assert!(signals.holds(now + Duration::from_millis(3999)));
        assert!(!signals.holds(now + Duration::from_secs(4)));
        signals.set_endless();
        assert!(signals.holds(now + Duration::from_hours(1000)));
        signals.set(None);
        assert!(!signals.holds(now));
    }
}
