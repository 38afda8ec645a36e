//! A tunnel as a candidate for the requests of its service: slots, load and health.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::limits;
use gw_region::owners::ownership;
use gw_shared::id::AgentId;
use gw_shared::tunnel::control::BackendHealth;
use gw_shared::tunnel::endpoint::{Endpoint, STREAMS_BEYOND_SLOTS, STREAMS_MAX};
use gw_shared::tunnel::heartbeat;

use super::choice::Candidate;
use super::health::{BegunAttempt, HealthTier, TunnelCondition, TunnelFailure, TunnelHealth};
use super::session::Session;
use crate::http_message::OpenedStream;

/// What the choice of a tunnel considers of one.
pub(super) struct Candidacy {
    /// Hash of the agent.
    key: u64,
    health: RefCell<TunnelHealth>,
    /// When the last PING of [`Session::watch`] was queued; `None` while the service has no other
    /// tunnel.
    pinged: Cell<Option<Instant>>,
    /// Slots and those in use, as the agent last reported them.
    slots: Cell<Option<(u32, u32)>>,
    /// When the agent last reported that all are in use.
    full_at: Cell<Option<Instant>>,
    /// The agent, or the administrator, says that it gets requests only if no other agent can take
    /// them.
    standby_by_agent: Cell<bool>,
    standby_by_record: Cell<bool>,
    /// Requests that were sent on the tunnel.
    requests: Cell<u64>,
}

impl Candidacy {
    pub(super) fn new(agent: &AgentId, now: Instant) -> Self {
        Self {
            key: ownership::fnv1a(agent.as_str().as_bytes()),
            health: RefCell::new(TunnelHealth::new(None, now)),
            pinged: Cell::default(),
            slots: Cell::default(),
            full_at: Cell::default(),
            standby_by_agent: Cell::default(),
            standby_by_record: Cell::default(),
            requests: Cell::default(),
        }
    }

    /// Takes the state that the agent reports.
    pub(super) fn reported(
        &self,
        slots: u32,
        slots_in_use: u32,
        backend: BackendHealth,
        standby: bool,
        now: Instant,
    ) {
        // A tunnel cannot have more slots than streams.
        let slots = slots.min(STREAMS_MAX as u32);
        // The agent reports changes: the time is also that of the end.
        let was_full = matches!(self.slots.get(), Some((slots, in_use)) if in_use == slots);
        if was_full || slots_in_use >= slots {
            self.full_at.set(Some(now));
        }
        self.slots.set(Some((slots, slots_in_use.min(slots))));
        self.standby_by_agent.set(standby);
        self.health.borrow_mut().reported(backend, now);
    }
}

impl Session {
    /// Begins with the latency of the other tunnels of the service.
    pub(super) fn begin_with_latency(&self, median: Option<Duration>, now: Instant) {
        self.candidacy
            .health
            .replace(TunnelHealth::new(median, now));
    }

    pub(super) fn latency_now(&self, now: Instant) -> Duration {
        self.candidacy.health.borrow().latency(now)
    }

    /// Takes whether the administrator wants the agent to be a standby.
    pub(super) fn set_standby(&self, is_standby: bool) {
        self.candidacy.standby_by_record.set(is_standby);
    }

    /// Whether the agent or the administrator says that the agent is a standby.
    pub(super) fn gets_requests_last(&self) -> bool {
        self.candidacy.standby_by_agent.get() || self.candidacy.standby_by_record.get()
    }

    /// State of the tunnel, since when, and why.
    pub(super) fn condition(&self, now: Instant) -> TunnelCondition {
        self.candidacy.health.borrow().condition(now)
    }

    /// Slots and those in use, as the agent last reported them.
    pub(super) fn reported_slots(&self) -> Option<(u32, u32)> {
        self.candidacy.slots.get()
    }

    /// Time since all slots were in use, as far as the agent has reported it: zero while they are.
    pub(super) fn full_for(&self, now: Instant) -> Option<Duration> {
        let at = self.candidacy.full_at.get()?;
        Some(match self.reported_slots() {
            Some((slots, in_use)) if in_use == slots => Duration::ZERO,
            _ => now.saturating_duration_since(at),
        })
    }

    /// Requests that were sent on the tunnel.
    pub(super) fn requests(&self) -> u64 {
        self.candidacy.requests.get()
    }

    /// Whether PINGs of [`Self::watch`] are sent.
    pub(super) fn is_watched(&self) -> bool {
        self.candidacy.pinged.get().is_some()
    }

    /// Whether a PING is unanswered for [`limits::PING_UNANSWERED`].
    pub(crate) fn is_suspect(&self) -> bool {
        self.candidacy.health.borrow().is_suspect()
    }

    /// Whether the agent has a slot for one more request, as far as it is known: the agent may not
    /// have reported its slots yet.
    pub(super) fn has_free_slot(&self) -> bool {
        self.open_streams() < self.total_slots()
    }

    fn total_slots(&self) -> usize {
        let most = self.tunnel.with(|endpoint| endpoint.streams_max());
        let reported = self.reported_slots().map(|(slots, _)| slots as usize);
        reported
            .unwrap_or_else(|| most.saturating_sub(STREAMS_BEYOND_SLOTS).max(1))
            .min(most)
    }

