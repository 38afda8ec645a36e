//! Starting, replacing and stopping a gateway: listeners, workers, control plane.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, Sender};
use futures_util::FutureExt;
use gw_shared::id::RequestIds;
use gw_shared::runtime::{self, Driver, DriverError};
use gw_shared::telemetry::mask::Masker;
use gw_shared::telemetry::trace::{Exporter, Identity, SpanCounts};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::admin::{self, Admin};
use crate::config::Config;
use crate::control::{self, Control, ControlError, Executor, JobQueue};
use crate::limit::{Level, SuccessorBuckets, levels};
use crate::limits;
use crate::mailbox::mailbox;
use crate::memory::sockets::{PressureWatch, SocketBudget, TcpMemory};
use crate::ownership::WorkerId;
use crate::process::listeners::{Inherited, ListenError, Listeners};
use crate::process::takeover::{Predecessor, Program, Successor, TakeoverError};
use crate::telemetry::counters::WorkerReport;
use crate::telemetry::request_log::{LogError, RequestLog};
use crate::telemetry::timeseries::{Sampler, Series};
use crate::telemetry::trace;
use crate::tunnel::grace::TunnelGrace;
use crate::worker::{self, Message, Peers, Setup, Succeeded};

/// How often a drain looks whether the last request has ended: in its first second, and later.
const DRAIN_TICK_FIRST: Duration = Duration::from_millis(4);
const DRAIN_TICK: Duration = Duration::from_millis(20);
/// Where a stop keeps the levels of rate limits for the next start, in the data folder.
const LEVELS_FILE: &str = "rate-limits.json";
/// How long administration requests under way may take once the admin listener is to stop.
const ADMIN_ENDS_WITHIN: Duration = Duration::from_secs(2);

/// A running gateway. Dropping it stops it at once; see [`Gateway::drain`].
pub struct Gateway {
    control: Arc<Control>,
    peers: Arc<Peers>,
    request_log: Arc<RequestLog>,
    series: Arc<Series>,
    /// Of `series`; `None` only while draining.
    sampler: Option<Sampler>,
    address: SocketAddr,
    admin_address: SocketAddr,
    /// Given up in a drain.
    listeners: Option<Listeners>,
    draining: Arc<AtomicBool>,
    drain_within: Duration,
    levels_path: PathBuf,
    workers: Vec<JoinHandle<()>>,
    executor: Executor,
    /// The threads of the control plane. One ends when `executor` is closed; what waits there then can be taken on.
    jobs: Option<JoinHandle<JobQueue>>,
    admin: Option<AdminThread>,
    /// Of spans.
    exporter: Option<Exporter>,
    /// Disconnects when the process that this one has taken over from has ended; `None` if there was none.
    predecessor: Option<Receiver<Infallible>>,
    has_successor: bool,
    /// `None` where the kernel does not show its limits on TCP memory.
    _pressure_watch: Option<PressureWatch>,
}

