//! One core: a pinned thread with its own reactor, listener, directory snapshot, buckets and tunnels. Nothing of it is
//! shared; others reach it through its mailbox.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gw_shared::id::RequestIds;
use gw_shared::runtime::{self, Driver};
use http::Response;
use http::header::{self, HeaderMap, HeaderValue};

use crate::apex::AddressTables;
use crate::auth::VerifiedTokens;
use crate::client_address::TrustedProxies;
use crate::clock::Timestamp;
use crate::config::HandOver;
use crate::connections::Connections;
use crate::connections::handshakes::Handshakes;
use crate::control::Executor;
use crate::hostname::Region;
use crate::ingress::accept::{self, Acceptor};
use crate::limit::{self, Arrivals, Bucket, Buckets, Level, Rate};
use crate::limits;
use crate::mailbox::{Inbox, Mailbox, Message};
use crate::memory::relay::RelayMemory;
use crate::memory::sockets::{SocketBudget, SocketMemory};
use crate::ownership::WorkerId;
use crate::relay;
use crate::store::Directory;
use crate::telemetry::counters::{Counters, WorkerReport};
use crate::telemetry::request_log::{CaptureBudget, LogQueue, Recorder};
use crate::telemetry::trace::{self, Tracing};
use crate::tls::ServerConfigs;
use crate::tunnel::Registry;
use crate::tunnel::grace::Expected;
use crate::upstream;

/// How often certificates are looked at that may have expired.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(1);
/// How often it is looked whether the last requests are gone.
const LAST_WORDS_TICK: Duration = Duration::from_millis(10);

/// What every worker knows of the others.
pub(crate) struct Peers {
    pub(crate) mailboxes: Vec<Mailbox>,
    /// Share of its time that each worker was busy lately, in per mille.
    pub(crate) busy: Vec<AtomicU32>,
}

/// Everything a worker starts with.
pub(crate) struct Setup {
    pub(crate) id: WorkerId,
    pub(crate) inbox: Inbox,
    pub(crate) peers: Arc<Peers>,
    pub(crate) listeners: Vec<TcpListener>,
    /// Nobody but this process listens on them.
    pub(crate) listeners_are_ours: bool,
    pub(crate) region: Region,
    pub(crate) directory: Arc<Directory>,
    pub(crate) certificates: Arc<ServerConfigs>,
    /// Tunnels that were the predecessor's.
    pub(crate) expected: Arc<Expected>,
    /// Levels from the last stop; `None` if a predecessor sends them later.
    pub(crate) levels: Option<Arc<Vec<Level>>>,
    pub(crate) policy: Policy,
    pub(crate) executor: Executor,
    pub(crate) log: LogQueue,
    /// `None` where there is no collector of spans.
    pub(crate) traces: Option<trace::Destination>,
    pub(crate) connection_limit: usize,
    /// Kernel memory of all workers' callers.
    pub(crate) socket_budget: Arc<SocketBudget>,
    /// Told once the worker takes connections; dropped untold if it cannot.
    pub(crate) up: crossbeam_channel::Sender<()>,
}

/// What the configuration says about serving.
#[derive(Debug, Clone)]
pub(crate) struct Policy {
    pub(crate) hand_over: HandOver,
    pub(crate) trusted_proxies: TrustedProxies,
    /// Agents authenticate by client certificates; otherwise by signing a challenge.
    pub(crate) agent_mtls: bool,
    pub(crate) token_lifetime: Duration,
    /// Bytes that the relayed requests of one worker may hold.
    pub(crate) relay_memory: usize,
    /// Of each address.
    pub(crate) token_requests: Rate,
    pub(crate) enrollment_requests: Rate,
    pub(crate) auth_failures: Rate,
    pub(crate) new_connections: Rate,
    pub(crate) connections_per_address: usize,
}

