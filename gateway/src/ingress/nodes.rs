//! Connections between nodes of the region: tunnels that one node splices to the owner of their service.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bytes::{Buf, BytesMut};
use gw_shared::net::Socket;
use gw_shared::net::tls::{ClientHello, Greeting};
use gw_shared::runtime;

use super::splice::{self, SpliceTo};
use super::{Ingress, is_tunnel};
use crate::connections::ConnectionGuard;
use crate::hostname::Destination;
use crate::region::{InvalidAnnouncement, Owner, Peering, TunnelAnnouncement};

/// Reason in the counter of connections that were not taken.
const UNVERIFIED: &str = "node_unverified";
const NOT_OWNER: &str = "not_owner";
const UNREACHABLE: &str = "owner_unreachable";

impl Ingress {
    /// The other node that owns the service of a tunnel, if any. Tunnels of unknown services are refused here.
    pub(super) fn node_for(&self, hello: &ClientHello) -> Option<SpliceTo> {
        let placement = self.peering.as_ref()?.placement()?;
        let Destination::Tenant(label) = self.region.destination(hello.server_name.as_deref()?) else { return None };
        let directory = self.directory.get();
        match placement.owner(&directory.service(&label)?.hostname) {
            Owner::Here => None,
            Owner::Peer(owner) => Some(SpliceTo { owner: owner.clone(), here: placement.here() }),
        }
    }

    /// Splices a tunnel to the node that owns its service. On a failure the connection closes and the agent tries again.
    pub(super) async fn splice(
        self: Rc<Self>,
        greeting: Greeting,
        agent: SocketAddr,
        mut guard: ConnectionGuard,
        to: SpliceTo,
    ) {
        let Some(peering) = &self.peering else { return };
        let node = to.owner.slot.get();
        match splice::connect(&to, agent, &greeting.received, &peering.announcements).await {
            Ok(owner) => {
                guard.has_shaken_hands();
                // A spliced tunnel counts as a running request: a drain waits until the agent has moved.
                guard.busy();
                self.counters.tunnels_spliced.increment();
                tracing::debug!(%agent, node, "tunnel spliced to the owner of its service");
                let ended = splice::carry(&greeting.socket, &owner).await;
                tracing::debug!(%agent, node, error = ended.err().map(tracing::field::display), "spliced tunnel ended");
            }
            Err(error) => {
                self.counters.turned_away.increment(UNREACHABLE);
                if self.tunnels.may_log_refusal() {
                    let address = to.owner.peer_address;
                    tracing::warn!(%agent, node, %address, %error, "cannot splice a tunnel to the owner of its service");
                }
            }
        }
    }

    /// Reads the beginning of a connection from another node. Serves a tunnel if this node owns its service; never
    /// splices it again, so that nodes with different placements do not send a tunnel around.
    pub(super) async fn greet_node(self: Rc<Self>, fd: OwnedFd, node: SocketAddr) {
        let Some(peering) = self.peering.clone() else { return };
        let Ok(socket) = Socket::from_fd(fd) else { return };
        let Some(mut guard) = self.register(&socket) else { return };
        let (announced, received) = match read_announcement(&socket, &peering).await {
            Ok(read) => read,
            Err(error) => {
                self.counters.turned_away.increment(UNVERIFIED);
                if self.tunnels.may_log_refusal() {
                    tracing::warn!(%node, %error, "connection from another node refused");
                }
                return;
            }
        };
        let agent = announced.agent;
        let greeting = match Greeting::read(socket, received).await {
            Ok(greeting) => greeting,
            Err(error) => return self.handshake_failed(agent, &error),
        };
        if !self.owns(&peering, &announced, &greeting.hello) {
            self.counters.turned_away.increment(NOT_OWNER);
            let sender = announced.sender.get();
            return tracing::debug!(%agent, sender, "spliced tunnel refused: this process does not own its service");
        }
        if !self.trusted_proxies.contains(agent.ip()) {
            let Some(counted) = self.count_connection(agent) else { return };
            guard.counts_for(Some(counted));
        }
        let Some(worker) = self.worker_for(&greeting.hello) else {
            return runtime::spawn(self.welcome(greeting, agent, guard));
        };
        drop(guard);
        self.hand_over(worker, greeting, agent).await;
    }

    fn owns(&self, peering: &Peering, announced: &TunnelAnnouncement, hello: &ClientHello) -> bool {
        let Some(name) = hello.server_name.as_deref().filter(|_| is_tunnel(hello)) else { return false };
        let Destination::Tenant(label) = self.region.destination(name) else { return false };
        peering.owns(&format!("{label}.{}", self.region.apex()), announced.owner_session)
    }
}

#[derive(Debug, thiserror::Error)]
enum AnnouncementError {
    #[error(transparent)]
    Invalid(#[from] InvalidAnnouncement),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("the connection ended before a tunnel was announced")]
    CutOff,
}

/// Reads the announcement of a tunnel; also returns the bytes behind it.
async fn read_announcement(
    socket: &Socket,
    peering: &Peering,
) -> Result<(TunnelAnnouncement, BytesMut), AnnouncementError> {
    let mut received = BytesMut::new();
    loop {
        if std::future::poll_fn(|cx| socket.poll_recv_buf(cx, &mut received)).await? == 0 {
            return Err(AnnouncementError::CutOff);
        }
        if let Some((announced, length)) = peering.announcements.parse(&received)? {
            received.advance(length);
            return Ok((announced, received));
        }
    }
}
