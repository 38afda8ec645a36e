//! The nodes of a simulated region: their certificates, and the views by which their workers know
//! the owners of services. The membership is that of the world; `gateway/region/src/simulation` has
//! that of the product.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use gw_base::tls::pki::NodeIdentity;
use gw_data_plane::apex::{NodeQuestions, node_questions};
use gw_data_plane::worker::RegionSetup;
use gw_interface::node_connections::{self, NodeConnections};
use gw_interface::workers::{LostNode, Workers as _};
use gw_region::{Member, NodeSlot, Placement, RegionKey, RegionKeys, RegionSignals, View};
use tokio::sync::mpsc::unbounded_channel;

use super::gateway::Publisher;
use super::{Region, SetupError};

/// The nodes of a region, and which of them own services.
pub struct Nodes {
    epoch: u64,
    nodes: Vec<Node>,
}

struct Node {
    member: Member,
    /// It owns services.
    is_member: bool,
}

impl Nodes {
    /// Nodes at these addresses for each other, all of them members.
    pub fn new(addresses: impl IntoIterator<Item = SocketAddr>) -> Result<Self, SetupError> {
        let addresses = addresses.into_iter().enumerate();
        let nodes = addresses.map(|(number, peer_address)| {
            let member = Member {
                slot: slot(number)?,
                session: 1,
                peer_address,
            };
            Ok(Node {
                member,
                is_member: true,
            })
        });
        Ok(Self {
            epoch: 1,
            nodes: nodes.collect::<Result<_, SetupError>>()?,
        })
    }

    /// Whether there are several.
    pub fn are_several(&self) -> bool {
        self.nodes.len() > 1
    }

    /// Number of the node that owns a service.
    pub fn owner(&self, hostname: &str) -> Option<usize> {
        let owner = self.placement(0)?.owning_member(hostname)?.slot;
        self.nodes.iter().position(|node| node.member.slot == owner)
    }

    /// Begins or ends the membership of a node. It is another process then, if it `is_new`. Returns
    /// what others do about the earlier process.
    pub fn change(&mut self, number: usize, is_member: bool, is_new: bool) -> LostNode {
        let node = &mut self.nodes[number];
        let lost = LostNode {
            slot: node.member.slot,
            session: node.member.session,
            until: Instant::now(),
        };
        node.is_member = is_member;
        node.member.session += u128::from(is_new);
        self.epoch += 1;
        lost
    }

    fn placement(&self, here: usize) -> Option<Placement> {
        let members = self.nodes.iter().filter(|node| node.is_member);
        let members = members.map(|node| node.member.clone()).collect();
        let here = self.nodes.get(here)?.member.slot;
        Some(Placement::new(self.epoch, here, members))
    }

    /// Publishes the members to the workers of a process of node `here`.
    pub fn publish(&self, here: usize, gateway: &Publisher) {
        let Some(placement) = self.placement(here) else {
            return;
        };
        let nodes = self.nodes.iter();
        let processes: Vec<_> = nodes
            .map(|node| (node.member.slot, node.member.session))
            .collect();
        let view = View::settled(placement).with_processes(&processes);
        // Levels of buckets that move are lost: they are full at the next owner.
        let (applied, _) = unbounded_channel();
        gateway
            .handles()
            .publish_view(self.epoch, &Arc::new(view), &applied);
    }

    /// Publishes the certificate of node `here` to the workers of a process of it.
    pub fn certify(
        &self,
        here: usize,
        region: &Region,
        gateway: &Publisher,
    ) -> Result<(), SetupError> {
        let Member { slot, session, .. } = self.nodes[here].member;
        let tls = region.certificates().node(NodeIdentity { slot, session })?;
        gateway.handles().publish_node_tls(&Arc::new(tls));
        Ok(())
    }
}

/// What the workers of one process of a node start with.
pub struct NodeSetup {
    keys: RegionKeys,
    signals: Arc<RegionSignals>,
    control_plane: NodeConnections,
    apex_questions: NodeQuestions,
}

impl Default for NodeSetup {
    /// A process with a lease that does not end.
    fn default() -> Self {
        let signals = RegionSignals::new(Instant::now());
        signals.set_endless();
        Self {
            keys: RegionKeys::new(RegionKey::new([1; RegionKey::BYTES]), None, None),
            signals: Arc::new(signals),
            // Calls between control planes are not simulated.
            control_plane: node_connections::channel().0,
            apex_questions: node_questions().0,
        }
    }
}

impl NodeSetup {
    /// The set-up of a worker with this listener for other nodes.
    pub fn of_worker(&self, listener: std::net::TcpListener) -> RegionSetup {
        RegionSetup {
            keys: self.keys.clone(),
            signals: Arc::clone(&self.signals),
            listeners: vec![listener],
            control_plane: self.control_plane.clone(),
            apex_questions: self.apex_questions.clone(),
        }
    }
}

fn slot(number: usize) -> Result<NodeSlot, SetupError> {
    let slot = u16::try_from(number).ok().and_then(NodeSlot::new);
    slot.ok_or_else(|| SetupError::Plan(format!("{number} is no slot of a node")))
}
