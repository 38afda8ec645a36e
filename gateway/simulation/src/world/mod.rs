//! The world of a simulation: gateways, agents, backends and callers, each on hosts of their own.

pub(crate) mod backend;
mod caller;
mod faults;
mod http1_caller;
mod http2_backend;
mod http2_caller;
pub mod ledger;
mod message;
pub(crate) mod processes;
mod recovery;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gw_base::service::affinity::{Affinity, CookieName};
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::ServiceSettings;
use gw_shared::id::AgentId;
use gw_shared::net::Listener;
use gw_shared::runtime;
use gw_simulated_kernel::clock::Nanos;
use gw_simulated_kernel::network::{self, Path as NetworkPath};
use gw_simulated_kernel::{Host, clock};
use gw_telemetry::counters::WorkerReport;
use gw_telemetry::request_log::RequestRecord;

use self::caller::Caller;
use self::ledger::Ledger;
use self::processes::{AgentProcess, GatewayProcess};
use crate::checks;
use crate::product::{AgentPlan, Nodes, PlannedService, Region, ServicePlan, SetupError};
use crate::scenario::{self, FaultKind, Scenario};

/// Where callers and agents reach the gateway.
const GATEWAY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 443);
/// Port of the backend of the first service; the others follow.
const BACKEND_PORT: u16 = 8000;
/// Port of nodes for each other.
const NODE_PORT: u16 = 7000;
/// Field of requests by whose value sessions are told apart.
pub(crate) const SESSION: &str = "x-sim-session";
/// Time for agents to open their tunnels before the first caller begins.
const START: Duration = Duration::from_millis(500);
/// Interval between checks of what must always hold.
const CHECK_EVERY: Duration = Duration::from_millis(250);
/// Time after which all requests must have ended.
const ALL_ENDED: Duration = Duration::from_secs(400);
/// Time within which workers send the records of ended requests.
const RECORDED_WITHIN: Duration = Duration::from_millis(1500);
/// Time for what is left of ended requests to go.
const QUIET: Duration = Duration::from_secs(100);

/// The state of a running world.
pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) region: Rc<RefCell<Region>>,
    pub(crate) services: Vec<PlannedService>,
    pub(crate) ledger: Rc<Ledger>,
    /// The nodes of the region.
    pub(crate) nodes: RefCell<Nodes>,
    /// All processes of the gateway, the serving one of each node last.
    pub(crate) gateways: RefCell<Vec<Rc<GatewayProcess>>>,
    pub(crate) agents: RefCell<Vec<Rc<AgentProcess>>>,
    pub(crate) backends: RefCell<Vec<Host>>,
    pub(crate) callers: Vec<Host>,
    /// Records of the request log.
    pub(crate) records: RefCell<Vec<Rc<Recorded>>>,
    /// Counters of the processes that run at the end.
    pub(crate) reports: RefCell<BTreeMap<usize, Vec<WorkerReport>>>,
    /// Faults that have begun.
    pub(crate) happened: RefCell<Vec<Happened>>,
    /// When each service key was disabled and enabled, for each service.
    pub(crate) disabled: RefCell<Vec<(usize, Nanos, Option<Nanos>)>>,
    /// Whether each service had a tunnel with room at the serving process, at times.
    pub(crate) served: RefCell<BTreeMap<Nanos, Vec<bool>>>,
    /// Tasks and tunnels of the gateway's process before the first caller.
    pub(crate) at_start: Cell<(usize, usize)>,
    folder: std::path::PathBuf,
    callers_left: Cell<usize>,
    faults_left: Cell<usize>,
    /// A predecessor of the gateway's process drains.
    is_taken_over: Cell<bool>,
    violation: RefCell<Option<Violation>>,
}

/// A record of the request log.
pub(crate) struct Recorded {
    /// Number of the gateway's process.
    pub(crate) process: usize,
    /// Label of the service.
    pub(crate) label: Arc<str>,
    pub(crate) record: RequestRecord,
}

