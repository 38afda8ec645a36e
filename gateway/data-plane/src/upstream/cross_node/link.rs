//! A link to another node: opened for the first request, and kept until it is idle for long or the
//! node leaves. The link to the successor of this process is a socket that both have from the
//! takeover, and ends with either of them.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use futures_util::future::{Either, select};
use gw_base::tls::node::ALPN_NODE;
use gw_base::tls::pki::{self, NodeIdentity};
use gw_region::{Member, NodeSlot};
use gw_shared::net::{Socket, TlsStream};
use gw_shared::runtime;
use gw_shared::text::error_line;
use gw_shared::tunnel::connection::{Tunnel, TunnelError};
use gw_shared::tunnel::endpoint::Endpoint;
use gw_shared::tunnel::transport::Transport;
use gw_shared::tunnel::{heartbeat, window};
use rustls::client::UnbufferedClientConnection;
use rustls_pki_types::ServerName;
use tokio::sync::Notify;

use super::pulse::Pulse;
use super::{Nodes, prepare};

/// Interval between checks whether a link is still used, and between two links to a member whose
/// path is watched.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Time for the end of a link to be sent.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// A link to another node, or to the process that has taken over from this one.
pub(crate) struct Link {
    /// `None` for the successor.
    pub(super) to: Option<Member>,
    state: RefCell<LinkState>,
    /// Wakes requests that wait for the link.
    changed: Notify,
    requests: Cell<usize>,
    /// Valid while there are no requests.
    idle_since: Cell<Instant>,
    pulse: RefCell<Pulse>,
    /// Time without an answer of the other node, or without a connection to it, as of the last
    /// look.
    silence: Cell<Duration>,
    /// The node has left: the link ends after its running requests.
    retired: Cell<bool>,
}

enum LinkState {
    Opening,
    Open(Tunnel),
    /// The link cannot be opened, or has ended.
    Ended,
}

/// The link cannot be opened, or has ended.
#[derive(Debug)]
pub(crate) struct Unreachable;

/// A use of a link until it is dropped: a request, or a spliced tunnel whose path the link watches.
pub(crate) struct OnLink(Rc<Link>);

impl Nodes {
    /// The link to this member. Begins to open it if there is none.
    pub(super) fn link(self: &Rc<Self>, to: &Member) -> Rc<Link> {
        let mut links = self.links.borrow_mut();
        let link = links.entry((to.slot, to.session)).or_insert_with(|| {
            let link = Link::opening(Some(to.clone()));
            runtime::spawn(run(Rc::clone(self), Rc::clone(&link), to.clone()));
            link
        });
        link.idle_since.set(Instant::now());
        Rc::clone(link)
    }

    /// Whether a member leaves PINGs of this worker unanswered, or cannot be connected to.
    pub(crate) fn is_silent(&self, member: &Member) -> bool {
        let links = self.links.borrow();
        let link = links.get(&(member.slot, member.session));
        link.is_some_and(|link| link.is_silent())
    }

    /// The node that a request of `owner` is sent to: a third one while the owner is silent. `None`
    /// if there is none.
    pub(super) fn way_to(self: &Rc<Self>, owner: &Member) -> Option<Member> {
        // Keeps the link, which notices that the owner answers again.
        if !self.link(owner).is_silent() {
            return Some(owner.clone());
        }
        let view = self.peering.view()?;
        let is_way = |member: &&Member| member.slot != owner.slot && !self.is_silent(member);
        let ways: Vec<&Member> = view.placement().others().filter(is_way).collect();
        fastrand::choice(ways).cloned()
    }

    /// Watches the path to the node in this slot by a link. Returns once the node has been silent
    /// for [`limits::SPLICE_SILENT`] while it was a member.
    pub(crate) async fn until_silent(self: &Rc<Self>, slot: NodeSlot) {
        loop {
            let member = self.peering.view();
            let member = member.and_then(|view| view.placement().member(slot).cloned());
            let Some(member) = member else {
                self.peering.changed().await;
                continue;
            };
            let link = self.link(&member);
            // Before, nothing tells whether this node can connect to the other one at all.
            if link.tunnel().await.is_ok() {
                let _counted = link.count();
                let silent = pin!(link.silent_for(limits::SPLICE_SILENT));
                if let Either::Left(_) = select(silent, pin!(link.left())).await {
                    return;
                }
            }
            runtime::sleep(CHECK_INTERVAL).await;
        }
    }

