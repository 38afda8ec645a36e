//! A region whose nodes, databases and agents have machines of their own.

use std::cell::Cell;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use gw_local_region::is_settled;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::NODES;
use super::engine::Engine;
use super::haproxy::Balancer;
use super::node::{ADMIN_URL, Node};
use super::world::{Machine, World};
use crate::admin_api::{AdminApi, ServiceKey, text};
use crate::agents::{Agent, Plan};
use crate::backend::Received;
use crate::client::Target;
use crate::failure::{Failure, ensure, wait_until};
use crate::machine::process::{self, output};
use crate::metrics;

const APEX: &str = "eu1.gw.localhost";
const PORT: u16 = 8443;
const PEER_PORT: u16 = 9443;
const STARTED_WITHIN: Duration = Duration::from_secs(90);
/// Duration of each request, so that some are in flight.
const DELAY: Duration = Duration::from_millis(10);
/// Services of an agent that connects to one node: enough for the node to own one of them.
const SERVICES_OF_NODE: usize = 12;
/// Services of the twins, which are two agents that connect to any node. The last one is limited.
const SERVICES_OF_TWINS: usize = 3;
pub(super) const TWINS: [usize; 2] = [NODES, NODES + 1];
/// Limits of the limited service.
pub(super) const BURST: usize = 100;
pub(super) const REFILL_PER_SECOND: usize = 5;

/// A running region. Fields are dropped in this order.
pub(super) struct Site {
    /// One of each node, and the twins.
    pub(super) agents: Vec<Agent>,
    _balancers: Vec<Balancer>,
    pub(super) nodes: Vec<Node>,
    pub(super) engines: Vec<Engine>,
    /// The engine that takes changes.
    pub(super) primary: usize,
    pub(super) world: World,
    pub(super) services: Vec<Service>,
    pub(super) received: Received,
    pub(super) gateway: PathBuf,
    key: String,
    token_form: String,
    release: Option<Release>,
    /// The version to which the region has gone.
    upgraded: Option<String>,
    keys: Cell<usize>,
    pub(super) folder: TempDir,
}

#[derive(Clone)]
pub(super) struct Service {
    pub(super) id: String,
    /// The node to which its agent connects; `None` for any.
    pub(super) entry: Option<usize>,
    /// Body of the responses of its backend.
    pub(super) answer: String,
}

/// The next release, to which nodes and agents go.
struct Release {
    programs: PathBuf,
    key: PathBuf,
    public_key: String,
}

