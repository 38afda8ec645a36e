//! A gateway or a region, with services that have several agents.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::admin_api::AdminApi;
use crate::callers::{Callers, Load, Methods, PER_CONNECTION};
use crate::client::Target;
use crate::demo::{self, Demo, UNLIMITED};
use crate::enrolled::{Enrolled, TUNNELS_WITHIN};
use crate::failure::{Failure, ensure};
use crate::machine::process;
use crate::machine::process::Process;
use crate::metrics;
use crate::scenarios::region::nodes::{NODES, Region};

const TICK: Duration = Duration::from_millis(20);
const SLOTS: &str = "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS";
const METRICS: &str = "GW_AGENT_METRICS_LISTEN";
/// Slots of an agent, unless a section is about them: more than there are callers.
const MANY_SLOTS: u32 = 1024;

pub(crate) struct Site {
    product: Product,
    api: AdminApi,
    gateway: PathBuf,
    pools: Cell<usize>,
}

enum Product {
    Gateway(Box<Demo>),
    Region(Box<Region>),
}

/// A service with its agents.
pub(crate) struct Pool<'a> {
    site: &'a Site,
    service: String,
    host: String,
    key: String,
    pub(crate) agents: Vec<Agent>,
}

/// What an agent is started with.
pub(crate) struct Plan {
    pub(crate) backend: String,
    pub(crate) slots: u32,
    /// Port in place of the one of its node.
    pub(crate) port: Option<u16>,
    /// Name servers of the agent in place of the machine's, as root: a file like
    /// `/etc/resolv.conf`.
    pub(crate) name_servers: Option<PathBuf>,
}

pub(crate) struct Agent {
    enrolled: Enrolled,
    plan: Plan,
    metrics_port: u16,
    process: Option<Process>,
}

impl Site {
    pub(crate) fn start(gateway: &Path, nodes: usize) -> Result<Self, Failure> {
        let (product, token) = if nodes == NODES {
            let region = Region::start(gateway, None)?;
            let token = region.admin_token().to_owned();
            (Product::Region(Box::new(region)), token)
        } else {
            let demo = Demo::start(gateway, &demo::Options::default())?;
            let token = demo.admin_token.clone();
            (Product::Gateway(Box::new(demo)), token)
        };
        Ok(Self {
            product,
            api: AdminApi::new(&token),
            gateway: gateway.to_owned(),
            pools: Cell::new(0),
        })
    }

    pub(crate) fn stop(self) -> Result<(), Failure> {
        match self.product {
            Product::Gateway(demo) => demo.stop(),
            Product::Region(region) => region.stop(),
        }
    }

    /// A new service, whose agents are at all nodes in turns. All tunnels are open when this
    /// returns.
    pub(crate) fn pool(&self, plans: Vec<Plan>) -> Result<Pool<'_>, Failure> {
        let service = format!("pool{}", self.pools.replace(self.pools.get() + 1));
        let create = json!({ "id": service, "burst": UNLIMITED, "refill_per_minute": UNLIMITED });
        self.change("POST", "/accounts/demo/services", &create)?;
        let text = |answer: Value, field: &str| {
            answer[field]
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| Failure::new(format!("no {field} in {answer}")))
        };
        let key = json!({ "name": service, "allowed_services": [service] });
        let key = text(
            self.change("POST", "/accounts/demo/service-keys", &key)?,
            "service_key",
        )?;
        let token = json!({ "services": [service], "uses": plans.len() });
        let token = text(
            self.change("POST", "/accounts/demo/enrollment-tokens", &token)?,
            "token",
        )?;
        let host = self
            .target(0)
            .host
            .replacen("demo--echo", &format!("demo--{service}"), 1);
        let mut pool = Pool {
            site: self,
            service,
            host,
            key,
            agents: Vec::new(),
        };
        for (number, plan) in plans.into_iter().enumerate() {
            let url = self.url_for_agents(number % self.ports().len(), plan.port);
            let enrolled = Enrolled::new(&self.gateway, &url, self.ca_file(), &token)?;
            let [metrics_port] = process::free_ports()?;
            let mut agent = Agent {
                enrolled,
                plan,
                metrics_port,
                process: None,
            };
            agent.start()?;
            pool.agents.push(agent);
        }
        pool.wait_for_tunnels(pool.agents.len())?;
        Ok(pool)
    }

    fn change(&self, method: &str, path: &str, body: &Value) -> Result<Value, Failure> {
        self.api.change(self.admin_urls()[0], method, path, body)
    }

    pub(crate) fn ca_file(&self) -> &Path {
        match &self.product {
            Product::Gateway(demo) => &demo.ca_file,
            Product::Region(region) => region.ca_file(),
        }
    }

    /// Target of requests to the demo's service at a node.
    fn target(&self, node: usize) -> Target {
        match &self.product {
            Product::Gateway(demo) => demo.target.clone(),
            Product::Region(region) => region.target(node),
        }
    }

    pub(crate) fn ports(&self) -> Vec<u16> {
        match &self.product {
            Product::Gateway(demo) => vec![demo.target.port],
            Product::Region(region) => region.ports().to_vec(),
        }
    }

    fn admin_urls(&self) -> Vec<&str> {
        match &self.product {
            Product::Gateway(demo) => vec![&demo.admin_url],
            Product::Region(region) => region.admin_urls().to_vec(),
        }
    }

    fn url_for_agents(&self, node: usize, port: Option<u16>) -> String {
        let target = self.target(node);
        let apex = target.host.split_once('.').map_or("", |(_, apex)| apex);
        format!("https://{apex}:{}", port.unwrap_or(target.port))
    }
}

