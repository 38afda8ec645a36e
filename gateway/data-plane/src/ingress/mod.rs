//! New connections: accept, PROXY protocol, ClientHello, hand-over to the owning worker or node,
//! TLS handshake, protocol.

mod acceptor;
mod hand_over;
mod nodes;
mod own_domains;
mod plain_http;
pub(crate) mod proxy_protocol;
mod splice;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use crate::limits;
use bytes::BytesMut;
use gw_base::client_address::{ProxyProtocol, TrustedProxies};
use gw_base::error::Error;
use gw_base::mailbox::Post;
use gw_base::service::hostname::Region;
use gw_base::tls::{ALPN_ACME, ALPN_HTTP2, ServerConfigs};
use gw_interface::config::HandOver;
use gw_interface::node_connections::NodeConnections;
use gw_interface::rate_limit::{AddressSlot, Arrivals, Bucket, Claimant};
use gw_region::NodeSlot;
use gw_region::owners::ownership::WorkerId;
use gw_shared::net::tls::{ClientHello, Greeting};
use gw_shared::net::{Socket, TlsStream};
use gw_shared::{runtime, tunnel as protocol};
use gw_store::Directory;
use gw_telemetry::counters::Counters;

pub(crate) use self::acceptor::Acceptor;
use self::acceptor::Entrance;
pub(crate) use self::hand_over::HandedOver;
pub(crate) use self::own_domains::DomainCertificates;
use self::proxy_protocol::{Announcement, InvalidHeader, Unannounced};
use crate::connections::handshakes::{HandshakeGuard, Handshakes};
use crate::connections::{ConnectionGuard, Connections};
use crate::current::Current;
use crate::peer::Peer;
use crate::route::Router;
use crate::tunnel::{self, Tunnels};
use crate::upstream::cross_node::Nodes;
use crate::{downstream, http1};

/// Message of the answer to plain HTTP.
pub const PLAIN_HTTP: &str = "this port speaks https, not http: begin the URL with https://";

/// Reason in the counter of connections that were not taken.
const PROXY_HEADER_MISSING: &str = "proxy_header_missing";

/// Takes in the connections of one worker.
pub(crate) struct Ingress {
    pub(crate) worker: WorkerId,
    pub(crate) workers: usize,
    pub(crate) region: Region,
    pub(crate) trusted_proxies: TrustedProxies,
    pub(crate) hand_over: HandOver,
    pub(crate) acceptor: Acceptor,
    pub(crate) arrivals: Rc<Arrivals>,
    pub(crate) connections: Rc<Connections>,
    /// Handshakes with callers and agents.
    pub(crate) handshakes: Rc<Handshakes>,
    /// Connections to the listener for other nodes, until they have proved that a node sends them.
    pub(crate) node_handshakes: Rc<Handshakes>,
    pub(crate) directory: Rc<Current<Directory>>,
    pub(crate) certificates: Rc<Current<ServerConfigs>>,
    /// TLS configurations of own domains.
    pub(crate) domain_certificates: RefCell<DomainCertificates>,
    /// Share of its time that each worker was busy lately, in per mille.
    pub(crate) busy: Arc<[AtomicU32]>,
    /// Mailboxes of all workers.
    pub(crate) mailboxes: Arc<dyn Post<Box<HandedOver>>>,
    pub(crate) router: Rc<Router>,
    pub(crate) tunnels: Rc<Tunnels>,
    /// Warnings of proxies that do not announce their client.
    pub(crate) unannounced_lines: RefCell<Bucket>,
    /// `None` if this gateway is the only node of its region.
    pub(crate) nodes: Option<Rc<Nodes>>,
    /// Takes connections of other nodes' control planes; `None` as `nodes`.
    pub(crate) control_plane: Option<NodeConnections>,
    pub(crate) counters: Rc<Counters>,
}

/// The other end of a connection.
#[derive(Debug, Clone, Copy)]
struct ConnectionOrigin {
    /// The client of the TCP connection, or the one that a trusted proxy or a node announced.
    peer: SocketAddr,
    /// Node that splices the connection.
    via: Option<NodeSlot>,
}

/// A new connection within the limits of its client.
struct Arrival {
    socket: Socket,
    /// The client, which a proxy may have announced.
    peer: SocketAddr,
    /// Bytes behind the header of the PROXY protocol.
    received: BytesMut,
    guard: ConnectionGuard,
}

impl ConnectionOrigin {
    fn direct(peer: SocketAddr) -> Self {
        Self { peer, via: None }
    }
}

