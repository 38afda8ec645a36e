//! Start of a gateway: listeners, control plane, workers.

mod error;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use crate::limits;
use crossbeam_channel::Receiver;
use gw_base::agent_releases::AgentReleases;
use gw_base::mailbox::{Inbox, mailbox};
use gw_base::process::background::{Background, Tasks};
use gw_control_plane::admin_client::console_url;
use gw_control_plane::control::{self, Control, ControlError, JobQueue};
use gw_control_plane::members::{Members, remember_primary};
use gw_data_plane::memory::sockets::{self, SocketBudget, TcpMemory};
pub(crate) use gw_data_plane::tunnel::waiting::grace::TunnelGrace;
use gw_data_plane::worker::{RegionSetup, Setup, WorkerHandles, WorkerMessage};
use gw_interface::config::{AcmeConfig, Config};
use gw_interface::control_plane::{self, Executor};
use gw_interface::node_connections::{self, NodeConnections, WaitingConnections};
use gw_interface::rate_limit::Level;
use gw_region::owners::ownership::WorkerId;
use gw_region::{
    CarriedMembership, NodeSlot, Placement, RegionKeyError, RegionKeys, RegionSignals, View,
};
use gw_shared::id::RequestIds;
use gw_shared::runtime::{self, Driver};
use gw_shared::telemetry::mask::Masker;
use gw_shared::telemetry::trace::{Exporter, ProgramIdentity, SpanCounts};
use gw_telemetry::request_log::{Names, RequestLog};
use gw_telemetry::timeseries::{self, Series};
use gw_telemetry::trace;
use tokio::sync::{Mutex, Notify};

pub use self::error::StartError;
use super::apex_nodes;
use super::config_file::ConfigFile;
use super::control_plane::archive_audit_heads;
use super::membership::MemberSettings;
use super::sockets::listeners::{Addresses, Inherited, ListenError, Listeners, own_shares};
use super::stop::last_stop::{self, LastStop};
use super::takeover::{Predecessor, TakeoverError};
use super::workers::Workers;

/// A running gateway. A drop stops it at once; [`Gateway::drain`] lets requests finish.
pub struct Gateway {
    pub(super) control: Arc<Control>,
    pub(super) handles: Arc<WorkerHandles>,
    pub(super) request_log: Arc<RequestLog>,
    pub(super) series: Arc<Series>,
    pub(super) addresses: Addresses,
    /// `None` while draining.
    pub(super) listeners: Option<Listeners>,
    /// `None` until they are started, and after they have ended.
    pub(super) workers: Option<Workers>,
    /// Notified when workers panic too often for the process to go on.
    pub(super) workers_failed: Arc<Notify>,
    executor: Executor,
    /// What workers ask of the control plane. Locked while it is served.
    pub(super) jobs: Arc<Mutex<JobQueue>>,
    pub(super) node: RegionNode,
    pub(super) drain: DrainState,
    /// `None` in a demo.
    config_file: Option<ConfigFile>,
    pub(super) tasks: BesideWorkers,
    /// Declared last: the runtime ends after its tasks.
    pub(super) background: Background,
}

/// This process as a node of a region.
pub(super) struct RegionNode {
    pub(super) signals: Arc<RegionSignals>,
    /// Connections of the control planes of other nodes, locked while they are served; `None`
    /// without a listener for them.
    pub(super) waiting: Option<Arc<Mutex<WaitingConnections>>>,
    /// Authority that issues certificates; `None` without one.
    pub(super) acme: Option<AcmeConfig>,
    /// Membership in a region of several nodes.
    pub(super) members: Option<Members>,
    pub(super) settings: Option<MemberSettings>,
}

/// How the process stops, and which processes are before and after it.
pub(super) struct DrainState {
    pub(super) begun: Arc<AtomicBool>,
    pub(super) within: Duration,
    pub(super) last_stop_path: PathBuf,
    /// Disconnects when the predecessor has ended; `None` if this process has replaced none.
    pub(super) predecessor: Option<Receiver<Infallible>>,
    pub(super) has_successor: bool,
}