/// A fault that has begun.
pub(crate) struct Happened {
    pub(crate) fault: FaultKind,
    pub(crate) began: Nanos,
    pub(crate) ended: Option<Nanos>,
}

/// Something that must always hold does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Name of the invariant.
    pub invariant: &'static str,
    /// What was found.
    pub found: String,
}

/// What a simulation found.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Requests that began.
    pub requests: usize,
    /// Responses of backends that arrived whole.
    pub relayed: usize,
    pub violation: Option<Violation>,
}

/// Lets `scenario` take place. State folders are below `folder`.
pub async fn run(scenario: Scenario, folder: &Path) -> Result<Report, SetupError> {
    let world = World::new(scenario, folder)?;
    world.start().await?;
    world.pass().await?;
    let violation = world.violation.take();
    let is_relayed =
        |entry: &ledger::Entry| entry.seen.is_complete && entry.seen.answer_to.is_some();
    Ok(Report {
        requests: world.ledger.count(|_| true),
        relayed: world.ledger.count(is_relayed),
        violation,
    })
}

impl World {
    fn new(scenario: Scenario, folder: &Path) -> Result<Rc<Self>, SetupError> {
        network::set_default(NetworkPath {
            delay: scenario.delay,
            jitter: scenario.delay / 4,
            segment: scenario.segment,
        });
        // Links between two processes of the gateway do not leave the machine.
        for node in (0..scenario.nodes).map(|node| machine(5, node)) {
            network::set_path(node, node, NetworkPath::default());
        }
        let mut region = Region::new("eu1", "example.com")?;
        let services = scenario.services.iter().enumerate();
        let services: Result<Vec<_>, _> = services
            .map(|(number, service)| region.add_service(&service_plan(number, service)))
            .collect();
        let requests = scenario.callers.iter().flat_map(|caller| &caller.requests);
        let ledger = Rc::new(Ledger::new(requests.cloned()));
        let callers = (0..scenario.callers.len())
            .map(|number| Host::new(&format!("caller {number}"), machine(1, number)))
            .collect();
        Ok(Rc::new(Self {
            callers_left: Cell::new(scenario.callers.len()),
            faults_left: Cell::new(scenario.faults.len()),
            is_taken_over: Cell::default(),
            region: Rc::new(RefCell::new(region)),
            services: services?,
            ledger,
            nodes: RefCell::new(Nodes::new((0..scenario.nodes).map(address_of_node))?),
            gateways: RefCell::default(),
            agents: RefCell::default(),
            backends: RefCell::default(),
            callers,
            records: RefCell::default(),
            reports: RefCell::default(),
            happened: RefCell::default(),
            at_start: Cell::default(),
            disabled: RefCell::default(),
            served: RefCell::default(),
            folder: folder.to_owned(),
            violation: RefCell::default(),
            scenario,
        }))
    }

    async fn start(self: &Rc<Self>) -> Result<(), SetupError> {
        for node in 0..self.scenario.nodes {
            GatewayProcess::start(self, node, None)?;
        }
        for number in 0..self.scenario.agents.len() {
            let backend = self.start_backend(number)?;
            self.backends.borrow_mut().push(backend);
            let agent = AgentProcess::enroll(self, number)?;
            agent.start(self)?;
            self.agents.borrow_mut().push(Rc::new(agent));
        }
        runtime::sleep(START).await;
        if let Some(gateway) = self.gateways.borrow().last() {
            self.at_start.set(checks::tasks_and_tunnels(gateway));
        }
        for number in 0..self.scenario.callers.len() {
            self.start_caller(number)?;
        }
        for fault in self.scenario.faults.clone() {
            let world = Rc::clone(self);
            runtime::spawn(async move {
                runtime::sleep(fault.at).await;
                faults::happen(&world, fault.kind).await;
                world.faults_left.set(world.faults_left.get() - 1);
            });
        }
        Ok(())
    }