impl Ingress {
    /// Reads the beginning of a new connection and finds the worker that serves it.
    async fn greet(self: Rc<Self>, fd: OwnedFd, peer: SocketAddr) {
        let Some(arrival) = self.arrive(fd, peer, Entrance::Public).await else {
            return;
        };
        let Arrival {
            socket,
            peer,
            received,
            guard,
        } = arrival;
        let greeting = match Greeting::read(socket, received, || self.plain_http_answer()).await {
            Ok(greeting) => greeting,
            Err(error) => return self.handshake_failed(peer, &error),
        };
        if is_tunnel(&greeting.hello)
            && let Some(to) = self.node_for(&greeting.hello)
        {
            return runtime::spawn(self.splice(greeting, peer, guard, to));
        }
        let Some(owner) = self.worker_for(&greeting.hello) else {
            return self
                .welcome(greeting, ConnectionOrigin::direct(peer), guard)
                .await;
        };
        drop(guard);
        self.hand_over(owner, greeting, ConnectionOrigin::direct(peer))
            .await;
    }

    /// Counts and registers a new connection, and reads the header of the PROXY protocol. `None` if
    /// the connection was refused.
    async fn arrive(&self, fd: OwnedFd, peer: SocketAddr, entrance: Entrance) -> Option<Arrival> {
        let proxy = self.trusted_proxies.proxy_protocol(peer.ip());
        // Limits apply before anything is spent on the connection. Trusted proxies have yet to name
        // their client.
        let mut slot = None;
        if proxy.is_none() {
            slot = Some(self.count_connection(peer)?);
        }
        let socket = Socket::from_fd(fd).ok()?;
        if let Err(error) =
            socket.keep_alive(limits::CALLER_KEEP_ALIVE, limits::CALLER_KEEP_ALIVE / 4, 4)
        {
            tracing::debug!(%error, "no TCP keep-alive");
        }
        let unfinished = match (&self.acceptor.plain_http, entrance) {
            (Some(plain), Entrance::PlainHttp) => &plain.unanswered,
            _ => &self.handshakes,
        };
        let mut guard = self.register(&socket, unfinished, Claimant::counted(slot.as_ref()))?;
        let (peer, received) = self.announced(&socket, peer, proxy).await?;
        if slot.is_none() && !self.trusted_proxies.contains(peer.ip()) {
            slot = Some(self.count_connection(peer)?);
            guard.has_shaken_hands();
            let claimant = Claimant::counted(slot.as_ref());
            guard.shakes_hands(self.begin_handshake(&socket, unfinished, claimant));
        }
        guard.counts_for(slot);
        Some(Arrival {
            socket,
            peer,
            received,
            guard,
        })
    }

    /// Reads the header with which `proxy` announces its client. Returns the client, with the bytes
    /// behind the header; `None` if the connection was refused.
    async fn announced(
        &self,
        socket: &Socket,
        peer: SocketAddr,
        proxy: Option<ProxyProtocol>,
    ) -> Option<(SocketAddr, BytesMut)> {
        let parse = match proxy {
            None | Some(ProxyProtocol::Off) => return Some((peer, BytesMut::new())),
            Some(ProxyProtocol::Required) => proxy_protocol::parse,
            Some(ProxyProtocol::Guessed) => proxy_protocol::parse_optional,
        };
        match proxy_protocol::read(socket, parse).await {
            Ok(Announcement { source, rest }) => return Some((source.unwrap_or(peer), rest)),
            Err(Unannounced::Header(InvalidHeader::Missing)) => {
                self.counters.turned_away.increment(PROXY_HEADER_MISSING);
                if self.may_warn() {
                    tracing::warn!(
                        proxy = %peer,
                        "connection closed: it does not begin with a header of the PROXY protocol, \
                         which `proxy_protocol = \"required\"` of this address in trusted_proxies \
                         demands; let the proxy send it, or set \"off\""
                    );
                }
            }
            Err(error) => {
                let is_long = matches!(error, Unannounced::Header(InvalidHeader::TooLong(_)));
                if is_long && self.may_warn() {
                    tracing::warn!(proxy = %peer,
                        "connection closed: {error}; let the proxy send fewer extensions (TLVs)");
                }
                self.handshake_failed(peer, &error);
            }
        }
        None
    }

    /// Takes one of the warnings of proxies.
    fn may_warn(&self) -> bool {
        let mut lines = self.unannounced_lines.borrow_mut();
        lines.take(Instant::now()).is_ok()
    }