/// The state of one worker. Tasks share it by reference count; none holds a borrow across an await.
pub(crate) struct Core {
    pub(crate) id: WorkerId,
    pub(crate) region: Region,
    /// {base_url}, the issuer of access tokens.
    pub(crate) issuer: String,
    pub(crate) policy: Policy,
    pub(crate) executor: Executor,
    pub(crate) tokens: RefCell<VerifiedTokens>,
    pub(crate) addresses: AddressTables,
    pub(crate) connections: Rc<Connections>,
    pub(crate) arrivals: Rc<Arrivals>,
    pub(crate) handshakes: Rc<Handshakes>,
    pub(crate) buckets: RefCell<Buckets>,
    pub(crate) tunnels: RefCell<Registry>,
    pub(crate) relay_memory: Rc<RelayMemory>,
    pub(crate) socket_memory: Rc<SocketMemory>,
    pub(crate) counters: Counters,
    pub(crate) recorder: RefCell<Recorder>,
    pub(crate) capture_budget: Rc<CaptureBudget>,
    /// Records of requests to the apex that did not authenticate.
    pub(crate) apex_records: RefCell<Bucket>,
    pub(crate) ids: RequestIds,
    pub(crate) tracing: Tracing,
    pub(crate) crossings_served: Cell<usize>,
    peers: Arc<Peers>,
    /// The second now, and as a value of `Date`.
    date: RefCell<(u64, HeaderValue)>,
    directory: RefCell<Rc<Snapshot>>,
    certificates: RefCell<Arc<ServerConfigs>>,
    pub(crate) acceptor: Acceptor,
    pub(crate) expected: Arc<Expected>,
    draining: Cell<bool>,
    ending: Cell<bool>,
    /// Requests under way.
    pub(crate) journeys: Cell<usize>,
    stop: Stop,
}

/// The directory as requests hold it: counted on this core. The inner count is every core's, and a request must not
/// touch it.
pub(crate) struct Snapshot(Arc<Directory>);

impl Deref for Snapshot {
    type Target = Directory;

    fn deref(&self) -> &Directory {
        &self.0
    }
}

/// Runs a worker on the calling thread until it is told to stop.
pub(crate) fn run(setup: Setup, driver: &Driver) -> io::Result<()> {
    pin(setup.id);
    driver.block_on(serve(setup))?
}

/// Pins the calling thread to a core of its own, as far as there are as many.
fn pin(id: WorkerId) {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    if let Some(core) = cores.get(id.0 % cores.len().max(1))
        && !core_affinity::set_for_current(*core)
    {
        tracing::warn!(worker = id.0, "could not pin this worker to a core");
    }
}

async fn serve(setup: Setup) -> io::Result<()> {
    let socket_memory = SocketMemory::new(setup.id, setup.socket_budget);
    let core = Rc::new(Core {
        id: setup.id,
        issuer: setup.region.base_url(),
        region: setup.region,
        tokens: RefCell::default(),
        addresses: AddressTables::new(
            setup.policy.token_requests,
            setup.policy.enrollment_requests,
            setup.policy.auth_failures,
        ),
        relay_memory: RelayMemory::new(setup.policy.relay_memory, Rc::clone(&socket_memory)),
        arrivals: Arrivals::new(setup.policy.connections_per_address, setup.policy.new_connections),
        handshakes: Handshakes::new(limits::HANDSHAKES),
        policy: setup.policy,
        executor: setup.executor,
        connections: Connections::new(setup.connection_limit, Rc::clone(&socket_memory)),
        socket_memory,
        buckets: RefCell::new(match setup.levels {
            Some(levels) => Buckets::new(&levels, &setup.directory, setup.id, Instant::now()),
            None => Buckets::awaited(),
        }),
        tunnels: RefCell::new(Registry::new(Arc::clone(&setup.expected))),
        counters: Counters::default(),
        recorder: RefCell::new(Recorder::new(setup.log)),
        capture_budget: CaptureBudget::new(limits::CAPTURE_MEMORY),
        apex_records: RefCell::new(Bucket::new(limits::APEX_RECORDS, Instant::now())),
        ids: RequestIds::new(),
        tracing: Tracing::new(setup.traces),
        crossings_served: Cell::new(0),
        peers: setup.peers,
        date: RefCell::new((0, HeaderValue::from_static(""))),
        directory: RefCell::new(Rc::new(Snapshot(setup.directory))),
        certificates: RefCell::new(setup.certificates),
        acceptor: Acceptor::new(setup.listeners, setup.listeners_are_ours)?,
        expected: setup.expected,
        draining: Cell::new(false),
        ending: Cell::new(false),
        journeys: Cell::new(0),
        stop: Stop::default(),
    });
    runtime::spawn(setup.inbox.serve(Rc::clone(&core)));
    accept::accept_all(&core);
    runtime::spawn(keep_deadlines(Rc::clone(&core)));
    runtime::spawn(Rc::clone(&core.socket_memory).keep_within_budget());
    runtime::spawn(cut_expired_tunnels(Rc::clone(&core)));
    runtime::spawn(publish_busy_share(Rc::clone(&core)));
    if let Some(flushing) = core.tracing.keep_flushing() {
        runtime::spawn(flushing);
    }
    // Whoever started us may have given up. Dropped at once: the last one gone says that all have spoken.
    let _ = setup.up.send(());
    drop(setup.up);
    core.stop.requested().await;
    see_off(&core).await;
    core.recorder.borrow_mut().flush();
    core.tracing.flush();
    Ok(())
}