impl Site {
    /// Starts a region. `next` has the programs of the next release.
    pub(super) fn start(gateway: &Path, next: Option<&Path>) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        let path = folder.path().to_owned();
        // The user of PostgreSQL enters it.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o711))?;
        fs::create_dir(path.join("agent-programs"))?;
        // An upgrade replaces this copy.
        let program = path.join("gw-gateway");
        for name in ["gw-gateway", "gw-agent"] {
            fs::copy(gateway.with_file_name(name), path.join(name))?;
        }
        let world = World::start()?;
        let [first, second] = [0, 1].map(Machine::Engine);
        let at = |name: &str| path.join(name);
        let primary = Engine::start(&world, first, &at("engine-0"), gateway)?;
        let standby = Engine::standby(&world, second, &at("engine-1"), gateway, &primary)?;
        let mut site = Self {
            agents: Vec::new(),
            _balancers: Vec::new(),
            nodes: Vec::new(),
            engines: vec![primary, standby],
            primary: 0,
            world,
            services: Vec::new(),
            received: Received::default(),
            gateway: program,
            key: String::new(),
            token_form: String::new(),
            release: next.map(|next| Release::new(next, &path)).transpose()?,
            upgraded: None,
            keys: Cell::new(0),
            folder,
        };
        site.start_nodes()?;
        site.start_agents()?;
        site.wait_until_well(STARTED_WITHIN)?;
        Ok(site)
    }

    fn start_nodes(&mut self) -> Result<(), Failure> {
        let folder = self.folder.path().to_owned();
        let names = [APEX.to_owned(), format!("*.{APEX}")];
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(names)
                .map_err(|error| Failure::during("making a certificate", error))?;
        fs::write(self.ca_file(), cert.pem())?;
        fs::write(folder.join("server.key"), signing_key.serialize_pem())?;
        for number in 0..NODES {
            let data = folder.join(format!("node-{number}"));
            fs::create_dir(&data)?;
            fs::set_permissions(&data, fs::Permissions::from_mode(0o700))?;
            self.nodes.push(Node::new(data, &self.config(number))?);
        }
        let mut init = process::command(&self.gateway, &[])?;
        init.args(["region", "init", "--config"])
            .arg(self.nodes[0].config());
        self.world.on(Machine::Node(0), || output(&mut init))?;
        // One after another, so that slots are numbers of nodes.
        for number in 0..NODES {
            self.start_node(number)?;
            let otherwise = || format!("node {number} does not join");
            wait_until(STARTED_WITHIN, otherwise, || {
                Ok((0..=number).all(|node| is_settled(&self.status(node), number + 1)))
            })?;
        }
        Ok(())
    }

    pub(super) fn start_node(&mut self, number: usize) -> Result<(), Failure> {
        let node = &mut self.nodes[number];
        self.world
            .on(Machine::Node(number), || node.start(&self.gateway))
    }

    fn config(&self, number: usize) -> String {
        let folder = self.folder.path().display();
        let hosts: Vec<String> = self
            .engines
            .iter()
            .map(|engine| engine.machine().address().to_string())
            .collect();
        format!(
            "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{folder}/node-{number}\"\n\
             listen = \"0.0.0.0:{PORT}\"\nworkers = 1\ntls_certificate = \"{folder}/server.crt\"\n\
             tls_key = \"{folder}/server.key\"\nregion_key = \"{folder}/region.key\"\n\
             store = \"postgres://gw@{}/postgres?sslmode=disable\"\n\
             peer_listen = \"{}:{PEER_PORT}\"\nagent_versions = \"previous\"\n\
             agent_programs = \"{folder}/agent-programs\"\n",
            hosts.join(","),
            Machine::Node(number).address(),
        )
    }

    /// Starts an agent of each node and the twins, with their services.
    fn start_agents(&mut self) -> Result<(), Failure> {
        self.administer(0, |api| api.create_account("demo"))?;
        let nodes: Vec<SocketAddr> = (0..NODES)
            .map(|node| SocketAddr::from((Machine::Node(node).address(), PORT)))
            .collect();
        for entry in (0..NODES).map(Some).chain([None]) {
            let behind = entry.map_or(&nodes[..], |node| &nodes[node..=node]);
            let count = entry.map_or(SERVICES_OF_TWINS, |_| SERVICES_OF_NODE);
            let agents = entry.map_or(TWINS.len(), |_| 1);
            let answer = format!("the backend behind {entry:?} ").repeat(100);
            let first = self.services.len();
            let ids: Vec<String> = (first..first + count).map(|it| format!("s{it}")).collect();
            let token = self.administer(0, |api| {
                ids.iter()
                    .try_for_each(|id| api.create_service("demo", id))?;
                api.enrollment_token("demo", &ids, agents)
            })?;
            self.services.extend(ids.into_iter().map(|id| Service {
                id,
                entry,
                answer: answer.clone(),
            }));
            let plan = Plan {
                environment: self.release.iter().flat_map(Release::environment).collect(),
                ..Plan::default()
            };
            let (balancer, started) = self.world.on(Machine::Agents, || {
                let balancer = Balancer::start(behind)?;
                let url = format!("https://{APEX}:{}", balancer.port);
                let plan = Plan {
                    backend: self.received.backend(DELAY, &answer)?.url,
                    ..plan
                };
                let start =
                    |_| Agent::start(&self.gateway, &url, &self.ca_file(), &token, plan.clone());
                let started: Result<Vec<_>, _> = (0..agents).map(start).collect();
                Ok((balancer, started?))
            })?;
            self.agents.extend(started);
            self._balancers.push(balancer);
        }
        let limits = json!({ "burst": BURST, "refill_per_minute": 60 * REFILL_PER_SECOND });
        let path = format!(
            "/accounts/demo/services/{}",
            self.services[self.limited()].id
        );
        self.administer(0, |api| api.change("PATCH", &path, &limits))?;
        self.key = self.new_key()?.secret;
        self.token_form = self.new_client()?;
        Ok(())
    }

    fn ca_file(&self) -> PathBuf {
        self.folder.path().join("server.crt")
    }

    /// The service with a small bucket.
    pub(super) fn limited(&self) -> usize {
        self.services.len() - 1
    }

    fn ids(&self) -> Vec<String> {
        self.services.iter().map(|it| it.id.clone()).collect()
    }

    /// A new key for all services.
    pub(super) fn new_key(&self) -> Result<ServiceKey, Failure> {
        self.keys.set(self.keys.get() + 1);
        let name = format!("key {}", self.keys.get());
        self.administer(0, |api| api.create_key("demo", &name, &self.ids()))
    }

    /// Request of a new client to the token endpoint.
    fn new_client(&self) -> Result<String, Failure> {
        let client = json!({ "name": "client", "allowed_services": self.ids() });
        let path = "/accounts/demo/credentials";
        let client = self.administer(0, |api| api.change("POST", path, &client))?;
        Ok(format!(
            "grant_type=client_credentials&client_id={}&client_secret={}&\
             scope=account%3Ademo%20service%3A{}",
            text(&client, "client_id")?,
            text(&client, "client_secret")?,
            self.services[0].id
        ))
    }

    /// Lets a node issue an access token.
    pub(super) fn issue_token(&self, node: usize) -> Result<(), Failure> {
        let apex = Target::new(&format!("https://{APEX}:{PORT}"), &self.ca_file(), "")?;
        let answer = self.world.on(Machine::Node(node), || {
            apex.connect()?.post_form("/oauth/token", &self.token_form)
        })?;
        ensure(answer.head.status == 200, || {
            format!("no access token: {}", answer.head.status)
        })
    }

    /// Target of requests that are sent on the machine of a node.
    pub(super) fn target(&self, service: usize) -> Result<Target, Failure> {
        let url = format!("https://demo--{}.{APEX}:{PORT}", self.services[service].id);
        Target::new(&url, &self.ca_file(), &self.key)
    }

    /// The node that has the tunnel of each service.
    pub(super) fn owners(&self) -> Result<Vec<Option<usize>>, Failure> {
        let mut owners = vec![None; self.services.len()];
        for node in (0..NODES).filter(|node| self.nodes[*node].is_running()) {
            let tunnels = self.world.on(Machine::Node(node), || {
                metrics::of_services(ADMIN_URL, "gw_service_tunnels")
            })?;
            for (service, owner) in self.services.iter().zip(&mut owners) {
                if tunnels.get(&format!("demo--{}", service.id)) > Some(&0) {
                    *owner = Some(node);
                }
            }
        }
        Ok(owners)
    }

    /// Sends requests of the administration API to a node, on its machine.
    pub(super) fn administer<T>(
        &self,
        node: usize,
        ask: impl FnOnce(&AdminApi) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.world
            .on(Machine::Node(node), || ask(&self.nodes[node].api))
    }

    /// The region as a node sees it; null if the node does not answer.
    pub(super) fn status(&self, node: usize) -> Value {
        let asked = self.administer(node, |api| api.exchange("GET", "/region", &Value::Null));
        asked.map_or(Value::Null, |reply| reply.body)
    }

    /// Waits until all nodes are members, all tunnels are open, each node serves each service, and
    /// a change at each node is in use at all others. Returns how long that took.
    pub(super) fn wait_until_well(&self, within: Duration) -> Result<Duration, Failure> {
        let began = Instant::now();
        let finding = Cell::new(String::new());
        let otherwise = || format!("not well after {within:?}: {}", finding.take());
        wait_until(within, otherwise, || {
            let ill = self.is_well().err();
            finding.set(ill.as_ref().map_or_else(String::new, Failure::to_string));
            Ok(ill.is_none())
        })?;
        Ok(began.elapsed())
    }

    fn is_well(&self) -> Result<(), Failure> {
        for node in 0..NODES {
            let status = self.status(node);
            ensure(is_settled(&status, NODES), || {
                format!("node {node} is not settled: {status}")
            })?;
        }
        let without = self.owners()?.iter().filter(|it| it.is_none()).count();
        ensure(without == 0, || {
            format!("{without} services have no tunnel")
        })?;
        let behind = self.agents_behind()?;
        ensure(behind == 0, || format!("{behind} agents are not updated"))?;
        for node in 0..NODES {
            let change = json!({ "burst": BURST });
            let path = format!(
                "/accounts/demo/services/{}",
                self.services[self.limited()].id
            );
            let reply = self.administer(node, |api| api.exchange("PATCH", &path, &change))?;
            ensure(reply.status == 200 && reply.pending.is_empty(), || {
                format!("a change at node {node}: {}", reply.status)
            })?;
        }
        for service in 0..self.services.len() {
            let target = self.target(service)?;
            for node in 0..NODES {
                let asked = || target.connect()?.ask("/hello");
                let status = self.world.on(Machine::Node(node), asked)?.head.status;
                ensure(matches!(status, 200 | 429), || {
                    format!("node {node}, service {service}: {status}")
                })?;
            }
        }
        Ok(())
    }

    /// Puts the next release in place of the programs, and replaces all nodes.
    pub(super) fn upgrade(&mut self) -> Result<(), Failure> {
        let Some(release) = &self.release else {
            return Err(Failure::new("an upgrade needs --next FOLDER"));
        };
        release.install(self.folder.path())?;
        self.upgraded = Some(release.version()?);
        for number in 0..NODES {
            self.nodes[number].replace()?;
        }
        Ok(())
    }

    /// Agents that do not run the next release after an upgrade.
    fn agents_behind(&self) -> Result<usize, Failure> {
        let Some(version) = &self.upgraded else {
            return Ok(0);
        };
        let path = "/accounts/demo/agents";
        let agents = self.administer(0, |api| api.change("GET", path, &Value::Null))?;
        let agents = agents["items"].as_array().into_iter().flatten();
        Ok(agents
            .filter(|it| it["version"] != version.as_str())
            .count())
    }
}

