//! The node that owns a service: it holds the tunnels and the rate-limit bucket of the service.

use std::net::SocketAddr;

use crate::owners::ownership;

/// Number of a node in its region: 0 to 1023, so that it takes 10 bits of a request id. 0 is the
/// only node of a region.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeSlot(u16);

impl NodeSlot {
    /// Highest slot.
    pub const MAX: u16 = 1023;

    /// `None` above [`Self::MAX`].
    pub fn new(slot: u16) -> Option<Self> {
        (slot <= Self::MAX).then_some(Self(slot))
    }

    /// Returns the number.
    pub fn get(self) -> u16 {
        self.0
    }
}

/// A node that owns services.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Slot of the node.
    pub slot: NodeSlot,
    /// Differs between two processes that use the same slot one after the other.
    pub session: u128,
    /// Where the node accepts connections of other nodes.
    pub peer_address: SocketAddr,
}

/// The members of the region at one epoch, as seen by one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    epoch: u64,
    here: NodeSlot,
    members: Vec<Member>,
}

/// The node that owns a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner<'a> {
    /// The node that asks.
    Here,
    /// Another member.
    OtherNode(&'a Member),
}

impl Placement {
    /// `members` are the nodes that own services. `here` may be missing: it then owns none.
    pub fn new(epoch: u64, here: NodeSlot, members: Vec<Member>) -> Self {
        Self {
            epoch,
            here,
            members,
        }
    }

    /// Grows with every change of the members.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Slot of the node that asks.
    pub fn here(&self) -> NodeSlot {
        self.here
    }

    /// The nodes that own services.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The member in this slot; `None` if the node owns no services.
    pub fn member(&self, slot: NodeSlot) -> Option<&Member> {
        self.members.iter().find(|member| member.slot == slot)
    }

    /// All members but this node.
    pub fn others(&self) -> impl Iterator<Item = &Member> {
        self.members
            .iter()
            .filter(|member| member.slot != self.here)
    }

    /// The owner of the service with this hostname. Without members it is this node.
    pub fn owner(&self, hostname: &str) -> Owner<'_> {
        match self.owning_member(hostname) {
            Some(member) if member.slot != self.here => Owner::OtherNode(member),
            _ => Owner::Here,
        }
    }

    /// The member that owns the service with this hostname, this node or another; `None` without
    /// members.
    pub fn owning_member(&self, hostname: &str) -> Option<&Member> {
        let slots = self.members.iter().map(|member| u64::from(member.slot.0));
        ownership::owner_node(hostname, slots).map(|index| &self.members[index])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owners::ownership::owner;

    fn placement(here: u16, slots: &[u16]) -> Placement {
        let member = |slot: &u16| Member {
            slot: NodeSlot::new(*slot).unwrap(),
            session: 1,
            peer_address: ([127, 0, 0, 1], 7000 + slot).into(),
        };
        Placement::new(
            1,
            NodeSlot::new(here).unwrap(),
            slots.iter().map(member).collect(),
        )
    }

    fn hostnames() -> impl Iterator<Item = String> {
        (0..6_000).map(|n| format!("acme{n}--api.eu1.example.com"))
    }

    #[test]
    fn every_node_names_the_same_owner() {
        for name in hostnames() {
            let owners = [0, 1, 2].map(|here| match placement(here, &[0, 1, 2]).owner(&name) {
                Owner::Here => here,
                Owner::OtherNode(member) => member.slot.get(),
            });
            assert!(
                owners.iter().all(|owner| *owner == owners[0]),
                "{name}: {owners:?}"
            );
        }
    }

    #[test]
    fn services_of_a_node_are_spread_over_its_workers() {
        let placement = placement(0, &[0, 1, 2]);
        let mut workers = [0usize; 2];
        for name in hostnames().filter(|name| placement.owner(name) == Owner::Here) {
            workers[owner(&name, 2).0] += 1;
        }
        assert!(
            workers.iter().all(|share| share.abs_diff(1000) < 100),
            "{workers:?}"
        );
    }

    #[test]
    fn a_lost_node_moves_only_its_own_services() {
        let three = placement(0, &[0, 1, 2]);
        let two = placement(0, &[0, 1]);
        for name in hostnames() {
            match three.owner(&name) {
                Owner::OtherNode(member) if member.slot.get() == 2 => {}
                owner => assert_eq!(owner, two.owner(&name)),
            }
        }
    }

    #[test]
    fn without_members_this_node_owns_all() {
        assert_eq!(placement(7, &[]).owner("a"), Owner::Here);
    }

    #[test]
    fn members_are_found_by_their_slot() {
        let placement = placement(7, &[0, 2]);
        assert_eq!(
            placement.member(NodeSlot(2)).unwrap().peer_address.port(),
            7002
        );
        assert_eq!(placement.member(NodeSlot(7)), None);
    }
}
