//! One core: a pinned thread with its own reactor, listeners, directory snapshot, buckets and
//! tunnels. Workers share no mutable state; other threads reach a worker through its mailbox.

mod build;
mod handles;
mod message;
mod stop;

use std::cell::{Cell, RefCell};
use std::io;
use std::net::TcpListener;
use std::panic::resume_unwind;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::limits;
use gw_base::agent_releases::AgentReleases;
use gw_base::clock::Timestamp;
use gw_base::mailbox::Inbox;
use gw_base::process::freeze::AwaitedRead;
use gw_base::service::affinity::AffinityKey;
use gw_base::tls::ServerConfigs;
use gw_interface::config::Config;
use gw_interface::control_plane::Executor;
use gw_interface::node_connections::NodeConnections;
use gw_interface::rate_limit::{self, Buckets, Level};
use gw_interface::workers::{LostNode, ViewApplied};
use gw_region::owners::ownership::WorkerId;
use gw_region::{RegionKeys, RegionSignals};
use gw_shared::net::Socket;
use gw_shared::runtime::{self, Driver};
use gw_store::{Directory, Service};
use gw_telemetry::counters::{Counters, ReasonCounts, WorkerReport, with_shares};
use gw_telemetry::request_log::LogQueue;
use gw_telemetry::trace;

pub use self::handles::WorkerHandles;
pub(crate) use self::message::NewView;
pub use self::message::{Succeeded, WorkerMessage};
use self::stop::Stop;
use crate::apex::NodeQuestions;
use crate::connections::Connections;
use crate::current::{Current, UseNewer};
use crate::ingress::Ingress;
use crate::lifecycle::Lifecycle;
use crate::memory::sockets::{SocketBudget, SocketMemory};
use crate::relay;
use crate::request_scope::Observers;
use crate::route::Router;
use crate::tunnel::Tunnels;
use crate::tunnel::waiting::grace::TunnelGrace;
use crate::upstream::Upstream;
use crate::upstream::cross_node::Nodes;

/// Interval of the check for tunnels that are to end.
const TUNNELS_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the check whether the last requests have ended.
const LAST_REQUESTS_TICK: Duration = Duration::from_millis(10);

/// Everything a worker starts with. [`Setup::again`] makes that of a later start.
pub struct Setup {
    /// Id of the worker: its index among the workers of the process.
    pub id: WorkerId,
    /// Handles of all workers of the process.
    pub handles: Arc<WorkerHandles>,
    /// Listening sockets for callers and agents.
    pub listeners: Vec<TcpListener>,
    /// No other process listens on them.
    pub listeners_are_ours: bool,
    /// Listening sockets for plain HTTP; empty without `listen_http`.
    pub plain_listeners: Vec<TcpListener>,
    /// `None` if this gateway is the only node of its region.
    pub region: Option<RegionSetup>,
    /// Directory at the start. A later publication replaces it.
    pub directory: Arc<Directory>,
    /// `None` if no other process changes the records.
    pub awaited_read: Option<Arc<AwaitedRead>>,
    /// Server certificates at the start. A later publication replaces them.
    pub certificates: Arc<ServerConfigs>,
    /// Key that signs affinity cookies.
    pub affinity_key: AffinityKey,
    /// Tunnels that agents had with the predecessor.
    pub tunnel_grace: Arc<TunnelGrace>,
    /// Levels from the last stop; `None` if a predecessor sends them later.
    pub levels: Option<Arc<Vec<Level>>>,
    /// Configuration of the gateway.
    pub config: Arc<Config>,
    /// Agent versions that are served, and the programs for agents that update themselves.
    pub agent_releases: Arc<AgentReleases>,
    /// Submits jobs to the control plane.
    pub executor: Executor,
    /// Sending end of the queue of the request log.
    pub log: LogQueue,
    /// `None` without a collector of spans.
    pub traces: Option<trace::SpanDestination>,
    /// Largest number of connections of this worker.
    pub connection_limit: usize,
    /// Kernel memory of the callers of all workers.
    pub socket_budget: Arc<SocketBudget>,
}

/// What a worker of a node in a region of several nodes starts with.
pub struct RegionSetup {
    /// Region keys that this node accepts.
    pub keys: RegionKeys,
    /// Lease of this node, and what its workers learn from other nodes.
    pub signals: Arc<RegionSignals>,
    /// For other nodes.
    pub listeners: Vec<TcpListener>,
    /// Takes connections of other nodes' control planes.
    pub control_plane: NodeConnections,
    /// Sends questions of the apex to the other nodes.
    pub apex_questions: NodeQuestions,
}

