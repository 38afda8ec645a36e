//! Registry of the live tunnels of a worker.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use gw_base::agent_releases::AgentReleases;
use gw_base::clock::Timestamp;
use gw_region::NodeSlot;
use gw_region::owners::ownership::WorkerId;
use gw_shared::http::caller_connection::CallerConnection;
use gw_shared::id::AgentId;
use gw_shared::tunnel::control::ToAgent;
use gw_shared::tunnel::cut_reason::CutReason;
use gw_shared::tunnel::head::OutboundRequest;
use gw_shared::version::{self, VERSION};
use gw_store::{Directory, Service};
use gw_telemetry::counters::{EndedTunnel, RefusedVersion, TunnelReport};

use super::attempt_budget::AttemptBudget;
use super::bound_callers::{self, BoundCallers};
use super::choice::{self, Candidate, Choice, Wanted};
use super::handshake::openings::Openings;
use super::health::{HealthTier, median_latency};
use super::latest::LatestEvents;
use super::session::Session;
use super::waiting::grace::TunnelGrace;
use super::waiting::lost::LostServices;
use crate::memory::relay::RelayMemory;

/// The live tunnels of the services that one worker owns.
pub(crate) struct Registry {
    by_service: HashMap<Arc<str>, ServiceTunnels>,
    /// Sessions that a newer one of the same agent has replaced. They still have requests, or are a
    /// reserve: the agent of a copied state folder keeps its tunnel open.
    replaced: Vec<Rc<Session>>,
    /// Services whose last tunnel has ended a moment ago.
    lost: LostServices,
    /// A service may have several tunnels.
    has_several: bool,
    generations: u64,
    tunnel_grace: Arc<TunnelGrace>,
    /// Tunnels that are not registered yet.
    openings: Rc<Openings>,
    /// Version of each agent that was refused because of it, until it gets a tunnel.
    refused_versions: LatestEvents<String>,
    /// Why the last tunnel ended.
    ended: LatestEvents<CutReason>,
}

/// The live tunnels of one service, one of each agent.
struct ServiceTunnels {
    sessions: Vec<Rc<Session>>,
    /// For further attempts of requests.
    budget: RefCell<AttemptBudget>,
    callers: RefCell<BoundCallers>,
}

/// The tunnels of a service that take requests.
pub(crate) enum Serving {
    None,
    One(Rc<Session>),
    Several,
}

/// The tunnel for an attempt.
pub(crate) enum Chosen {
    Tunnel(Rc<Session>),
    /// No tunnel that could take the request has a free slot.
    Full,
    None,
}

/// Whether an agent exists, and a service with this label that was created at this time.
fn exist(directory: &Directory) -> impl Fn(&AgentId, &str, u64) -> bool {
    |agent, label, created_ms| {
        directory.agent(agent.as_str()).is_some() && directory.is_service(label, created_ms)
    }
}

impl Registry {
    pub(crate) fn new(tunnel_grace: Arc<TunnelGrace>) -> Self {
        let openings = Openings::new();
        Self {
            by_service: HashMap::new(),
            replaced: Vec::new(),
            lost: LostServices::default(),
            has_several: false,
            generations: 0,
            tunnel_grace,
            openings,
            refused_versions: LatestEvents::default(),
            ended: LatestEvents::default(),
        }
    }

    pub(crate) fn openings(&self) -> &Rc<Openings> {
        &self.openings
    }

    /// The number of the next session. A newer session has a higher number.
    pub(crate) fn next_generation(&mut self) -> u64 {
        self.generations += 1;
        self.generations
    }

    /// Records that an agent was refused a tunnel of the service because of its version.
    pub(super) fn refused_version(
        &mut self,
        agent: &AgentId,
        service: &Service,
        version: String,
        now: Instant,
    ) {
        self.refused_versions.record(agent, service, version, now);
    }

    pub(crate) fn refused_versions(&self) -> Vec<RefusedVersion> {
        self.refused_versions
            .report(Instant::now(), |agent_id, service, version, seconds_ago| {
                RefusedVersion {
                    agent_id,
                    service,
                    agent_version: version.clone(),
                    gateway_version: VERSION.to_owned(),
                    seconds_ago,
                }
            })
    }

