//! One process of a gateway: what its workers start with, and what its control plane tells and asks
//! them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;
use crossbeam_channel::Sender;
use gw_base::mailbox::{Inbox, mailbox};
use gw_base::service::affinity::AffinityKey;
use gw_base::service::hostname;
use gw_base::tls::tickets::TicketKeys;
use gw_base::tls::{CertificateSource, ServerConfigs, TlsMaterial};
use gw_data_plane::limits;
use gw_data_plane::memory::sockets::SocketBudget;
use gw_data_plane::tunnel::waiting::grace::TunnelGrace;
use gw_data_plane::worker::{Setup, WorkerHandles, WorkerMessage};
use gw_interface::config::Config;
use gw_interface::control_plane::{self, Executor, Job};
use gw_interface::rate_limit::Level;
use gw_interface::workers::Workers as _;
use gw_region::owners::ownership::WorkerId;
use gw_shared::runtime;
use gw_telemetry::counters::{Scrape, WorkerReport};
use gw_telemetry::request_log::{LogQueue, LogReceiver, LogStats, RequestRecord};
use tokio::sync::mpsc;

use super::{Region, SetupError};

/// Memory of relayed requests, for all workers: the least of the configuration.
const RELAY_MEMORY: usize = 16 << 20;
/// Time limit for the answers of all workers.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Interval between checks whether all have answered.
const ANSWER_TICK: Duration = Duration::from_millis(1);

/// What a process of a gateway starts with.
pub struct GatewayPlan {
    /// The configuration of the region's gateway. [`GatewayPlan::new`] gives one whose numbers do
    /// not depend on the machine.
    pub config: Config,
    /// Largest number of connections of each worker.
    pub connections: usize,
    /// Kernel memory of the callers of all workers, in bytes.
    pub socket_memory: usize,
    /// Levels of the buckets; `None` if a predecessor sends them, as
    /// [`take_over`](super::takeover::take_over) does.
    pub levels: Option<Vec<Level>>,
    /// Tunnels that agents had with the process before this one, by label of the service.
    pub tunnels_before: BTreeMap<String, usize>,
    /// No other process listens on the sockets.
    pub listeners_are_ours: bool,
}

impl GatewayPlan {
    /// A first start with `workers` workers. Files are written to `folder`, which has to exist.
    pub fn new(region: &Region, workers: usize, folder: &Path) -> Self {
        let mut config = Config::new(region.name().clone(), folder.to_owned());
        config.workers = workers;
        config.relay_memory = RELAY_MEMORY;
        config.certificate = CertificateSource::Files {
            certificate: folder.join("public.crt"),
            key: folder.join("public.key"),
        };
        Self {
            socket_memory: config.relay_memory / 2,
            config,
            connections: 1000,
            levels: Some(Vec::new()),
            tunnels_before: BTreeMap::new(),
            listeners_are_ours: true,
        }
    }
}

/// One process of a gateway. Its workers run as long as their futures do: dropping these kills the
/// process, and another gateway of the same region, with the same folder, is its next start.
pub struct Gateway {
    publisher: Publisher,
    inboxes: Vec<Inbox<WorkerMessage>>,
    config: Arc<Config>,
    certificates: Arc<ServerConfigs>,
    affinity_key: AffinityKey,
    tunnel_grace: Arc<TunnelGrace>,
    levels: Option<Arc<Vec<Level>>>,
    executor: Executor,
    log: LogQueue,
    records: LogReceiver,
    socket_budget: Arc<SocketBudget>,
    connections: usize,
    listeners_are_ours: bool,
}

impl Gateway {
    /// Writes the files that a gateway reads at its start. The jobs of its workers are for
    /// [`control::serve`](super::control::serve).
    pub fn new(
        region: &Region,
        plan: GatewayPlan,
    ) -> Result<(Self, mpsc::Receiver<Job>), SetupError> {
        let GatewayPlan {
            config,
            connections,
            socket_memory,
            levels,
            tunnels_before,
            listeners_are_ours,
        } = plan;
        let (mailboxes, inboxes) = (0..config.workers)
            .map(|_| mailbox(limits::MAILBOX))
            .unzip();
        let handles = WorkerHandles::new(mailboxes);
        let (executor, jobs) = control_plane::executor();
        let (log, records) = LogQueue::to_receiver();
        let gateway = Self {
            publisher: Publisher {
                handles,
                region: region.name().clone(),
            },
            inboxes,
            certificates: certificates(region, &config)?,
            affinity_key: AffinityKey::new(hmac::Key::new(hmac::HMAC_SHA256, b"simulation")),
            tunnel_grace: Arc::new(TunnelGrace::new(tunnels_before, Instant::now())),
            levels: levels.map(Arc::new),
            executor,
            log,
            records,
            socket_budget: Arc::new(SocketBudget::new(socket_memory, config.workers)),
            connections,
            listeners_are_ours,
            config: Arc::new(config),
        };
        Ok((gateway, jobs))
    }