impl Pool<'_> {
    /// Addresses of the service, one of each node.
    pub(crate) fn targets(&self) -> Result<Vec<Target>, Failure> {
        let of_node = |node| self.site.target(node).for_service(&self.host, &self.key);
        (0..self.site.ports().len()).map(of_node).collect()
    }

    /// Starts callers of the service at all nodes, with requests back to back unless there is a
    /// rate.
    pub(crate) fn call(
        &self,
        callers: u32,
        rate: Option<u32>,
        methods: Methods,
    ) -> Result<Callers, Failure> {
        Ok(Callers::send(&Load {
            targets: self.targets()?,
            callers,
            rate,
            methods,
            per_connection: PER_CONNECTION,
        }))
    }

    /// Changes settings of the service.
    pub(crate) fn set(&self, settings: &Value) -> Result<(), Failure> {
        self.site.change(
            "PATCH",
            &format!("/accounts/demo/services/{}", self.service),
            settings,
        )?;
        Ok(())
    }

    /// Waits until `count` tunnels take requests.
    pub(crate) fn wait_for_tunnels(&self, count: usize) -> Result<(), Failure> {
        let deadline = Instant::now() + TUNNELS_WITHIN;
        let label = format!("demo--{}", self.service);
        loop {
            let mut tunnels = 0;
            for admin_url in self.site.admin_urls() {
                tunnels += metrics::read_of_service(admin_url, "gw_service_tunnels", &label)?;
            }
            if tunnels == count as u64 {
                return Ok(());
            }
            ensure(Instant::now() < deadline, || {
                format!("{tunnels} of {count} tunnels after {TUNNELS_WITHIN:?}")
            })?;
            std::thread::sleep(TICK);
        }
    }
}

impl Plan {
    pub(crate) fn new(backend: impl Into<String>) -> Self {
        Self {
            backend: backend.into(),
            slots: MANY_SLOTS,
            port: None,
            name_servers: None,
        }
    }
}

impl Agent {
    pub(crate) fn start(&mut self) -> Result<(), Failure> {
        let mut run = self.enrolled.command(&self.plan.backend, &[])?;
        run.env(SLOTS, self.plan.slots.to_string())
            .env(METRICS, format!("127.0.0.1:{}", self.metrics_port));
        if let Some(file) = &self.plan.name_servers {
            run = process::with_file(&run, file, "/etc/resolv.conf")?;
            run.stdin(Stdio::null()).stderr(Stdio::null());
        }
        self.process = Some(Process::spawn("gw-agent", &mut run)?);
        Ok(())
    }

    pub(crate) fn stop(&mut self) -> Result<(), Failure> {
        self.process.take().map_or(Ok(()), Process::stop)
    }

    pub(crate) fn kill(&mut self) -> Result<(), Failure> {
        self.process.take().map_or(Ok(()), Process::kill)
    }

    /// Stops all its processes (`Signal::STOP`) or lets them continue (`Signal::CONT`).
    pub(crate) fn signal(&self, signal: Signal) {
        self.process
            .iter()
            .for_each(|process| process.send_all(signal));
    }

    /// Requests that it has received from the gateway.
    pub(crate) fn requests(&self) -> Result<u64, Failure> {
        metrics::read(
            &format!("http://127.0.0.1:{}", self.metrics_port),
            "gw_agent_requests_total",
        )
    }
}
