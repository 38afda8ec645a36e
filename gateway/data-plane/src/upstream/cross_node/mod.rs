//! Requests of services that another node of the region owns.
//!
//! The node of the caller sends the request to the owner over a link: a TLS connection between the
//! two nodes with the frames of the tunnel protocol, on which the node of the caller opens streams.
//! The owner checks the access again, admits the request and serves it on a tunnel of its own, or
//! answers that it is not the owner. While the owner does not answer the node of the caller, that
//! node sends the request to a third one with a mark, by which that passes it on to the owner if
//! that answers it. A process that has been replaced has such a link to its successor, which passes
//! on what another node owns.
//!
//! If the link is lost while a request waits for its answer, the node of the caller sends it to the
//! next owner by the rules of `attempts`: the owner is gone, and with it what it knew of its
//! attempts.

mod link;
mod pulse;
mod request;
pub(crate) mod wire;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use gw_base::service::hostname::Region;
use gw_base::tls::node::NodeTls;
use gw_region::{NodeSlot, Peering, View};
use gw_shared::net::{Closer, Socket, retransmit_within};
use gw_shared::tunnel::connection::UNSENT;
use gw_shared::tunnel::heartbeat::TCP_DEAD_AFTER;
use rustls_pki_types::CertificateDer;
use slab::Slab;
use tokio::sync::Notify;

pub(crate) use self::link::Link;
pub(super) use self::request::OnNode;
pub(crate) use self::request::{CrossNodeRequest, NotSent, ShortBody};
pub(super) use self::wire::{Refused, parse_notice, read_refusal, timing};
use crate::limits;
use crate::tunnel::attempt_budget::AttemptBudgets;

/// Prepares the socket of a connection with another node.
pub(crate) fn prepare(socket: &Socket) -> io::Result<()> {
    socket.detect_dead_peer(TCP_DEAD_AFTER)?;
    socket.limit_unsent(UNSENT)?;
    // Not on older kernels: the connection goes on later after a cut.
    let _ = retransmit_within(socket, limits::NODE_RETRANSMISSION);
    Ok(())
}

/// A connection with another node that [`Nodes::cut`] and [`Nodes::end_connections`] end.
pub(crate) struct Attached<'a> {
    nodes: &'a Nodes,
    key: usize,
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        self.nodes.connections.borrow_mut().try_remove(self.key);
    }
}

/// The links of one worker to other nodes, and what it serves for them.
pub(crate) struct Nodes {
    pub(crate) region: Region,
    pub(crate) peering: Rc<Peering>,
    /// `None` until this node has a certificate.
    #[expect(
        clippy::redundant_allocation,
        reason = "the inner count is atomic and shared by all cores"
    )]
    tls: RefCell<Option<Rc<Arc<NodeTls>>>>,
    /// Notified when [`Self::tls`] is another one.
    tls_changed: Notify,
    /// Links for new requests, by slot and session of the other node.
    links: RefCell<HashMap<(NodeSlot, u128), Rc<Link>>>,
    /// Connections of all links, of this worker to other nodes and the other way round, and both
    /// ends of spliced tunnels, with the session of the other node.
    connections: RefCell<Slab<(u128, Closer)>>,
    /// For requests that are sent again after their node was lost.
    attempt_budgets: RefCell<AttemptBudgets>,
    /// Open links of other nodes to this worker.
    pub(crate) links_served: Cell<usize>,
}

impl Nodes {
    pub(crate) fn new(region: Region, peering: Rc<Peering>) -> Rc<Self> {
        Rc::new(Self {
            region,
            peering,
            tls: RefCell::default(),
            tls_changed: Notify::new(),
            links: RefCell::default(),
            connections: RefCell::default(),
            attempt_budgets: RefCell::default(),
            links_served: Cell::default(),
        })
    }

    #[expect(clippy::redundant_allocation, reason = "as the field")]
    pub(crate) fn tls(&self) -> Option<Rc<Arc<NodeTls>>> {
        self.tls.borrow().clone()
    }

    /// Uses this configuration for new links. Earlier ones show an earlier certificate of this
    /// process, and end after their running requests.
    pub(crate) fn use_tls(&self, tls: Arc<NodeTls>) {
        self.tls.replace(Some(Rc::new(tls)));
        self.links
            .borrow_mut()
            .drain()
            .for_each(|(_, link)| link.retire());
        self.tls_changed.notify_waiters();
    }

    /// Waits until the certificate that another node has shown is of no trusted authority any more.
    pub(crate) async fn distrusts(&self, certificate: &CertificateDer<'_>) {
        loop {
            let changed = self.tls_changed.notified();
            if self.tls().is_none_or(|tls| !tls.trusts(certificate)) {
                return;
            }
            changed.await;
        }
    }

    /// Uses this view. Links to processes that are no members end after their running requests.
    /// Returns the slots of members that have left.
    pub(crate) fn use_view(&self, view: Arc<View>) -> Vec<NodeSlot> {
        self.links.borrow_mut().retain(|_, link| {
            let members = view.placement().members();
            let stays = link.to.as_ref().is_some_and(|to| members.contains(to));
            if !stays {
                link.retire();
            }
            stays
        });
        let previous = self.peering.view();
        let members = previous
            .iter()
            .flat_map(|previous| previous.placement().members());
        let left = members
            .map(|member| member.slot)
            .filter(|slot| view.placement().member(*slot).is_none())
            .collect();
        self.peering.replace_view(view, Instant::now());
        left
    }

    /// Ends all connections at once.
    pub(crate) fn cut(&self) {
        self.connections
            .borrow()
            .iter()
            .for_each(|(_, (_, connection))| connection.abort());
    }

    /// Ends the connections with the process of this session at once.
    pub(crate) fn end_connections(&self, session: u128) {
        let connections = self.connections.borrow();
        let lost = connections.iter().filter(|(_, (with, _))| *with == session);
        lost.for_each(|(_, (_, connection))| connection.abort());
    }

    /// Lets [`Self::cut`] and [`Self::end_connections`] end a connection with the process of this
    /// session until the returned value is dropped.
    pub(crate) fn attach(&self, session: u128, connection: Closer) -> Attached<'_> {
        Attached {
            nodes: self,
            key: self.connections.borrow_mut().insert((session, connection)),
        }
    }

    /// Links to other nodes that take requests.
    pub(crate) fn open_links(&self) -> usize {
        self.links
            .borrow()
            .values()
            .filter(|link| link.is_open())
            .count()
    }
}