impl Setup {
    /// What this worker starts again with after a panic. Its buckets start full.
    pub fn again(&self, directory: Arc<Directory>) -> io::Result<Self> {
        let clones = |listeners: &[TcpListener]| {
            listeners
                .iter()
                .map(TcpListener::try_clone)
                .collect::<io::Result<Vec<_>>>()
        };
        let of_region = |region: &RegionSetup| {
            io::Result::Ok(RegionSetup {
                keys: region.keys.clone(),
                signals: Arc::clone(&region.signals),
                listeners: clones(&region.listeners)?,
                control_plane: region.control_plane.clone(),
                apex_questions: region.apex_questions.clone(),
            })
        };
        Ok(Self {
            id: self.id,
            handles: Arc::clone(&self.handles),
            listeners: clones(&self.listeners)?,
            listeners_are_ours: self.listeners_are_ours,
            plain_listeners: clones(&self.plain_listeners)?,
            region: self.region.as_ref().map(of_region).transpose()?,
            directory,
            awaited_read: self.awaited_read.clone(),
            certificates: Arc::clone(&self.certificates),
            affinity_key: self.affinity_key.clone(),
            tunnel_grace: Arc::clone(&self.tunnel_grace),
            levels: Some(Arc::default()),
            config: Arc::clone(&self.config),
            agent_releases: Arc::clone(&self.agent_releases),
            executor: self.executor.clone(),
            log: self.log.clone(),
            traces: self.traces.clone(),
            connection_limit: self.connection_limit,
            socket_budget: Arc::clone(&self.socket_budget),
        })
    }
}

/// One worker: its parts, and how messages change them. No task holds a borrow across an await.
pub(crate) struct Worker {
    id: WorkerId,
    handles: Arc<WorkerHandles>,
    /// Number of the last publication that this worker uses.
    published: Cell<u64>,
    use_newer: Rc<UseNewer>,
    pub(crate) lifecycle: Rc<Lifecycle>,
    pub(crate) directory: Rc<Current<Directory>>,
    certificates: Rc<Current<ServerConfigs>>,
    counters: Rc<Counters>,
    pub(crate) observers: Rc<Observers>,
    pub(crate) socket_memory: Rc<SocketMemory>,
    pub(crate) connections: Rc<Connections>,
    pub(crate) buckets: Rc<RefCell<Buckets>>,
    pub(crate) tunnels: Rc<Tunnels>,
    pub(crate) upstream: Rc<Upstream>,
    pub(crate) router: Rc<Router>,
    pub(crate) ingress: Rc<Ingress>,
    /// `None` if this gateway is the only node of its region.
    nodes: Option<Rc<Nodes>>,
    stop: Stop,
}

/// Runs a worker on the calling thread until it is stopped. Panics if the worker did, once its
/// connections are closed. `up` receives one message once the worker accepts connections; it is
/// dropped without one if the worker cannot start.
pub fn run(
    setup: Setup,
    inbox: Inbox<WorkerMessage>,
    up: crossbeam_channel::Sender<()>,
    driver: &Driver,
) -> io::Result<()> {
    pin(setup.id);
    driver
        .run(serve(setup, inbox, up))?
        .unwrap_or_else(|panic| resume_unwind(panic))
}

/// Pins the calling thread to a core. Workers share cores if there are fewer cores than workers.
fn pin(id: WorkerId) {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    if let Some(core) = cores.get(id.0 % cores.len().max(1))
        && !core_affinity::set_for_current(*core)
    {
        tracing::warn!(worker = id.0, "could not pin this worker to a core");
    }
}

async fn serve(
    setup: Setup,
    inbox: Inbox<WorkerMessage>,
    up: crossbeam_channel::Sender<()>,
) -> io::Result<()> {
    Worker::built(setup)?.serve(inbox, up).await;
    Ok(())
}

async fn keep_deadlines(worker: Rc<Worker>) {
    loop {
        runtime::sleep(limits::DEADLINE_TICK).await;
        worker.tunnels.freeze.look(Instant::now());
        worker.connections.sweep(Instant::now());
        worker.observers.recorder.borrow_mut().flush();
    }
}