    /// Records why a tunnel has ended, which may not have been registered.
    pub(super) fn ended(
        &mut self,
        session: &Session,
        reason: CutReason,
        directory: &Directory,
        now: Instant,
    ) {
        // A deletion ends the tunnel after the records of the agent or the service are gone.
        let Session { agent, service, .. } = session;
        if exist(directory)(agent, &service.label, service.created_ms) {
            self.ended.record(agent, service, reason, now);
        }
    }

    pub(crate) fn ended_tunnels(&self) -> Vec<EndedTunnel> {
        self.ended
            .report(Instant::now(), |agent_id, service, reason, seconds_ago| {
                EndedTunnel {
                    agent_id,
                    service,
                    reason: reason.as_str().to_owned(),
                    advice: reason.advice().map(str::to_owned),
                    seconds_ago,
                }
            })
    }

    /// Forgets deleted agents and services.
    pub(crate) fn retain(&mut self, directory: &Directory) {
        self.refused_versions.retain(exist(directory));
        self.ended.retain(exist(directory));
    }

    /// Adds a session. It replaces an older one of the same agent, which gets no more requests
    /// while the newer one is open.
    pub(crate) fn insert(&mut self, session: &Rc<Session>, now: Instant) -> Result<(), CutReason> {
        self.refused_versions
            .remove(&session.agent, &session.service.label);
        let tunnels = self.by_service.entry(Arc::clone(&session.service.label));
        let tunnels = tunnels.or_insert_with(|| ServiceTunnels::new(now));
        if let Some(at) = tunnels
            .sessions
            .iter()
            .position(|other| other.agent == session.agent)
        {
            // Sessions may register in another order than they began in.
            if tunnels.sessions[at].generation > session.generation {
                return Err(CutReason::NewerTunnel);
            }
            let older = std::mem::replace(&mut tunnels.sessions[at], Rc::clone(session));
            older.replace();
            // Only the latest replaced sessions may finish their requests, so that an agent that
            // keeps reconnecting does not accumulate sessions.
            let newest_first = self
                .replaced
                .iter()
                .rev()
                .filter(|other| other.is_same(session));
            newest_first
                .skip(limits::REPLACED_TUNNELS - 1)
                .for_each(|stale| stale.cut(CutReason::Replaced));
            self.replaced.push(older);
            tunnels.tell_of_others();
            return Ok(());
        }
        if tunnels.sessions.len() >= limits::TUNNELS_PER_SERVICE {
            return Err(CutReason::TunnelLimit);
        }
        session.begin_with_latency(tunnels.median_latency(now), now);
        tunnels.sessions.push(Rc::clone(session));
        tunnels.tell_of_others();
        self.has_several |= tunnels.sessions.len() > 1;
        self.tunnel_grace.arrived(&session.service.label);
        Ok(())
    }

    /// Removes a session that has ended.
    pub(crate) fn remove(&mut self, session: &Rc<Session>, reason: CutReason, now: Instant) {
        // A drained one was retired before.
        if reason != CutReason::AgentDrained {
            self.retire(session, reason, now);
        }
        self.replaced.retain(|other| !Rc::ptr_eq(other, session));
        let label = &session.service.label;
        let Some(tunnels) = self.by_service.get_mut(label) else {
            return;
        };
        tunnels.sessions.retain(|other| !Rc::ptr_eq(other, session));
        tunnels.tell_of_others();
        if tunnels.sessions.is_empty() {
            self.by_service.remove(label);
        }
    }

    /// Handles that a session takes no more requests. A reserve takes its place. Without another
    /// tunnel, requests wait for the next one of the service.
    pub(super) fn retire(&mut self, session: &Session, reason: CutReason, now: Instant) {
        self.use_reserve_of(session);
        if reason.agent_may_return() && !self.has_tunnel(&session.service.label) {
            self.lost.note(&session.service.label, now);
        }
    }

