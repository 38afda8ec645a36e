//! Connections in: accept, ask a trusted proxy for whom, read the ClientHello, decide which worker serves, shake hands,
//! serve.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::future::{Either, select};
use gw_shared::net::tls::{ClientHello, Greeting};
use gw_shared::net::{Listener, Socket, TlsStream};
use gw_shared::{runtime, tunnel as protocol};
use tokio::sync::watch;

use crate::config::HandOver;
use crate::connections::Registered;
use crate::downstream;
use crate::hostname::Destination;
use crate::ingress::proxy_protocol::{self, Announcement};
use crate::limit::Place;
use crate::limits;
use crate::mailbox::Message;
use crate::ownership::{self, WorkerId};
use crate::tls;
use crate::tunnel::{self, grace};
use crate::worker::Core;

/// Pause after an accept that failed for lack of descriptors or memory: trying again at once fails again.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// A worker's listening sockets.
pub(crate) struct Acceptor {
    /// Empty once they have been left to others.
    listeners: RefCell<Vec<Rc<Listener>>>,
    /// Nobody but this process listens on them.
    are_ours: bool,
    stopped: watch::Sender<bool>,
}

impl Acceptor {
    pub(crate) fn new(listeners: Vec<std::net::TcpListener>, are_ours: bool) -> io::Result<Self> {
        let listeners: io::Result<_> =
            listeners.into_iter().map(|listener| Listener::new(listener).map(Rc::new)).collect();
        Ok(Self { listeners: RefCell::new(listeners?), are_ours, stopped: watch::Sender::new(false) })
    }

    /// Accepts nothing more. Those that wait in the kernel are another process's, if it listens too; otherwise they are
    /// still taken, and what comes later is refused.
    pub(crate) fn stop(&self, has_successor: bool) {
        if has_successor || !self.are_ours {
            self.listeners.take();
        }
        self.stopped.send_replace(true);
    }

    /// Has the kernel refuse connections at once, unless another process listens too.
    pub(crate) fn abandon(&self) {
        self.stop(false);
        self.listeners.take().iter().for_each(|listener| listener.shut());
    }
}

/// Accepts on every listener of this worker.
pub(crate) fn accept_all(core: &Rc<Core>) {
    for listener in core.acceptor.listeners.borrow().iter() {
        runtime::spawn(accept(Rc::clone(core), Rc::clone(listener)));
    }
}

/// A connection on its way to the worker that owns its service, with what was received of it.
pub(crate) struct Arrival {
    fd: OwnedFd,
    received: Bytes,
    hello: ClientHello,
    /// The other end: of the TCP connection, or of the one that a trusted proxy announced.
    peer: SocketAddr,
}

/// Accepts until it is told to stop.
async fn accept(core: Rc<Core>, listener: Rc<Listener>) {
    let mut stopped = core.acceptor.stopped.subscribe();
    let mut stopped = pin!(stopped.wait_for(|stopped| *stopped));
    loop {
        let accepted = match select(stopped.as_mut(), pin!(listener.accept())).await {
            Either::Left(_) => break,
            Either::Right((accepted, _)) => accepted,
        };
        match accepted {
            Ok((fd, peer)) => begin(&core, fd, peer),
            Err(error) => {
                core.counters.accept_errors.increment();
                // The peer gave up between its handshake and our accept; everything else is a shortage.
                if error.kind() != io::ErrorKind::ConnectionAborted {
                    tracing::warn!(%error, "accepting connections fails");
                    runtime::sleep(ACCEPT_BACKOFF).await;
                }
            }
        }
    }
    // Left to others: what waits there is theirs.
    let is_left = !core.acceptor.listeners.borrow().iter().any(|kept| Rc::ptr_eq(kept, &listener));
    if !is_left {
        while let Ok(Some((fd, peer))) = listener.try_accept() {
            begin(&core, fd, peer);
        }
        listener.shut();
    }
}

fn begin(core: &Rc<Core>, fd: OwnedFd, peer: SocketAddr) {
    core.counters.accepted.increment();
    runtime::spawn(greet(Rc::clone(core), fd, peer));
}

/// Reads how a new connection begins and finds it a worker.
async fn greet(core: Rc<Core>, fd: OwnedFd, peer: SocketAddr) {
    // Before anything is spent on it. Trusted proxies have yet to say for whom they connect.
    let mut place = None;
    if !core.policy.trusted_proxies.contains(peer.ip()) {
        let Some(admitted) = admit(&core, peer) else { return };
        place = Some(admitted);
    }
    let Ok(socket) = Socket::from_fd(fd) else { return };
    if let Err(error) = socket.keep_alive(limits::CALLER_KEEP_ALIVE) {
        tracing::debug!(%error, "no TCP keep-alive");
    }
    let Some(mut registered) = register(&core, &socket) else { return };
    let (peer, received) = if core.policy.trusted_proxies.contains(peer.ip()) {
        match proxy_protocol::read(&socket).await {
            Ok(Announcement { source, rest }) => (source.unwrap_or(peer), rest),
            Err(error) => return handshake_failed(&core, peer, &error),
        }
    } else {
        (peer, BytesMut::new())
    };
    if place.is_none() && !core.policy.trusted_proxies.contains(peer.ip()) {
        let Some(admitted) = admit(&core, peer) else { return };
        place = Some(admitted);
    }
    registered.counts_for(place);
    let greeting = match Greeting::read(socket, received).await {
        Ok(greeting) => greeting,
        Err(error) => return handshake_failed(&core, peer, &error),
    };
    if !is_tunnel(&greeting.hello) {
        grace::wait_for_tunnels(&core, &greeting.hello, &registered).await;
    }
    let Some(owner) = worker_for(&core, &greeting.hello) else {
        return welcome(core, greeting, peer, registered).await;
    };
    drop(registered);
    hand_over(core, owner, greeting, peer).await;
}