/// Tasks beside the workers, in the order in which they stop.
pub(super) struct BesideWorkers {
    /// Records the time series.
    pub(super) recording: Tasks,
    /// Serves the admin listener, other nodes and jobs.
    pub(super) control_plane: Tasks,
    /// Exporter of spans.
    pub(super) exporter: Option<Exporter>,
    /// Tasks that stop last, in no order: the feed, the watch of TCP memory, the count of services,
    /// questions of the apex, and the exchange with the process before or after this one.
    pub(super) helpers: Tasks,
}

/// State that the workers continue from an earlier process.
struct CarriedState {
    /// Tunnels that agents had with the predecessor, or before the last stop.
    tunnel_grace: Arc<TunnelGrace>,
    /// Levels of rate limits at the last stop; `None` if a predecessor sends them later.
    levels: Option<Arc<Vec<Level>>>,
    /// Membership of the predecessor.
    membership: Option<CarriedMembership>,
}

impl Gateway {
    /// Starts a gateway. It accepts connections when this returns.
    pub fn start(config: &Config) -> Result<Self, StartError> {
        let background = Background::start().map_err(StartError::Thread)?;
        Self::start_after(config, None, background)
    }

    /// Starts a gateway that replaces `predecessor`, if any, on a runtime that is there. The
    /// predecessor drains when this returns.
    pub fn start_after(
        config: &Config,
        mut predecessor: Option<&mut Predecessor>,
        background: Background,
    ) -> Result<Self, StartError> {
        let driver = Driver::choose()?;
        let descriptors = runtime::raise_open_file_limit();
        driver.log();
        let listeners = open_listeners(config, predecessor.as_deref_mut())?;
        let carried = CarriedState::of(config, predecessor.as_deref_mut())?;
        let (mailboxes, inboxes): (Vec<_>, Vec<_>) = (0..config.workers)
            .map(|_| mailbox(limits::MAILBOX))
            .unzip();
        let socket_budget = Arc::new(SocketBudget::beside(config.relay_memory, config.workers));
        let (mut gateway, traces) = Self::open(
            background,
            config,
            listeners,
            WorkerHandles::new(mailboxes),
            &socket_budget,
        )?;
        if let Some(revision) = predecessor.as_ref().and_then(|it| it.used_revision()) {
            gateway.control.acknowledge(revision);
        }
        let (nodes, waiting_nodes) = node_connections::channel();
        let waiting_nodes = Arc::new(Mutex::new(waiting_nodes));
        gateway.node.waiting = gateway.addresses.nodes.map(|_| waiting_nodes);
        let setups = gateway.worker_setups(
            config,
            &carried,
            descriptors,
            traces.as_ref(),
            &socket_budget,
            &nodes,
        )?;
        let agent_releases = setups.first().map(|it| Arc::clone(&it.agent_releases));
        gateway.start_workers(setups, inboxes, &driver)?;
        gateway.record_series();
        control::follow(&gateway.control, &config.data_dir, &gateway.tasks.helpers)
            .map_err(StartError::Thread)?;
        gateway.node.settings = MemberSettings::of(config, gateway.addresses.nodes);
        gateway.start_members(carried.membership)?;
        gateway.serve_administration()?;
        // After all steps that can fail, so that a failed start keeps the file for the next one. A
        // predecessor leaves no file.
        last_stop::remove(&gateway.drain.last_stop_path);
        gateway.log_start(config);
        match predecessor {
            Some(predecessor) => {
                gateway.drain.predecessor = Some(predecessor.serving(
                    &gateway.control,
                    &gateway.handles,
                    &gateway.tasks.helpers,
                )?);
            }
            None => gateway.control.keep_no_changes(),
        }
        let roll_backs = agent_releases.iter().flat_map(|it| it.roll_backs());
        control::changes::audit::note_roll_backs(&gateway.control, roll_backs);
        Ok(gateway)
    }