/// Ends the tunnels of agents with an expired certificate, which agents renew long before, and all
/// tunnels while this node is suspended. Also has agents use a certificate of another authority.
async fn end_tunnels(worker: Rc<Worker>) {
    loop {
        runtime::sleep(TUNNELS_INTERVAL).await;
        {
            let registry = worker.tunnels.registry.borrow();
            registry.enforce(&worker.directory.in_use(), Timestamp::now());
            if worker.tunnels.is_suspended() {
                registry.relocate(|_| true, |_| false);
            }
        }
        worker.tunnels.move_renewed(Instant::now());
    }
}

/// Checks which agents of services with several tunnels answer.
async fn watch_tunnels(worker: Rc<Worker>) {
    let mut checked = Instant::now();
    let mut pause = limits::PING_EVERY;
    loop {
        runtime::sleep(pause).await;
        let now = Instant::now();
        let was_late = now.saturating_duration_since(checked) > pause + limits::PING_CHECK_LATE;
        let reserves = worker.tunnels.registry.borrow_mut().use_late_reserves(now);
        for label in reserves {
            worker.tunnels.waiting.look_again(&label);
        }
        let has_several = worker.tunnels.registry.borrow_mut().watch(was_late, now);
        for label in worker.tunnels.registry.borrow().several() {
            worker.tunnels.waiting.look_again(label);
        }
        checked = now;
        pause = if has_several {
            limits::PING_CHECK
        } else {
            limits::PING_EVERY
        };
    }
}

/// Publishes CPU time over wall time once an interval, for workers that consider handing
/// connections over.
async fn publish_busy_share(worker: Rc<Worker>) {
    let mut cpu_before = thread_cpu_time();
    let mut wall_before = Instant::now();
    loop {
        runtime::sleep(limits::BUSY_INTERVAL).await;
        let cpu = thread_cpu_time();
        let wall = Instant::now();
        let share = (cpu - cpu_before).as_micros() * 1000 / (wall - wall_before).as_micros().max(1);
        worker.handles.busy[worker.id.0]
            .store(u32::try_from(share).unwrap_or(1000), Ordering::Relaxed);
        (cpu_before, wall_before) = (cpu, wall);
    }
}

fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

impl Worker {
    /// Builds a worker, which uses what was published before.
    pub(crate) fn built(setup: Setup) -> io::Result<Rc<Self>> {
        let worker = Rc::new(Self::new(setup)?);
        let weak = Rc::downgrade(&worker);
        let use_newer = move || weak.upgrade().iter().for_each(|it| it.use_published());
        // Not set before.
        let _ = worker.use_newer.0.set(Box::new(use_newer));
        worker.use_published();
        Ok(worker)
    }

    /// Uses what was published since the last call.
    fn use_published(&self) {
        // A borrow that is held here is an error of the caller, also when nothing is newer.
        debug_assert!(self.tunnels.registry.try_borrow_mut().is_ok());
        debug_assert!(self.buckets.try_borrow_mut().is_ok());
        if let Some((number, messages)) = self.handles.published_since(self.published.get()) {
            self.published.set(number);
            messages
                .into_iter()
                .for_each(|message| self.handle(message));
        }
    }

    /// Accepts connections and handles messages until the worker is stopped. `up` is as in [`run`].
    pub(crate) async fn serve(
        self: Rc<Self>,
        inbox: Inbox<WorkerMessage>,
        up: crossbeam_channel::Sender<()>,
    ) {
        let handler = Rc::clone(&self);
        runtime::spawn_essential(inbox.serve(self.id, move |message| {
            // Before each message: one about a publication may have found no room.
            handler.use_published();
            handler.handle(message);
        }));
        self.ingress.accept_all();
        runtime::spawn_essential(keep_deadlines(Rc::clone(&self)));
        runtime::spawn_essential(Rc::clone(&self.socket_memory).keep_within_budget());
        runtime::spawn_essential(end_tunnels(Rc::clone(&self)));
        runtime::spawn_essential(watch_tunnels(Rc::clone(&self)));
        runtime::spawn_essential(publish_busy_share(Rc::clone(&self)));
        if let Some(flushing) = self.observers.tracing.keep_flushing() {
            runtime::spawn(flushing);
        }
        // Fails if the process gave up starting. Dropped at once: the end of the channel says that
        // every worker is up.
        let _ = up.send(());
        drop(up);
        self.stop.requested().await;
        self.end_last_requests().await;
        self.observers.recorder.borrow_mut().flush();
        self.observers.tracing.flush();
    }