    /// Removes a link that takes no more requests.
    pub(super) fn forget(&self, link: &Rc<Link>) {
        let Some(to) = &link.to else { return };
        let mut links = self.links.borrow_mut();
        let key = (to.slot, to.session);
        if links
            .get(&key)
            .is_some_and(|current| Rc::ptr_eq(current, link))
        {
            links.remove(&key);
        }
    }
}

impl Link {
    fn opening(to: Option<Member>) -> Rc<Self> {
        Rc::new(Self {
            to,
            state: RefCell::new(LinkState::Opening),
            changed: Notify::new(),
            requests: Cell::new(0),
            idle_since: Cell::new(Instant::now()),
            pulse: RefCell::new(Pulse::new(Instant::now())),
            silence: Cell::default(),
            retired: Cell::new(false),
        })
    }

    /// A link to the process that has taken over, which [`Self::drive_to_successor`] opens.
    pub(crate) fn to_successor() -> Rc<Self> {
        Self::opening(None)
    }

    /// Opens the link to the successor, which is at the other end of `socket`, and drives it to its
    /// end. Returns whether the other end was closed, by the end of a worker or of the process.
    pub(crate) async fn drive_to_successor(&self, socket: &Socket) -> bool {
        let ended = drive(self, socket, socket, Endpoint::gateway(), pending()).await;
        let is_closed = !matches!(ended, Err(TunnelError::Silent));
        let error = ended.err().map(|error| error_line(&error));
        tracing::info!(error, "link to the successor ended");
        is_closed
    }

    /// Waits until the link is open.
    pub(crate) async fn tunnel(&self) -> Result<Tunnel, Unreachable> {
        loop {
            let changed = self.changed.notified();
            match &*self.state.borrow() {
                LinkState::Open(tunnel) => return Ok(tunnel.clone()),
                LinkState::Ended => return Err(Unreachable),
                LinkState::Opening if self.is_silent() => return Err(Unreachable),
                LinkState::Opening => {}
            }
            changed.await;
        }
    }