    /// Puts the latest tunnel that `session` has replaced in its place.
    fn use_reserve_of(&mut self, session: &Session) {
        let label = &session.service.label;
        let Some(tunnels) = self.by_service.get_mut(label) else {
            return;
        };
        let Some(at) = tunnels
            .sessions
            .iter()
            .position(|other| std::ptr::eq(Rc::as_ptr(other), session))
        else {
            return;
        };
        let Some(reserve) = self
            .replaced
            .iter()
            .rposition(|other| other.is_same(session) && other.is_reserve())
        else {
            return;
        };
        let reserve = self.replaced.remove(reserve);
        tell_ready_again(&reserve);
        self.replaced
            .push(std::mem::replace(&mut tunnels.sessions[at], reserve));
    }

    /// Puts replaced tunnels in the place of newer ones that have ended, now that their agents have
    /// shown that they are still there: an agent that stood still while the newer tunnel was open
    /// was no reserve at its end. Returns their services.
    pub(crate) fn use_late_reserves(&mut self, now: Instant) -> Vec<Arc<str>> {
        let mut services = Vec::new();
        while let Some(at) = self.replaced.iter().rposition(|session| {
            let mut others = self.of_service(&session.service.label);
            session.is_reserve() && !session.is_cut() && !others.any(|other| other.is_same(session))
        }) {
            let reserve = self.replaced.remove(at);
            let label = &reserve.service.label;
            let tunnels = self.by_service.entry(Arc::clone(label));
            let tunnels = tunnels.or_insert_with(|| ServiceTunnels::new(now));
            if tunnels.sessions.len() >= limits::TUNNELS_PER_SERVICE {
                reserve.cut(CutReason::TunnelLimit);
                continue;
            }
            tell_ready_again(&reserve);
            self.tunnel_grace.arrived(label);
            services.push(Arc::clone(label));
            tunnels.sessions.push(reserve);
            tunnels.tell_of_others();
            self.has_several |= tunnels.sessions.len() > 1;
        }
        services
    }

    /// Time until which a tunnel of the service is expected again, if its last one has ended a
    /// moment ago.
    pub(crate) fn lost_until(&self, label: &str, now: Instant) -> Option<Instant> {
        self.lost.until(label, now)
    }

    /// Labels of the services whose last tunnel has ended a moment ago.
    pub(super) fn lost(&self, now: Instant) -> impl Iterator<Item = &str> {
        self.lost.labels(now)
    }

    /// The tunnels of the service that take requests.
    pub(crate) fn serving(&self, label: &str) -> Serving {
        let mut serving = self
            .of_service(label)
            .filter(|session| session.takes_requests());
        match (serving.next(), serving.next()) {
            (None, _) => Serving::None,
            (Some(only), None) => Serving::One(Rc::clone(only)),
            (Some(_), Some(_)) => Serving::Several,
        }
    }

    /// Whether all agents of the service take requests to switch protocols that have content.
    /// Agents of the previous line ignore their `Upgrade`, and take what follows the content for a
    /// part of it.
    pub(crate) fn takes_upgrade_content(&self, label: &str) -> bool {
        self.of_service(label)
            .all(|session| session.version.line != version::PREVIOUS)
    }

    /// The tunnel for an attempt, among those that `may_take` it.
    pub(crate) fn choose(
        &self,
        label: &str,
        may_take: impl Fn(&Session) -> bool,
        wanted: Wanted,
        now: Instant,
    ) -> Chosen {
        let Some(tunnels) = self.by_service.get(label) else {
            return Chosen::None;
        };
        let may_take = |session: &Rc<Session>| session.takes_requests() && may_take(session);
        match choice::choose(&tunnels.sessions, may_take, wanted, now, &mut fastrand::f64) {
            Choice::Tunnel(index) => Chosen::Tunnel(Rc::clone(&tunnels.sessions[index])),
            Choice::Full => Chosen::Full,
            Choice::NoCandidate => Chosen::None,
        }
    }

    /// The agent that earlier requests of the caller's connection went to, if it has a name.
    pub(crate) fn bound_to(&self, request: &OutboundRequest, label: &str) -> Option<AgentId> {
        let caller = request.caller_connection?.name()?;
        let callers = self.by_service.get(label)?.callers.borrow();
        callers.agent_of(caller, Instant::now()).cloned()
    }

