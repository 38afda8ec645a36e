//! Registry of the live tunnels of a worker.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use gw_shared::id::AgentId;
use gw_shared::tunnel::control::ToAgent;
use gw_shared::tunnel::cut_reason::CutReason;

use super::grace::TunnelGrace;
use super::openings::Openings;
use super::refused_versions::RefusedVersions;
use super::session::Session;
use crate::agent_releases::AgentReleases;
use crate::clock::Timestamp;
use crate::error::Error;
use crate::limits;
use crate::ownership::WorkerId;
use crate::rate_limit::Admitted;
use crate::region::NodeSlot;
use crate::store::{Directory, Service};
use crate::telemetry::counters::{RefusedVersion, TunnelReport};

/// The live tunnels of the services that one worker owns.
pub(crate) struct Registry {
    by_service: HashMap<Arc<str>, Vec<Rc<Session>>>,
    /// Sessions that a newer one of the same agent has replaced and that still have requests.
    replaced: Vec<Rc<Session>>,
    /// Services that lost a tunnel which came through another node, and when.
    cut_off: HashMap<Arc<str>, Instant>,
    generations: u64,
    /// Number of picks so far, so that equally busy tunnels take turns.
    picks: Cell<u64>,
    tunnel_grace: Arc<TunnelGrace>,
    /// Tunnels that are not registered yet.
    openings: Rc<Openings>,
    refused_versions: RefusedVersions,
}

impl Registry {
    pub(crate) fn new(tunnel_grace: Arc<TunnelGrace>) -> Self {
        let openings = Openings::new();
        Self {
            by_service: HashMap::new(),
            replaced: Vec::new(),
            cut_off: HashMap::new(),
            generations: 0,
            picks: Cell::default(),
            tunnel_grace,
            openings,
            refused_versions: RefusedVersions::default(),
        }
    }

    pub(super) fn openings(&self) -> &Rc<Openings> {
        &self.openings
    }

    /// The number of the next session. A newer session has a higher number.
    pub(crate) fn next_generation(&mut self) -> u64 {
        self.generations += 1;
        self.generations
    }

    /// Records that an agent was refused a tunnel of the service because of its version.
    pub(super) fn refused_version(&mut self, agent: AgentId, service: &Service, version: String, now: Instant) {
        self.refused_versions.record(agent, &service.label, version, now);
    }

    pub(crate) fn refused_versions(&self) -> Vec<RefusedVersion> {
        self.refused_versions.report(Instant::now())
    }

    /// Adds a session. It replaces an older one of the same agent, which gets no more requests.
    pub(crate) fn insert(&mut self, session: &Rc<Session>) -> Result<(), CutReason> {
        self.refused_versions.accepted(&session.agent, &session.service.label);
        let sessions = self.by_service.entry(Arc::clone(&session.service.label)).or_default();
        if let Some(at) = sessions.iter().position(|other| other.agent == session.agent) {
            // Sessions may register in another order than they began in.
            if sessions[at].generation > session.generation {
                return Err(CutReason::NewerTunnel);
            }
            let older = std::mem::replace(&mut sessions[at], Rc::clone(session));
            older.replace();
            // Only the latest replaced sessions may finish their requests, so that an agent that keeps reconnecting does
            // not accumulate sessions.
            let same =
                |other: &&Rc<Session>| other.agent == session.agent && other.service.label == session.service.label;
            let newest_first = self.replaced.iter().rev().filter(same);
            newest_first.skip(limits::REPLACED_TUNNELS - 1).for_each(|stale| stale.cut(CutReason::Replaced));
            self.replaced.push(older);
            return Ok(());
        }
        if sessions.len() >= limits::TUNNELS_PER_SERVICE {
            return Err(CutReason::TunnelLimit);
        }
        sessions.push(Rc::clone(session));
        self.tunnel_grace.arrived(&session.service.label);
        Ok(())
    }

    /// Removes a session that has ended.
    pub(crate) fn remove(&mut self, session: &Rc<Session>) {
        self.replaced.retain(|other| !Rc::ptr_eq(other, session));
        if let Some(sessions) = self.by_service.get_mut(&session.service.label) {
            sessions.retain(|other| !Rc::ptr_eq(other, session));
            if sessions.is_empty() {
                self.by_service.remove(&session.service.label);
            }
        }
    }