/// What still runs has lost its tunnel: its end is told to callers and recorded. Who does not take it is cut off.
async fn see_off(core: &Core) {
    for last_words in [true, false] {
        let until = Instant::now() + limits::LAST_WORDS;
        while core.journeys.get() > 0 && Instant::now() < until {
            runtime::sleep(LAST_WORDS_TICK).await;
        }
        if last_words {
            core.connections.abort();
        }
    }
}

async fn keep_deadlines(core: Rc<Core>) {
    loop {
        runtime::sleep(limits::DEADLINE_TICK).await;
        core.connections.sweep(Instant::now());
        core.recorder.borrow_mut().flush();
    }
}

/// Ends the tunnels of agents whose certificate has expired. Agents renew theirs long before.
async fn cut_expired_tunnels(core: Rc<Core>) {
    loop {
        runtime::sleep(EXPIRY_INTERVAL).await;
        core.tunnels.borrow().enforce(&core.directory(), Timestamp::now());
    }
}

/// CPU time over wall time, once an interval, for those who consider handing us connections.
async fn publish_busy_share(core: Rc<Core>) {
    let (mut cpu_before, mut wall_before) = (thread_cpu_time(), Instant::now());
    loop {
        runtime::sleep(limits::BUSY_INTERVAL).await;
        let (cpu, wall) = (thread_cpu_time(), Instant::now());
        let share = (cpu - cpu_before).as_micros() * 1000 / (wall - wall_before).as_micros().max(1);
        core.peers.busy[core.id.0].store(u32::try_from(share).unwrap_or(1000), Ordering::Relaxed);
        (cpu_before, wall_before) = (cpu, wall);
    }
}

fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

impl Core {
    pub(crate) fn directory(&self) -> Rc<Snapshot> {
        Rc::clone(&self.directory.borrow())
    }

    pub(crate) fn certificates(&self) -> Arc<ServerConfigs> {
        Arc::clone(&self.certificates.borrow())
    }

    /// Adds `Date` to a response that has none (RFC 9110 §6.6.1).
    pub(crate) fn date(&self, headers: &mut HeaderMap) {
        if headers.contains_key(header::DATE) {
            return;
        }
        let now = SystemTime::now();
        let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut date = self.date.borrow_mut();
        if date.0 != seconds
            && let Ok(value) = HeaderValue::try_from(httpdate::fmt_http_date(now))
        {
            *date = (seconds, value);
        }
        headers.insert(header::DATE, date.1.clone());
    }

    /// A response of ours, with its `Date`.
    pub(crate) fn dated(&self, mut response: Response<Vec<u8>>) -> Response<Vec<u8>> {
        self.date(response.headers_mut());
        response
    }

    pub(crate) fn mailbox(&self, worker: WorkerId) -> &Mailbox {
        &self.peers.mailboxes[worker.0]
    }

    pub(crate) fn workers(&self) -> usize {
        self.peers.mailboxes.len()
    }

    pub(crate) fn busy_per_mille(&self, worker: WorkerId) -> u32 {
        self.peers.busy[worker.0].load(Ordering::Relaxed)
    }