    /// Does what a message of another thread asks. Never blocks: what takes time becomes a task.
    fn handle(&self, message: WorkerMessage) {
        match message {
            WorkerMessage::Connection(connection) => {
                runtime::spawn(Rc::clone(&self.ingress).take_over(*connection));
            }
            WorkerMessage::Relay(request) => relay::serve_for_worker(&self.upstream, *request),
            WorkerMessage::Replay(replay) => {
                runtime::spawn(Rc::clone(&self.router.relay).replay(*replay));
            }
            WorkerMessage::Wake(wake) => wake.deliver(),
            // It was used before.
            WorkerMessage::Published => {}
            WorkerMessage::Directory(directory) => self.use_directory(directory),
            WorkerMessage::RecordsRead(began) => {
                self.tunnels.freeze.records_were_read(began, Instant::now());
            }
            WorkerMessage::ChargeApex(charge) => self.router.apex.limits.serve(*charge),
            WorkerMessage::View(new) => self.use_view(*new),
            WorkerMessage::NodeLevels(levels) => {
                self.buckets.borrow_mut().receive(
                    &levels,
                    &self.directory.in_use(),
                    self.id,
                    Instant::now(),
                );
            }
            WorkerMessage::MoveTunnels { via } => {
                self.tunnels
                    .registry
                    .borrow()
                    .relocate(|_| false, |node| node == via);
            }
            WorkerMessage::NodeLost(LostNode {
                slot,
                session,
                until,
            }) => {
                self.nodes
                    .iter()
                    .for_each(|nodes| nodes.end_connections(session));
                self.tunnels.registry.borrow().lose_node(slot, until);
            }
            WorkerMessage::NodeTls(tls) => self
                .nodes
                .iter()
                .for_each(|nodes| nodes.use_tls(Arc::clone(&tls))),
            WorkerMessage::Certificates(certificates) => {
                self.certificates.replace(certificates);
                self.tunnels.use_authorities();
            }
            WorkerMessage::Levels(levels) => {
                self.buckets.borrow_mut().take_over(
                    &levels,
                    &self.directory.in_use(),
                    self.id,
                    Instant::now(),
                );
            }
            WorkerMessage::ChargeForPredecessor(charge) => {
                rate_limit::charge_for_predecessor(
                    &self.buckets,
                    &self.directory.in_use(),
                    *charge,
                );
            }
            // The replies below fail when they come too late.
            WorkerMessage::Succeeded(succeeded) => {
                let levels = self
                    .buckets
                    .borrow_mut()
                    .hand_over(succeeded.buckets, Instant::now());
                drop(succeeded.levels.try_send(levels));
            }
            WorkerMessage::LinkToSuccessor(socket) => match Socket::from_unix(socket) {
                Ok(socket) => self.upstream.successor.add(socket),
                Err(error) => tracing::warn!(%error, "no link to the successor"),
            },
            WorkerMessage::LinkOfPredecessor(socket) => match Socket::from_unix(socket) {
                Ok(socket) => {
                    let upstream = Rc::clone(&self.upstream);
                    runtime::spawn(relay::serve_predecessor(upstream, socket));
                }
                Err(error) => tracing::warn!(%error, "no link of the predecessor"),
            },
            WorkerMessage::ReportLevels(reply) => {
                drop(reply.try_send(self.buckets.borrow().levels(Instant::now())));
            }
            WorkerMessage::ReportAwaited(reply) => {
                drop(reply.try_send(self.tunnels.awaited_services(Instant::now())));
            }
            WorkerMessage::ReportQuiet(reply) => drop(reply.try_send(self.is_quiet())),
            WorkerMessage::EndQuiet => self.connections.end_quiet(Instant::now()),
            WorkerMessage::Scrape(scrape) => {
                drop(scrape.reply.try_send(self.report(scrape.with_services)));
            }
            WorkerMessage::Drain { successor } => self.drain(successor),
            WorkerMessage::End => {
                self.lifecycle.end();
                self.tunnels.registry.borrow().end();
            }
            WorkerMessage::Stop => {
                self.lifecycle.drain();
                self.lifecycle.end();
                self.ingress.acceptor.abandon();
                self.tunnels.registry.borrow().cut();
                self.nodes.iter().for_each(|nodes| nodes.cut());
                self.upstream.successor.cut();
                self.stop.request();
            }
            #[cfg(debug_assertions)]
            WorkerMessage::Panic => runtime::spawn_essential(async { panic!("injected") }),
        }
    }