    /// Opens the data folder, and runs what the workers need: the jobs of the control plane, the
    /// request log, the export of spans and the watch of TCP memory.
    fn open(
        background: Background,
        config: &Config,
        listeners: Listeners,
        handles: Arc<WorkerHandles>,
        socket_budget: &Arc<SocketBudget>,
    ) -> Result<(Self, Option<trace::SpanDestination>), StartError> {
        let helpers = background.tasks();
        remember_primary(config);
        let control = Arc::new(Control::open(config, handles.clone(), helpers.clone())?);
        let masker = Masker::new([control.admin_token()]);
        let of_names = Arc::clone(&control);
        let request_log = Arc::new(RequestLog::open_on(
            &background,
            &config.data_dir.join("requests"),
            masker.clone(),
            config.access_log.as_ref(),
            config.request_log_max_bytes,
            Names(Some(Arc::new(move || of_names.directory()))),
        )?);
        let region_keys = region_keys(&control, config)?;
        if let (Some(settings), Some(keys), None) =
            (&config.archive, &region_keys, config.peer_listen)
        {
            // In a region of several nodes it starts when the node has its slot.
            request_log.archive_to(settings, keys, config.region.apex(), NodeSlot::default())?;
            archive_audit_heads(&control, &request_log);
        }
        let (exporter, traces) = start_exporter(config, masker)?.unzip();
        watch_tcp_memory(&helpers, socket_budget);
        let (executor, jobs) = control_plane::executor();
        let gateway = Self {
            control,
            handles,
            request_log,
            series: Arc::new(Series::open(&config.data_dir.join("series.sqlite"))),
            addresses: listeners.addresses().map_err(ListenError::from)?,
            listeners: Some(listeners),
            workers: None,
            workers_failed: Arc::default(),
            executor,
            jobs: Arc::new(Mutex::new(JobQueue::new(jobs))),
            node: RegionNode {
                signals: Arc::new(RegionSignals::new(Instant::now())),
                waiting: None,
                acme: config.acme.clone(),
                members: None,
                settings: None,
            },
            drain: DrainState {
                begun: Arc::default(),
                within: config.drain,
                last_stop_path: config.data_dir.join(last_stop::FILE),
                predecessor: None,
                has_successor: false,
            },
            config_file: None,
            tasks: BesideWorkers {
                recording: background.tasks(),
                control_plane: background.tasks(),
                exporter,
                helpers,
            },
            background,
        };
        gateway.serve_jobs();
        Ok((gateway, traces))
    }

    fn worker_setups(
        &self,
        config: &Config,
        carried: &CarriedState,
        descriptors: u64,
        traces: Option<&trace::SpanDestination>,
        socket_budget: &Arc<SocketBudget>,
        nodes: &NodeConnections,
    ) -> Result<Vec<Setup>, StartError> {
        let Some(listeners) = &self.listeners else {
            return Ok(Vec::new());
        };
        let shares = listeners
            .shares(config.workers)
            .map_err(ListenError::from)?;
        let region_keys =
            region_keys(&self.control, config)?.filter(|_| config.peer_listen.is_some());
        let node_client = self.control.node_client();
        let apex_questions = region_keys
            .as_ref()
            .map(|_| apex_nodes::start(&self.tasks.helpers, node_client.clone()));
        let peer_shares = own_shares(&listeners.peers, config.workers)?;
        let plain_shares = own_shares(&listeners.plain, config.workers)?;
        let (directory, certificates) = self.control.initial_state()?;
        let affinity_key = self.control.affinity_key();
        let shared_config = Arc::new(config.clone());
        let agent_releases = AgentReleases::load(&config.agent_releases, &config.data_dir);
        let agent_releases = Arc::new(agent_releases.map_err(StartError::AgentPrograms)?);
        let connection_limit = connections_per_worker(descriptors, config.workers);
        let setup = |(number, ((listeners_share, peer_listeners), plain_listeners))| Setup {
            id: WorkerId(number),
            handles: Arc::clone(&self.handles),
            listeners: listeners_share,
            region: region_keys.clone().zip(apex_questions.clone()).map(
                |(keys, apex_questions)| RegionSetup {
                    keys,
                    signals: Arc::clone(&self.node.signals),
                    listeners: peer_listeners,
                    control_plane: nodes.clone(),
                    apex_questions,
                },
            ),
            listeners_are_ours: listeners.are_ours,
            plain_listeners,
            directory: Arc::clone(&directory),
            awaited_read: self.control.awaited_read().cloned(),
            certificates: Arc::clone(&certificates),
            affinity_key: affinity_key.clone(),
            tunnel_grace: Arc::clone(&carried.tunnel_grace),
            levels: carried.levels.clone(),
            config: Arc::clone(&shared_config),
            agent_releases: Arc::clone(&agent_releases),
            executor: self.executor.clone(),
            log: self.request_log.queue(),
            traces: traces.cloned(),
            socket_budget: Arc::clone(socket_budget),
            connection_limit,
        };
        Ok(shares
            .into_iter()
            .zip(peer_shares)
            .zip(plain_shares)
            .enumerate()
            .map(setup)
            .collect())
    }

