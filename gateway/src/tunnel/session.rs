//! One tunnel: an HTTP/2 connection on which the gateway is the client.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use gw_shared::http::fields::X_GW_REQUEST_ID;
use gw_shared::id::{AgentId, ServiceId};
use gw_shared::net::{Closer, TlsStream};
use gw_shared::runtime;
use gw_shared::tunnel::control::{self as messages, ToAgent, ToGateway};
use gw_shared::tunnel::text::error_line;
use gw_shared::tunnel::unread::UnreadBody;
use gw_shared::tunnel::{heartbeat, settings};
use gw_shared::version::VERSION;
use http::Request;

use super::Tunnels;
use super::control;
use super::flow_control::FlowControl;
use super::openings::Opening;
use super::outbox::{Full, Outbox};
use crate::clock::Timestamp;
use crate::control::{AgentProof, Executor};
use crate::error::Error;
use crate::http2::frame_meter::{AGENT, Meter, Metered};
use crate::limit::Bucket;
use crate::limits;
use crate::ownership::WorkerId;
use crate::store::{Directory, Service};
use crate::telemetry::counters::TunnelReport;

/// A live tunnel.
pub(crate) struct Session {
    pub(crate) agent: AgentId,
    pub(crate) service: Arc<Service>,
    pub(crate) generation: u64,
    /// Value of the registry's counter at the last pick of this session.
    pub(super) last_pick: Cell<u64>,
    requests: h2::client::SendRequest<Bytes>,
    /// Flow control, which also counts the open requests.
    pub(super) flow: FlowControl,
    /// No more requests: the tunnel drains, was cut, or has ended.
    closed_to_requests: Cell<bool>,
    /// The gateway has cut the tunnel.
    cut: Cell<bool>,
    /// A certificate is being issued.
    renewing: Cell<bool>,
    /// Services that were last announced to the agent.
    announced: RefCell<BTreeSet<ServiceId>>,
    /// Rate of certificates that the agent may request.
    renewals: RefCell<Bucket>,
    /// Messages to send on the control stream.
    pub(super) outbox: Outbox,
    /// Counts the frames that the agent sends.
    meter: Rc<Meter>,
    statistics: Cell<Option<(u32, u32)>>,
    opened: Instant,
    closer: Closer,
}

/// Violation of the protocol on the control stream.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ProtocolViolation {
    #[error("the agent answered a change of the window without acknowledging its SETTINGS")]
    SettingsNotAcknowledged,
}

/// Reason why a tunnel failed.
#[derive(Debug, thiserror::Error)]
enum EndError {
    #[error(transparent)]
    Http2(#[from] h2::Error),
    #[error("the agent sends too many frames that belong to no request")]
    Flood,
}

/// A stream that was opened for a request.
#[derive(Debug, Clone)]
pub(crate) struct OpenedStream {
    pub(crate) at: Instant,
    pub(crate) agent: AgentId,
}

/// Counts one request in flight on a session until dropped.
pub(crate) struct InFlight {
    session: Rc<Session>,
    opened: Instant,
    body: Option<UnreadBody>,
}

impl InFlight {
    pub(crate) fn stream(&self) -> OpenedStream {
        OpenedStream { at: self.opened, agent: self.session.agent.clone() }
    }