    /// Waits until the other node has not answered for this time: one of those that
    /// [`Self::set_silence`] names.
    pub(super) async fn silent_for(&self, time: Duration) {
        while self.silence.get() < time {
            self.changed.notified().await;
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(&*self.state.borrow(), LinkState::Ended)
    }

    /// Waits until the link has ended, or ends after its running requests.
    async fn left(&self) {
        while !self.retired.get() && !self.has_ended() {
            self.changed.notified().await;
        }
    }

    pub(super) fn count(self: &Rc<Self>) -> OnLink {
        self.requests.set(self.requests.get() + 1);
        OnLink(Rc::clone(self))
    }

    fn is_silent(&self) -> bool {
        self.silence.get() >= limits::PING_UNANSWERED
    }

    fn set_silence(&self, silence: Duration) {
        let before = self.silence.replace(silence);
        let exceeds = |limit| before < limit && silence >= limit;
        if exceeds(limits::PING_UNANSWERED) {
            match &self.to {
                Some(Member { slot, .. }) => tracing::warn!(
                    node = slot.get(),
                    "another node does not answer: requests go by a third one"
                ),
                None => tracing::warn!("the process that has taken over does not answer"),
            }
        }
        let waited_for = [
            limits::PING_UNANSWERED,
            limits::LINK_SILENT,
            limits::SPLICE_SILENT,
        ];
        if waited_for.into_iter().any(exceeds) {
            self.changed.notify_waiters();
        }
    }

    /// Ends the link after its running requests. Those that wait until it is open fail at once: the
    /// node may be lost.
    pub(super) fn retire(&self) {
        self.retired.set(true);
        let is_opening = matches!(&*self.state.borrow(), LinkState::Opening);
        if is_opening {
            self.set(LinkState::Ended);
        }
        self.changed.notify_waiters();
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(&*self.state.borrow(), LinkState::Open(_))
    }

    fn set(&self, state: LinkState) {
        self.state.replace(state);
        self.changed.notify_waiters();
    }

    /// Whether the link has no requests and is to end.
    fn is_unused(&self) -> bool {
        let is_due = self.retired.get() || self.idle_since.get().elapsed() >= limits::LINK_IDLE;
        self.requests.get() == 0 && is_due
    }

    async fn unused(&self) {
        while !self.is_unused() {
            runtime::sleep(CHECK_INTERVAL).await;
        }
    }
}

impl Drop for OnLink {
    fn drop(&mut self) {
        self.0.requests.set(self.0.requests.get() - 1);
        if self.0.requests.get() == 0 {
            self.0.idle_since.set(Instant::now());
        }
    }
}

/// Opens a link and drives it to its end.
async fn run(nodes: Rc<Nodes>, link: Rc<Link>, to: Member) {
    let node = to.slot.get();
    let address = to.peer_address;
    if let Some(stream) = open(&nodes, &link, &to).await {
        let _attached = nodes.attach(to.session, stream.closer());
        tracing::info!(node, %address, "link to another node opened");
        let ended = drive_tls(&nodes, &link, &stream).await;
        if ended.is_err() {
            nodes.peering.signals.link_broke();
        }
        let error = ended.err().map(|error| error_line(&error));
        tracing::info!(node, %address, error, "link to another node ended");
    }
    nodes.forget(&link);
    link.set(LinkState::Ended);
}

/// Connects to a member. Tries again while the link is used, so that requests go there as soon as
/// the node answers: a cut may refuse connections, or leave them without an answer.
async fn open(nodes: &Nodes, link: &Link, to: &Member) -> Option<TlsStream> {
    let began = Instant::now();
    let late = || io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
    loop {
        let connected = runtime::timeout(limits::NODE_CONNECT, connect(nodes, to)).await;
        let error = match connected.unwrap_or_else(|_| Err(late())) {
            Ok(stream) => return Some(stream),
            Err(error) => error,
        };
        nodes.peering.signals.link_broke();
        if link.silence.get().is_zero() {
            let (node, address) = (to.slot.get(), to.peer_address);
            tracing::warn!(node, %address, %error,
                "cannot open a link to another node: trying again");
        }
        link.set_silence(began.elapsed());
        runtime::sleep(limits::LINK_PING).await;
        if link.retired.get() || link.is_unused() {
            return None;
        }
    }
}

/// Connects to a member. Fails if another process answers there.
async fn connect(nodes: &Nodes, to: &Member) -> io::Result<TlsStream> {
    let tls = nodes
        .tls()
        .ok_or_else(|| io::Error::other("this node has no certificate yet"))?;
    let socket = Socket::connect(to.peer_address, None).await?;
    let stream = TlsStream::new(socket, session(&tls.client, to.peer_address)?);
    stream.handshake().await?;
    let other = stream
        .peer_certificate()
        .and_then(|certificate| pki::node_identity(&certificate, &nodes.region));
    if other
        != Some(NodeIdentity {
            slot: to.slot,
            session: to.session,
        })
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "another process than the member answers there",
        ));
    }
    Ok(stream)
}

fn session(
    config: &Arc<rustls::ClientConfig>,
    address: SocketAddr,
) -> io::Result<UnbufferedClientConnection> {
    // An address is not sent in the ClientHello.
    let name = ServerName::IpAddress(address.ip().into());
    UnbufferedClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)
}

/// Moves bytes until the connection ends or nothing uses it any more.
async fn drive_tls(nodes: &Nodes, link: &Rc<Link>, stream: &TlsStream) -> Result<(), TunnelError> {
    let socket = stream.socket();
    prepare(socket)?;
    let mut endpoint = Endpoint::gateway();
    if !stream.speaks(ALPN_NODE) {
        endpoint = endpoint.without_upload_reports();
    }
    let ended = drive(link, stream, socket, endpoint, link.unused()).await;
    nodes.forget(link);
    if ended.is_ok() {
        let _ = runtime::timeout(CLOSED_WITHIN, stream.close()).await;
    }
    ended
}

