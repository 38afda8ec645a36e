//! The other nodes of the region, as one worker sees them.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::{
    AnnouncementKeys, ArrivedFrom, Decision, Member, NodeSlot, Owner, Placement, RegionKeys,
    RegionSignals, View,
};

/// Earlier placements that are kept.
const EARLIER: usize = 16;

/// What one worker knows of the other nodes. Exists only on a node with a listener for other nodes.
pub struct Peering {
    /// `None` until the first view is published: requests wait for it, and this node serves no
    /// other.
    #[expect(
        clippy::redundant_allocation,
        reason = "the inner count is atomic and shared by all cores"
    )]
    view: RefCell<Option<Rc<Arc<View>>>>,
    /// Earlier placements, the last one first, with the time of their end.
    earlier: RefCell<VecDeque<(Instant, Option<Arc<View>>)>>,
    /// Lease of this node, and what its workers tell the membership.
    pub signals: Arc<RegionSignals>,
    /// Wakes tasks that wait for another view.
    changed: Notify,
    /// Keys of the headers of spliced tunnels.
    pub announcements: AnnouncementKeys,
}

/// The node that a request goes to now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextHop {
    /// This node admits it.
    Here,
    /// The owner by the placement of this epoch.
    Node {
        /// The owner.
        owner: Member,
        /// Epoch of the placement.
        epoch: u64,
    },
    /// Not known yet: ask again when the view changes.
    Unknown,
}

impl Peering {
    /// A region without a view yet. The keys of announcements are derived from `keys`.
    pub fn new(keys: &RegionKeys, signals: Arc<RegionSignals>) -> Rc<Self> {
        Rc::new(Self {
            view: RefCell::default(),
            earlier: RefCell::default(),
            signals,
            changed: Notify::new(),
            announcements: AnnouncementKeys::new(keys),
        })
    }

    /// The last view; `None` until the first is published.
    pub fn view(&self) -> Option<Rc<Arc<View>>> {
        self.view.borrow().clone()
    }

    /// Uses this view from `now` on, and wakes the tasks that wait for another view.
    pub fn replace_view(&self, view: Arc<View>, now: Instant) {
        let epoch = view.epoch();
        let previous = self.view.replace(Some(Rc::new(view)));
        if previous
            .as_ref()
            .is_none_or(|previous| previous.epoch() != epoch)
        {
            let mut earlier = self.earlier.borrow_mut();
            earlier.truncate(EARLIER - 1);
            earlier.push_front((now, previous.map(|previous| Arc::clone(&previous))));
        }
        self.changed.notify_waiters();
    }

    /// Until when the agents of the service may not have connected yet, because it came to this
    /// node by a change of the placement: for `moved` after a change that was announced, which
    /// agents are told, and for `lost` after the loss of its owner, which they may notice only once
    /// the owner goes on.
    pub fn arrived_until(
        &self,
        hostname: &str,
        moved: Duration,
        lost: Duration,
        now: Instant,
    ) -> Option<Instant> {
        let is_here = |placement: &Placement| placement.owner(hostname) == Owner::Here;
        let earlier = self.earlier.borrow();
        let late = earlier
            .iter()
            .take_while(|(ended, _)| now.saturating_duration_since(*ended) < lost);
        let until = late.filter_map(|(ended, view)| match view {
            Some(view) if is_here(view.placement()) => None,
            Some(view) if !view.next().is_some_and(is_here) => Some(*ended + lost),
            _ => Some(*ended + moved),
        });
        until.filter(|until| now < *until).max()
    }

    /// Whether this node may admit a request of the service now.
    pub fn admits(&self, hostname: &str, now: Instant) -> bool {
        let view = self.view.borrow();
        let admit = |view: &Rc<Arc<View>>| {
            view.decide(hostname, ArrivedFrom::Caller, self.signals.holds(now)) == Decision::Admit
        };
        view.as_ref().is_some_and(admit)
    }

    /// Where a request of a caller goes.
    pub fn next_hop(&self, hostname: &str, now: Instant) -> NextHop {
        let Some(view) = &*self.view.borrow() else {
            return NextHop::Unknown;
        };
        match view.decide(hostname, ArrivedFrom::Caller, self.signals.holds(now)) {
            Decision::Admit => NextHop::Here,
            Decision::Forward(owner) => NextHop::Node {
                owner: owner.clone(),
                epoch: view.epoch(),
            },
            Decision::Wait | Decision::NotOwner { .. } => NextHop::Unknown,
        }
    }

    /// Whether this node serves a request that another node has sent: `None` if that is not known
    /// yet, the epoch of the placement if another node owns the service.
    pub fn accepts(&self, hostname: &str, now: Instant) -> Option<Result<(), u64>> {
        let view = self.view.borrow();
        let Some(view) = &*view else {
            return Some(Err(0));
        };
        match view.decide(hostname, ArrivedFrom::Node, self.signals.holds(now)) {
            Decision::Admit => Some(Ok(())),
            Decision::NotOwner { epoch } => Some(Err(epoch)),
            Decision::Wait | Decision::Forward(_) => None,
        }
    }

