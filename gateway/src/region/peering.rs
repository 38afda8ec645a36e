//! The other nodes of the region, as one worker sees them.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::{AnnouncementKey, Owner, Placement, RegionKey};

/// What one worker knows of the other nodes. Exists only on a node with a listener for other nodes.
pub(crate) struct Peering {
    /// `None` until the first placement is published: this node then owns all services, and serves no other node.
    #[expect(clippy::redundant_allocation, reason = "the inner count is atomic and shared by all cores")]
    placement: RefCell<Option<Rc<Arc<Placement>>>>,
    pub(crate) announcements: AnnouncementKey,
}

impl Peering {
    pub(crate) fn new(key: &RegionKey) -> Rc<Self> {
        Rc::new(Self { placement: RefCell::default(), announcements: AnnouncementKey::new(key) })
    }

    #[expect(clippy::redundant_allocation, reason = "as the field")]
    pub(crate) fn placement(&self) -> Option<Rc<Arc<Placement>>> {
        self.placement.borrow().clone()
    }

    pub(crate) fn replace_placement(&self, placement: Arc<Placement>) {
        self.placement.replace(Some(Rc::new(placement)));
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
        peering.replace_placement(Arc::new(Placement::new(1, here, vec![member])));
        assert!(peering.owns("a", 5) && !peering.owns("a", 4));
        peering.replace_placement(Arc::new(Placement::new(2, here, Vec::new())));
        assert!(!peering.owns("a", 5), "not a member any more");
    }
}