    /// Time since the stream was opened.
    pub(crate) fn open_for(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Counts an interim response that was read from the stream.
    pub(crate) fn took_interim(&self) {
        self.session.meter.took_interim(self.session.flow.streams());
    }

    /// Counts the bytes that `body`, the response's, buffers. Drop both together.
    pub(crate) fn watch(&mut self, body: &mut h2::RecvStream) {
        self.body = Some(self.session.flow.watch(body));
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.session.flow.leave();
        self.session.meter.ended_request(self.session.flow.streams());
    }
}

/// Runs HTTP/2 on an upgraded connection until it ends.
pub(super) async fn run(
    tunnels: Rc<Tunnels>,
    stream: TlsStream,
    agent: AgentId,
    service: Arc<Service>,
    opening: Opening,
) {
    let closer = stream.closer();
    let last_received = stream.socket().last_received();
    if let Err(error) = stream.socket().detect_dead_peer(heartbeat::TCP_DEAD_AFTER) {
        tracing::warn!(%error, "cannot set TCP keep-alive on a tunnel; only heartbeats detect a dead agent");
    }
    if let Err(error) = stream.socket().limit_unsent(settings::UNSENT) {
        tracing::warn!(%error, "cannot limit unsent bytes in the socket of a tunnel");
    }
    let flow = FlowControl::new(stream.socket(), tunnels.relay_memory.account(&service.account));
    let meter = Rc::new(Meter::new(AGENT, Instant::now()));
    let metered = Metered::new(stream, Rc::clone(&meter));
    let (requests, mut connection) = match settings::client().handshake::<_, Bytes>(metered).await {
        Ok(begun) => begun,
        Err(error) => {
            let error = error_line(&error);
            tracing::warn!(%agent, %error, "HTTP/2 handshake of a tunnel failed");
            return;
        }
    };
    if let Some(ping_pong) = connection.ping_pong() {
        runtime::spawn(heartbeat::keep(ping_pong, last_received, closer.clone()));
    }
    let generation = tunnels.registry.borrow_mut().next_generation();
    let session = Rc::new(Session {
        agent,
        service,
        generation,
        last_pick: Cell::default(),
        requests,
        flow,
        closed_to_requests: Cell::new(false),
        cut: Cell::new(false),
        renewing: Cell::new(false),
        announced: RefCell::default(),
        renewals: RefCell::new(Bucket::new(limits::RENEWALS, Instant::now())),
        outbox: Outbox::default(),
        meter,
        statistics: Cell::new(None),
        opened: Instant::now(),
        closer,
    });
    runtime::spawn(control::serve(Rc::clone(&tunnels), Rc::clone(&session), opening));
    let ended: Result<(), EndError> = std::future::poll_fn(|cx| {
        if session.meter.abuse().is_some() {
            return Poll::Ready(Err(EndError::Flood));
        }
        session.flow.adjust(&session, &mut connection);
        Pin::new(&mut connection).poll(cx).map_err(EndError::from)
    })
    .await;
    session.closed_to_requests.set(true);
    if matches!(ended, Err(EndError::Flood)) {
        tunnels.counters.abused("tunnel_frames");
        session.cut();
    }
    tunnels.registry.borrow_mut().remove(&session);
    let error = ended.err().map(|error| error_line(&error));
    tracing::info!(agent = %session.agent, service = %session.service.label, generation, error, "tunnel ended");
}

impl Session {
    /// Opens a stream for a request. Fails instead of queueing if the agent allows no further stream.
    pub(crate) fn open_stream(
        self: &Rc<Self>,
        head: Request<()>,
        end: bool,
    ) -> Result<(h2::client::ResponseFuture, h2::SendStream<Bytes>, InFlight), Error> {
        // One stream is the control stream.
        if self.flow.streams() + 1 >= self.requests.current_max_send_streams().min(settings::STREAMS_MAX) {
            return Err(Error::AgentConcurrencyLimit);
        }
        self.flow.enter()?;
        let in_flight = InFlight { session: Rc::clone(self), opened: Instant::now(), body: None };
        let request_id = tracing::enabled!(tracing::Level::DEBUG).then(|| head.headers().get(X_GW_REQUEST_ID).cloned());
        let (response, upload) = self.requests.clone().send_request(head, end).map_err(|error| {
            let request_id = request_id.flatten();
            let request_id = request_id.as_ref().and_then(|id| id.to_str().ok());
            tracing::debug!(request_id, error = error_line(&error), "cannot open a stream");
            if self.takes_no_streams() {
                self.end();
            }
            Error::TunnelLost
        })?;
        self.meter.sent_request(self.flow.streams());
        Ok((response, upload, in_flight))
    }

    /// Whether no stream can be opened any more: the agent has sent GOAWAY, or all stream identifiers are used up
    /// (RFC 9113 §5.1.1).
    fn takes_no_streams(&self) -> bool {
        let ready = self.requests.clone().poll_ready(&mut Context::from_waker(Waker::noop()));
        matches!(ready, Poll::Ready(Err(_)))
    }

    /// Opens the control stream.
    pub(super) fn open_control(
        &self,
        head: Request<()>,
    ) -> Result<(h2::client::ResponseFuture, h2::SendStream<Bytes>), h2::Error> {
        self.requests.clone().send_request(head, false)
    }

    /// Queues a message to the agent. Cuts the tunnel if the queue is full.
    pub(crate) fn send(&self, message: &ToAgent) {
        let Ok(line) = messages::encode(message) else { return };
        if let Err(Full) = self.outbox.push(line)
            && !self.is_cut()
        {
            tracing::warn!(agent = %self.agent, "tunnel cut: the agent does not read its control stream");
            self.cut();
        }
    }

