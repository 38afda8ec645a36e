//! Processes of the product: a gateway with a host for each worker, and agents.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gw_agent::support::simulation::RunningAgent;
use gw_base::mailbox::Inbox;
use gw_data_plane::support::simulation::{RunningWorker, serve};
use gw_data_plane::worker::{Setup, WorkerMessage};
use gw_interface::config::HandOver;
use gw_interface::rate_limit::Level;
use gw_shared::runtime;
use gw_simulated_kernel::{Host, sockets};
use tokio::sync::watch;

use super::{World, address_of_node, gateway_address, listen, machine};
use crate::product::{AgentPlan, Gateway, GatewayPlan, NodeSetup, Region, SetupError, control};

/// A process of a gateway.
pub(crate) struct GatewayProcess {
    pub(crate) gateway: Gateway,
    pub(crate) node: usize,
    number: usize,
    /// Present if there are other nodes.
    of_node: Option<NodeSetup>,
    control: Host,
    workers: RefCell<Vec<Host>>,
    /// Hosts of workers that panicked. Connections that they had passed on are still theirs in the
    /// kernel.
    unwound: RefCell<Vec<Host>>,
    running: Rc<RefCell<BTreeMap<usize, RunningWorker>>>,
}

impl GatewayProcess {
    /// Starts a process of a node, which serves from then on. `predecessor` is the one that it
    /// takes over from.
    pub(crate) fn start(
        world: &Rc<World>,
        node: usize,
        predecessor: Option<BTreeMap<String, usize>>,
    ) -> Result<Rc<Self>, SetupError> {
        let number = world.gateways.borrow().len();
        let folder = world.folder().join("gateway");
        std::fs::create_dir_all(&folder)?;
        let region = world.region.borrow();
        let mut plan = GatewayPlan::new(&region, world.scenario.workers, &folder);
        plan.config.connections_per_address = plan.config.connections_per_address.max(64);
        if world.scenario.crosses_workers {
            plan.config.hand_over = HandOver::Never;
        }
        // Room for all requests of a scenario.
        plan.config.relay_memory *= 16;
        plan.socket_memory *= 16;
        plan.levels = predecessor.is_none().then(Vec::<Level>::new);
        plan.tunnels_before = predecessor.unwrap_or_default();
        plan.listeners_are_ours = false;
        let (gateway, jobs) = Gateway::new(&region, plan)?;
        let nodes = world.nodes.borrow();
        if nodes.are_several() {
            nodes.publish(node, gateway.publisher());
            nodes.certify(node, &region, gateway.publisher())?;
        }
        let control = control::serve(Rc::clone(&world.region), jobs, gateway.publisher().clone());
        let control_host = Host::new(&format!("control {number}"), machine(5, node));
        control_host.spawn(control);
        let process = Rc::new(Self {
            gateway,
            node,
            number,
            of_node: nodes.are_several().then(NodeSetup::default),
            control: control_host,
            workers: RefCell::default(),
            unwound: RefCell::default(),
            running: Rc::default(),
        });
        for worker in 0..world.scenario.workers {
            let host = process.start_worker(&region, worker, None)?;
            process.workers.borrow_mut().push(host);
        }
        world.gateways.borrow_mut().push(Rc::clone(&process));
        Ok(process)
    }

    /// Starts a worker on a host of its own, at these levels of its buckets if it starts again.
    fn start_worker(
        &self,
        region: &Region,
        worker: usize,
        levels: Option<Arc<Vec<Level>>>,
    ) -> Result<Host, SetupError> {
        let name = format!("worker {}.{worker}", self.number);
        let host = Host::new(&name, machine(5, self.node));
        let listener = host.enter(listen)?;
        let (mut setup, inbox) = self.gateway.setup(region, worker, vec![listener]);
        if let Some(of_node) = &self.of_node {
            let address = address_of_node(self.node);
            let for_nodes = host.enter(|| TcpListener::bind(address))?;
            setup.region = Some(of_node.of_worker(for_nodes));
        }
        setup.levels = levels.or(setup.levels);
        self.serve(host, setup, inbox);
        Ok(host)
    }

    fn serve(&self, host: Host, setup: Setup, inbox: Inbox<WorkerMessage>) {
        let running = Rc::clone(&self.running);
        let worker = setup.id.0;
        host.spawn(async move {
            let (up, _) = crossbeam_channel::bounded(1);
            match serve(setup, inbox, up) {
                Ok((handle, served)) => {
                    running.borrow_mut().insert(worker, handle);
                    served.await;
                }
                Err(error) => tracing::error!(%error, "a worker cannot start"),
            }
        });
    }

    /// Ends a worker as a panic does, and starts it again: its buckets are full.
    pub(crate) fn panic_worker(&self, world: &World, worker: usize) -> Result<(), SetupError> {
        let panicked = self.workers.borrow()[worker];
        panicked.unwind();
        self.unwound.borrow_mut().push(panicked);
        self.running.borrow_mut().remove(&worker);
        let region = world.region.borrow();
        let host = self.start_worker(&region, worker, Some(Arc::default()))?;
        self.workers.borrow_mut()[worker] = host;
        Ok(())
    }

