//! The wait of a request for a tunnel of its service, or for a slot of one.

use std::time::{Duration, Instant};

use crate::limits;
use gw_base::error::Error;
use gw_interface::auth::Authenticated;
use gw_store::Service;

use super::Upstream;
use crate::tunnel::Tunnels;
use crate::tunnel::waiting::{NoTurn, Turn};

/// Why a request is not opened here.
pub(crate) enum NotHere {
    /// Another node or another process serves the service now. Nothing of the request has reached a
    /// tunnel.
    Moved,
    Failed(Error),
}

impl From<Error> for NotHere {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Upstream {
    /// Time until which a request of the service waits for a tunnel; `None` if it need not wait. It
    /// waits if the service came to this node a moment ago, if its last tunnel ended a moment ago,
    /// if this process replaced another, and if the tunnels in order are full while another one is
    /// not in order. A request that has waited elsewhere waits here, too. While earlier requests
    /// wait, later ones go behind them.
    pub(crate) fn wait_until(&self, request: &Authenticated, now: Instant) -> Option<Instant> {
        let service = &*request.service;
        let Tunnels {
            grace,
            registry,
            waiting,
            ..
        } = &*self.tunnels;
        let label = &service.label;
        let others_wait = waiting.is_waited_for(label);
        let for_several = grace.wait_until(label, others_wait, now);
        let for_first = self.nodes.as_ref().and_then(|nodes| {
            nodes.peering.arrived_until(
                &service.hostname,
                limits::FIRST_TUNNEL_BACK,
                limits::WAIT_IN_ALL,
                now,
            )
        });
        let for_moved = request.waited.map(|_| now + limits::FIRST_TUNNEL_BACK);
        let for_first = for_first
            .max(registry.borrow().lost_until(label, now))
            .max(for_moved);
        let for_first = for_first.filter(|_| others_wait || !registry.borrow().has_tunnel(label));
        let for_slot = (others_wait || registry.borrow().is_short(label, now))
            .then(|| now + limits::SLOT_WAIT);
        let until = for_several.max(for_first).max(for_slot)?;
        Some(until.min(now + left(request)))
    }

    /// Whether another node owns the service, or another process has taken over, and there is no
    /// tunnel of it here.
    pub(crate) fn has_left(&self, service: &Service) -> bool {
        (self.lifecycle.is_succeeded() || self.tunnels.is_elsewhere(service))
            && !self.tunnels.registry.borrow().has_tunnel(&service.label)
    }

    /// Waits for the turn of a request, if it [waits](Self::wait_until).
    pub(crate) async fn turn(&self, request: &Authenticated) -> Result<Option<Turn<'_>>, NotHere> {
        let service = &*request.service;
        if self.has_left(service) {
            return Err(NotHere::Moved);
        }
        let now = Instant::now();
        let Some(until) = self.wait_until(request, now) else {
            return Ok(None);
        };
        let last = now + left(request);
        let Tunnels {
            registry, waiting, ..
        } = &*self.tunnels;
        let can_open = || {
            registry
                .borrow()
                .has_room(&service.label, |_| true, Instant::now())
        };
        let has_moved = || self.lifecycle.is_succeeded() || self.tunnels.is_elsewhere(service);
        let turn = |within| waiting.turn(&service.label, within, can_open, has_moved);
        let mut waited = turn(until - now).await;
        if waited.as_ref().err() == Some(&NoTurn::Unavailable) {
            if registry.borrow().has_tunnel(&service.label) {
                return Err(Error::AgentConcurrencyLimit.into());
            }
            let now = Instant::now();
            // The last tunnel may have ended while the request waited for a slot.
            let lost_until = registry.borrow().lost_until(&service.label, now);
            if let Some(until) = lost_until {
                waited = turn(until.min(last).saturating_duration_since(now)).await;
            }
        }
        waited.map(Some).map_err(|no_turn| match no_turn {
            NoTurn::Moved => NotHere::Moved,
            NoTurn::Unavailable => Error::AgentUnavailable.into(),
        })
    }
}

/// How long a request may still wait.
fn left(request: &Authenticated) -> Duration {
    limits::WAIT_IN_ALL.saturating_sub(request.waited.unwrap_or_default())
}
