//! One tunnel: a connection on which the gateway opens a stream for each request.

mod report;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crate::limits;
use futures_util::future::{self, Either, FutureExt as _, select};
use gw_base::agent_releases::AgentReleases;
use gw_base::clock::Timestamp;
use gw_base::error::{Error, Overload};
use gw_interface::control_plane::{AgentProof, Executor};
use gw_interface::rate_limit::Bucket;
use gw_region::NodeSlot;
use gw_shared::http::InvalidHead;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::id::{AgentId, AuthorityId, ServiceId};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::program::{ReleaseKeys, UpdateReport, UpdateState};
use gw_shared::net::{Socket, TlsStream, retransmit_within};
use gw_shared::runtime;
use gw_shared::text::{error_line, printable};
use gw_shared::tunnel::connection::{StreamReceiver, StreamSender, Tunnel, TunnelError, UNSENT};
use gw_shared::tunnel::control::{self as messages, ToAgent, ToGateway};
use gw_shared::tunnel::cut_reason::CutReason;
use gw_shared::tunnel::endpoint::{Endpoint, OpenError, OutgoingFull};
use gw_shared::tunnel::frame::REQUEST_HEAD;
use gw_shared::tunnel::head::OutboundRequest;
use gw_shared::tunnel::heartbeat;
use gw_shared::tunnel::ledger::Share;
use gw_shared::tunnel::transport::Transport;
use gw_shared::version::{self, Version};
use gw_store::{Directory, PublicKeyHash, Service};
use gw_telemetry::counters::AgentUpdate;

use super::candidate::{Candidacy, InFlight};
use super::control::Told;
use super::flow_control::FlowControl;
use super::handshake::openings::TunnelOpening;
use super::waiting::Waiting;
use super::{Tunnels, Via, control};

/// The agent at the other end of a tunnel, and the service that the tunnel is for.
pub(crate) struct Party {
    pub(crate) agent: AgentId,
    /// Key of the certificate that the tunnel was opened with.
    pub(crate) key: PublicKeyHash,
    /// Authority that has issued this certificate.
    pub(crate) issuer: Option<AuthorityId>,
    pub(crate) version: Version,
    pub(crate) service: Arc<Service>,
}

/// A live tunnel.
pub(crate) struct Session {
    pub(crate) agent: AgentId,
    /// Version of the agent.
    pub(super) version: Version,
    /// Authority that has issued the certificate that the tunnel was opened with.
    pub(super) issuer: Option<AuthorityId>,
    /// When the agent, which has a certificate of another authority by now, is asked to connect
    /// again.
    pub(super) move_at: Cell<Option<Instant>>,
    /// As the agent last reported it.
    update: RefCell<Option<UpdateReport>>,
    pub(crate) service: Arc<Service>,
    pub(crate) generation: u64,
    /// Node that splices the connection; `None` if the agent is connected to this node.
    pub(super) via: Cell<Option<NodeSlot>>,
    /// What the choice of a tunnel considers.
    pub(super) candidacy: Candidacy,
    pub(crate) tunnel: Tunnel,
    /// Flow control, which also counts the open requests.
    pub(super) flow: FlowControl,
    waiting: Rc<Waiting>,
    /// No more requests: the tunnel drains, was cut, or has ended.
    closed_to_requests: Cell<bool>,
    /// Why the tunnel drains.
    draining_for: Cell<Option<CutReason>>,
    /// Why the gateway has cut the tunnel.
    cut_for: Cell<Option<CutReason>>,
    /// Task that moves the tunnel's bytes. Unlike the endpoint's, it is woken while the connection
    /// takes no bytes.
    driver: Cell<Option<Waker>>,
    /// A certificate is being issued.
    renewing: Cell<bool>,
    /// Services that were last announced to the agent.
    announced: RefCell<BTreeSet<ServiceId>>,
    /// Rate of certificates that the agent may request.
    renewals: RefCell<Bucket>,
    /// When a newer tunnel replaced this one.
    replaced_at: Cell<Option<Instant>>,
    /// What the agent was told of its service.
    pub(super) told: Cell<Told>,
    opened: Instant,
}

