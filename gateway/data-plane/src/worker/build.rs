//! Builds the parts of a worker.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use crate::limits;
use gw_base::agent_releases::AgentReleases;
use gw_base::process::freeze::Freeze;
use gw_base::service::affinity::AffinityKey;
use gw_base::tls::ServerConfigs;
use gw_interface::config::Config;
use gw_interface::control_plane::Executor;
use gw_interface::node_connections::NodeConnections;
use gw_interface::rate_limit::{Arrivals, Bucket, Buckets};
use gw_region::Peering;
use gw_region::owners::ownership::WorkerId;
use gw_shared::id::RequestIds;
use gw_store::Directory;
use gw_telemetry::counters::Counters;
use gw_telemetry::request_log::{CaptureBudget, LogQueue, Recorder};
use gw_telemetry::trace::{self, Tracing};

use super::{Setup, Stop, Worker, WorkerHandles};
use crate::apex::{Apex, ApexLimits, ApexNodes, NodeQuestions};
use crate::caller_session::CallerSessions;
use crate::connections::Connections;
use crate::connections::handshakes::Handshakes;
use crate::current::Current;
use crate::ingress::{Acceptor, DomainCertificates, Ingress};
use crate::lifecycle::Lifecycle;
use crate::memory::relay::RelayMemory;
use crate::memory::sockets::SocketMemory;
use crate::relay::{AuthFailures, Relay};
use crate::request_scope::{Observers, UnauthenticatedRecords};
use crate::route::Router;
use crate::tunnel::waiting::grace::TunnelGrace;
use crate::tunnel::{Registry, ReplacedKeys, Tunnels};
use crate::upstream::Upstream;
use crate::upstream::cross_node::Nodes;

/// What several parts of a worker share.
struct Common {
    id: WorkerId,
    config: Arc<Config>,
    agent_releases: Arc<AgentReleases>,
    handles: Arc<WorkerHandles>,
    executor: Executor,
    directory: Rc<Current<Directory>>,
    freeze: Rc<Freeze>,
    certificates: Rc<Current<ServerConfigs>>,
    counters: Rc<Counters>,
    ids: Rc<RequestIds>,
    lifecycle: Rc<Lifecycle>,
    socket_memory: Rc<SocketMemory>,
    nodes: Option<Rc<Nodes>>,
    apex_questions: Option<NodeQuestions>,
}

impl Worker {
    /// Fails if the listeners cannot be used.
    pub(crate) fn new(setup: Setup) -> io::Result<Self> {
        let id = setup.id;
        let buckets = Rc::new(RefCell::new(match setup.levels {
            Some(levels) => Buckets::new(&levels, &setup.directory, id, Instant::now()),
            None => Buckets::awaited(),
        }));
        let region = setup.region.as_ref();
        let nodes = region.map(|region| {
            Nodes::new(
                setup.config.region.clone(),
                Peering::new(&region.keys, Arc::clone(&region.signals)),
            )
        });
        let apex_questions = region.map(|region| region.apex_questions.clone());
        let use_newer = Rc::default();
        let common = Common {
            id,
            config: setup.config,
            agent_releases: setup.agent_releases,
            handles: setup.handles,
            executor: setup.executor,
            directory: Current::new(setup.directory, &use_newer),
            freeze: Freeze::new(setup.awaited_read, Instant::now()),
            certificates: Current::new(setup.certificates, &use_newer),
            counters: Rc::default(),
            ids: Rc::new(RequestIds::new()),
            lifecycle: Rc::default(),
            socket_memory: SocketMemory::new(id, setup.socket_budget),
            nodes,
            apex_questions,
        };
        let observers = Rc::new(common.observers(setup.log, setup.traces));
        let tunnels = Rc::new(common.tunnels(setup.tunnel_grace));
        let upstream = Rc::new(common.upstream(&buckets, &tunnels, setup.affinity_key));
        let router = Rc::new(common.router(&upstream, &observers));
        let connections =
            Connections::new(setup.connection_limit, Rc::clone(&common.socket_memory));
        let (peer_listeners, control_plane) = setup
            .region
            .map(|region| (region.listeners, region.control_plane))
            .unzip();
        let acceptor = Acceptor::new(
            setup.listeners,
            setup.listeners_are_ours,
            setup.plain_listeners,
            peer_listeners.unwrap_or_default(),
        )?;
        let ingress =
            Rc::new(common.ingress(acceptor, &connections, &router, &tunnels, control_plane));
        Ok(Self {
            id,
            handles: common.handles,
            published: Cell::default(),
            use_newer,
            lifecycle: common.lifecycle,
            directory: common.directory,
            certificates: common.certificates,
            counters: common.counters,
            observers,
            socket_memory: common.socket_memory,
            connections,
            buckets,
            tunnels,
            upstream,
            router,
            ingress,
            nodes: common.nodes,
            stop: Stop::default(),
        })
    }
}

impl Common {
    fn observers(&self, log: LogQueue, traces: Option<trace::SpanDestination>) -> Observers {
        let recorder = Recorder::new(log);
        Observers {
            ids: Rc::clone(&self.ids),
            counters: Rc::clone(&self.counters),
            records_all: recorder.wants_all(),
            recorder: RefCell::new(recorder),
            capture_budget: CaptureBudget::new(limits::CAPTURE_MEMORY),
            unauthenticated: RefCell::new(UnauthenticatedRecords::new(Instant::now())),
            tracing: Tracing::new(traces),
            requests_in_flight: Cell::new(0),
            lifecycle: Rc::clone(&self.lifecycle),
        }
    }