    /// Starts the workers. They accept connections when this returns.
    fn start_workers(
        &mut self,
        setups: Vec<Setup>,
        inboxes: Vec<Inbox<WorkerMessage>>,
        driver: &Driver,
    ) -> Result<(), StartError> {
        let count = setups.len();
        let failed = Arc::clone(&self.workers_failed);
        let tasks = self.background.tasks();
        let control = &self.control;
        let started = Workers::start(
            tasks,
            control,
            &self.handles,
            setups,
            inboxes,
            driver,
            failed,
        );
        let (workers, up) = started.map_err(StartError::Thread)?;
        self.workers = Some(workers);
        if up < count {
            Err(StartError::Worker)
        } else {
            Ok(())
        }
    }

    fn record_series(&self) {
        let control = Arc::clone(&self.control);
        let reports = move || control.reports_with_services();
        timeseries::record(&self.tasks.recording, Arc::clone(&self.series), reports);
    }

    fn log_start(&self, config: &Config) {
        let address = self.addresses.callers;
        let admin_address = self.addresses.admin;
        if let Some(warning) = config.open_admin_listener(admin_address) {
            tracing::warn!("{warning}");
        }
        if let Some((found, remedy)) = config.guessed_proxies() {
            tracing::warn!("trusted_proxies: {found}; {remedy}");
        }
        let console = config
            .admin_certificate
            .is_none()
            .then(|| console_url(admin_address));
        let http_address = self.addresses.plain.map(tracing::field::display);
        tracing::info!(
            %address,
            %admin_address,
            http_address,
            console,
            workers = config.workers,
            region = config.region.apex(),
            "gateway started"
        );
        if let Some(acme) = &config.acme
            && acme.challenge.is_some()
            && self.control.development_ca().is_some()
        {
            tracing::warn!(
                directory = acme.settings.directory,
                "no certificate of the ACME authority yet: the gateway answers with a certificate \
                 of its development authority until there is one"
            );
        }
    }

    /// Runtime of the tasks.
    pub fn background(&self) -> &Background {
        &self.background
    }

    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Address that callers and agents connect to.
    pub fn address(&self) -> SocketAddr {
        self.addresses.callers
    }

    pub fn admin_address(&self) -> SocketAddr {
        self.addresses.admin
    }

    /// Address of the listener in plain HTTP; `None` without one.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.addresses.plain
    }

    /// Address that other nodes of the region connect to; `None` without one.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.addresses.nodes
    }

    /// Uses this placement of services on nodes from now on, in place of the one that the members
    /// of the region agree on. `processes` are the slots and sessions of all nodes, also of those
    /// that own no services. For tests.
    #[doc(hidden)]
    pub fn set_placement(
        &self,
        placement: Placement,
        session: u128,
        processes: &[(NodeSlot, u128)],
    ) -> Result<(), ControlError> {
        self.node.signals.set_endless();
        let (applied, _) = tokio::sync::mpsc::unbounded_channel();
        let view = View::settled(placement).with_processes(processes);
        self.control
            .publish_view(0, &Arc::new(view), session, &applied)
    }

    /// Counts of exported and lost spans; `None` without a collector.
    pub fn span_counts(&self) -> Option<&Arc<SpanCounts>> {
        self.tasks.exporter.as_ref().map(Exporter::counts)
    }

    /// Sets the file that the configuration was read from, so that a reload can say what has
    /// changed in it.
    pub fn set_config_file(&mut self, file: ConfigFile) {
        self.config_file = Some(file);
    }

    /// Reads the certificates again, and opens the access log again.
    pub(super) fn reload(&self) {
        if let Some(file) = &self.config_file {
            file.log_changes();
        }
        self.request_log.reopen_access_log();
        match self.control.reload_certificates() {
            Ok(()) => tracing::info!("certificates reloaded"),
            Err(error) => {
                tracing::error!(%error, "cannot reload a certificate: the old one stays in use");
            }
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.handles.tell_all(|| WorkerMessage::Stop);
        self.tasks.control_plane.stopping().cancel();
        self.tasks.helpers.stop(limits::HELPERS_END);
    }
}