    /// A tunnel of the service that came through another node has broken: its agent connects through a third one.
    pub(super) fn cut_off(&mut self, label: &Arc<str>, now: Instant) {
        self.cut_off.retain(|_, since| is_recent(*since, now));
        self.cut_off.insert(Arc::clone(label), now);
    }

    /// Time until which a tunnel of the service is expected again, if the node between was lost a moment ago.
    pub(crate) fn cut_off_until(&self, label: &str, now: Instant) -> Option<Instant> {
        let since = self.cut_off.get(label).filter(|since| is_recent(**since, now))?;
        Some(*since + limits::FIRST_TUNNEL_BACK)
    }

    /// The tunnel for an admitted request: the one with the fewest open streams among those with a free slot, and among equals
    /// the least recently picked.
    pub(crate) fn pick(&self, request: &Admitted) -> Result<Rc<Session>, Error> {
        let picked = self
            .by_service
            .get(&request.0.service.label)
            .into_iter()
            .flatten()
            .filter(|session| session.takes_requests())
            .min_by_key(|session| (!session.has_free_slot(), session.open_streams(), session.last_pick.get()))
            .ok_or(Error::AgentUnavailable)?;
        self.picks.set(self.picks.get() + 1);
        picked.last_pick.set(self.picks.get());
        Ok(Rc::clone(picked))
    }

    /// Whether the service has a tunnel that takes requests.
    pub(crate) fn has_tunnel(&self, label: &str) -> bool {
        self.by_service.get(label).into_iter().flatten().any(|session| session.takes_requests())
    }

    /// Whether the service has a tunnel that takes one more request.
    pub(crate) fn has_free_slot(&self, label: &str) -> bool {
        let mut sessions = self.by_service.get(label).into_iter().flatten();
        sessions.any(|session| session.takes_requests() && session.has_free_slot())
    }

    /// Sends the agents the services that they serve. To be called before [`Self::enforce`], so that an agent that
    /// loses its tunnel gets the message.
    pub(crate) fn announce(&self, directory: &Directory) {
        self.by_service.values().flatten().for_each(|session| session.announce_services(directory));
    }

    /// Cuts tunnels, including those being opened, of agents that may no longer serve their service.
    pub(crate) fn enforce(&self, directory: &Directory, now: Timestamp) {
        self.openings.enforce(directory, now);
        for session in self.by_service.values().flatten().chain(&self.replaced) {
            if !session.is_cut()
                && let Some(reason) = session.not_allowed(directory, now)
            {
                session.cut(reason);
            }
        }
    }

    /// Sends the agents of services that `is_elsewhere` to the node that owns them now, and those whose connection comes
    /// through a node that `has_left` to another node. Running requests finish.
    pub(crate) fn relocate(&self, is_elsewhere: impl Fn(&Service) -> bool, has_left: impl Fn(NodeSlot) -> bool) {
        for session in self.by_service.values().flatten().filter(|session| session.takes_requests()) {
            if is_elsewhere(&session.service) {
                session.send(&ToAgent::Drain);
                session.end(CutReason::Moved);
            } else if session.via.get().is_some_and(&has_left) {
                session.send(&ToAgent::Drain);
            }
        }
    }

    /// Tells every agent that this gateway drains.
    pub(crate) fn drain(&self) {
        self.by_service.values().flatten().for_each(|session| session.send(&ToAgent::Drain));
    }

    /// Ends every tunnel once its running requests have finished.
    pub(crate) fn end(&self) {
        let sessions = self.by_service.values().flatten().chain(&self.replaced);
        sessions.for_each(|session| session.end(CutReason::GatewayDrains));
    }

    /// Cuts every tunnel: the gateway stops.
    pub(crate) fn cut(&self) {
        self.openings.cut();
        let sessions = self.by_service.values().flatten().chain(&self.replaced);
        sessions.for_each(|session| session.cut(CutReason::GatewayStops));
    }

    pub(crate) fn report(
        &self,
        worker: WorkerId,
        directory: &Directory,
        releases: &AgentReleases,
    ) -> Vec<TunnelReport> {
        let now = Instant::now();
        self.by_service.values().flatten().map(|session| session.report(worker, directory, releases, now)).collect()
    }
}

fn is_recent(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) < limits::FIRST_TUNNEL_BACK
}
