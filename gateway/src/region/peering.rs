//! The other nodes of the region, as one worker sees them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::{AnnouncementKey, Owner, Placement, RegionKey};

/// What one worker knows of the other nodes. Exists only on a node with a listener for other nodes.
pub(crate) struct Peering {
    /// `None` until the first placement is published: this node then owns all services, and serves no other node.
    #[expect(clippy::redundant_allocation, reason = "the inner count is atomic and shared by all cores")]
    placement: RefCell<Option<Rc<Arc<Placement>>>>,
    /// The placement before, and the time of the change.
    previous: RefCell<Option<Arc<Placement>>>,
    changed_at: Cell<Option<Instant>>,
    /// Wakes tasks that wait for another placement.
    changed: Notify,
    pub(crate) announcements: AnnouncementKey,
}

impl Peering {
    pub(crate) fn new(key: &RegionKey) -> Rc<Self> {
        Rc::new(Self {
            placement: RefCell::default(),
            previous: RefCell::default(),
            changed_at: Cell::default(),
            changed: Notify::new(),
            announcements: AnnouncementKey::new(key),
        })
    }

    #[expect(clippy::redundant_allocation, reason = "as the field")]
    pub(crate) fn placement(&self) -> Option<Rc<Arc<Placement>>> {
        self.placement.borrow().clone()
    }

    pub(crate) fn replace_placement(&self, placement: Arc<Placement>, now: Instant) {
        let previous = self.placement.replace(Some(Rc::new(placement)));
        self.previous.replace(previous.map(|previous| Arc::clone(&previous)));
        self.changed_at.set(Some(now));
        self.changed.notify_waiters();
    }

    /// Whether the service came to this node by a change of the placement less than `lately` ago: its agents may not have
    /// connected yet.
    pub(crate) fn has_arrived(&self, hostname: &str, lately: Duration, now: Instant) -> bool {
        let is_late = self.changed_at.get().is_none_or(|changed| now.saturating_duration_since(changed) >= lately);
        !is_late && self.previous.borrow().as_ref().is_none_or(|previous| previous.owner(hostname) != Owner::Here)
    }

    /// Waits for a placement with a later epoch.
    pub(crate) async fn later_than(&self, epoch: u64) {
        loop {
            let changed = self.changed.notified();
            if self.placement.borrow().as_ref().is_some_and(|placement| placement.epoch() > epoch) {
                return;
            }
            changed.await;
        }
    }

    /// Whether another node owns the service.
    pub(crate) fn is_elsewhere(&self, hostname: &str) -> bool {
        self.placement.borrow().as_ref().is_some_and(|placement| placement.owner(hostname) != Owner::Here)
    }

    /// Whether this process owns the service by its placement, as a member with this session.
    pub(crate) fn owns(&self, hostname: &str, session: u128) -> bool {
        self.placement.borrow().as_ref().is_some_and(|placement| {
            let is_member = placement.member(placement.here()).is_some_and(|here| here.session == session);
            is_member && placement.owner(hostname) == Owner::Here
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Member, NodeSlot};

    #[test]
    fn a_process_owns_services_only_as_the_member_that_is_meant() {
        let peering = Peering::new(&RegionKey::new([1; 32]));
        assert!(!peering.owns("a", 5), "no placement yet");
        let here = NodeSlot::new(3).unwrap();
        let member = Member { slot: here, session: 5, peer_address: ([127, 0, 0, 1], 1).into() };
        let now = Instant::now();
        peering.replace_placement(Arc::new(Placement::new(1, here, vec![member])), now);
        assert!(peering.owns("a", 5) && !peering.owns("a", 4));
        peering.replace_placement(Arc::new(Placement::new(2, here, Vec::new())), now);
        assert!(!peering.owns("a", 5), "not a member any more");
    }

    #[test]
    fn services_that_another_node_had_before_have_arrived_for_a_while() {
        let peering = Peering::new(&RegionKey::new([1; 32]));
        let slot = |slot| NodeSlot::new(slot).unwrap();
        let member = |number| Member { slot: slot(number), session: 1, peer_address: ([127, 0, 0, 1], 1).into() };
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let has_arrived = |at| peering.has_arrived("a", 5 * second, at);
        assert!(!has_arrived(start), "no placement yet");
        peering.replace_placement(Arc::new(Placement::new(1, slot(0), vec![member(1)])), start);
        peering.replace_placement(Arc::new(Placement::new(2, slot(0), vec![member(0)])), start);
        assert!(has_arrived(start + 4 * second) && !has_arrived(start + 5 * second));
        peering.replace_placement(Arc::new(Placement::new(3, slot(0), vec![member(0)])), start + second);
        assert!(!has_arrived(start + second), "it was here before");
    }
}