    /// Records that a request went to `session`, as further ones of the caller's connection will if
    /// it has a name.
    pub(crate) fn bind(
        &self,
        request: &OutboundRequest,
        session: &Session,
        memory: &Rc<RelayMemory>,
    ) {
        let service = &session.service;
        let caller = request.caller_connection.and_then(CallerConnection::name);
        if let Some(caller) = caller
            && let Some(tunnels) = self.by_service.get(&service.label)
        {
            let reserve = || memory.spare(&service.account, bound_callers::SIZE);
            let mut callers = tunnels.callers.borrow_mut();
            callers.bind(caller, &session.agent, reserve, Instant::now());
        }
    }

    /// Whether this agent has a tunnel that takes requests of the service and is in order.
    pub(crate) fn is_in_order(&self, label: &str, agent: &AgentId, now: Instant) -> bool {
        self.of_service(label).any(|session| {
            let is_in_order = || session.tier(false, now) != HealthTier::Impaired;
            session.agent == *agent && session.takes_requests() && is_in_order()
        })
    }

    /// Whether a tunnel that `may_take` a request, and can be repeated, is ready for it.
    pub(crate) fn has_ready(
        &self,
        label: &str,
        may_take: impl Fn(&Session) -> bool,
        now: Instant,
    ) -> bool {
        self.of_service(label).any(|session| {
            let is_free = session.takes_requests() && session.has_free_slot() && may_take(session);
            is_free && session.tier(true, now) == HealthTier::Ready
        })
    }

    /// Counts a request of a service with several tunnels, which allows further attempts.
    pub(crate) fn deposit(&self, label: &str, now: Instant) {
        if let Some(tunnels) = self.by_service.get(label) {
            tunnels.budget.borrow_mut().request(now);
        }
    }

    /// Takes a further attempt from the budget of the service. Returns false if there is none.
    pub(crate) fn take_attempt(&self, label: &str, now: Instant) -> bool {
        self.by_service
            .get(label)
            .is_some_and(|tunnels| tunnels.budget.borrow_mut().try_take(now))
    }

    /// Whether the service has a tunnel that takes requests.
    pub(crate) fn has_tunnel(&self, label: &str) -> bool {
        self.of_service(label)
            .any(|session| session.takes_requests())
    }

    /// Whether one of the service's tunnels that `may_take` a request has a free slot; one of those
    /// in order, if there are any.
    pub(crate) fn has_room(
        &self,
        label: &str,
        may_take: impl Fn(&Session) -> bool,
        now: Instant,
    ) -> bool {
        let serving = || {
            self.of_service(label)
                .filter(|session| session.takes_requests() && may_take(session))
        };
        let is_in_order = |session: &&Rc<Session>| session.tier(false, now) != HealthTier::Impaired;
        let mut in_order = serving().filter(is_in_order).peekable();
        match in_order.peek() {
            Some(_) => in_order.any(|session| session.has_free_slot()),
            None => serving().any(|session| session.has_free_slot()),
        }
    }

    /// Whether the tunnels in order of a service are full while another one is not in order: the
    /// slots that are missing may be its.
    pub(crate) fn is_short(&self, label: &str, now: Instant) -> bool {
        let is_one_of_several = self.has_several && self.of_service(label).count() > 1;
        let is_impaired = |session: &Rc<Session>| {
            session.takes_requests() && session.tier(false, now) == HealthTier::Impaired
        };
        is_one_of_several
            && !self.has_room(label, |_| true, now)
            && self.of_service(label).any(is_impaired)
    }

    /// Checks by PINGs which agents of services with several tunnels answer. Returns whether there
    /// are such services.
    pub(crate) fn watch(&mut self, was_late: bool, now: Instant) -> bool {
        self.has_several = false;
        for tunnels in self.by_service.values() {
            let has_others = tunnels.sessions.len() > 1;
            self.has_several |= has_others;
            tunnels.callers.borrow_mut().forget(now);
            for session in &tunnels.sessions {
                if has_others || session.is_watched() {
                    session.watch(has_others, was_late, now);
                }
            }
        }
        self.lost.forget(now);
        self.has_several
    }

    /// Services with several tunnels, whose slots can become free without a byte on a tunnel.
    pub(crate) fn several(&self) -> impl Iterator<Item = &Arc<str>> {
        self.by_service
            .iter()
            .filter(|(_, tunnels)| tunnels.sessions.len() > 1)
            .map(|(label, _)| label)
    }