    /// Waits for a view with a later epoch.
    pub async fn later_than(&self, epoch: u64) {
        loop {
            let changed = self.changed.notified();
            if self
                .view
                .borrow()
                .as_ref()
                .is_some_and(|view| view.epoch() > epoch)
            {
                return;
            }
            changed.await;
        }
    }

    /// Waits until the process with this slot and session is known as a node of the region.
    pub async fn knows(&self, slot: NodeSlot, session: u128) {
        loop {
            let changed = self.changed.notified();
            if self
                .view
                .borrow()
                .as_ref()
                .is_some_and(|view| view.knows(slot, session))
            {
                return;
            }
            changed.await;
        }
    }

    /// Waits for another view.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whether another node owns the service.
    pub fn is_elsewhere(&self, hostname: &str) -> bool {
        self.view
            .borrow()
            .as_ref()
            .is_some_and(|view| view.placement().owner(hostname) != Owner::Here)
    }

    /// Whether this process owns the service by its placement, as a member with this session.
    pub fn owns(&self, hostname: &str, session: u128) -> bool {
        let owns = |placement: &Placement| {
            let is_member = placement
                .member(placement.here())
                .is_some_and(|here| here.session == session);
            is_member && placement.owner(hostname) == Owner::Here
        };
        self.view
            .borrow()
            .as_ref()
            .is_some_and(|view| owns(view.placement()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegionKey;

    const HERE: u16 = 3;

    fn peering(now: Instant) -> Rc<Peering> {
        Peering::new(
            &RegionKey::new([1; 32]).into(),
            Arc::new(RegionSignals::new(now)),
        )
    }

    fn member(slot: u16, session: u128) -> Member {
        Member {
            slot: NodeSlot::new(slot).unwrap(),
            session,
            peer_address: ([127, 0, 0, 1], 1).into(),
        }
    }

    fn view(epoch: u64, members: Vec<Member>) -> Arc<View> {
        Arc::new(View::settled(Placement::new(
            epoch,
            NodeSlot::new(HERE).unwrap(),
            members,
        )))
    }

    #[test]
    fn a_process_owns_services_only_as_the_member_that_is_meant() {
        let now = Instant::now();
        let peering = peering(now);
        assert!(!peering.owns("a", 5), "no view yet");
        peering.replace_view(view(1, vec![member(HERE, 5)]), now);
        assert!(peering.owns("a", 5) && !peering.owns("a", 4));
        peering.replace_view(view(2, Vec::new()), now);
        assert!(!peering.owns("a", 5), "not a member any more");
    }

    #[test]
    fn services_that_another_node_had_before_have_arrived_for_a_while() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let peering = peering(start);
        let arrived = |at| peering.arrived_until("a", 5 * second, 10 * second, at);
        let has_arrived = |at| arrived(at).is_some();
        assert!(!has_arrived(start), "no view yet");
        let next = view(2, vec![member(HERE, 1)]).shared_placement();
        let joins = (*view(1, vec![member(1, 1)])).clone().with_next(next);
        peering.replace_view(Arc::new(joins), start);
        peering.replace_view(view(2, vec![member(HERE, 1)]), start);
        assert!(has_arrived(start + 4 * second) && !has_arrived(start + 5 * second));
        peering.replace_view(view(3, vec![member(HERE, 1)]), start + second);
        assert!(
            has_arrived(start + 4 * second),
            "a later change does not hide the earlier one"
        );
        assert!(
            !has_arrived(start + 5 * second),
            "it was here before the later change"
        );
        // Its owner is lost: the change was not announced.
        peering.replace_view(view(4, vec![member(1, 1)]), start);
        peering.replace_view(view(5, vec![member(HERE, 1)]), start);
        assert_eq!(arrived(start + 9 * second), Some(start + 10 * second));
        assert!(!has_arrived(start + 10 * second));
    }

    #[test]
    fn a_node_admits_while_its_lease_holds() {
        let now = Instant::now();
        let peering = peering(now);
        assert_eq!(peering.next_hop("a", now), NextHop::Unknown);
        assert_eq!(peering.accepts("a", now), Some(Err(0)));
        peering.replace_view(view(1, vec![member(HERE, 5)]), now);
        assert!(!peering.admits("a", now));
        assert_eq!(
            (peering.next_hop("a", now), peering.accepts("a", now)),
            (NextHop::Unknown, None)
        );
        peering.signals.set(Some(now + Duration::from_secs(1)));
        assert!(peering.admits("a", now) && !peering.admits("a", now + Duration::from_secs(1)));
        assert_eq!(
            (peering.next_hop("a", now), peering.accepts("a", now)),
            (NextHop::Here, Some(Ok(())))
        );
        peering.replace_view(view(2, vec![member(1, 6)]), now);
        assert_eq!(
            peering.next_hop("a", now),
            NextHop::Node {
                owner: member(1, 6),
                epoch: 2
            }
        );
        assert_eq!(peering.accepts("a", now), Some(Err(2)));
    }
}
