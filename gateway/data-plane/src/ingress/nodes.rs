//! Connections between nodes of the region: tunnels that one node splices to the owner of their
//! service, links that carry requests to it, and HTTP between control planes.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::limits;
use bytes::{Buf, BytesMut};
use futures_util::future::{Either, select};
use gw_base::service::hostname::Destination;
use gw_base::tls::node::{ALPN_CONTROL, ALPN_NODE};
use gw_base::tls::pki::{self, NodeIdentity};
use gw_interface::node_connections::NodeConnection;
use gw_interface::rate_limit::Claimant;
use gw_region::{InvalidAnnouncement, Member, NodeSlot, Owner, Peering, TunnelAnnouncement};
use gw_shared::net::tls::{ClientHello, Greeting};
use gw_shared::net::{Socket, TlsStream};
use gw_shared::runtime;

use super::splice::{self, SpliceTo};
use super::{ConnectionOrigin, Ingress, is_tunnel};
use crate::connections::ConnectionGuard;
use crate::relay;
use crate::tunnel::Via;
use crate::upstream::cross_node::Nodes;

/// Reason in the counter of connections that were not taken.
const UNVERIFIED: &str = "node_unverified";
const NOT_OWNER: &str = "not_owner";
const UNREACHABLE: &str = "owner_unreachable";
const CONTROL_PLANE_BUSY: &str = "control_plane_busy";

impl Ingress {
    /// The other node that owns the service of a tunnel, if any. Tunnels of unknown services are
    /// refused here.
    pub(super) fn node_for(&self, hello: &ClientHello) -> Option<SpliceTo> {
        let view = self.nodes.as_ref()?.peering.view()?;
        let placement = view.placement();
        let Destination::Tenant(label) = self.region.destination(hello.server_name.as_deref()?)
        else {
            return None;
        };
        let directory = self.directory.get();
        match placement.owner(&directory.service(&label)?.hostname) {
            Owner::Here => None,
            Owner::OtherNode(owner) => Some(SpliceTo {
                owner: owner.clone(),
                here: placement.here(),
                epoch: placement.epoch(),
            }),
        }
    }