    /// Starts the backends of an agent, one for each service, on a machine of their own.
    pub(crate) fn start_backend(&self, agent: usize) -> Result<Host, SetupError> {
        let machine = machine(3, agent);
        let host = Host::new(&format!("backend {agent}"), machine);
        for service in 0..self.services.len() {
            let address = SocketAddr::new(machine, backend_port(service));
            let listener = host.enter(|| std::net::TcpListener::bind(address))?;
            let listener = host.enter(|| Listener::new(listener))?;
            let ledger = Rc::clone(&self.ledger);
            let is_http2 = self.scenario.agents[agent].has_http2_backends;
            host.spawn(backend::serve(listener, agent, is_http2, ledger));
        }
        Ok(host)
    }

    fn start_caller(self: &Rc<Self>, number: usize) -> Result<(), SetupError> {
        let caller = self.caller(number, self.scenario.callers[number].clone())?;
        let world = Rc::clone(self);
        self.callers[number].spawn(async move {
            caller::run(caller).await;
            world.callers_left.set(world.callers_left.get() - 1);
        });
        Ok(())
    }

    fn caller(&self, number: usize, plan: scenario::Caller) -> Result<Caller, SetupError> {
        let service = &self.services[plan.service];
        let protocol: &[u8] = if plan.is_http2 { b"h2" } else { b"http/1.1" };
        Ok(Caller {
            number,
            gateway: GATEWAY,
            hostname: service.hostname.to_string(),
            service_key: service.key.clone(),
            tls: self.region.borrow().certificates().caller(protocol)?,
            ledger: Rc::clone(&self.ledger),
            cookie: RefCell::default(),
            plan,
        })
    }

    /// Lets time pass until all is over, and checks.
    async fn pass(self: &Rc<Self>) -> Result<(), SetupError> {
        let began = clock::now().unwrap_or(0);
        let elapsed = || Duration::from_nanos(clock::now().unwrap_or(0) - began);
        while self.callers_left.get() > 0 || self.faults_left.get() > 0 {
            runtime::sleep(CHECK_EVERY).await;
            self.take_records();
            self.note_served();
            self.check(checks::always(self));
            if self.has_failed() {
                return Ok(());
            }
            if elapsed() > ALL_ENDED {
                let found = format!(
                    "{} callers wait, {} faults last",
                    self.callers_left.get(),
                    self.faults_left.get()
                );
                self.check(Err(Violation {
                    invariant: "requests end",
                    found,
                }));
                return Ok(());
            }
        }
        self.becomes_quiet().await;
        if !self.has_failed() {
            recovery::services_recover(self).await?;
            self.becomes_quiet().await;
        }
        runtime::sleep(RECORDED_WITHIN).await;
        self.take_records();
        self.take_reports().await;
        self.check(checks::at_the_end(self));
        Ok(())
    }

    /// Waits until nothing is held for requests that have ended.
    async fn becomes_quiet(&self) {
        let began = clock::now().unwrap_or(0);
        loop {
            runtime::sleep(CHECK_EVERY * 2).await;
            self.take_records();
            let quiet = checks::quiet(self);
            if quiet.is_ok() {
                return;
            }
            if Duration::from_nanos(clock::now().unwrap_or(0) - began) > QUIET {
                return self.check(quiet);
            }
        }
    }

    /// Asks the workers of processes that run for their counters.
    async fn take_reports(&self) {
        let gateways = self.gateways.borrow().clone();
        for (process, gateway) in gateways.into_iter().enumerate() {
            if gateway.runs() {
                // A worker that does not answer shows as missing counts.
                if let Ok(reports) = gateway.gateway.publisher().reports(true).await {
                    self.reports.borrow_mut().insert(process, reports);
                }
            }
        }
    }

    pub(crate) fn take_records(&self) {
        for (process, gateway) in self.gateways.borrow().iter().enumerate() {
            let ended = gateway.gateway.ended_requests().into_iter();
            let recorded = ended.map(|(label, record)| {
                Rc::new(Recorded {
                    process,
                    label,
                    record,
                })
            });
            self.records.borrow_mut().extend(recorded);
        }
    }

