//! Start of a gateway: listeners, control plane, workers.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::Receiver;
use gw_shared::id::RequestIds;
use gw_shared::runtime::{self, Driver, DriverError};
use gw_shared::telemetry::mask::Masker;
use gw_shared::telemetry::trace::{Exporter, Identity, SpanCounts};

use crate::config::Config;
use crate::control::{self, Control, ControlError, Executor, JobQueue};
use crate::limit::levels;
use crate::limits;
use crate::mailbox::mailbox;
use crate::memory::sockets::{PressureWatch, SocketBudget, TcpMemory};
use crate::ownership::WorkerId;
use crate::telemetry::request_log::{LogError, RequestLog};
use crate::telemetry::timeseries::{Sampler, Series};
use crate::telemetry::trace;
use crate::tunnel::grace::TunnelGrace;
use crate::worker::{self, Message, Peers, Setup};

use super::control_plane::AdminThread;
use super::listeners::{Inherited, ListenError, Listeners};
use super::takeover::{Predecessor, TakeoverError};
use super::threads::spawn;

/// File in the data folder that keeps the levels of rate limits from a stop to the next start.
const LEVELS_FILE: &str = "rate-limits.json";

/// A running gateway. A drop stops it at once; [`Gateway::drain`] lets requests finish.
pub struct Gateway {
    pub(super) control: Arc<Control>,
    pub(super) peers: Arc<Peers>,
    pub(super) request_log: Arc<RequestLog>,
    pub(super) series: Arc<Series>,
    /// Thread that records `series`; `None` only while draining.
    pub(super) sampler: Option<Sampler>,
    pub(super) address: SocketAddr,
    pub(super) admin_address: SocketAddr,
    /// `None` while draining.
    pub(super) listeners: Option<Listeners>,
    pub(super) draining: Arc<AtomicBool>,
    pub(super) drain_within: Duration,
    pub(super) levels_path: PathBuf,
    pub(super) workers: Vec<JoinHandle<()>>,
    pub(super) executor: Executor,
    /// Thread that serves what workers ask of the control plane. It ends when `executor` is closed, and returns the jobs
    /// that still wait.
    pub(super) jobs: Option<JoinHandle<JobQueue>>,
    pub(super) admin: Option<AdminThread>,
    /// Exporter of spans.
    pub(super) exporter: Option<Exporter>,
    /// Disconnects when the predecessor has ended; `None` if this process has replaced none.
    pub(super) predecessor: Option<Receiver<Infallible>>,
    pub(super) has_successor: bool,
    /// `None` if the kernel does not show its limits on TCP memory.
    _pressure_watch: Option<PressureWatch>,
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
    #[error("cannot take over from the running process: {0}")]
    Takeover(#[from] TakeoverError),
    #[error(transparent)]
    RequestLog(#[from] LogError),
    #[error("a worker did not start; see the log for the reason")]
    Worker,
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

impl Gateway {
    /// Starts a gateway. It accepts connections when this returns.
    pub fn start(config: &Config) -> Result<Self, StartError> {
        Self::start_after(config, None)
    }

    /// Starts a gateway that replaces `predecessor`, if any. The predecessor drains when this returns.
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
            workers.push(
                spawn(format!("gw-worker-{number}"), move || {
                    if let Err(error) = worker::run(setup, inbox, up, &driver) {
                        tracing::error!(worker = number, %error, "worker did not start");
                    }
                })
                .map_err(StartError::Thread)?,
            );
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
        // After all steps that can fail, so that a failed start keeps the levels for the next one. A predecessor leaves
        // no file.
        levels::remove(&gateway.levels_path);
        tracing::info!(%address, %admin_address, workers = config.workers, region = config.region.apex(), "gateway started");
        if let Some(predecessor) = predecessor {
            gateway.predecessor = Some(predecessor.serving(&gateway.control, &gateway.peers)?);
        }
        Ok(gateway)
    }

    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Address that callers and agents connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// Counts of exported and lost spans; `None` without a collector.
    pub fn span_counts(&self) -> Option<&Arc<SpanCounts>> {
        self.exporter.as_ref().map(Exporter::counts)
    }

    pub(super) fn reload_certificates(&self) {
        match self.control.reload_certificates() {
            Ok(()) => tracing::info!("certificates reloaded"),
            Err(error) => tracing::error!(%error, "cannot reload certificates: the old ones stay in use"),
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.peers.tell_all(|| Message::Stop);
        self.executor.close();
    }
}

/// Starts the export of spans if a collector is configured.
fn start_exporter(config: &Config, masker: Masker) -> Result<Option<(Exporter, trace::Destination)>, StartError> {
    let Some(settings) = &config.traces else { return Ok(None) };
    let region = config.region.apex().split('.').next().unwrap_or_default().to_owned();
    let instance_id = RequestIds::new().next_id().to_string();
    let identity = Identity { service_name: "gw-gateway", instance_id, region };
    let (exporter, queue) = Exporter::start(settings, &identity)?;
    Ok(Some((exporter, trace::Destination { queue, sample_ratio: settings.sample_ratio, masker })))
}

/// Starts a thread that tells the workers when the TCP memory of the machine runs short.
fn watch_tcp_memory(budget: &Arc<SocketBudget>) -> Result<Option<PressureWatch>, StartError> {
    let held_mib = budget.total() >> 20;
    let Some(memory) = TcpMemory::of_machine() else {
        tracing::warn!(held_mib, "cannot read the kernel's limits on TCP memory (net.ipv4.tcp_mem)");
        return Ok(None);
    };
    tracing::info!(
        held_mib,
        pressure_mib = memory.pressure >> 20,
        "limits on kernel memory for connections of callers"
    );
    PressureWatch::start(memory, Arc::clone(budget)).map(Some).map_err(StartError::Thread)
}

/// Connections of one worker, so that all workers together do not run out of descriptors.
fn connections_per_worker(descriptors: u64, workers: usize) -> usize {
    let share = descriptors.saturating_sub(limits::RESERVED_DESCRIPTORS) / workers as u64;
    usize::try_from(share).unwrap_or(usize::MAX).clamp(1, limits::CONNECTIONS_PER_WORKER)
}