    /// Handles a message from the agent.
    pub(super) fn receive(self: &Rc<Self>, tunnels: &Rc<Tunnels>, message: ToGateway) -> Result<(), ProtocolViolation> {
        match message {
            ToGateway::Statistics { slots, slots_in_use, .. } => {
                // A tunnel cannot have more slots than streams.
                let slots = slots.min(u32::try_from(settings::STREAMS_MAX).unwrap_or(u32::MAX));
                self.statistics.set(Some((slots, slots_in_use.min(slots))));
            }
            // Unacknowledged SETTINGS are not in force (RFC 9113 §6.5.3).
            ToGateway::Window if self.meter.settings_acknowledged() < self.flow.settings_sent() => {
                return Err(ProtocolViolation::SettingsNotAcknowledged);
            }
            ToGateway::Window => self.flow.answered(),
            ToGateway::Drain => self.end(),
            // One at a time, at a limited rate. Further requests get no answer, which would need memory.
            ToGateway::Renew { csr } => {
                if !self.renewing.get() && self.renewals.borrow_mut().take(Instant::now()).is_ok() {
                    self.renewing.set(true);
                    runtime::spawn(Rc::clone(self).renew(tunnels.executor.clone(), csr));
                }
            }
        }
        Ok(())
    }

    /// Whether the agent has not answered a change of the window in time. Without the answer, windows cannot change.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        let is_acknowledged = self.meter.settings_acknowledged() >= self.flow.settings_sent();
        self.flow.unanswered_for(now) >= self.flow.answered_within(is_acknowledged)
    }

    /// Issues the next certificate of the agent. The agent uses it for its next tunnel; this one stays.
    async fn renew(self: Rc<Self>, executor: Executor, csr: String) {
        let proof = AgentProof::Tunnel(self.agent.clone());
        let reply = executor.run(move |control| control.sign(&proof, &csr)).await;
        self.renewing.set(false);
        self.send(&match reply {
            Ok(certificate) => ToAgent::Certificate(certificate),
            Err(error) => {
                tracing::warn!(agent = %self.agent, %error, "cannot renew the certificate of the agent");
                ToAgent::RenewalRefused { message: error.to_string() }
            }
        });
    }

    /// Sends the agent the services that it serves, if they have changed.
    pub(super) fn announce_services(&self, directory: &Directory) {
        let Some(agent) = directory.agent(self.agent.as_str()) else { return };
        if *self.announced.borrow() != agent.services {
            self.announced.borrow_mut().clone_from(&agent.services);
            self.send(&ToAgent::Services { hostnames: directory.hostnames(agent) });
        }
    }

    /// Whether the agent may serve the service, by the current records.
    pub(crate) fn is_allowed(&self, directory: &Directory, now: Timestamp) -> bool {
        let (service, agent) = (directory.service(&self.service.label), directory.agent(self.agent.as_str()));
        service.zip(agent).is_some_and(|(service, agent)| agent.may_serve(service) && !agent.is_expired(now))
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut.get()
    }

    pub(crate) fn takes_requests(&self) -> bool {
        !self.closed_to_requests.get()
    }

    pub(crate) fn requests_in_flight(&self) -> usize {
        self.flow.streams()
    }

    /// Sends no more requests and tells the agent, which ends the tunnel once running requests have finished.
    pub(super) fn end(&self) {
        if !self.closed_to_requests.replace(true) {
            self.send(&ToAgent::Drained);
        }
    }

    /// Closes the connection and aborts its requests.
    pub(crate) fn cut(&self) {
        self.cut.set(true);
        self.closed_to_requests.set(true);
        self.closer.abort();
    }

    pub(crate) fn report(&self, worker: WorkerId, directory: &Directory, now: Instant) -> TunnelReport {
        let certificate = directory.agent(self.agent.as_str()).and_then(|agent| agent.certificate_not_after);
        TunnelReport {
            service: self.service.label.to_string(),
            agent_id: self.agent.to_string(),
            // The handshake accepts agents of the same version only.
            agent_version: VERSION.to_owned(),
            certificate_not_after: certificate.map(|not_after| not_after.to_string()),
            generation: self.generation,
            worker: worker.0,
            age_seconds: now.saturating_duration_since(self.opened).as_secs(),
            idle_seconds: self.flow.quiet_for(now).as_secs(),
            round_trip_us: self.flow.round_trip().and_then(|rtt| rtt.as_micros().try_into().ok()),
            in_flight: self.flow.streams(),
            window: self.flow.window(),
            held_bytes: self.flow.held_bytes(),
            slots: self.statistics.get().map(|(slots, _)| slots),
            slots_in_use: self.statistics.get().map(|(_, in_use)| in_use),
            draining: self.closed_to_requests.get(),
        }
    }
}