    fn use_directory(&self, directory: Arc<Directory>) {
        let mut tunnels = self.tunnels.registry.borrow_mut();
        tunnels.announce(&directory);
        tunnels.enforce(&directory, Timestamp::now());
        tunnels.retain(&directory);
        self.buckets.borrow_mut().retain(&directory, Instant::now());
        self.counters.services.retain(&directory);
        self.directory.replace(directory);
    }

    fn use_view(
        &self,
        NewView {
            number,
            view,
            applied,
        }: NewView,
    ) {
        let Some(nodes) = &self.nodes else { return };
        self.observers
            .ids
            .use_node_slot(view.placement().here().get());
        let left = nodes.use_view(view);
        let is_elsewhere = |service: &Service| nodes.peering.is_elsewhere(&service.hostname);
        let levels =
            self.buckets
                .borrow_mut()
                .leave(&self.directory.in_use(), is_elsewhere, Instant::now());
        self.tunnels
            .registry
            .borrow()
            .relocate(is_elsewhere, |slot| left.contains(&slot));
        self.tunnels.waiting.look_for_moves();
        // Fails if the control plane has ended.
        drop(applied.send(ViewApplied {
            number,
            worker: self.id,
            levels,
        }));
    }

    fn drain(&self, has_successor: bool) {
        self.lifecycle.drain();
        if has_successor {
            self.lifecycle.succeed();
            self.tunnels.waiting.look_for_moves();
        }
        self.ingress.acceptor.stop(has_successor);
        let idle = if has_successor {
            limits::DRAIN_IDLE_SUCCEEDED
        } else {
            limits::DRAIN_IDLE
        };
        self.connections.drain(Instant::now(), idle);
        self.tunnels.registry.borrow().drain();
    }

    /// Waits until the requests on cut tunnels have told their callers and are recorded. Aborts the
    /// connections of callers that do not read in time.
    async fn end_last_requests(&self) {
        for has_aborted in [false, true] {
            let until = Instant::now() + limits::LAST_WORDS;
            while self.observers.requests_in_flight.get() > 0 && Instant::now() < until {
                runtime::sleep(LAST_REQUESTS_TICK).await;
            }
            if !has_aborted {
                self.connections.abort();
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.observers.requests_in_flight.get() == 0
            && self.upstream.cross_core_served.get() == 0
            && self.upstream.link_requests_served.get() == 0
            && self.connections.are_quiet(Instant::now())
    }

    fn report(&self, with_services: bool) -> WorkerReport {
        let tunnels = self.tunnels.registry.borrow().report(
            self.id,
            &self.directory.in_use(),
            &self.tunnels.releases,
        );
        WorkerReport {
            worker: self.id,
            totals: self.counters.totals(),
            by_reason: self.by_reason(),
            connections: self.connections.len(),
            crossings_served: self.upstream.cross_core_served.get(),
            node_links: self.nodes.as_ref().map_or(0, |nodes| nodes.open_links()),
            node_requests: self.upstream.link_requests_served.get(),
            relay_bytes: self.tunnels.relay_memory.charged(),
            relay_limit: self.tunnels.relay_memory.limit(),
            socket_bytes: self.socket_memory.held(),
            socket_limit: self.socket_memory.limit(),
            restarts: self.handles.restarts[self.id.0].load(Ordering::Relaxed),
            busy_per_mille: self.handles.busy[self.id.0].load(Ordering::Relaxed),
            tunnels: with_shares(tunnels),
            tunnels_of_another_authority: self.tunnels.of_another_authority(),
            refused_versions: self.tunnels.registry.borrow().refused_versions(),
            ended_tunnels: self.tunnels.registry.borrow().ended_tunnels(),
            services: if with_services {
                self.counters.services.report()
            } else {
                Vec::new()
            },
        }
    }

    fn by_reason(&self) -> ReasonCounts {
        let mut reasons = self.counters.by_reason();
        let elsewhere = [
            ("idle", &self.connections.evicted),
            ("unfinished", &self.connections.ended_unfinished),
            ("memory", &self.socket_memory.shed),
        ];
        let counted = elsewhere
            .into_iter()
            .map(|(reason, counter)| (reason, counter.value()));
        let counted = counted.filter(|(_, count)| *count > 0);
        reasons.ended_early.extend(counted);
        reasons
    }
}