/// Moves bytes until the connection ends, or `unused` resolves.
async fn drive(
    link: &Link,
    stream: &impl Transport,
    socket: &Socket,
    endpoint: Endpoint,
    unused: impl Future<Output = ()>,
) -> Result<(), TunnelError> {
    let last_received = socket.last_received();
    let tunnel = Tunnel::new(endpoint);
    tunnel.with(|endpoint| endpoint.set_credit(window::FIRST as usize, limits::LINK_BUDGET));
    let ended = {
        let driven = pin!(std::future::poll_fn(|cx| tunnel.poll_drive(
            cx,
            stream,
            &mut |endpoint| {
                if endpoint.take_pong().is_some() {
                    link.pulse.borrow_mut().answered();
                }
                Ok(())
            }
        )));
        let dead = pin!(heartbeat::until_dead(&tunnel, &last_received));
        let unused = pin!(async {
            if tunnel.hello().await.is_some() {
                link.set_silence(Duration::ZERO);
                link.set(LinkState::Open(tunnel.clone()));
            }
            select(pin!(unused), pin!(watch(link, &tunnel))).await;
        });
        match select(driven, select(dead, unused)).await {
            Either::Left((ended, _)) => ended,
            Either::Right((Either::Left(_), _)) => Err(TunnelError::Silent),
            Either::Right((Either::Right(_), _)) => Ok(()),
        }
    };
    // First, so that no request begins on a tunnel that has ended.
    link.set(LinkState::Ended);
    tunnel.with(Endpoint::lose);
    ended
}

/// Sends PINGs while the link has requests, and wakes what waits while the other node does not
/// answer. Never returns.
async fn watch(link: &Link, tunnel: &Tunnel) {
    loop {
        runtime::sleep(limits::PING_CHECK).await;
        let now = Instant::now();
        let is_due = link.pulse.borrow_mut().look(link.requests.get() > 0, now);
        if is_due {
            tunnel.with(|endpoint| endpoint.ping(heartbeat::PAYLOAD));
        }
        link.set_silence(link.pulse.borrow().silence(now));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use gw_base::service::hostname::Region;
    use gw_region::{Peering, Placement, RegionKey, RegionSignals, View};
    use gw_shared::runtime::Driver;

    use super::*;

    fn member() -> Member {
        Member {
            slot: NodeSlot::new(1).unwrap(),
            session: 1,
            peer_address: ([127, 0, 0, 1], 1).into(),
        }
    }

    #[test]
    fn requests_do_not_wait_for_a_link_to_a_node_that_is_no_member() {
        let link = Link::opening(Some(member()));
        let mut waiting = pin!(link.tunnel());
        assert!(waiting.as_mut().now_or_never().is_none());
        link.retire();
        assert!(matches!(waiting.now_or_never(), Some(Err(Unreachable))));
    }

    #[test]
    fn a_link_that_cannot_be_opened_is_given_up_when_it_is_idle() {
        let link = Link::opening(Some(member()));
        assert!(!link.is_unused());
        let counted = link.count();
        link.idle_since.set(Instant::now() - limits::LINK_IDLE);
        assert!(!link.is_unused(), "a request waits");
        drop(counted);
        assert!(!link.is_unused(), "it was used a moment ago");
        link.idle_since.set(Instant::now() - limits::LINK_IDLE);
        assert!(link.is_unused());
    }

    #[test]
    fn the_path_to_a_node_is_watched_while_it_is_a_member() {
        let keys = RegionKey::new([1; 32]).into();
        let signals = Arc::new(RegionSignals::new(Instant::now()));
        let peering = Peering::new(&keys, signals);
        let nodes = Nodes::new(Region::new("eu1", "example.com"), peering);
        let placement = |members| Placement::new(1, NodeSlot::new(2).unwrap(), members);
        nodes.use_view(Arc::new(View::settled(placement(Vec::new()))));
        Driver::choose()
            .unwrap()
            .block_on(async {
                let mut silent = pin!(nodes.until_silent(member().slot));
                assert!(silent.as_mut().now_or_never().is_none());
                assert!(nodes.links.borrow().is_empty());
                nodes.use_view(Arc::new(View::settled(placement(vec![member()]))));
                assert!(silent.as_mut().now_or_never().is_none());
                assert_eq!(nodes.links.borrow().len(), 1);
            })
            .unwrap();
    }
}