    /// Notes which services have a tunnel with room at their owner.
    fn note_served(&self) {
        let is_served = |service: &PlannedService| {
            let owner = self.nodes.borrow().owner(&service.hostname);
            let gateway = owner.and_then(|node| self.serving(node));
            let workers = gateway.into_iter().flat_map(|it| it.running());
            let mut tunnels = workers
                .filter_map(|(_, worker)| worker.probe())
                .flat_map(|probe| probe.tunnels)
                .filter(|tunnel| !tunnel.is_replaced && !tunnel.report.draining);
            tunnels.any(|tunnel| {
                let has_room = tunnel.open_streams < tunnel.streams_max;
                has_room && tunnel.report.service == *service.label
            })
        };
        let services = self.services.iter().map(is_served).collect();
        let now = clock::now().unwrap_or(0);
        self.served.borrow_mut().insert(now, services);
    }

    /// The process of a node that serves, or did last.
    pub(crate) fn serving(&self, node: usize) -> Option<Rc<GatewayProcess>> {
        let gateways = self.gateways.borrow();
        let mut of_node = gateways.iter().rev().filter(|it| it.node == node);
        of_node.next().map(Rc::clone)
    }

    fn check(&self, checked: Result<(), Violation>) {
        if let Err(violation) = checked {
            self.violation.borrow_mut().get_or_insert(violation);
        }
    }

    fn has_failed(&self) -> bool {
        self.violation.borrow().is_some()
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The plan of an agent.
    pub(crate) fn agent_plan(&self, number: usize) -> AgentPlan {
        let backend = machine(3, number);
        let plan = &self.scenario.agents[number];
        let scheme = if plan.has_http2_backends {
            "h2c"
        } else {
            "http"
        };
        let services = self.services.iter().enumerate();
        let services = services.filter(|(index, _)| self.scenario.serves(number, *index));
        AgentPlan {
            number: u32::try_from(number).unwrap_or(0),
            services: services
                .map(|(index, service)| {
                    let url = format!("{scheme}://{backend}:{}", backend_port(index));
                    (service.path.clone(), vec![url])
                })
                .collect(),
            slots: plan.slots,
            standby: plan.is_standby,
        }
    }
}

fn service_plan(number: usize, service: &scenario::Service) -> ServicePlan {
    ServicePlan {
        account: ["acme", "umbrella"][service.account].to_owned(),
        id: format!("api{number}"),
        settings: ServiceSettings {
            rate: Rate::new(service.burst, service.per_minute).unwrap_or(ServiceSettings::RATE),
            retries: service.retries,
            affinity: match service.affinity {
                scenario::Affinity::None => Affinity::None,
                scenario::Affinity::Client => Affinity::Client,
                scenario::Affinity::Header => {
                    Affinity::Header(Box::new(http::HeaderName::from_static(SESSION)))
                }
                scenario::Affinity::Cookie => Affinity::Cookie(CookieName::default()),
            },
            ..ServiceSettings::default()
        },
    }
}

fn backend_port(service: usize) -> u16 {
    BACKEND_PORT + u16::try_from(service).unwrap_or(0)
}

/// Id of the agent with this number.
pub(crate) fn agent_id(number: usize) -> Option<AgentId> {
    AgentId::new(&format!("ag_{number:020}")).ok()
}

/// Address of a machine of a kind: 1 callers, 2 agents, 3 backends, 4 copies of agents, 5 nodes
/// for each other.
pub(crate) fn machine(kind: u8, number: usize) -> IpAddr {
    Ipv4Addr::new(10, kind, 0, u8::try_from(number).unwrap_or(0) + 1).into()
}

/// Where a node listens for others.
pub(crate) fn address_of_node(node: usize) -> SocketAddr {
    SocketAddr::new(machine(5, node), NODE_PORT)
}

/// Address of the machine of the gateway.
pub(crate) fn gateway_machine() -> IpAddr {
    GATEWAY.ip()
}

pub(crate) fn listen() -> io::Result<std::net::TcpListener> {
    std::net::TcpListener::bind(GATEWAY)
}

pub(crate) fn gateway_address() -> SocketAddr {
    GATEWAY
}