/// The thread that serves the admin listener; it ends when `stop` is dropped.
struct AdminThread {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Traces(#[from] gw_shared::telemetry::trace::StartError),
    #[error("taking over: {0}")]
    Takeover(#[from] TakeoverError),
    #[error(transparent)]
    RequestLog(#[from] LogError),
    #[error("a worker did not start; see the log above")]
    Worker,
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

impl Gateway {
    /// Starts a gateway; it takes connections when this returns.
    pub fn start(config: &Config) -> Result<Self, StartError> {
        Self::start_after(config, None)
    }

    /// Starts a gateway in place of another process, if there is one, which drains when this returns.
    pub fn start_after(config: &Config, mut predecessor: Option<&mut Predecessor>) -> Result<Self, StartError> {
        let driver = Driver::choose()?;
        let descriptors = runtime::raise_open_file_limit();
        driver.log();
        let inherited = match &mut predecessor {
            Some(predecessor) => predecessor.listeners()?,
            None => Inherited::from_service_manager()?,
        };
        let listeners = Listeners::open(config, inherited)?;
        let address = listeners.address().map_err(ListenError::from)?;
        let admin_address = listeners.admin_address().map_err(ListenError::from)?;
        let tunnel_grace = match &mut predecessor {
            Some(predecessor) => TunnelGrace::new(predecessor.take_store()?, Instant::now()),
            None => TunnelGrace::default(),
        };

        let (mailboxes, inboxes): (Vec<_>, Vec<_>) = (0..config.workers).map(|_| mailbox(limits::MAILBOX)).unzip();
        let peers = Peers::new(mailboxes);
        let control = Arc::new(Control::open(config, peers.clone())?);
        let masker = Masker::new([control.admin_token()]);
        let request_log = Arc::new(RequestLog::open_masking(&config.data_dir.join("requests"), masker.clone())?);
        let series = Arc::new(Series::open(&config.data_dir.join("series.sqlite")));
        let (directory, certificates) = control.initial_state()?;
        let levels_path = config.data_dir.join(LEVELS_FILE);
        let levels = match &predecessor {
            Some(_) => None,
            None => Some(Arc::new(levels::load(&levels_path, SystemTime::now()))),
        };
        let (executor, jobs) = control::executor();
        let tunnel_grace = Arc::new(tunnel_grace);
        let (exporter, traces) = start_exporter(config, masker)?.unzip();
        let (up, ups) = crossbeam_channel::bounded(config.workers);
        let socket_budget = Arc::new(SocketBudget::beside(config.relay_memory, config.workers));
        let shared_config = Arc::new(config.clone());
        let mut workers = Vec::with_capacity(config.workers);
        let shares = listeners.shares(config.workers).map_err(ListenError::from)?;
        for (number, (inbox, share)) in inboxes.into_iter().zip(shares).enumerate() {
            let setup = Setup {
                id: WorkerId(number),
                peers: Arc::clone(&peers),
                listeners: share,
                listeners_are_ours: listeners.are_ours,
                directory: Arc::clone(&directory),
                certificates: Arc::clone(&certificates),
                tunnel_grace: Arc::clone(&tunnel_grace),
                levels: levels.clone(),
                config: Arc::clone(&shared_config),
                executor: executor.clone(),
                log: request_log.queue(),
                traces: traces.clone(),
                socket_budget: Arc::clone(&socket_budget),
                connection_limit: connections_per_worker(descriptors, config.workers),
            };
            let (driver, up) = (driver.clone(), up.clone());
            workers.push(spawn(format!("gw-worker-{number}"), move || {
                if let Err(error) = worker::run(setup, inbox, up, &driver) {
                    tracing::error!(worker = number, %error, "worker did not start");
                }
            })?);
        }
        drop(up);
        if ups.iter().count() < config.workers {
            peers.tell_all(|| Message::Stop);
            return Err(StartError::Worker);
        }
        let reports = {
            let control = Arc::clone(&control);
            move || control.reports_with_services()
        };
        let sampler = Sampler::start(Arc::clone(&series), reports).map_err(StartError::Thread)?;
        let mut gateway = Self {
            sampler: Some(sampler),
            series,
            control,
            peers,
            request_log,
            address,
            admin_address,
            listeners: Some(listeners),
            draining: Arc::default(),
            drain_within: config.drain,
            levels_path,
            workers,
            executor,
            jobs: None,
            admin: None,
            exporter,
            predecessor: None,
            has_successor: false,
            _pressure_watch: watch_tcp_memory(&socket_budget)?,
        };
        gateway.serve_jobs(jobs)?;
        gateway.serve_admin()?;
        // After all steps that can fail, so that a failed start keeps the levels for the next one. With a predecessor there
        // is no file.
        levels::remove(&gateway.levels_path);
        tracing::info!(%address, %admin_address, workers = config.workers, region = config.region.apex(), "gateway");
        if let Some(predecessor) = predecessor {
            gateway.predecessor = Some(predecessor.serving(&gateway.control, &gateway.peers)?);
        }
        Ok(gateway)
    }

    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Where callers and agents connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// What became of spans; `None` where there is no collector.
    pub fn span_counts(&self) -> Option<&Arc<SpanCounts>> {
        self.exporter.as_ref().map(Exporter::counts)
    }

    /// Starts `program` beside this process and gives it listeners and store; what is left to do here then is to drain.
    /// Returns its process id. On an error nothing has changed.
    fn hand_over(&mut self, program: Option<&Program>) -> Result<u32, TakeoverError> {
        let (Some(program), Some(listeners)) = (program, &self.listeners) else { return Err(TakeoverError::NoProgram) };
        if std::process::id() == 1 {
            return Err(TakeoverError::FirstProcess);
        }
        let mut successor = Successor::start(program, listeners)?;
        let id = successor.id().unwrap_or_default();
        successor.wait_until_ready()?;
        let jobs = self.pause_control_plane();
        let given = match successor.give_store(self.live_tunnels()) {
            Ok(()) => {
                self.give_buckets(successor);
                Ok(())
            }
            Err(error) => {
                // Ended: the store is free.
                drop(successor);
                Err(error)
            }
        };
        if given.is_err()
            && let Err(error) = self.control.reopen_store()
        {
            tracing::error!(%error, "the store does not open again: requests are served, but nothing can be changed");
        }
        // After a success too: what waits is told to try again.
        let resumed = jobs.map_or(Ok(()), |jobs| self.serve_jobs(jobs));
        let resumed = resumed.and_then(|()| if given.is_err() { self.serve_admin() } else { Ok(()) });
        if let Err(error) = resumed {
            tracing::error!(%error, "the control plane does not go on");
        }
        self.has_successor = given.is_ok();
        given.map(|()| id)
    }

    /// Lets the control plane finish what it is doing and closes the store. What comes meanwhile waits.
    fn pause_control_plane(&mut self) -> Option<JobQueue> {
        if let Some(admin) = self.admin.take() {
            admin.stop();
        }
        self.executor.close();
        let jobs = self.jobs.take().and_then(joined);
        self.control.close_store();
        jobs
    }

    /// Has the successor admit all requests from here on, those of this process included.
    fn give_buckets(&self, successor: Successor) {
        let (buckets, charges) = SuccessorBuckets::new();
        let levels =
            self.bucket_levels(|levels| Message::Succeeded(Box::new(Succeeded { buckets: buckets.clone(), levels })));
        if let Err(error) = successor.follow(levels, charges, &self.control, &self.peers) {
            tracing::warn!(%error, "the successor is gone: no more requests are taken, running ones may end");
            self.peers.tell_all(|| Message::End);
        }
    }

    /// Asks the workers for the levels of their buckets. Logs how many workers did not answer.
    fn bucket_levels(&self, question: impl Fn(Sender<Vec<Level>>) -> Message) -> Vec<Level> {
        let levels = self.peers.ask_all_within(limits::LEVELS_WITHIN, question);
        let missing = self.workers.len() - levels.len();
        if missing > 0 {
            tracing::warn!("levels of {missing} workers are missing: their limits start full");
        }
        levels.concat()
    }

    /// Keeps the levels of rate limits for the next start.
    fn keep_levels(&self) {
        let levels = self.bucket_levels(Message::ReportLevels);
        if let Err(error) = levels::store(&self.levels_path, levels, SystemTime::now()) {
            tracing::error!(path = %self.levels_path.display(), %error, "rate limits will start full");
        }
    }

    fn serve_jobs(&mut self, jobs: JobQueue) -> Result<(), StartError> {
        let control = Arc::clone(&self.control);
        self.jobs = Some(spawn("gw-executor".to_owned(), move || jobs.serve(&control))?);
        Ok(())
    }

    fn serve_admin(&mut self) -> Result<(), StartError> {
        let Some(listeners) = &self.listeners else { return Ok(()) };
        let listener = listeners.admin.try_clone().map_err(ListenError::from)?;
        let (control, request_log) = (Arc::clone(&self.control), Arc::clone(&self.request_log));
        let (spans, series) = (self.span_counts().cloned(), Arc::clone(&self.series));
        let draining = Arc::clone(&self.draining);
        let admin = Admin::new(control, request_log, spans, series, draining, self.address.port());
        let (stop, stopped) = oneshot::channel();
        let thread = spawn("gw-control".to_owned(), move || serve_admin(listener, admin, stopped))?;
        self.admin = Some(AdminThread { stop, thread });
        Ok(())
    }

    /// By label of their service, how many tunnels take requests.
    fn live_tunnels(&self) -> BTreeMap<String, usize> {
        let mut tunnels = BTreeMap::new();
        for tunnel in self.control.reports().into_iter().flat_map(|report| report.tunnels) {
            if !tunnel.draining {
                *tunnels.entry(tunnel.service).or_default() += 1;
            }
        }
        tunnels
    }

    /// Takes no new connections, serves those that are there until they end (for as long as the configuration says),
    /// has the agents end their tunnels, then stops.
    pub fn drain(mut self) {
        self.draining.store(true, Ordering::Relaxed);
        let (successor, began) = (self.has_successor, Instant::now());
        self.peers.tell_all(|| Message::Drain { successor });
        self.listeners = None;
        self.wait_within(self.drain_within, || {
            if !successor {
                self.end_quiet_connections();
            }
            self.all_report(|report| report.connections == 0 && report.crossings_served == 0)
        });
        if successor && let Some(predecessor) = &self.predecessor {
            // It hears only from here what the successor says. Nothing is ever sent: this is the wait for its end.
            let _ = predecessor.recv_timeout(self.drain_within.saturating_sub(began.elapsed()));
        }
        self.peers.tell_all(|| Message::End);
        self.wait_within(limits::TUNNELS_END, || self.all_report(|report| report.tunnels.is_empty()));
        if !successor {
            self.keep_levels();
        }
        // While the workers still answer: what happened last is in it.
        if let Some(sampler) = self.sampler.take() {
            sampler.stop();
        }
        self.peers.tell_all(|| Message::Stop);
        self.executor.close();
        if let Some(admin) = self.admin.take() {
            admin.stop();
        }
        for worker in self.workers.drain(..) {
            joined(worker);
        }
        if let Some(exporter) = self.exporter.take() {
            exporter.stop(limits::SPANS_END);
        }
        self.jobs.take().map(joined);
        self.request_log.close();
    }

    /// Once no request runs on any worker, ends the connections without one: nothing else is left to wait for.
    fn end_quiet_connections(&self) {
        let quiet = self.peers.ask_all(Message::ReportQuiet);
        if quiet.len() == self.control.workers() && !quiet.contains(&false) {
            self.peers.tell_all(|| Message::EndQuiet);
        }
    }

    fn all_report(&self, is_so: impl Fn(&WorkerReport) -> bool) -> bool {
        let reports = self.control.reports();
        reports.len() == self.control.workers() && reports.iter().all(is_so)
    }

    fn wait_within(&self, limit: Duration, is_done: impl Fn() -> bool) {
        let began = Instant::now();
        // Twice in a row: one look misses a connection on its way from one worker to another.
        let mut times_done = 0;
        loop {
            times_done = if is_done() { times_done + 1 } else { 0 };
            if times_done == 2 || began.elapsed() >= limit {
                return;
            }
            let is_first_second = began.elapsed() < Duration::from_secs(1);
            std::thread::sleep(if is_first_second { DRAIN_TICK_FIRST } else { DRAIN_TICK });
        }
    }

    fn reload_certificates(&self) {
        match self.control.reload_certificates() {
            Ok(()) => tracing::info!("certificates reloaded"),
            Err(error) => tracing::error!(%error, "certificates not reloaded: the old ones stay in use"),
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.peers.tell_all(|| Message::Stop);
        self.executor.close();
    }
}

impl AdminThread {
    fn stop(self) {
        drop(self.stop);
        joined(self.thread);
    }
}

fn joined<T>(thread: JoinHandle<T>) -> Option<T> {
    let ended = thread.join();
    if ended.is_err() {
        tracing::error!("a thread panicked");
    }
    ended.ok()
}

/// The signals that a gateway listens to.
pub struct Signals {
    runtime: tokio::runtime::Runtime,
    heard: Heard,
}

struct Heard {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
    user_2: Signal,
}

enum Wish {
    Stop,
    Reload,
    Replace,
}

impl Signals {
    /// From now on none of them ends the process by itself.
    pub fn listen() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let heard = {
            let _entered = runtime.enter();
            Heard {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
                hang_up: signal(SignalKind::hangup())?,
                user_2: signal(SignalKind::user_defined2())?,
            }
        };
        Ok(Self { runtime, heard })
    }

    /// Runs until SIGTERM or SIGINT, or until on SIGUSR2 `program` has taken over, then drains; another signal to stop
    /// ends the process at once. On SIGHUP certificates are read again. Tells systemd, if it asked.
    pub fn run(self, mut gateway: Gateway, program: Option<&Program>) -> io::Result<()> {
        let Self { runtime, mut heard } = self;
        let result = runtime.block_on(async {
            if gateway.predecessor.is_none() {
                notify(&[NotifyState::Ready]);
            }
            heard.until_stopped(&mut gateway, program).await;
            let has_successor = gateway.has_successor;
            let drained = tokio::task::spawn_blocking(|| gateway.drain());
            let cut = async {
                if has_successor {
                    // Whoever stops the successor with all of its kind means this process too; it is ending already.
                    heard.stop().await;
                }
                heard.stop().await;
            };
            tokio::select! {
                _ = drained => Ok(()),
                () = cut => Err(io::Error::other("stopped during the drain: running requests were cut")),
            }
        });
        // A drain that was cut short is not waited for.
        runtime.shutdown_background();
        result
    }
}

impl Heard {
    /// Does what signals ask for until this process is to drain.
    async fn until_stopped(&mut self, gateway: &mut Gateway, program: Option<&Program>) {
        loop {
            match self.next().await {
                Wish::Reload => gateway.reload_certificates(),
                Wish::Stop => {
                    notify(&[NotifyState::Stopping]);
                    tracing::warn!("stopping: running requests may end; a second signal cuts them");
                    return;
                }
                // Nothing else is done meanwhile: one successor at a time.
                Wish::Replace => match gateway.hand_over(program) {
                    Ok(successor) => {
                        notify(&[NotifyState::MainPid(successor)]);
                        tracing::warn!(successor, "replaced: running requests may end");
                        return;
                    }
                    Err(error) => tracing::error!(%error, "not replaced: this process goes on"),
                },
            }
        }
    }

    async fn next(&mut self) -> Wish {
        tokio::select! {
            _ = self.interrupt.recv() => Wish::Stop,
            _ = self.terminate.recv() => Wish::Stop,
            _ = self.hang_up.recv() => Wish::Reload,
            _ = self.user_2.recv() => Wish::Replace,
        }
    }

    async fn stop(&mut self) {
        while !matches!(self.next().await, Wish::Stop) {}
    }
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd cannot be told");
    }
}

/// Starts the export of spans, if there is a collector.
fn start_exporter(config: &Config, masker: Masker) -> Result<Option<(Exporter, trace::Destination)>, StartError> {
    let Some(settings) = &config.traces else { return Ok(None) };
    let region = config.region.apex().split('.').next().unwrap_or_default().to_owned();
    let instance_id = RequestIds::new().next_id().to_string();
    let identity = Identity { service_name: "gw-gateway", instance_id, region };
    let (exporter, queue) = Exporter::start(settings, &identity)?;
    Ok(Some((exporter, trace::Destination { queue, sample_ratio: settings.sample_ratio, masker })))
}

/// Serves the admin listener until `stopped` resolves, and then what is under way.
fn serve_admin(listener: TcpListener, admin: Admin, stopped: oneshot::Receiver<()>) {
    let stopped = stopped.map(drop).shared();
    let served = tokio::runtime::Builder::new_current_thread().enable_all().build().and_then(|control| {
        control.block_on(async {
            let too_late = async {
                stopped.clone().await;
                tokio::time::sleep(ADMIN_ENDS_WITHIN).await;
            };
            tokio::select! {
                served = admin::serve(listener, admin, stopped.clone()) => served,
                () = too_late => Ok(()),
            }
        })
    });
    if let Err(error) = served {
        tracing::error!(%error, "the admin listener ended");
    }
}

fn spawn<T: Send + 'static>(
    name: String,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, StartError> {
    std::thread::Builder::new().name(name).spawn(run).map_err(StartError::Thread)
}

/// Has the workers told when the machine's TCP memory runs short.
fn watch_tcp_memory(budget: &Arc<SocketBudget>) -> Result<Option<PressureWatch>, StartError> {
    let held_mib = budget.total() >> 20;
    let Some(memory) = TcpMemory::of_machine() else {
        tracing::warn!(held_mib, "the kernel's limits on TCP memory (net.ipv4.tcp_mem) cannot be read");
        return Ok(None);
    };
    tracing::info!(held_mib, pressure_mib = memory.pressure >> 20, "kernel memory for callers' connections");
    PressureWatch::start(memory, Arc::clone(budget)).map(Some).map_err(StartError::Thread)
}

/// A worker's share of the descriptors, so that accepting never runs out of them.
fn connections_per_worker(descriptors: u64, workers: usize) -> usize {
    let share = descriptors.saturating_sub(limits::RESERVED_DESCRIPTORS) / workers as u64;
    usize::try_from(share).unwrap_or(usize::MAX).clamp(1, limits::CONNECTIONS_PER_WORKER)
}
