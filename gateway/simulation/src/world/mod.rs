//! The world of a simulation: gateways, agents, backends and callers, each on hosts of their own.

pub(crate) mod backend;
pub mod body;
mod caller;
mod faults;
mod http1_caller;
mod http2_caller;
pub mod ledger;
mod message;
mod processes;

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gw_base::service::affinity::Affinity;
use gw_base::service::rate::Rate;
use gw_base::service::service_settings::ServiceSettings;
use gw_shared::net::Listener;
use gw_shared::runtime;
use gw_simulated_kernel::clock::Nanos;
use gw_simulated_kernel::network::{self, Path as NetworkPath};
use gw_simulated_kernel::{Host, clock};
use gw_telemetry::request_log::RequestRecord;

use self::caller::Caller;
use self::ledger::Ledger;
use self::processes::{AgentProcess, GatewayProcess};
use crate::checks;
use crate::product::{AgentPlan, PlannedService, Region, ServicePlan, SetupError};
use crate::scenario::Scenario;

/// Where callers and agents reach the gateway.
const GATEWAY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 443);
/// Port of the backend of the first service; the others follow.
const BACKEND_PORT: u16 = 8000;
/// Time for agents to open their tunnels before the first caller begins.
const START: Duration = Duration::from_millis(500);
/// Interval between checks of what must always hold.
const CHECK_EVERY: Duration = Duration::from_millis(250);
/// Time after which all requests must have ended.
const ALL_ENDED: Duration = Duration::from_secs(400);
/// Time for what is left of ended requests to go.
const QUIET: Duration = Duration::from_secs(100);

/// The state of a running world.
pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) region: Rc<RefCell<Region>>,
    pub(crate) services: Vec<PlannedService>,
    pub(crate) ledger: Rc<Ledger>,
    /// All processes of the gateway, the serving one last.
    pub(crate) gateways: RefCell<Vec<Rc<GatewayProcess>>>,
    pub(crate) agents: RefCell<Vec<Rc<AgentProcess>>>,
    pub(crate) backends: RefCell<Vec<Host>>,
    pub(crate) callers: Vec<Host>,
    /// Records of the request log.
    pub(crate) records: RefCell<Vec<(Arc<str>, RequestRecord)>>,
    /// When each service key was disabled and enabled, for each service.
    pub(crate) disabled: RefCell<Vec<(usize, Nanos, Option<Nanos>)>>,
    folder: std::path::PathBuf,
    callers_left: Cell<usize>,
    faults_left: Cell<usize>,
    /// A predecessor of the gateway's process drains.
    is_taken_over: Cell<bool>,
    violation: RefCell<Option<Violation>>,
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
    world.pass().await;
    let violation = world.violation.take();
    let entries = world.ledger.entries();
    let is_relayed =
        |entry: &ledger::Entry| entry.seen.is_complete && entry.seen.answer_to.is_some();
    Ok(Report {
        requests: entries.len(),
        relayed: entries
            .iter()
            .filter(|(_, entry)| is_relayed(entry))
            .count(),
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
            gateways: RefCell::default(),
            agents: RefCell::default(),
            backends: RefCell::default(),
            callers,
            records: RefCell::default(),
            disabled: RefCell::default(),
            folder: folder.to_owned(),
            violation: RefCell::default(),
            scenario,
        }))
    }

    async fn start(self: &Rc<Self>) -> Result<(), SetupError> {
        let gateway = GatewayProcess::start(self, None)?;
        self.gateways.borrow_mut().push(Rc::new(gateway));
        for number in 0..self.scenario.agents.len() {
            let backend = self.start_backend(number)?;
            self.backends.borrow_mut().push(backend);
            let agent = AgentProcess::enroll(self, number)?;
            agent.start(self)?;
            self.agents.borrow_mut().push(Rc::new(agent));
        }
        runtime::sleep(START).await;
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
            host.spawn(backend::serve(listener, agent, Rc::clone(&self.ledger)));
        }
        Ok(host)
    }

    fn start_caller(self: &Rc<Self>, number: usize) -> Result<(), SetupError> {
        let plan = self.scenario.callers[number].clone();
        let service = &self.services[plan.service];
        let protocol: &[u8] = if plan.is_http2 { b"h2" } else { b"http/1.1" };
        let caller = Caller {
            number,
            gateway: GATEWAY,
            hostname: service.hostname.clone(),
            service_key: service.key.clone(),
            tls: self.region.borrow().certificates().caller(protocol)?,
            ledger: Rc::clone(&self.ledger),
            plan,
        };
        let world = Rc::clone(self);
        self.callers[number].spawn(async move {
            caller::run(caller).await;
            world.callers_left.set(world.callers_left.get() - 1);
        });
        Ok(())
    }

    /// Lets time pass until all is over, and checks.
    async fn pass(self: &Rc<Self>) {
        let began = clock::now().unwrap_or(0);
        let elapsed = || Duration::from_nanos(clock::now().unwrap_or(0) - began);
        while self.callers_left.get() > 0 || self.faults_left.get() > 0 {
            runtime::sleep(CHECK_EVERY).await;
            self.take_records();
            self.check(checks::always(self));
            if self.has_failed() {
                return;
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
                return;
            }
        }
        let ended = elapsed();
        loop {
            runtime::sleep(CHECK_EVERY * 2).await;
            self.take_records();
            let quiet = checks::quiet(self);
            if quiet.is_ok() {
                break;
            }
            if elapsed() > ended + QUIET {
                self.check(quiet);
                return;
            }
        }
        self.take_records();
        self.check(checks::at_the_end(self));
    }

    pub(crate) fn take_records(&self) {
        for gateway in self.gateways.borrow().iter() {
            let ended = gateway.gateway.ended_requests();
            self.records.borrow_mut().extend(ended);
        }
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

    /// The plan of an agent, which may serve all services.
    pub(crate) fn agent_plan(&self, number: usize) -> AgentPlan {
        let backend = machine(3, number);
        let services = self.services.iter().enumerate();
        AgentPlan {
            number: u32::try_from(number).unwrap_or(0),
            services: services
                .map(|(index, service)| {
                    let url = format!("http://{backend}:{}", backend_port(index));
                    (service.path.clone(), vec![url])
                })
                .collect(),
            slots: self.scenario.agents[number].slots,
            standby: self.scenario.agents[number].is_standby,
        }
    }
}

fn service_plan(number: usize, service: &crate::scenario::Service) -> ServicePlan {
    ServicePlan {
        account: "acme".to_owned(),
        id: format!("api{number}"),
        settings: ServiceSettings {
            rate: Rate::new(service.burst, service.per_minute).unwrap_or(ServiceSettings::RATE),
            retries: service.retries,
            affinity: if service.has_affinity {
                Affinity::Client
            } else {
                Affinity::None
            },
            ..ServiceSettings::default()
        },
    }
}

fn backend_port(service: usize) -> u16 {
    BACKEND_PORT + u16::try_from(service).unwrap_or(0)
}

/// Address of a machine of a kind: 1 callers, 2 agents, 3 backends, 4 copies of agents.
pub(crate) fn machine(kind: u8, number: usize) -> IpAddr {
    Ipv4Addr::new(10, kind, 0, u8::try_from(number).unwrap_or(0) + 1).into()
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