    /// What a worker of this process starts with, and the records of `region`, for
    /// [`serve`](gw_data_plane::support::simulation::serve). Later calls start the worker again: it
    /// gets the messages that were left meanwhile.
    pub fn setup(
        &self,
        region: &Region,
        worker: usize,
        listeners: Vec<TcpListener>,
    ) -> (Setup, Inbox<WorkerMessage>) {
        let handles = &self.publisher.handles;
        let setup = Setup {
            id: WorkerId(worker),
            handles: Arc::clone(handles),
            listeners,
            listeners_are_ours: self.listeners_are_ours,
            plain_listeners: Vec::new(),
            region: None,
            directory: region.directory(self.publisher.workers()),
            awaited_read: None,
            certificates: Arc::clone(&self.certificates),
            affinity_key: self.affinity_key.clone(),
            tunnel_grace: Arc::clone(&self.tunnel_grace),
            levels: self.levels.clone(),
            config: Arc::clone(&self.config),
            agent_releases: Arc::default(),
            executor: self.executor.clone(),
            log: self.log.clone(),
            traces: None,
            connection_limit: self.connections,
            socket_budget: Arc::clone(&self.socket_budget),
        };
        (setup, self.inboxes[worker].clone())
    }

    /// Sends records and messages to the workers, beside this gateway.
    pub fn publisher(&self) -> &Publisher {
        &self.publisher
    }

    /// Limit and use of kernel memory, to set memory pressure.
    pub fn socket_budget(&self) -> &Arc<SocketBudget> {
        &self.socket_budget
    }

    /// The records of requests that have ended since the last call, each with the label of its
    /// service. Workers send them within a second.
    pub fn ended_requests(&self) -> Vec<(Arc<str>, RequestRecord)> {
        let batches = std::iter::from_fn(|| self.records.try_next());
        let services = batches.flat_map(|batch| batch.services);
        services
            .flat_map(|(label, records)| {
                records
                    .into_iter()
                    .map(move |record| (Arc::clone(&label), record))
            })
            .collect()
    }

    /// Counters of the queue of the records: those that were dropped are missing in
    /// [`Self::ended_requests`].
    pub fn log_stats(&self) -> LogStats {
        self.records.stats()
    }
}

/// Sends messages to the workers of a gateway.
#[derive(Clone)]
pub struct Publisher {
    handles: Arc<WorkerHandles>,
    region: hostname::Region,
}

impl Publisher {
    /// The workers, as the control plane publishes to them.
    pub(super) fn handles(&self) -> &WorkerHandles {
        &self.handles
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.handles.mailboxes.len()
    }

    /// Host name of the service with this label.
    pub(super) fn hostname(&self, label: &str) -> String {
        format!("{label}.{}", self.region.apex())
    }

    /// Publishes the records of `region`: workers use them for each request that they authenticate
    /// from now on.
    pub fn publish(&self, region: &Region) {
        self.handles
            .publish_directory(&region.directory(self.workers()));
    }

    /// Leaves a message for a worker. Fails if its mailbox is full.
    pub fn tell(&self, worker: usize, message: WorkerMessage) -> io::Result<()> {
        self.handles.mailboxes[worker]
            .post(message)
            .map_err(|_| io::Error::other(format!("the mailbox of worker {worker} is full")))
    }

    /// Leaves a message for every worker. Fails if a mailbox is full.
    pub fn tell_all(&self, message: impl Fn() -> WorkerMessage) -> io::Result<()> {
        (0..self.workers()).try_for_each(|worker| self.tell(worker, message()))
    }

    /// Asks every worker. Returns the answers that arrive in time, in their order: workers that
    /// have ended give none.
    pub async fn ask_all<T>(
        &self,
        question: impl Fn(Sender<T>) -> WorkerMessage,
    ) -> io::Result<Vec<T>> {
        let workers = self.workers();
        let (reply, received) = crossbeam_channel::bounded(workers);
        self.tell_all(|| question(reply.clone()))?;
        let deadline = Instant::now() + ANSWER_WITHIN;
        let mut answers = Vec::new();
        loop {
            answers.extend(received.try_iter());
            if answers.len() == workers || Instant::now() >= deadline {
                return Ok(answers);
            }
            runtime::sleep(ANSWER_TICK).await;
        }
    }

    /// The report of each worker that answers in time, in the order of their ids.
    pub async fn reports(&self, with_services: bool) -> io::Result<Vec<WorkerReport>> {
        let scrape = |reply| {
            WorkerMessage::Scrape(Scrape {
                reply,
                with_services,
            })
        };
        let mut reports = self.ask_all(scrape).await?;
        reports.sort_by_key(|report| report.worker);
        Ok(reports)
    }
}

/// The TLS configurations, as a gateway builds them from the files of its configuration.
fn certificates(region: &Region, config: &Config) -> Result<Arc<ServerConfigs>, SetupError> {
    let CertificateSource::Files { certificate, key } = &config.certificate else {
        let message = "the certificate of a simulated gateway is in files".to_owned();
        return Err(SetupError::Plan(message));
    };
    let (chain, private_key) = region.certificates().public();
    fs::write(certificate, chain)?;
    fs::write(key, private_key)?;
    let material = TlsMaterial::new(
        config.certificate.clone(),
        region.name().clone(),
        config.tls_min_version,
        region.certificates().trusted(),
        TicketKeys::default(),
        config.agent_mtls,
    );
    Ok(material.load()?)
}