    fn tunnels(&self, grace: Arc<TunnelGrace>) -> Tunnels {
        let now = Instant::now();
        Tunnels {
            worker: self.id,
            region: self.config.region.clone(),
            agent_mtls: self.config.agent_mtls,
            registry: RefCell::new(Registry::new(Arc::clone(&grace))),
            releases: Arc::clone(&self.agent_releases),
            downloads: Rc::default(),
            admissions: self
                .nodes
                .is_some()
                .then(|| RefCell::new(Bucket::new(limits::ADMITTED_TUNNELS, now))),
            peering: self.nodes.as_ref().map(|nodes| Rc::clone(&nodes.peering)),
            waiting: Rc::default(),
            grace,
            directory: Rc::clone(&self.directory),
            freeze: Rc::clone(&self.freeze),
            certificates: Rc::clone(&self.certificates),
            executor: self.executor.clone(),
            replaced_keys: ReplacedKeys::default(),
            relay_memory: RelayMemory::new(
                relay_memory_of_worker(&self.config),
                Rc::clone(&self.socket_memory),
            ),
            counters: Rc::clone(&self.counters),
            ids: Rc::clone(&self.ids),
            lifecycle: Rc::clone(&self.lifecycle),
        }
    }

    fn upstream(
        &self,
        buckets: &Rc<RefCell<Buckets>>,
        tunnels: &Rc<Tunnels>,
        affinity_key: AffinityKey,
    ) -> Upstream {
        Upstream {
            worker: self.id,
            buckets: Rc::clone(buckets),
            tunnels: Rc::clone(tunnels),
            counters: Rc::clone(&self.counters),
            cross_core_served: Cell::new(0),
            link_requests_served: Cell::new(0),
            mailboxes: self.handles.clone(),
            wakes: self.handles.clone(),
            nodes: self.nodes.clone(),
            directory: Rc::clone(&self.directory),
            lifecycle: Rc::clone(&self.lifecycle),
            caller_sessions: CallerSessions::new(affinity_key, self.config.trusted_proxies.clone()),
            successor: Rc::default(),
        }
    }

    fn router(&self, upstream: &Rc<Upstream>, observers: &Rc<Observers>) -> Router {
        let config = &self.config;
        let relay = Rc::new(Relay {
            directory: Rc::clone(&self.directory),
            issuer: config.region.base_url(),
            tokens: RefCell::default(),
            auth_failures: AuthFailures::new(config.auth_failures),
            refusals: RefCell::default(),
            upstream: Rc::clone(upstream),
            observers: Rc::clone(observers),
            lifecycle: Rc::clone(&self.lifecycle),
        });
        let asked = self.nodes.as_ref().zip(self.apex_questions.clone());
        let other_nodes =
            asked.map(|(nodes, questions)| ApexNodes::new(Rc::clone(&nodes.peering), questions));
        let apex = Apex {
            worker: self.id,
            workers: self.handles.mailboxes.len(),
            issuer: config.region.base_url(),
            region: config.region.clone(),
            token_lifetime: config.token_lifetime,
            directory: Rc::clone(&self.directory),
            freeze: Rc::clone(&self.freeze),
            executor: self.executor.clone(),
            limits: ApexLimits::new(config.token_requests, config.enrollment_requests),
            mailboxes: self.handles.clone(),
            other_nodes,
            counters: Rc::clone(&self.counters),
        };
        Router {
            region: config.region.clone(),
            trusted_proxies: config.trusted_proxies.clone(),
            relay,
            apex,
            observers: Rc::clone(observers),
            lifecycle: Rc::clone(&self.lifecycle),
        }
    }

    fn ingress(
        &self,
        acceptor: Acceptor,
        connections: &Rc<Connections>,
        router: &Rc<Router>,
        tunnels: &Rc<Tunnels>,
        control_plane: Option<NodeConnections>,
    ) -> Ingress {
        let config = &self.config;
        Ingress {
            worker: self.id,
            workers: self.handles.mailboxes.len(),
            region: config.region.clone(),
            trusted_proxies: config.trusted_proxies.clone(),
            hand_over: config.hand_over,
            acceptor,
            arrivals: Arrivals::new(config.connections_per_address, config.new_connections),
            connections: Rc::clone(connections),
            handshakes: Handshakes::new(limits::HANDSHAKES, limits::HANDSHAKES_PER_ADDRESS),
            node_handshakes: Handshakes::new(
                limits::NODE_HANDSHAKES,
                limits::NODE_HANDSHAKES_PER_ADDRESS,
            ),
            directory: Rc::clone(&self.directory),
            certificates: Rc::clone(&self.certificates),
            domain_certificates: RefCell::new(DomainCertificates::new()),
            busy: Arc::clone(&self.handles.busy),
            mailboxes: self.handles.clone(),
            router: Rc::clone(router),
            tunnels: Rc::clone(tunnels),
            unannounced_lines: RefCell::new(Bucket::new(limits::UNANNOUNCED_LINES, Instant::now())),
            nodes: self.nodes.clone(),
            control_plane,
            counters: Rc::clone(&self.counters),
        }
    }
}

/// Bytes that the relayed requests of one worker may hold.
fn relay_memory_of_worker(config: &Config) -> usize {
    (config.relay_memory / config.workers.max(1)).max(limits::RELAY_MEMORY_LEAST)
}
