//! What the workers of a node know about the owners of services, and what they do with a request by
//! it.

use std::sync::Arc;

use super::placement::{Member, NodeSlot, Owner, Placement};
use crate::engine::is_among;

/// The owners of services at one epoch, and which services this node may admit already. Immutable:
/// every change is a new view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    pub(super) placement: Arc<Placement>,
    pub(super) next: Option<Arc<Placement>>,
    /// Slot and session of all rows, also of nodes that own no services.
    pub(super) processes: Arc<[(NodeSlot, u128)]>,
    /// This session is a member of the placement.
    pub(super) is_member: bool,
    /// Sessions that may still admit services which this node owns now.
    pub(super) awaited: Vec<Awaited>,
    /// Placement by which this node admitted before, if it awaited no session then.
    pub(super) held: Option<Arc<Placement>>,
}

/// A session that has not acknowledged the epoch of a view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Awaited {
    pub(super) slot: NodeSlot,
    pub(super) session: u128,
    /// Placements by which the session may still admit. `None`: this node has missed one of them.
    pub(super) placements: Option<Vec<Arc<Placement>>>,
}

impl Awaited {
    fn may_admit(&self, hostname: &str) -> Option<bool> {
        let placements = self.placements.as_ref()?;
        Some(placements.iter().any(|placement| {
            placement
                .owning_member(hostname)
                .is_some_and(|member| member.session == self.session)
        }))
    }
}

/// From where a request arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivedFrom {
    /// From a caller or an agent: this node is the ingress.
    Caller,
    /// Forwarded by another node. Never forwarded again.
    Node,
}

/// What to do with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision<'a> {
    /// This node owns the service: admit by its bucket.
    Admit,
    /// This node owns the service, but another may still admit for it, or this node is not sure to
    /// be the owner. Decide again when the view or the end of the lease changes, for at most 5 s.
    Wait,
    /// Forward to the owner.
    Forward(&'a Member),
    /// Answer the other node that this node is not the owner at this epoch.
    NotOwner {
        /// Epoch of the view of this node.
        epoch: u64,
    },
}

impl View {
    /// A view in which every member has stopped admitting by earlier placements. This node is a
    /// member if the placement says so.
    pub fn settled(placement: Placement) -> Self {
        let is_member = placement.member(placement.here()).is_some();
        let processes = placement
            .members()
            .iter()
            .map(|member| (member.slot, member.session))
            .collect();
        Self {
            placement: Arc::new(placement),
            next: None,
            processes,
            is_member,
            awaited: Vec::new(),
            held: None,
        }
    }

    /// This view, with rows of other nodes that own no services.
    pub fn with_processes(self, processes: &[(NodeSlot, u128)]) -> Self {
        Self {
            processes: processes.into(),
            ..self
        }
    }

    #[cfg(test)]
    pub(crate) fn with_next(self, next: Arc<Placement>) -> Self {
        Self {
            next: Some(next),
            ..self
        }
    }

    /// Whether the process with this slot and session is a node of the region, and so may call this
    /// one. The certificate of a process that has ended names a session without a row.
    pub fn knows(&self, slot: NodeSlot, session: u128) -> bool {
        is_among(&self.processes, slot, session)
    }

    /// Epoch of the placement.
    pub fn epoch(&self) -> u64 {
        self.placement.epoch()
    }

    /// The placement at this epoch.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The placement at this epoch, shared with this view.
    pub fn shared_placement(&self) -> Arc<Placement> {
        Arc::clone(&self.placement)
    }

    /// The placement after the joins and drains under way; `None` if there are none. Tunnels are
    /// opened by it ahead; it grants nothing.
    pub fn next(&self) -> Option<&Placement> {
        self.next.as_deref()
    }

    /// Whether this node may own services at this epoch.
    pub fn is_member(&self) -> bool {
        self.is_member
    }

    /// Whether other nodes may still admit for some services that moved to this node.
    pub fn is_moving(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Decides a request. `has_lease` says whether the time is before [`Membership::admit_until`].
    ///
    /// [`Membership::admit_until`]: crate::Membership::admit_until
    pub fn decide(&self, hostname: &str, arrival: ArrivedFrom, has_lease: bool) -> Decision<'_> {
        match (self.placement.owner(hostname), arrival) {
            (Owner::Here, _) if self.is_member && has_lease && !self.is_awaiting(hostname) => {
                Decision::Admit
            }
            // Without members, or with the row of an earlier session of this slot, the owner is not
            // known yet.
            (Owner::Here, _) => Decision::Wait,
            (Owner::OtherNode(member), ArrivedFrom::Caller) => Decision::Forward(member),
            (Owner::OtherNode(_), ArrivedFrom::Node) => Decision::NotOwner {
                epoch: self.epoch(),
            },
        }
    }

    /// Whether another session may still admit for this service of this node.
    fn is_awaiting(&self, hostname: &str) -> bool {
        self.awaited.iter().any(|awaited| {
            awaited
                .may_admit(hostname)
                .unwrap_or_else(|| !self.is_held(hostname))
        })
    }

    fn is_held(&self, hostname: &str) -> bool {
        self.held
            .as_ref()
            .is_some_and(|held| held.owner(hostname) == Owner::Here)
    }
}