    /// Sends a PING every [`limits::PING_EVERY`] to an agent whose service has other tunnels, and
    /// marks one that leaves it unanswered: it gets no new requests, and those that can go
    /// elsewhere do. Any received byte is a sign of life. `was_late` tells that this worker did
    /// nothing for a while, so that an answer may have arrived and not been read.
    pub(super) fn watch(&self, has_others: bool, was_late: bool, now: Instant) {
        let candidacy = &self.candidacy;
        let pinged = candidacy.pinged.get().filter(|_| has_others && !was_late);
        match pinged {
            Some(at) if self.flow.last_received() < at => {
                // The checks are late by up to their interval.
                if now.saturating_duration_since(at) + limits::PING_CHECK >= limits::PING_UNANSWERED
                {
                    self.suspect(true, now);
                }
                return;
            }
            Some(at)
                if now.saturating_duration_since(at) + limits::PING_CHECK < limits::PING_EVERY => {}
            _ if has_others => {
                self.tunnel
                    .with(|endpoint| endpoint.ping(heartbeat::PAYLOAD));
                candidacy.pinged.set(Some(now));
            }
            _ => candidacy.pinged.set(None),
        }
        if !was_late {
            self.suspect(false, now);
        }
    }

    fn suspect(&self, is_suspect: bool, now: Instant) {
        if is_suspect {
            // The requests that wait for it look each time whether another agent can take them.
            self.tunnel.with(Endpoint::wake_receivers);
        }
        if !self.candidacy.health.borrow_mut().suspect(is_suspect, now) {
            return;
        }
        let agent = &self.agent;
        let service = &self.service.label;
        if is_suspect {
            tracing::warn!(%agent, %service,
                "the agent does not answer a PING: new requests go to other agents");
        } else {
            tracing::info!(%agent, %service, "the agent answers again");
        }
    }
}

impl Candidate for Rc<Session> {
    fn tier(&self, is_repeatable: bool, now: Instant) -> HealthTier {
        self.candidacy.health.borrow().tier(is_repeatable, now)
    }

    fn is_standby(&self) -> bool {
        self.gets_requests_last()
    }

    fn in_flight(&self) -> usize {
        self.open_streams()
    }

    fn slots(&self) -> usize {
        self.total_slots()
    }

    fn latency(&self, now: Instant) -> Duration {
        self.latency_now(now)
    }

    fn key(&self) -> u64 {
        self.candidacy.key
    }
}

/// Counts one request in flight on a session until dropped, and reports how it went to the health
/// of the tunnel if it is [observed](Self::observe).
pub(crate) struct InFlight {
    session: Rc<Session>,
    opened: Instant,
    /// The attempt, until it has an outcome. `None` if it is not observed.
    attempt: Cell<Option<BegunAttempt>>,
    /// The request has no body, so the time since it was opened is that of the agent and its
    /// backend.
    is_timed: Cell<bool>,
}

impl InFlight {
    pub(super) fn new(session: Rc<Session>) -> Self {
        Self {
            session,
            opened: Instant::now(),
            attempt: Cell::default(),
            is_timed: Cell::default(),
        }
    }

    pub(crate) fn stream(&self) -> OpenedStream {
        OpenedStream {
            at: self.opened,
            agent: self.session.agent.clone(),
        }
    }

    /// Time since the stream was opened.
    pub(crate) fn open_for(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Counts the request as sent on the tunnel.
    pub(super) fn count(&self) {
        let requests = &self.session.candidacy.requests;
        requests.set(requests.get() + 1);
    }

    /// Lets the outcome of the request count for the health of the tunnel. `is_timed` tells that
    /// the request has no body.
    pub(crate) fn observe(&self, is_timed: bool) {
        self.is_timed.set(is_timed);
        self.attempt.set(Some(
            self.session
                .candidacy
                .health
                .borrow_mut()
                .began(self.opened),
        ));
    }

    /// A response has begun. `latency` is the time that the agent and its backend took, if it is
    /// known.
    pub(crate) fn succeeded(&self, latency: Option<Duration>) {
        if let Some(attempt) = self.attempt.take() {
            let mut health = self.session.candidacy.health.borrow_mut();
            let now = Instant::now();
            let latency = latency.unwrap_or_else(|| health.latency(now));
            health.succeeded(attempt, latency, now);
        }
    }

    /// The attempt has failed; `None` if nothing is known of the cause.
    pub(crate) fn failed(&self, failure: Option<TunnelFailure>) {
        let Some(failure) = failure else {
            return self.abandon();
        };
        if let Some(attempt) = self.attempt.take() {
            let mut health = self.session.candidacy.health.borrow_mut();
            health.failed(
                attempt,
                failure,
                self.open_for(),
                Instant::now(),
                &mut fastrand::f64,
            );
        }
    }

    fn abandon(&self) {
        if let Some(attempt) = self.attempt.take() {
            let after = if self.is_timed.get() {
                self.open_for()
            } else {
                Duration::ZERO
            };
            self.session
                .candidacy
                .health
                .borrow_mut()
                .abandoned(attempt, after, Instant::now());
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.abandon();
        self.session.flow.leave();
    }
}