/// Time limit for sending the end of a tunnel that has ended.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// The gateway's end of a tunnel to an agent of this version, whose streams are charged to `share`.
fn endpoint(agent: Version, share: Rc<Share>) -> Endpoint {
    let endpoint = Endpoint::gateway_within(share);
    if agent.line == version::PREVIOUS {
        endpoint.without_upload_reports()
    } else {
        endpoint
    }
}

/// Runs a tunnel on an upgraded connection until it ends.
pub(crate) async fn run(
    tunnels: Rc<Tunnels>,
    stream: TlsStream,
    party: Party,
    opening: TunnelOpening,
    via: Option<Via>,
) {
    let last_received = stream.socket().last_received();
    if let Err(error) = stream.socket().detect_dead_peer(heartbeat::TCP_DEAD_AFTER) {
        tracing::warn!(%error,
            "cannot set TCP keep-alive on a tunnel; only heartbeats detect a dead agent");
    }
    if let Err(error) = stream.socket().limit_unsent(UNSENT) {
        tracing::warn!(%error, "cannot limit unsent bytes in the socket of a tunnel");
    }
    if via.is_some() {
        let _ = retransmit_within(stream.socket(), limits::NODE_RETRANSMISSION);
    }
    let key = party.key.clone();
    let session = Session::new(&tunnels, stream.socket(), party);
    session.via.set(via.as_ref().map(|via| via.node));
    runtime::spawn(control::serve(
        Rc::clone(&tunnels),
        Rc::clone(&session),
        opening,
        key,
    ));
    let ended = {
        let driven = std::pin::pin!(drive(&session, &stream));
        let ping = || session.flow.probe();
        let dead = std::pin::pin!(heartbeat::pinging_until_dead(&last_received, ping));
        let cut = via.map_or_else(|| future::pending().boxed_local(), |via| via.silent);
        match select(driven, select(dead, cut)).await {
            Either::Left((ended, _)) => ended,
            Either::Right(_) => Err(TunnelError::Silent),
        }
    };
    session.tunnel.with(Endpoint::lose);
    session.closed_to_requests.set(true);
    let reason = session.reason(&ended);
    if matches!(reason, CutReason::Flood | CutReason::Violation) {
        tunnels.counters.abused("tunnel_frames");
    }
    tunnels.counters.tunnels_ended.increment(reason.as_str());
    {
        let mut registry = tunnels.registry.borrow_mut();
        let now = Instant::now();
        registry.remove(&session, reason, now);
        registry.ended(&session, reason, &tunnels.directory.in_use(), now);
    }
    tunnels.waiting.look_again(&session.service.label);
    // An agent that has ended its direction waits for the end of this one.
    let is_awaited = ended.is_ok() && !session.is_cut();
    session.log_end(reason, ended.err());
    let closed = async {
        session.tell(&stream, reason).await?;
        if is_awaited {
            stream.close().await
        } else {
            Ok(())
        }
    };
    // Fails if the agent has closed the connection, or does not read.
    let _ = runtime::timeout(CLOSED_WITHIN, closed).await;
    stream.closer().abort();
    session.driver.take();
    session.flow.end();
}

/// Moves bytes between the endpoint and the connection until the connection ends or the agent
/// breaks a limit.
pub(crate) async fn drive(session: &Session, stream: &impl Transport) -> Result<(), TunnelError> {
    let mut frames = Bucket::new(limits::TUNNEL_CONTROL_FRAMES, Instant::now());
    let mut after_receive = |endpoint: &mut Endpoint| {
        session.flow.take_pong(endpoint);
        charge(&mut frames, endpoint.take_overhead())
    };
    std::future::poll_fn(|cx| {
        session.driver.set(Some(cx.waker().clone()));
        Poll::Ready(())
    })
    .await;
    std::future::poll_fn(|cx| {
        if session.is_cut() {
            return Poll::Ready(Ok(()));
        }
        session.flow.adjust();
        let driven = session.tunnel.poll_drive(cx, stream, &mut after_receive);
        session.waiting.look_again(&session.service.label);
        driven
    })
    .await
}

/// Charges frames without content.
fn charge(bucket: &mut Bucket, frames: u32) -> Result<(), TunnelError> {
    if frames == 0 {
        return Ok(());
    }
    let now = Instant::now();
    (0..frames)
        .try_for_each(|_| bucket.take(now))
        .map_err(|_| TunnelError::Flood)
}

