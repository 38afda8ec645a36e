//! Hands connections over to the worker that owns their service.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use crate::limits;
use bytes::Bytes;
use gw_base::service::hostname::{Destination, host_name};
use gw_interface::config::HandOver;
use gw_interface::rate_limit::Claimant;
use gw_region::owners::ownership;
use gw_region::owners::ownership::WorkerId;
use gw_shared::net::Socket;
use gw_shared::net::tls::{ClientHello, Greeting};

use super::{ConnectionOrigin, Ingress, is_tunnel};

/// A connection on its way to the worker that owns its service.
pub struct HandedOver {
    fd: OwnedFd,
    /// Bytes received so far: the ClientHello.
    received: Bytes,
    hello: ClientHello,
    origin: ConnectionOrigin,
}

impl Ingress {
    /// The other worker that should serve this connection, if any.
    pub(super) fn worker_for(&self, hello: &ClientHello) -> Option<WorkerId> {
        let name = hello.server_name.as_deref()?;
        let directory = self.directory.get();
        let owner = match self.region.destination(name) {
            Destination::Tenant(label) => match directory.service(&label) {
                Some(service) => service.owner,
                None => ownership::owner(name, self.workers),
            },
            Destination::Elsewhere => {
                let domain = directory.domain(&host_name(name))?;
                directory.service(&domain.label)?.owner
            }
            Destination::Apex => return None,
        };
        if owner == self.worker {
            return None;
        }
        let busy_per_mille = |worker: WorkerId| self.busy[worker.0].load(Ordering::Relaxed);
        let busier_per_mille = busy_per_mille(owner).saturating_sub(busy_per_mille(self.worker));
        should_hand_over(self.hand_over, is_tunnel(hello), busier_per_mille).then_some(owner)
    }

    pub(super) async fn hand_over(
        self: Rc<Self>,
        owner: WorkerId,
        greeting: Greeting,
        origin: ConnectionOrigin,
    ) {
        let Greeting {
            socket,
            received,
            hello,
        } = greeting;
        let Some(fd) = socket.into_fd() else { return };
        match self.mailboxes.post(
            owner,
            Box::new(HandedOver {
                fd,
                received,
                hello,
                origin,
            }),
        ) {
            Ok(()) => self.counters.handed_over.increment(),
            // The mailbox of the owner is full: the connection is served here and its requests
            // cross cores.
            Err(connection) if !is_tunnel(&connection.hello) => self.take_over(*connection).await,
            // A tunnel must be on the owner: it is dropped, and its agent tries again.
            Err(_) => self.counters.shed.increment(),
        }
    }

    /// Serves a connection whose ClientHello another worker read.
    pub(crate) async fn take_over(self: Rc<Self>, connection: HandedOver) {
        let HandedOver {
            fd,
            received,
            hello,
            origin,
        } = connection;
        let Ok(socket) = Socket::from_fd(fd) else {
            return;
        };
        let address = origin.peer.ip();
        let mut slot = None;
        if !self.trusted_proxies.contains(address) {
            match self.arrivals.count(address) {
                Ok(counted) => slot = Some(counted),
                Err(too_many) => return self.counters.turned_away.increment(too_many.reason()),
            }
        }
        let claimant = Claimant::counted(slot.as_ref());
        let Some(mut guard) = self.register(&socket, &self.handshakes, claimant) else {
            return;
        };
        guard.counts_for(slot);
        self.welcome(
            Greeting {
                socket,
                received,
                hello,
            },
            origin,
            guard,
        )
        .await;
    }
}

/// Whether a connection goes to an owner that is this much busier than the accepting worker.
/// Tunnels always do: the requests of their service look for them there.
fn should_hand_over(policy: HandOver, is_tunnel: bool, busier_per_mille: u32) -> bool {
    match policy {
        _ if is_tunnel => true,
        HandOver::Always => true,
        HandOver::Never => false,
        HandOver::Auto => busier_per_mille < limits::HAND_OVER_BUSY_MARGIN,
    }
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
            assert_eq!(
                should_hand_over(HandOver::Auto, false, busier),
                busier < margin
            );
            for policy in [HandOver::Auto, HandOver::Always, HandOver::Never] {
                assert!(
                    should_hand_over(policy, true, busier),
                    "tunnels always move"
                );
            }
        }
    }
}