    /// Connections should end, and new ones are not accepted; requests on those that are there are served.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// The drain is over: no request is served any more.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.get()
    }

    /// Does what a message from another thread asks. Never waits: what takes time becomes a task.
    pub(crate) fn handle(self: &Rc<Self>, message: Message) {
        match message {
            Message::Connection(arrival) => runtime::spawn(accept::take_over(Rc::clone(self), *arrival)),
            Message::Relay(crossing) => upstream::serve_crossing(self, *crossing),
            Message::Replay(replay) => runtime::spawn(relay::replay(Rc::clone(self), *replay)),
            Message::Wake(wake) => wake.deliver(),
            Message::Directory(directory) => {
                self.tunnels.borrow().announce(&directory);
                self.tunnels.borrow().enforce(&directory, Timestamp::now());
                self.buckets.borrow_mut().retain(&directory, Instant::now());
                self.counters.services.retain(&directory);
                self.directory.replace(Rc::new(Snapshot(directory)));
            }
            Message::Charge(charge) => self.addresses.serve(*charge),
            Message::Certificates(certificates) => drop(self.certificates.replace(certificates)),
            Message::Levels(levels) => {
                self.buckets.borrow_mut().take_over(&levels, &self.directory(), self.id, Instant::now());
            }
            Message::Take(request) => limit::serve_predecessor(self, *request),
            // Fails, like each of these answers, when it comes too late.
            Message::Succeeded(succeeded) => {
                let levels = self.buckets.borrow_mut().hand_over(succeeded.charges, Instant::now());
                drop(succeeded.levels.try_send(levels));
            }
            Message::ReportLevels(reply) => drop(reply.try_send(self.buckets.borrow().levels(Instant::now()))),
            Message::ReportQuiet(reply) => drop(reply.try_send(self.is_quiet())),
            Message::EndQuiet => self.connections.end_quiet(Instant::now()),
            Message::Scrape(scrape) => drop(scrape.reply.try_send(self.report(scrape.with_services))),
            Message::Drain { successor } => self.drain(successor),
            Message::End => {
                self.ending.set(true);
                self.tunnels.borrow().end();
            }
            Message::Stop => {
                self.draining.set(true);
                self.ending.set(true);
                self.acceptor.abandon();
                self.tunnels.borrow().cut();
                self.stop.request();
            }
        }
    }

    fn drain(&self, has_successor: bool) {
        self.draining.set(true);
        self.acceptor.stop(has_successor);
        let idle = if has_successor { limits::DRAIN_IDLE_SUCCEEDED } else { limits::DRAIN_IDLE };
        self.connections.drain(Instant::now(), idle);
        self.tunnels.borrow().drain();
    }

    fn is_quiet(&self) -> bool {
        self.journeys.get() == 0 && self.crossings_served.get() == 0 && self.connections.are_quiet(Instant::now())
    }

    fn report(&self, with_services: bool) -> WorkerReport {
        WorkerReport {
            worker: self.id,
            totals: self.counters.totals(),
            refusals: self.counters.refusals(),
            turned_away: self.counters.turned_away.values(),
            ended_early: self.ended_early(),
            connections: self.connections.len(),
            crossings_served: self.crossings_served.get(),
            socket_bytes: self.socket_memory.held(),
            socket_limit: self.socket_memory.limit(),
            busy_per_mille: self.busy_per_mille(self.id),
            tunnels: self.tunnels.borrow().report(self.id, &self.directory()),
            services: if with_services { self.counters.services.report() } else { Vec::new() },
        }
    }

    fn ended_early(&self) -> BTreeMap<&'static str, u64> {
        let mut reasons = self.counters.ended_early();
        let elsewhere = [("idle", &self.connections.evicted), ("memory", &self.socket_memory.shed)];
        let counted = elsewhere.into_iter().map(|(reason, counter)| (reason, counter.value()));
        reasons.extend(counted.filter(|(_, count)| *count > 0));
        reasons
    }
}

/// A request to stop, waited for by the worker's main task.
#[derive(Default)]
struct Stop {
    requested: Cell<bool>,
    waiting: RefCell<Option<Waker>>,
}

impl Stop {
    fn request(&self) {
        self.requested.set(true);
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    async fn requested(&self) {
        std::future::poll_fn(|cx| {
            if self.requested.get() {
                return Poll::Ready(());
            }
            self.waiting.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}