impl Session {
    /// A session on the connection of `socket`, which is not registered yet.
    pub(crate) fn new(tunnels: &Tunnels, socket: &Socket, party: Party) -> Rc<Self> {
        let Party {
            agent,
            issuer,
            version,
            service,
            ..
        } = party;
        let memory = tunnels.relay_memory.account(&service.account);
        let tunnel = Tunnel::new(endpoint(version, Rc::clone(memory.share())));
        let flow = FlowControl::new(tunnel.clone(), socket, memory);
        let candidacy = Candidacy::new(&agent, Instant::now());
        Rc::new(Self {
            agent,
            version,
            issuer,
            move_at: Cell::default(),
            update: RefCell::default(),
            service,
            generation: tunnels.registry.borrow_mut().next_generation(),
            via: Cell::default(),
            candidacy,
            tunnel,
            flow,
            waiting: Rc::clone(&tunnels.waiting),
            closed_to_requests: Cell::new(false),
            draining_for: Cell::default(),
            cut_for: Cell::default(),
            driver: Cell::default(),
            renewing: Cell::new(false),
            announced: RefCell::default(),
            renewals: RefCell::new(Bucket::new(limits::RENEWALS, Instant::now())),
            replaced_at: Cell::default(),
            told: Cell::default(),
            opened: Instant::now(),
        })
    }

    /// Opens a stream for a request. Fails instead of queueing if the agent allows no further
    /// stream.
    pub(crate) fn open_stream(
        self: &Rc<Self>,
        request: &OutboundRequest,
    ) -> Result<(StreamSender, StreamReceiver, InFlight), Error> {
        self.try_open(request)
            .map_err(|error| self.cannot_open(error))
    }

    /// As [`Self::open_stream`], with the reason for which no stream was opened.
    pub(crate) fn try_open(
        self: &Rc<Self>,
        request: &OutboundRequest,
    ) -> Result<(StreamSender, StreamReceiver, InFlight), OpenError> {
        let credit = self.flow.enter();
        let in_flight = InFlight::new(Rc::clone(self));
        // Agents of the previous line do not know the field.
        let is_previous = self.version.line == version::PREVIOUS;
        let caller = request.caller_connection.filter(|_| !is_previous);
        let write = |out: &mut Vec<u8>| request.write(out, caller);
        let opened = self.tunnel.open(credit, !request.has_body(), write);
        let (sender, receiver) = opened.inspect_err(|error| {
            let request_id = request
                .headers
                .get(X_GW_REQUEST_ID)
                .and_then(|id| id.to_str().ok());
            tracing::debug!(request_id, agent = %self.agent, %error, "cannot open a stream");
        })?;
        in_flight.count();
        Ok((sender, receiver, in_flight))
    }

    /// Error of a request for which no stream was opened.
    pub(crate) fn cannot_open(&self, error: OpenError) -> Error {
        match error {
            OpenError::StreamLimit => Error::AgentConcurrencyLimit,
            OpenError::Congested => Error::Overloaded(Overload::AgentDoesNotRead),
            OpenError::HeadTooLarge => {
                Error::HeadersTooLarge(InvalidHead::HeadTooLarge(REQUEST_HEAD.head))
            }
            OpenError::Memory => self.flow.refusal(),
            OpenError::Lost => Error::TunnelLost,
        }
    }

    /// Whether the agent sends a notice when it accepts a request that asks for it. Agents of the
    /// previous line do not.
    pub(crate) fn notifies_of_acceptance(&self) -> bool {
        self.version.line != version::PREVIOUS
    }

    /// Tells the agent that requests can arrive.
    pub(super) fn send_ready(&self) {
        self.draining_for.set(None);
        self.send(&ToAgent::Ready {
            agent_id: self.agent.to_string(),
            generation: self.generation,
        });
    }

    /// Whether the tunnel, which a newer one has replaced, can take requests again. An agent that
    /// ends it says so by a drain, and agents of the previous line always end it.
    pub(super) fn is_reserve(&self) -> bool {
        let is_alive = self
            .replaced_at
            .get()
            .is_some_and(|at| self.flow.last_received() > at);
        self.takes_requests() && is_alive && self.version.line != version::PREVIOUS
    }