    /// Kills the process.
    pub(crate) fn kill(&self) {
        self.control.kill();
        self.running.borrow_mut().clear();
        let (workers, unwound) = (self.workers.borrow(), self.unwound.borrow());
        workers.iter().chain(&*unwound).for_each(|host| host.kill());
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.control.is_dead()
    }

    /// The hosts of workers.
    pub(crate) fn workers(&self) -> Vec<Host> {
        self.workers.borrow().clone()
    }

    /// Connections of the process that are open.
    pub(crate) fn open_connections(&self) -> usize {
        let (workers, unwound) = (self.workers.borrow(), self.unwound.borrow());
        let hosts = workers.iter().chain(&*unwound);
        hosts.map(|host| sockets::open_connections(*host)).sum()
    }

    /// Whether a worker runs.
    pub(crate) fn runs(&self) -> bool {
        let running = self.running.borrow();
        running.values().any(|worker| worker.probe().is_some())
    }

    /// The workers that have started, by their numbers.
    pub(crate) fn running(&self) -> BTreeMap<usize, RunningWorker> {
        self.running.borrow().clone()
    }
}

/// An agent and its state folder. The process may be killed and started again.
pub(crate) struct AgentProcess {
    number: usize,
    plan: AgentPlan,
    folder: PathBuf,
    process: RefCell<Option<RunningProcess>>,
}

struct RunningProcess {
    host: Host,
    stop: watch::Sender<bool>,
    agent: Rc<RefCell<Option<RunningAgent>>>,
    has_ended: Rc<Cell<bool>>,
}

impl AgentProcess {
    /// Enrolls an agent.
    pub(crate) fn enroll(world: &World, number: usize) -> Result<Self, SetupError> {
        let plan = world.agent_plan(number);
        let folder = world.folder().join(format!("agent{number}"));
        std::fs::create_dir_all(&folder)?;
        plan.enroll(&mut world.region.borrow_mut(), gateway_address(), &folder)?;
        let region = world.region.borrow();
        for gateway in world.gateways.borrow().iter() {
            gateway.gateway.publisher().publish(&region);
        }
        Ok(Self {
            number,
            plan,
            folder,
            process: RefCell::default(),
        })
    }

    /// A copy of the state folder, for another machine.
    pub(crate) fn copy(&self, world: &World) -> Result<Self, SetupError> {
        let folder = world.folder().join(format!("copy{}", self.number));
        std::fs::create_dir_all(&folder)?;
        let region = world.region.borrow();
        self.plan.store(&region, gateway_address(), &folder)?;
        Ok(Self {
            number: self.number,
            plan: self.plan.clone(),
            folder,
            process: RefCell::default(),
        })
    }

    /// Starts the process on the agent's machine.
    pub(crate) fn start(&self, world: &World) -> Result<(), SetupError> {
        self.start_at(world, machine(2, self.number), "agent")
    }

    /// Starts the process on another machine.
    pub(crate) fn start_at(
        &self,
        _: &World,
        machine: IpAddr,
        name: &str,
    ) -> Result<(), SetupError> {
        let config = self.plan.load(&self.folder)?;
        let host = Host::new(&format!("{name} {}", self.number), machine);
        let (stop, stopped) = watch::channel(false);
        let agent: Rc<RefCell<Option<RunningAgent>>> = Rc::default();
        let has_ended: Rc<Cell<bool>> = Rc::default();
        let (kept, ends) = (Rc::clone(&agent), Rc::clone(&has_ended));
        host.spawn(async move {
            let (handle, running) = gw_agent::support::simulation::run(config, stopped);
            *kept.borrow_mut() = Some(handle);
            running.await;
            ends.set(true);
        });
        *self.process.borrow_mut() = Some(RunningProcess {
            host,
            stop,
            agent,
            has_ended,
        });
        Ok(())
    }

    /// Host of the process that runs.
    pub(crate) fn host(&self) -> Option<Host> {
        self.process.borrow().as_ref().map(|process| process.host)
    }

    pub(crate) fn agent(&self) -> Option<RunningAgent> {
        let process = self.process.borrow();
        let agent = process.as_ref()?.agent.borrow();
        agent.clone()
    }

    /// Kills the process.
    pub(crate) fn kill(&self) {
        let process = self.process.take();
        if let Some(process) = process {
            process.host.kill();
        }
    }

    /// Ends the process as SIGTERM does, and waits until it has ended.
    pub(crate) async fn drain(&self) {
        let Some(process) = self.process.take() else {
            return;
        };
        process.stop.send_replace(true);
        while !process.has_ended.get() && !process.host.is_dead() {
            runtime::sleep(Duration::from_millis(20)).await;
        }
        // What is left of the reactor ends with the process.
        process.host.kill();
    }
}
