//! Listening sockets of a worker, and their accept loops.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::net::Listener;
use gw_shared::runtime;
use tokio::sync::watch;

use super::Ingress;
use super::plain_http::PlainHttp;

/// Pause after an accept that failed for lack of descriptors or memory: an immediate retry fails,
/// too.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// A worker's listening sockets.
pub(crate) struct Acceptor {
    /// Empty once they are left to other processes.
    listeners: RefCell<Vec<(Rc<Listener>, Entrance)>>,
    /// No other process listens on them.
    are_ours: bool,
    /// `None` without a listener for plain HTTP.
    pub(super) plain_http: Option<PlainHttp>,
    stopped: watch::Sender<bool>,
}

/// Which peers connect to a listening socket.
#[derive(Debug, Clone, Copy)]
pub(super) enum Entrance {
    /// Callers and agents.
    Public,
    /// Clients that have to go to [`Self::Public`], and ACME authorities.
    PlainHttp,
    /// Other nodes of the region.
    Nodes,
}

impl Acceptor {
    /// `plain` are the sockets for plain HTTP, `of_nodes` those for other nodes of the region.
    pub(crate) fn new(
        listeners: Vec<std::net::TcpListener>,
        are_ours: bool,
        plain: Vec<std::net::TcpListener>,
        of_nodes: Vec<std::net::TcpListener>,
    ) -> io::Result<Self> {
        let plain_http = PlainHttp::of(&plain, &listeners);
        let all = [
            (listeners, Entrance::Public),
            (plain, Entrance::PlainHttp),
            (of_nodes, Entrance::Nodes),
        ];
        let listeners: io::Result<_> = all
            .into_iter()
            .flat_map(|(listeners, entrance)| {
                listeners
                    .into_iter()
                    .map(move |listener| Ok((Rc::new(Listener::new(listener)?), entrance)))
            })
            .collect();
        Ok(Self {
            listeners: RefCell::new(listeners?),
            are_ours,
            plain_http,
            stopped: watch::Sender::new(false),
        })
    }

    /// Stops accepting. Connections that wait in the kernel are left to another process that
    /// listens, too. Without one they are accepted, and later ones are refused.
    pub(crate) fn stop(&self, has_successor: bool) {
        if has_successor || !self.are_ours {
            self.listeners.take();
        }
        self.stopped.send_replace(true);
    }

    /// Makes the kernel refuse connections at once, unless another process listens, too.
    pub(crate) fn abandon(&self) {
        self.stop(false);
        self.listeners
            .take()
            .iter()
            .for_each(|(listener, _)| listener.shut());
    }
}

impl Ingress {
    /// Accepts on every listener of this worker.
    pub(crate) fn accept_all(self: &Rc<Self>) {
        for (listener, entrance) in self.acceptor.listeners.borrow().iter() {
            runtime::spawn_essential(Rc::clone(self).accept(Rc::clone(listener), *entrance));
        }
    }

    /// Accepts until the acceptor is stopped.
    async fn accept(self: Rc<Self>, listener: Rc<Listener>, entrance: Entrance) {
        let mut stopped = self.acceptor.stopped.subscribe();
        let mut stopped = pin!(stopped.wait_for(|stopped| *stopped));
        loop {
            let accepted = match select(stopped.as_mut(), pin!(listener.accept())).await {
                Either::Left(_) => break,
                Either::Right((accepted, _)) => accepted,
            };
            match accepted {
                Ok((fd, peer)) => self.begin(fd, peer, entrance),
                Err(error) => {
                    self.counters.accept_errors.increment();
                    // ECONNABORTED: the peer gave up before the accept. Other errors are a
                    // shortage.
                    if error.kind() != io::ErrorKind::ConnectionAborted {
                        tracing::warn!(%error, "accepting connections fails");
                        runtime::sleep(ACCEPT_BACKOFF).await;
                    }
                }
            }
        }
        // Connections that wait on a listener left to another process belong to that process.
        let is_left = !self
            .acceptor
            .listeners
            .borrow()
            .iter()
            .any(|(kept, _)| Rc::ptr_eq(kept, &listener));
        if !is_left {
            while let Ok(Some((fd, peer))) = listener.try_accept() {
                self.begin(fd, peer, entrance);
            }
            listener.shut();
        }
    }

    fn begin(self: &Rc<Self>, fd: OwnedFd, peer: SocketAddr, entrance: Entrance) {
        self.counters.accepted.increment();
        match entrance {
            Entrance::Public => runtime::spawn(Rc::clone(self).greet(fd, peer)),
            Entrance::PlainHttp => runtime::spawn(Rc::clone(self).greet_plain(fd, peer)),
            Entrance::Nodes => runtime::spawn(Rc::clone(self).greet_node(fd, peer)),
        }
    }
}