/// Opens the listening sockets. Uses those of the predecessor or of the service manager.
fn open_listeners(
    config: &Config,
    predecessor: Option<&mut Predecessor>,
) -> Result<Listeners, StartError> {
    let inherited = match predecessor {
        Some(predecessor) => predecessor.listeners()?,
        None => Inherited::from_service_manager()?,
    };
    Ok(Listeners::open(config, inherited)?)
}

impl CarriedState {
    /// Takes the store from the predecessor, or reads the file of the last stop.
    fn of(config: &Config, predecessor: Option<&mut Predecessor>) -> Result<Self, StartError> {
        Ok(match predecessor {
            Some(predecessor) => {
                let (tunnels, membership) = predecessor.take_store()?;
                let membership = membership.map(CarriedMembership::try_from).transpose();
                let membership =
                    membership.map_err(|error| TakeoverError::Unexpected(error.to_string()))?;
                let tunnel_grace = Arc::new(TunnelGrace::new(tunnels, Instant::now()));
                Self {
                    tunnel_grace,
                    levels: None,
                    membership,
                }
            }
            None => {
                let last =
                    LastStop::load(&config.data_dir.join(last_stop::FILE), SystemTime::now());
                let tunnel_grace = Arc::new(TunnelGrace::new(last.tunnels, Instant::now()));
                Self {
                    tunnel_grace,
                    levels: Some(Arc::new(last.levels)),
                    membership: None,
                }
            }
        })
    }
}

/// The region keys that the store uses, so that all parts agree about the one in use; those of the
/// configuration with SQLite.
fn region_keys(control: &Control, config: &Config) -> Result<Option<RegionKeys>, RegionKeyError> {
    control.postgres_source().map_or_else(
        || config.region_keys(),
        |source| Ok(Some(source.keys.clone())),
    )
}

/// Starts the export of spans if a collector is configured.
fn start_exporter(
    config: &Config,
    masker: Masker,
) -> Result<Option<(Exporter, trace::SpanDestination)>, StartError> {
    let Some(settings) = &config.traces else {
        return Ok(None);
    };
    let region = config
        .region
        .apex()
        .split('.')
        .next()
        .unwrap_or_default()
        .to_owned();
    let instance_id = RequestIds::new().next_id().to_string();
    let identity = ProgramIdentity {
        service_name: "gw-gateway",
        instance_id,
        region,
    };
    let (exporter, queue) = Exporter::start(settings, &identity)?;
    Ok(Some((
        exporter,
        trace::SpanDestination {
            queue,
            sample_ratio: settings.sample_ratio,
            masker,
        },
    )))
}

/// Starts to tell the workers when the TCP memory of the machine runs short.
fn watch_tcp_memory(tasks: &Tasks, budget: &Arc<SocketBudget>) {
    let held_mib = budget.total() >> 20;
    let Some(memory) = TcpMemory::of_machine() else {
        tracing::warn!(
            held_mib,
            "cannot read the kernel's limits on TCP memory (net.ipv4.tcp_mem)"
        );
        return;
    };
    tracing::info!(
        held_mib,
        pressure_mib = memory.pressure >> 20,
        "limits on kernel memory for connections of callers"
    );
    sockets::watch(tasks, memory, Arc::clone(budget));
}

/// Connections of one worker, so that all workers together do not run out of descriptors.
fn connections_per_worker(descriptors: u64, workers: usize) -> usize {
    let share = descriptors.saturating_sub(limits::RESERVED_DESCRIPTORS) / workers as u64;
    usize::try_from(share)
        .unwrap_or(usize::MAX)
        .clamp(1, limits::CONNECTIONS_PER_WORKER)
}