/// Counts a new connection to its address, if that may have one more.
fn admit(core: &Core, peer: SocketAddr) -> Option<Place> {
    let admitted = core.arrivals.admit(peer.ip(), Instant::now());
    admitted.map_err(|too_many| core.counters.turned_away.increment(too_many.reason())).ok()
}

/// A place among the worker's connections, and among those that shake hands.
fn register(core: &Core, socket: &Socket) -> Option<Registered> {
    let Some(mut registered) = core.connections.register(socket, Instant::now() + limits::HANDSHAKE) else {
        core.counters.shed.increment();
        core.counters.turned_away.increment("full");
        return None;
    };
    let (handshake, another_gave_way) = core.handshakes.begin(socket.closer());
    if another_gave_way {
        core.counters.gave_way("handshake");
    }
    registered.shakes_hands(handshake);
    Some(registered)
}

/// The other worker that should have this connection, if any.
fn worker_for(core: &Core, hello: &ClientHello) -> Option<WorkerId> {
    let Destination::Tenant(label) = core.region.destination(hello.server_name.as_deref()?) else { return None };
    let owner = match core.directory().service(&label) {
        Some(service) => service.owner,
        None => ownership::owner(hello.server_name.as_deref()?, core.workers()),
    };
    if owner == core.id {
        return None;
    }
    let busier_per_mille = core.busy_per_mille(owner).saturating_sub(core.busy_per_mille(core.id));
    should_hand_over(core.policy.hand_over, is_tunnel(hello), busier_per_mille).then_some(owner)
}

/// Whether a connection goes to an owner that is busier than its acceptor by so much. Tunnels always do: their service's
/// requests look for them there.
fn should_hand_over(policy: HandOver, is_tunnel: bool, busier_per_mille: u32) -> bool {
    match policy {
        _ if is_tunnel => true,
        HandOver::Always => true,
        HandOver::Never => false,
        HandOver::Auto => busier_per_mille < limits::HAND_OVER_BUSY_MARGIN,
    }
}

async fn hand_over(core: Rc<Core>, owner: WorkerId, greeting: Greeting, peer: SocketAddr) {
    let Greeting { socket, received, hello } = greeting;
    let Some(fd) = socket.into_fd() else { return };
    let arrival = Box::new(Arrival { fd, received, hello, peer });
    match core.mailbox(owner).post(Message::Connection(arrival)) {
        Ok(()) => core.counters.handed_over.increment(),
        // No room there: the connection is served here and its requests cross. A tunnel cannot be: it is dropped, and
        // its agent tries again.
        Err(Message::Connection(arrival)) if !is_tunnel(&arrival.hello) => take_over(core, *arrival).await,
        Err(_) => core.counters.shed.increment(),
    }
}

/// Serves a connection whose ClientHello another worker read.
pub(crate) async fn take_over(core: Rc<Core>, arrival: Arrival) {
    let Arrival { fd, received, hello, peer } = arrival;
    let Ok(socket) = Socket::from_fd(fd) else { return };
    let Some(mut registered) = register(&core, &socket) else { return };
    if !core.policy.trusted_proxies.contains(peer.ip()) {
        match core.arrivals.keep(peer.ip()) {
            Ok(place) => registered.counts_for(Some(place)),
            Err(too_many) => return core.counters.turned_away.increment(too_many.reason()),
        }
    }
    welcome(core, Greeting { socket, received, hello }, peer, registered).await;
}

/// Shakes hands and serves, as what the ClientHello asked to be.
async fn welcome(core: Rc<Core>, greeting: Greeting, peer: SocketAddr, mut registered: Registered) {
    let tunnel = is_tunnel(&greeting.hello);
    let certificates = core.certificates();
    let config = if tunnel { &certificates.tunnel } else { &certificates.public };
    let peer_end = greeting.socket.closer();
    let shaking = core.handshakes.one_a_turn(|| peer_end.is_hung_up(), greeting.accept(config.clone()));
    let left = || Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer did not wait for an answer"));
    let stream: TlsStream = match shaking.await.unwrap_or_else(left) {
        Ok(stream) => stream,
        Err(error) => return handshake_failed(&core, peer, &error),
    };
    registered.has_shaken_hands();
    // In a task of its own, so that a connection does not keep the memory that its beginning took.
    if tunnel {
        runtime::spawn(tunnel::handshake::serve(core, stream, peer, registered));
    } else if stream.speaks(tls::ALPN_HTTP2) {
        runtime::spawn(downstream::h2::serve(core, stream, peer.ip(), registered));
    } else {
        runtime::spawn(downstream::h1::serve(core, stream, peer.ip(), registered));
    }
}

fn is_tunnel(hello: &ClientHello) -> bool {
    hello.alpn.iter().any(|protocol| protocol == protocol::ALPN)
}

fn handshake_failed(core: &Core, peer: SocketAddr, error: &io::Error) {
    core.counters.handshake_failures.increment();
    tracing::debug!(%peer, %error, "handshake failed");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_go_to_their_owner_unless_it_is_clearly_busier() {
        let margin = limits::HAND_OVER_BUSY_MARGIN;
        for busier in [0, margin - 1, margin, 1000] {
            assert!(should_hand_over(HandOver::Always, false, busier));
            assert!(!should_hand_over(HandOver::Never, false, busier));
            assert_eq!(should_hand_over(HandOver::Auto, false, busier), busier < margin);
            for policy in [HandOver::Auto, HandOver::Always, HandOver::Never] {
                assert!(should_hand_over(policy, true, busier), "tunnels always move");
            }
        }
    }
}