    fn of_service(&self, label: &str) -> impl Iterator<Item = &Rc<Session>> {
        self.by_service
            .get(label)
            .into_iter()
            .flat_map(|tunnels| &tunnels.sessions)
    }

    /// The sessions that are not replaced.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = &Rc<Session>> {
        self.by_service
            .values()
            .flat_map(|tunnels| &tunnels.sessions)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Rc<Session>> {
        self.sessions().chain(&self.replaced)
    }

    /// Sends the agents the services that they serve. To be called before [`Self::enforce`], so
    /// that an agent that loses its tunnel gets the message.
    pub(crate) fn announce(&self, directory: &Directory) {
        self.all()
            .for_each(|session| session.announce_services(directory));
    }

    /// Cuts tunnels, including those being opened, of agents that may no longer serve their
    /// service.
    pub(crate) fn enforce(&self, directory: &Directory, now: Timestamp) {
        self.openings.enforce(directory, now);
        for session in self.all() {
            if !session.is_cut()
                && let Some(reason) = session.not_allowed(directory, now)
            {
                session.cut(reason);
            }
        }
    }

    /// Sends the agents of services that `is_elsewhere` to the node that owns them now, and those
    /// whose connection comes through a node that `has_left` to another node. Running requests
    /// finish.
    pub(crate) fn relocate(
        &self,
        is_elsewhere: impl Fn(&Service) -> bool,
        has_left: impl Fn(NodeSlot) -> bool,
    ) {
        for session in self.all().filter(|session| session.takes_requests()) {
            if is_elsewhere(&session.service) {
                session.relocate();
            } else if session.via.get().is_some_and(&has_left) {
                session.send(&ToAgent::Drain);
            }
        }
    }

    /// Cuts the tunnels that come through a lost node, unless they were opened after `until`.
    pub(crate) fn lose_node(&self, node: NodeSlot, until: Instant) {
        let is_lost =
            |session: &&Rc<Session>| session.via.get() == Some(node) && session.opened() <= until;
        let lost = self.sessions().chain(&self.replaced).filter(is_lost);
        lost.for_each(|session| session.cut(CutReason::ConnectionLost));
    }

    /// Tells every agent that this gateway drains.
    pub(crate) fn drain(&self) {
        let sessions = self.all().filter(|session| session.takes_requests());
        sessions.for_each(|session| session.send(&ToAgent::Drain));
    }

    /// Ends every tunnel once its running requests have finished.
    pub(crate) fn end(&self) {
        self.all()
            .for_each(|session| session.end(CutReason::GatewayDrains));
    }

    /// Cuts every tunnel: the gateway stops.
    pub(crate) fn cut(&self) {
        self.openings.cut();
        self.all()
            .for_each(|session| session.cut(CutReason::GatewayStops));
    }

    pub(crate) fn report(
        &self,
        worker: WorkerId,
        directory: &Directory,
        releases: &AgentReleases,
    ) -> Vec<TunnelReport> {
        let now = Instant::now();
        self.sessions()
            .map(|session| session.report(worker, directory, releases, now))
            .collect()
    }
}

impl ServiceTunnels {
    fn new(now: Instant) -> Self {
        Self {
            sessions: Vec::new(),
            budget: RefCell::new(AttemptBudget::new(now)),
            callers: RefCell::default(),
        }
    }

    fn median_latency(&self, now: Instant) -> Option<Duration> {
        median_latency(self.sessions.iter().map(|session| session.latency(now)))
    }

    /// Tells each agent whether there are others.
    fn tell_of_others(&self) {
        let exist = self.sessions.len() > 1;
        self.sessions
            .iter()
            .for_each(|session| session.tell_of_service(|told| told.others = exist));
    }
}

/// Tells the agent of a reserve that its tunnel takes requests again.
fn tell_ready_again(reserve: &Session) {
    let (agent, service) = (&reserve.agent, &reserve.service.label);
    tracing::info!(%agent, %service, generation = reserve.generation, "tunnel ready again");
    reserve.send_ready();
}