    /// Splices a tunnel to the node that owns its service. If that cannot be reached, waits for
    /// another owner, which can be this node. After a while the connection closes and the agent
    /// tries again.
    pub(super) async fn splice(
        self: Rc<Self>,
        greeting: Greeting,
        agent: SocketAddr,
        guard: ConnectionGuard,
        mut to: SpliceTo,
    ) {
        let nodes = self.nodes.clone();
        let Some(nodes) = nodes.filter(|nodes| !nodes.is_silent(&to.owner)) else {
            // The agent tries again, through the balancer at another node.
            return self.counters.turned_away.increment(UNREACHABLE);
        };
        let deadline = Instant::now() + limits::NODE_WAIT;
        let connected = loop {
            let connecting =
                splice::connect(&to, agent, &greeting.received, &nodes.peering.announcements);
            let moved = self.moved(&nodes, &greeting.hello, &to.owner);
            let connected = match select(pin!(connecting), pin!(moved)).await {
                Either::Left((connected, _)) => connected,
                Either::Right(((), _)) => {
                    Err(io::Error::other("another node owns the service now"))
                }
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if connected.is_ok() || left.is_zero() {
                break connected;
            }
            nodes.peering.signals.link_broke();
            // This wait does not count against the deadline of the agent.
            guard.expect_by(deadline + limits::HANDSHAKE);
            if runtime::timeout(left, nodes.peering.later_than(to.epoch))
                .await
                .is_err()
            {
                break connected;
            }
            match self.node_for(&greeting.hello) {
                Some(next) => to = next,
                None => {
                    return self
                        .take_tunnel(greeting, ConnectionOrigin::direct(agent), guard)
                        .await;
                }
            }
        };
        let node = to.owner.slot.get();
        match connected {
            Ok(owner) => {
                guard.has_shaken_hands();
                // A spliced tunnel counts as a running request: a drain waits until the agent has
                // moved.
                guard.busy();
                self.counters.tunnels_spliced.increment();
                tracing::debug!(%agent, node, "tunnel spliced to the owner of its service");
                let ended = carry_splice(&nodes, &to.owner, &greeting.socket, &owner).await;
                let error = ended.err().map(tracing::field::display);
                tracing::debug!(%agent, node, error, "spliced tunnel ended");
            }
            Err(error) => {
                self.counters.turned_away.increment(UNREACHABLE);
                if self.tunnels.may_log_refusal() {
                    let address = to.owner.peer_address;
                    tracing::warn!(%agent, node, %address, %error,
                        "cannot splice a tunnel to the owner of its service");
                }
            }
        }
    }

    /// Waits until another process than `owner` owns the service of a tunnel. A machine that is
    /// lost does not refuse connections.
    async fn moved(&self, nodes: &Nodes, hello: &ClientHello, owner: &Member) {
        while self.node_for(hello).is_some_and(|to| to.owner == *owner) {
            nodes.peering.changed().await;
        }
    }

    /// Reads the beginning of a connection from another node: a spliced tunnel, a link, or a call
    /// of its control plane.
    pub(super) async fn greet_node(self: Rc<Self>, fd: OwnedFd, node: SocketAddr) {
        let Some(nodes) = self.nodes.clone() else {
            return;
        };
        let claimant = claimant(&nodes.peering, node);
        // Nodes bring the tunnels of many agents, which are counted for the agents.
        let mut slot = None;
        if claimant != Claimant::Known {
            let Some(counted) = self.count_connection(node) else {
                return;
            };
            slot = Some(counted);
        }
        let Ok(socket) = Socket::from_fd(fd) else {
            return;
        };
        let Some(mut guard) = self.register(&socket, &self.node_handshakes, claimant) else {
            return;
        };
        guard.counts_for(slot);
        let (beginning, received) = match read_beginning(&socket, &nodes.peering).await {
            Ok(read) => read,
            Err(error) => return self.refuse_node(node, &error),
        };
        let greeting = match Greeting::read(socket, received, || self.plain_http_answer()).await {
            Ok(greeting) => greeting,
            Err(error) => return self.handshake_failed(node, &error),
        };
        match beginning {
            Beginning::Tunnel(announced) => {
                self.take_spliced(&nodes, announced, greeting, guard).await;
            }
            Beginning::Tls if offers(&greeting.hello, ALPN_CONTROL) => {
                drop(guard);
                self.give_to_control_plane(greeting, node, claimant);
            }
            Beginning::Tls => match self.shake_hands(&nodes, greeting, claimant).await {
                Ok((stream, identity)) => {
                    let upstream = Rc::clone(&self.router.relay.upstream);
                    runtime::spawn(relay::serve_link(upstream, nodes, stream, identity));
                }
                Err(error) => self.refuse_node(node, &error),
            },
        }
    }

    /// Hands a connection of another node's control plane to the control plane of this one.
    fn give_to_control_plane(&self, greeting: Greeting, from: SocketAddr, claimant: Claimant) {
        let (Some(control_plane), Some(socket)) = (&self.control_plane, greeting.socket.into_fd())
        else {
            return;
        };
        if !control_plane.give(NodeConnection {
            socket,
            received: greeting.received,
            from,
            claimant,
        }) {
            self.counters.turned_away.increment(CONTROL_PLANE_BUSY);
        }
    }

    fn refuse_node(&self, node: SocketAddr, error: &NotANode) {
        self.counters.turned_away.increment(UNVERIFIED);
        if error.is_by_the_other_end() {
            tracing::debug!(%node, %error, "connection from another node ended at its beginning");
        } else if self.tunnels.may_log_refusal() {
            tracing::warn!(%node, %error, "connection from another node refused");
        }
    }

    /// Serves a spliced tunnel if this node owns its service. Never splices it again, so that nodes
    /// with different placements do not send a tunnel around.
    async fn take_spliced(
        self: Rc<Self>,
        nodes: &Nodes,
        announced: TunnelAnnouncement,
        greeting: Greeting,
        mut guard: ConnectionGuard,
    ) {
        let agent = announced.agent;
        if !self.owns(&nodes.peering, &announced, &greeting.hello) {
            self.counters.turned_away.increment(NOT_OWNER);
            let sender = announced.sender.get();
            return tracing::debug!(%agent, sender,
                "spliced tunnel refused: this process does not own its service");
        }
        // From here on the connection is one of its agent.
        let mut slot = None;
        if !self.trusted_proxies.contains(agent.ip()) {
            let Some(counted) = self.count_connection(agent) else {
                return;
            };
            slot = Some(counted);
        }
        guard.shakes_hands(self.begin_handshake(
            &greeting.socket,
            &self.handshakes,
            Claimant::counted(slot.as_ref()),
        ));
        guard.counts_for(slot);
        self.take_tunnel(
            greeting,
            ConnectionOrigin {
                peer: agent,
                via: Some(announced.sender),
            },
            guard,
        )
        .await;
    }

    /// The path of a tunnel that this node splices.
    pub(super) fn path_by(&self, node: NodeSlot) -> Option<Via> {
        let nodes = self.nodes.clone()?;
        let silent = Box::pin(async move { nodes.until_silent(node).await });
        Some(Via { node, silent })
    }

    /// Serves a tunnel of a service that this node owns.
    async fn take_tunnel(
        self: Rc<Self>,
        greeting: Greeting,
        origin: ConnectionOrigin,
        guard: ConnectionGuard,
    ) {
        let Some(worker) = self.worker_for(&greeting.hello) else {
            return runtime::spawn(self.welcome(greeting, origin, guard));
        };
        drop(guard);
        self.hand_over(worker, greeting, origin).await;
    }

    /// Does the TLS handshake of a link. The other end must be a process that is a node of the
    /// region.
    async fn shake_hands(
        &self,
        nodes: &Nodes,
        greeting: Greeting,
        claimant: Claimant,
    ) -> Result<(TlsStream, NodeIdentity), NotANode> {
        if nodes.links_served.get() >= limits::LINKS_SERVED {
            return Err(NotANode::TooManyLinks);
        }
        let tls = nodes.tls().ok_or(NotANode::NoCertificate)?;
        if !offers(&greeting.hello, ALPN_NODE) {
            return Err(NotANode::OtherProtocol);
        }
        let other_end = greeting.socket.closer();
        let handshake = greeting.accept(Arc::clone(&tls.server));
        let stream = if claimant == Claimant::Known {
            handshake.await?
        } else {
            let in_turn =
                self.node_handshakes
                    .one_a_turn(None, || other_end.is_hung_up(), handshake);
            in_turn.await?
        };
        let certificate = stream
            .peer_certificate()
            .ok_or(NotANode::OtherCertificate)?;
        let node =
            pki::node_identity(&certificate, &self.region).ok_or(NotANode::OtherCertificate)?;
        // This node may not know yet of one that has just joined.
        let known = nodes.peering.knows(node.slot, node.session);
        runtime::timeout(limits::NODE_CONNECT, known)
            .await
            .map_err(|_| NotANode::Ended(node.slot.get()))?;
        Ok((stream, node))
    }

    fn owns(&self, peering: &Peering, announced: &TunnelAnnouncement, hello: &ClientHello) -> bool {
        let Some(name) = hello.server_name.as_deref().filter(|_| is_tunnel(hello)) else {
            return false;
        };
        let Destination::Tenant(label) = self.region.destination(name) else {
            return false;
        };
        peering.owns(
            &format!("{label}.{}", self.region.apex()),
            announced.owner_session,
        )
    }
}

/// What a connection of another node is for.
enum Beginning {
    Tunnel(TunnelAnnouncement),
    /// A TLS connection begins: a link, or HTTP between control planes.
    Tls,
}

/// The peer as it counts before it has proved that it is a node.
fn claimant(peering: &Peering, peer: SocketAddr) -> Claimant {
    let address = peer.ip().to_canonical();
    let is_of_member = peering.view().is_some_and(|view| {
        view.placement()
            .members()
            .iter()
            .any(|member| member.peer_address.ip().to_canonical() == address)
    });
    if is_of_member {
        Claimant::Known
    } else {
        Claimant::Address(address.into())
    }
}

fn offers(hello: &ClientHello, alpn: &[u8]) -> bool {
    hello.alpn.iter().any(|protocol| protocol == alpn)
}

/// Why a connection is refused on the listener for other nodes.
#[derive(Debug, thiserror::Error)]
enum NotANode {
    #[error(transparent)]
    Announcement(#[from] InvalidAnnouncement),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the connection ended at its beginning")]
    CutOff,
    #[error("a TLS connection that offers neither gw-peer nor gw-control/1")]
    OtherProtocol,
    #[error("its certificate is not that of a node of this region")]
    OtherCertificate,
    #[error(
        "its certificate is for a process as node {0} that has ended, or that the table of nodes \
         does not list"
    )]
    Ended(u16),
    #[error("this node has no certificate yet")]
    NoCertificate,
    #[error("there are too many links of other nodes")]
    TooManyLinks,
}