    /// Counts a new connection for its address, unless the address has too many.
    fn count_connection(&self, peer: SocketAddr) -> Option<AddressSlot> {
        let counted = self.arrivals.count_new(peer.ip(), Instant::now());
        counted
            .map_err(|too_many| self.counters.turned_away.increment(too_many.reason()))
            .ok()
    }

    /// Registers a connection with the worker's connections and with `handshakes`; `None` if the
    /// worker has too many.
    fn register(
        &self,
        socket: &Socket,
        handshakes: &Rc<Handshakes>,
        claimant: Claimant,
    ) -> Option<ConnectionGuard> {
        let Some(mut guard) = self
            .connections
            .register(socket, Instant::now() + limits::HANDSHAKE)
        else {
            self.counters.shed.increment();
            self.counters.turned_away.increment("full");
            return None;
        };
        guard.shakes_hands(self.begin_handshake(socket, handshakes, claimant));
        Some(guard)
    }

    fn begin_handshake(
        &self,
        socket: &Socket,
        handshakes: &Rc<Handshakes>,
        claimant: Claimant,
    ) -> HandshakeGuard {
        let (handshake, another_gave_way) = handshakes.begin(claimant, socket.closer());
        if another_gave_way {
            self.counters.gave_way("handshake");
        }
        handshake
    }

    /// Does the TLS handshake and serves the protocol that the ClientHello names.
    async fn welcome(
        self: Rc<Self>,
        greeting: Greeting,
        origin: ConnectionOrigin,
        guard: ConnectionGuard,
    ) {
        let ConnectionOrigin { peer, via } = origin;
        let tunnel = is_tunnel(&greeting.hello);
        let certificates = self.certificates.get();
        let challenge = certificates.challenge.as_ref();
        let challenge = challenge.filter(|_| is_challenge(&greeting.hello));
        let domain = self.own_domain(&greeting.hello).filter(|_| !tunnel);
        let account = domain.as_ref().map(|domain| &domain.account);
        let peer_end = greeting.socket.closer();
        let handshake = async {
            let config = match (challenge, &domain) {
                (Some(challenge), _) => Arc::clone(challenge),
                (None, _) if tunnel => Arc::clone(&certificates.tunnel),
                // Reads the certificate, in the time of the account.
                (None, Some(domain)) => self
                    .domain_certificates
                    .borrow_mut()
                    .config(&certificates.public, domain),
                (None, None) => Arc::clone(&certificates.public),
            };
            greeting.accept(config).await
        };
        let handshake = self
            .handshakes
            .one_a_turn(account, || peer_end.is_hung_up(), handshake);
        let stream: TlsStream = match handshake.await {
            Ok(stream) => stream,
            Err(error) => return self.handshake_failed(peer, &error),
        };
        guard.has_shaken_hands();
        // The handshake is the answer (RFC 8737 §3).
        if challenge.is_some() {
            return;
        }
        // A new task: the connection does not keep the memory of this future.
        let router = || Rc::clone(&self.router);
        let caller = |guard: &ConnectionGuard| {
            let domain = domain.map(|domain| domain.name.clone());
            Peer::new(peer.ip(), domain, Some(guard.socket_use()))
        };
        if tunnel {
            runtime::spawn(tunnel::handshake::serve(
                Rc::clone(&self.tunnels),
                stream,
                peer,
                via.and_then(|node| self.path_by(node)),
                guard,
            ));
        } else if stream.speaks(ALPN_HTTP2) {
            runtime::spawn(downstream::h2::serve(
                router(),
                stream,
                caller(&guard),
                guard,
            ));
        } else {
            runtime::spawn(downstream::h1::serve(
                router(),
                stream,
                caller(&guard),
                guard,
            ));
        }
    }

    /// Answer to a request in plain HTTP, which has no connection to be read from.
    fn plain_http_answer(&self) -> Vec<u8> {
        let error = Error::InvalidRequest(PLAIN_HTTP.to_owned());
        http1::closing_response(error.response(self.router.observers.ids.next_id()), false)
    }

    fn handshake_failed(&self, peer: SocketAddr, error: &dyn std::error::Error) {
        self.counters.handshake_failures.increment();
        tracing::debug!(%peer, %error, "handshake failed");
    }
}

/// Whether an ACME authority asks for the answer of a challenge: it offers nothing else.
fn is_challenge(hello: &ClientHello) -> bool {
    matches!(&hello.alpn[..], [protocol] if protocol == ALPN_ACME)
}

fn is_tunnel(hello: &ClientHello) -> bool {
    hello.alpn.iter().any(|protocol| protocol == protocol::ALPN)
}
