//! Entry point of gateway/simulation: a worker as a task of the calling thread's reactor, and what
//! invariants need to know of it beyond its [`WorkerReport`](gw_telemetry::counters::WorkerReport).
//! Not a public interface.

use std::collections::BTreeMap;
use std::io;
use std::rc::{Rc, Weak};
use std::time::Instant;

use crossbeam_channel::Sender;
use gw_base::mailbox::Inbox;
use gw_interface::rate_limit::Level;
use gw_shared::id::AccountId;
use gw_shared::tunnel::endpoint::Endpoint;
use gw_telemetry::counters::TunnelReport;

use crate::tunnel::session::Session;
use crate::worker::{Setup, Worker, WorkerMessage};

/// Builds a worker. The future is what [`worker::run`](crate::worker::run) does on the thread of a
/// worker: it ends once the worker is stopped. Must be called by a task, and the future awaited by
/// one: both use the reactor of the thread. Other tasks of the worker remain, which on a thread of
/// its own end with the reactor.
pub fn serve(
    setup: Setup,
    inbox: Inbox<WorkerMessage>,
    up: Sender<()>,
) -> io::Result<(RunningWorker, impl Future<Output = ()>)> {
    let worker = Worker::built(setup)?;
    let handle = RunningWorker(Rc::downgrade(&worker));
    Ok((handle, worker.serve(inbox, up)))
}

/// A worker of this thread, which the handle does not keep alive.
#[derive(Clone)]
pub struct RunningWorker(Weak<Worker>);

impl RunningWorker {
    /// What the worker holds now; `None` once its tasks have been dropped.
    pub fn probe(&self) -> Option<Probe> {
        self.0.upgrade().map(|worker| Probe::of(&worker))
    }
}

/// What a worker holds. All numbers but those of limits and tunnels are zero when no caller is
/// connected.
#[derive(Debug, Clone)]
pub struct Probe {
    /// Requests of callers of this worker, from their heads to their records.
    pub requests_in_flight: usize,
    /// Requests that this worker opens for callers of other workers.
    pub crossings_served: usize,
    /// Connections of callers, and those of agents until their tunnel begins.
    pub connections: usize,
    /// Connections that count against the limit of their address. Those of tunnels count, too.
    pub address_slots: usize,
    /// TLS handshakes under way.
    pub handshakes: usize,
    /// Refused requests whose rest is received.
    pub discards: usize,
    /// Requests that wait for a tunnel or for a slot of one, by the label of their service.
    pub waiting: BTreeMap<String, usize>,
    /// Bytes that are charged to all accounts: streams, kept bodies, and the pipes of requests that
    /// cross workers.
    pub relay_bytes: usize,
    /// Limit of these bytes now.
    pub relay_limit: usize,
    /// Bytes that are charged to each account; accounts without any are left out.
    pub relay_bytes_of_accounts: BTreeMap<AccountId, usize>,
    /// Bytes that the kernel holds for callers' connections, at the last measurement.
    pub socket_bytes: usize,
    /// Buckets that are not full.
    pub levels: Vec<Level>,
    /// Tunnels that are being opened.
    pub openings: usize,
    /// Tunnels that were opened and have not ended, those that newer ones have replaced included.
    pub tunnels: Vec<TunnelProbe>,
    /// The worker drains.
    pub is_draining: bool,
}

/// What a tunnel holds at the gateway.
#[derive(Debug, Clone)]
pub struct TunnelProbe {
    /// As administrators see the tunnel, with the requests in flight.
    pub report: TunnelReport,
    /// A newer tunnel of the same agent has replaced it.
    pub is_replaced: bool,
    /// Streams that the agent serves at once, from its HELLO; 0 before.
    pub streams_max: usize,
    /// Streams that are open on the wire. Those that the gateway has reset count until the agent
    /// answers.
    pub open_streams: usize,
    /// Bytes granted to the agent and not relayed yet.
    pub committed: usize,
    /// Received bytes of bodies that are not relayed yet.
    pub unread: usize,
    /// Bytes of all streams: bodies received and not relayed, bodies queued for sending, and heads.
    pub held: usize,
}

impl Probe {
    fn of(worker: &Worker) -> Self {
        let now = Instant::now();
        let relay_memory = &worker.tunnels.relay_memory;
        let registry = worker.tunnels.registry.borrow();
        let tunnels = registry.all().map(|session| {
            let is_replaced = !registry.sessions().any(|other| Rc::ptr_eq(other, session));
            TunnelProbe::of(worker, session, is_replaced, now)
        });
        Self {
            requests_in_flight: worker.observers.requests_in_flight.get(),
            crossings_served: worker.upstream.cross_core_served.get(),
            connections: worker.connections.len(),
            address_slots: worker.ingress.arrivals.open(),
            handshakes: worker.ingress.handshakes.len(),
            discards: worker.connections.discards(),
            waiting: worker.tunnels.waiting.in_line(),
            relay_bytes: relay_memory.charged(),
            relay_limit: relay_memory.limit(),
            relay_bytes_of_accounts: relay_memory.charged_by_account(),
            socket_bytes: worker.socket_memory.held(),
            levels: worker.buckets.borrow().levels(now),
            openings: registry.openings().len(),
            tunnels: tunnels.collect(),
            is_draining: worker.lifecycle.is_draining(),
        }
    }
}

impl TunnelProbe {
    fn of(worker: &Worker, session: &Session, is_replaced: bool, now: Instant) -> Self {
        let directory = worker.directory.in_use();
        let report = session.report(
            worker.tunnels.worker,
            &directory,
            &worker.tunnels.releases,
            now,
        );
        let of_endpoint = |endpoint: &mut Endpoint| Self {
            report,
            is_replaced,
            streams_max: endpoint.streams_max(),
            open_streams: endpoint.open_streams(),
            committed: endpoint.committed(),
            unread: endpoint.unread(),
            held: endpoint.held(),
        };
        session.tunnel.with(of_endpoint)
    }
}