impl NotANode {
    /// Whether the other end closed the connection, as `doctor` and the probes of a balancer do.
    fn is_by_the_other_end(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        match self {
            Self::CutOff => true,
            Self::Io(error) => [BrokenPipe, ConnectionReset, UnexpectedEof].contains(&error.kind()),
            _ => false,
        }
    }
}

/// Content type of the first TLS record (RFC 8446 §5.1).
const HANDSHAKE: u8 = 22;

/// Reads the beginning of a connection, with the announcement of a tunnel; also returns the bytes
/// behind it.
async fn read_beginning(
    socket: &Socket,
    peering: &Peering,
) -> Result<(Beginning, BytesMut), NotANode> {
    let mut received = BytesMut::new();
    loop {
        if std::future::poll_fn(|cx| socket.poll_recv_buf(cx, &mut received)).await? == 0 {
            return Err(NotANode::CutOff);
        }
        if received[0] == HANDSHAKE {
            return Ok((Beginning::Tls, received));
        }
        if let Some((announced, length)) = peering.announcements.parse(&received)? {
            received.advance(length);
            return Ok((Beginning::Tunnel(announced), received));
        }
    }
}

/// Carries a tunnel between its agent and the owner of its service until it ends, or the owner is
/// silent. Its TLS is the agent's: nothing here tells whether the owner lives.
async fn carry_splice(
    nodes: &Rc<Nodes>,
    owner: &Member,
    from_agent: &Socket,
    to_owner: &Socket,
) -> io::Result<()> {
    let ends = [from_agent.closer(), to_owner.closer()];
    let _attached = ends.map(|end| nodes.attach(owner.session, end));
    splice::carry_until(nodes.until_silent(owner.slot), from_agent, to_owner).await
}