impl Release {
    fn new(programs: &Path, folder: &Path) -> Result<Self, Failure> {
        let key = folder.join("release.key");
        let mut make = Command::new(programs.join("gw-gateway"));
        let public_key = output(make.args(["agent-program", "new-key"]).arg(&key))?;
        Ok(Self {
            programs: programs.to_owned(),
            key,
            public_key: String::from_utf8_lossy(&public_key).trim().to_owned(),
        })
    }

    /// Environment of agents that update themselves.
    fn environment(&self) -> [(&'static str, String); 2] {
        [
            ("GW_UPDATE", "auto".to_owned()),
            ("GW_UPDATE_KEY", self.public_key.clone()),
        ]
    }

    fn install(&self, folder: &Path) -> Result<(), Failure> {
        let gateway = self.programs.join("gw-gateway");
        let mut sign = Command::new(&gateway);
        sign.args(["agent-program", "sign", "--key"]).arg(&self.key);
        sign.arg("--out").arg(folder.join("agent-programs"));
        output(sign.arg(self.programs.join("gw-agent")))?;
        fs::copy(gateway, folder.join("new-program"))?;
        Ok(fs::rename(
            folder.join("new-program"),
            folder.join("gw-gateway"),
        )?)
    }

    fn version(&self) -> Result<String, Failure> {
        let said = output(Command::new(self.programs.join("gw-agent")).arg("--version"))?;
        let said = String::from_utf8_lossy(&said);
        let version = said.split_whitespace().nth(1).map(str::to_owned);
        version.ok_or_else(|| Failure::new(format!("no version in {said}")))
    }
}