    /// Whether this is a tunnel of the same agent and service.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.agent == other.agent && self.service.label == other.service.label
    }

    /// Queues a message to the agent. Cuts the tunnel if the queue is full.
    pub(crate) fn send(&self, message: &ToAgent) {
        let message = match messages::encode(message) {
            Ok(message) => message,
            Err(error) => {
                return tracing::warn!(agent = %self.agent, %error,
                    "cannot send a message to the agent");
            }
        };
        if let Err(OutgoingFull) = self.tunnel.send_message(message, limits::CONTROL_QUEUE) {
            self.cut(CutReason::MessagesNotRead);
        }
    }

    /// Handles a message from the agent.
    pub(super) fn receive(self: &Rc<Self>, tunnels: &Rc<Tunnels>, message: ToGateway) {
        match message {
            ToGateway::Statistics {
                slots,
                slots_in_use,
                backend,
                standby,
                ..
            } => {
                self.candidacy
                    .reported(slots, slots_in_use, backend, standby, Instant::now());
                self.waiting.look_again(&self.service.label);
            }
            ToGateway::Update(report) => {
                let error = report
                    .error
                    .map(|error| printable(error.as_bytes(), UpdateReport::ERROR_MAX));
                self.update.replace(Some(UpdateReport { error, ..report }));
            }
            ToGateway::Drain => {
                self.end(CutReason::AgentDrained);
                tunnels
                    .registry
                    .borrow_mut()
                    .retire(self, CutReason::AgentDrained, Instant::now());
            }
            // One at a time, at a limited rate. Further requests get no answer, which would need
            // memory.
            ToGateway::Renew { csr } => {
                if !self.renewing.get() && self.renewals.borrow_mut().take(Instant::now()).is_ok() {
                    self.renewing.set(true);
                    runtime::spawn(Rc::clone(self).renew(tunnels.executor.clone(), csr));
                }
            }
        }
    }

    /// Issues the next certificate of the agent. The agent uses it for its next tunnel; this one
    /// stays.
    async fn renew(self: Rc<Self>, executor: Executor, csr: String) {
        let proof = AgentProof::Tunnel(self.agent.clone());
        let reply = executor
            .run(move |control| control.sign(&proof, &csr))
            .await;
        self.renewing.set(false);
        self.send(&match reply {
            Ok(certificate) => ToAgent::Certificate(certificate),
            Err(error) => {
                tracing::warn!(agent = %self.agent, %error,
                    "cannot renew the certificate of the agent");
                ToAgent::RenewalRefused {
                    message: error.to_string(),
                }
            }
        });
    }

    /// Takes the current record of the agent: whether it is a standby, and the services that it
    /// serves, which it is sent if they have changed.
    pub(super) fn announce_services(&self, directory: &Directory) {
        let Some(agent) = directory.agent(self.agent.as_str()) else {
            return;
        };
        self.set_standby(agent.standby);
        if let Some(service) = directory.service(&self.service.label) {
            self.tell_of_service(|told| told.retries = service.settings.retries);
        }
        if *self.announced.borrow() != agent.services {
            self.announced.borrow_mut().clone_from(&agent.services);
            self.send(&ToAgent::Services {
                hostnames: directory.hostnames(agent),
            });
        }
    }

    /// Why the agent may not serve the service, by the current records; `None` if it may.
    pub(super) fn not_allowed(&self, directory: &Directory, now: Timestamp) -> Option<CutReason> {
        let agent = directory.agent(self.agent.as_str());
        let Some(agent) = agent.filter(|agent| agent.status == EnrollmentStatus::Approved) else {
            return Some(CutReason::AgentRevoked);
        };
        if agent.is_expired(now) {
            return Some(CutReason::CertificateExpired);
        }
        match directory.service(&self.service.label) {
            None => Some(CutReason::ServiceDeleted),
            Some(service) => (!agent.may_serve(service)).then_some(CutReason::NotAssigned),
        }
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut_for.get().is_some()
    }

    pub(crate) fn takes_requests(&self) -> bool {
        !self.closed_to_requests.get()
    }

    /// Streams that the agent has not let go of, which may be more than the requests in flight: a
    /// stream that the gateway has reset counts until the agent answers.
    pub(crate) fn open_streams(&self) -> usize {
        self.tunnel.with(|endpoint| endpoint.open_streams())
    }

    /// Sends no more requests and tells the agent, which ends the tunnel once running requests have
    /// finished.
    pub(super) fn end(&self, reason: CutReason) {
        self.drains_for(reason);
        if !self.closed_to_requests.replace(true) {
            self.send(&ToAgent::Drained);
        }
    }

    /// Sends the agent to the node that owns the service now. Running requests finish.
    pub(super) fn relocate(&self) {
        self.send(&ToAgent::Drain);
        self.end(CutReason::Moved);
    }

    /// Tells the agent that a newer tunnel replaces this one.
    pub(super) fn replace(&self) {
        self.replaced_at.set(Some(Instant::now()));
        // Its answer shows that the agent is still there.
        self.tunnel
            .with(|endpoint| endpoint.ping(heartbeat::PAYLOAD));
        self.drains_for(CutReason::Replaced);
        self.send(&ToAgent::Replaced);
    }

    /// The first reason is kept.
    fn drains_for(&self, reason: CutReason) {
        self.draining_for
            .set(self.draining_for.get().or(Some(reason)));
    }

    /// Ends the tunnel and aborts its requests. The first reason is kept.
    pub(crate) fn cut(&self, reason: CutReason) {
        self.cut_for.set(self.cut_for.get().or(Some(reason)));
        self.closed_to_requests.set(true);
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }

    /// When the tunnel was opened.
    pub(super) fn opened(&self) -> Instant {
        self.opened
    }

    /// Why the tunnel has ended, whose connection has `ended`.
    fn reason(&self, ended: &Result<(), TunnelError>) -> CutReason {
        if let Some(reason) = self.cut_for.get() {
            return reason;
        }
        match ended {
            Ok(()) => self.draining_for.get().unwrap_or(CutReason::AgentClosed),
            Err(TunnelError::Io(_)) => CutReason::ConnectionLost,
            Err(TunnelError::Silent) => CutReason::Silent,
            Err(TunnelError::Flood) => CutReason::Flood,
            Err(TunnelError::Violation(_)) => CutReason::Violation,
        }
    }

    fn log_end(&self, reason: CutReason, error: Option<TunnelError>) {
        let agent = &self.agent;
        let service = &self.service.label;
        let generation = self.generation;
        let is_warning = reason.is_misbehavior();
        let reason = reason.as_str();
        let error = error.map(|error| error_line(&error));
        if is_warning {
            tracing::warn!(%agent, %service, generation, reason, error, "tunnel ended");
        } else {
            tracing::info!(%agent, %service, generation, reason, error, "tunnel ended");
        }
    }

    /// Tells the agent why the tunnel has ended, if that is of use to it.
    async fn tell(&self, stream: &TlsStream, reason: CutReason) -> io::Result<()> {
        // Agents of the line before do not know the message.
        if reason.advice().is_none() || self.version.line == version::PREVIOUS {
            return Ok(());
        }
        self.send(&ToAgent::Ended {
            reason: reason.as_str().to_owned(),
        });
        std::future::poll_fn(|cx| self.tunnel.poll_flush(cx, stream)).await?;
        stream.close().await
    }

    /// Progress of the agent's update; `None` before the agent has reported it.
    fn update_view(&self, releases: &AgentReleases) -> Option<AgentUpdate> {
        let report = self.update.borrow().clone()?;
        let state = match report.state {
            UpdateState::Off => "off",
            UpdateState::Ready if releases.holds_back(&self.agent, self.version) => "held_back",
            UpdateState::Ready => "ready",
            UpdateState::Updating => "updating",
            UpdateState::Failed => "failed",
        };
        let version = report.version.map(|version| version.to_string());
        let keys = report.release_keys.iter().flat_map(ReleaseKeys::iter);
        let release_keys = keys.map(ToString::to_string).collect();
        Some(AgentUpdate {
            state: state.to_owned(),
            version,
            error: report.error,
            release_keys,
        })
    }
}

#[cfg(test)]
mod tests;
