//! A region whose nodes, databases and agents have machines of their own.

use std::cell::Cell;
use std::fs::{self, OpenOptions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use gw_local_region::is_settled;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::engine::Engine;
use super::world::{Machine, World};
use crate::admin_api::{AdminApi, Reply};
use crate::backend::Received;
use crate::client::Target;
use crate::demo::UNLIMITED;
use crate::enrolled::{Enrolled, output};
use crate::failure::{Failure, ensure};
use crate::machine::process;
use crate::machine::process::Process;
use crate::metrics;
use crate::scenarios::region::haproxy::Balancer;
use crate::scenarios::region::nodes::NODES;

const APEX: &str = "eu1.gw.localhost";
const ADMIN_URL: &str = "http://127.0.0.1:9080";
const PORT: u16 = 8443;
const PEER_PORT: u16 = 9443;
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(50);

/// What a region is started with.
#[derive(Default)]
pub(super) struct Plan {
    /// Services of each agent.
    pub(super) services: usize,
    /// `max_staleness_seconds` with `isolation = "refuse"`.
    pub(super) refuse_after: Option<u64>,
    pub(super) has_standby: bool,
    /// One more agent, which connects through a balancer to any node.
    pub(super) has_balanced_agent: bool,
    /// Environment of the last node.
    pub(super) environment: Vec<(&'static str, String)>,
}

/// A running region. Fields are dropped in this order.
pub(super) struct Site {
    agents: Vec<Process>,
    _balancers: Vec<Balancer>,
    nodes: Vec<Node>,
    pub(super) engines: Vec<Engine>,
    pub(super) world: World,
    pub(super) services: Vec<Service>,
    pub(super) key: String,
    gateway: PathBuf,
    ca_file: PathBuf,
    backend: String,
    /// Keys and credentials that were made.
    secrets: Cell<usize>,
    folder: TempDir,
}

struct Node {
    process: Option<Process>,
    api: AdminApi,
    folder: PathBuf,
    environment: Vec<(&'static str, String)>,
}

/// A service with one agent.
pub(super) struct Service {
    pub(super) id: String,
    /// The node to which its agent connects; `None` for any.
    pub(super) entry: Option<usize>,
}

impl Site {
    pub(super) fn start(gateway: &Path, plan: &Plan) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        // The user of PostgreSQL enters it.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711))?;
        let world = World::start()?;
        let mut engines = vec![Engine::start(
            &world,
            Machine::Engine(0),
            &folder.path().join("engine-0"),
            gateway,
        )?];
        if plan.has_standby {
            let standby = Engine::standby(
                &world,
                Machine::Engine(1),
                &folder.path().join("engine-1"),
                gateway,
                &engines[0],
            )?;
            engines.push(standby);
        }
        let received = Received::default();
        let backend = world.on(Machine::Agents, || Ok(received.start()?))?;
        let mut site = Self {
            agents: Vec::new(),
            _balancers: Vec::new(),
            nodes: Vec::new(),
            engines,
            world,
            services: Vec::new(),
            key: String::new(),
            gateway: gateway.to_owned(),
            ca_file: folder.path().join("server.crt"),
            backend,
            secrets: Cell::new(0),
            folder,
        };
        site.start_nodes(plan)?;
        site.administer(0, "POST", "/accounts", &json!({ "id": "demo" }))?;
        site.start_agents(plan)?;
        Ok(site)
    }

    fn start_nodes(&mut self, plan: &Plan) -> Result<(), Failure> {
        let folder = self.folder.path().to_owned();
        let names = [APEX.to_owned(), format!("*.{APEX}")];
        let failed = |error| Failure::during("making a certificate", error);
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(names).map_err(failed)?;
        fs::write(&self.ca_file, cert.pem())?;
        fs::write(folder.join("server.key"), signing_key.serialize_pem())?;
        for number in 0..NODES {
            let node = folder.join(format!("node-{number}"));
            fs::create_dir(&node)?;
            fs::set_permissions(&node, fs::Permissions::from_mode(0o700))?;
            fs::write(node.with_extension("toml"), self.config(number, plan))?;
            let environment = if number == NODES - 1 {
                plan.environment.clone()
            } else {
                Vec::new()
            };
            self.nodes.push(Node {
                process: None,
                api: AdminApi::new(""),
                folder: node,
                environment,
            });
        }
        let mut init = process::command(&self.gateway, &[])?;
        init.args(["region", "init", "--config"])
            .arg(self.nodes[0].folder.with_extension("toml"));
        self.world.on(Machine::Node(0), || output(&mut init))?;
        // One after another, so that slots are numbers of nodes.
        for number in 0..NODES {
            self.start_node(number)?;
            self.wait_for_members(0..=number)?;
        }
        Ok(())
    }

    fn config(&self, number: usize, plan: &Plan) -> String {
        let folder = self.folder.path().display();
        let hosts: Vec<String> = self
            .engines
            .iter()
            .map(|engine| engine.machine().address().to_string())
            .collect();
        let isolation = plan
            .refuse_after
            .map(|seconds| format!("isolation = \"refuse\"\nmax_staleness_seconds = {seconds}\n"));
        format!(
            "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{folder}/node-{number}\"\n\
             listen = \"0.0.0.0:{PORT}\"\nworkers = 1\ntls_certificate = \"{folder}/server.crt\"\n\
             tls_key = \"{folder}/server.key\"\n\
             store = \"postgres://gw@{}/postgres?sslmode=disable\"\n\
             region_key = \"{folder}/region.key\"\npeer_listen = \"{}:{PEER_PORT}\"\n{}",
            hosts.join(","),
            Machine::Node(number).address(),
            isolation.unwrap_or_default()
        )
    }

    /// Starts agents at each node, and one behind a balancer if it is planned, with services. Their
    /// tunnels are open when this returns.
    fn start_agents(&mut self, plan: &Plan) -> Result<(), Failure> {
        let nodes: Vec<SocketAddr> = (0..NODES)
            .map(|node| SocketAddr::from((Machine::Node(node).address(), PORT)))
            .collect();
        let balanced = plan.has_balanced_agent.then_some(None);
        for entry in (0..NODES).map(Some).chain(balanced) {
            let behind = entry.map_or(&nodes[..], |node| &nodes[node..=node]);
            let balancer = self.world.on(Machine::Agents, || Balancer::start(behind))?;
            let first = self.services.len();
            for number in first..first + plan.services {
                let id = format!("s{number}");
                let limits =
                    json!({ "id": id, "burst": UNLIMITED, "refill_per_minute": UNLIMITED });
                self.change(0, "POST", "/accounts/demo/services", &limits)?;
                self.services.push(Service { id, entry });
            }
            let ids: Vec<&str> = self.services[first..]
                .iter()
                .map(|service| service.id.as_str())
                .collect();
            let token = self.change(
                0,
                "POST",
                "/accounts/demo/enrollment-tokens",
                &json!({ "services": ids }),
            )?;
            let url = format!("https://{APEX}:{}", balancer.port);
            let agent = self.world.on(Machine::Agents, || {
                let enrolled =
                    Enrolled::new(&self.gateway, &url, &self.ca_file, &text(&token, "token"))?;
                let run = enrolled.command(&self.backend, &[])?;
                enrolled.into_process(run)
            })?;
            self.agents.push(agent);
            self._balancers.push(balancer);
        }
        self.key = self.new_key()?.1;
        self.wait_for_tunnels()
    }

    /// Id and secret of a new key for all services.
    pub(super) fn new_key(&self) -> Result<(String, String), Failure> {
        let key = self.change(
            0,
            "POST",
            "/accounts/demo/service-keys",
            &self.secret_of_all(),
        )?;
        Ok((text(&key, "key_id"), text(&key, "service_key")))
    }

    /// Request of a new client to the token endpoint.
    pub(super) fn token_form(&self, service: usize) -> Result<String, Failure> {
        let client = self.change(
            0,
            "POST",
            "/accounts/demo/credentials",
            &self.secret_of_all(),
        )?;
        let id = text(&client, "client_id");
        let secret = text(&client, "client_secret");
        let scope = format!("account%3Ademo%20service%3A{}", self.services[service].id);
        Ok(format!(
            "grant_type=client_credentials&client_id={id}&client_secret={secret}&scope={scope}"
        ))
    }

    /// An access token that a node issues.
    pub(super) fn token(&self, node: usize, form: &str) -> Result<String, Failure> {
        let apex = self.apex()?;
        let answer = self.world.on(Machine::Node(node), || {
            apex.connect()?.post_form("/oauth/token", form)
        })?;
        let body: Value = serde_json::from_slice(&answer.body)?;
        ensure(answer.head.status == 200, || {
            format!("no access token: {body}")
        })?;
        Ok(text(&body, "access_token"))
    }

    /// Description of a key or credential with a name that no other has.
    fn secret_of_all(&self) -> Value {
        let ids: Vec<&str> = self
            .services
            .iter()
            .map(|service| service.id.as_str())
            .collect();
        self.secrets.set(self.secrets.get() + 1);
        json!({ "name": format!("secret {}", self.secrets.get()), "allowed_services": ids })
    }

    /// Target of requests that are sent on the machine of a node.
    pub(super) fn target(&self, service: usize) -> Result<Target, Failure> {
        let url = format!("https://demo--{}.{APEX}:{PORT}", self.services[service].id);
        Target::new(&url, &self.ca_file, &self.key)
    }

    /// Target of the region's own endpoints.
    fn apex(&self) -> Result<Target, Failure> {
        Target::new(&format!("https://{APEX}:{PORT}"), &self.ca_file, "")
    }

    /// The node that has the tunnel of each service.
    pub(super) fn owners(&self) -> Result<Vec<Option<usize>>, Failure> {
        let mut owners = vec![None; self.services.len()];
        for node in (0..NODES).filter(|node| self.nodes[*node].process.is_some()) {
            let tunnels = self.world.on(Machine::Node(node), || {
                metrics::services_with(ADMIN_URL, "gw_service_tunnels")
            })?;
            for (service, owner) in self.services.iter().zip(&mut owners) {
                if tunnels.contains(&format!("demo--{}", service.id)) {
                    *owner = Some(node);
                }
            }
        }
        Ok(owners)
    }

    pub(super) fn wait_for_tunnels(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + SETTLED_WITHIN;
        loop {
            let missing = self
                .owners()?
                .iter()
                .filter(|owner| owner.is_none())
                .count();
            if missing == 0 {
                return Ok(());
            }
            ensure(Instant::now() < deadline, || {
                format!("{missing} services have no tunnel")
            })?;
            std::thread::sleep(TICK);
        }
    }

    pub(super) fn start_node(&mut self, number: usize) -> Result<(), Failure> {
        let node = &mut self.nodes[number];
        let mut serve = process::command(&self.gateway, &[])?;
        serve
            .arg("serve")
            .arg("--config")
            .arg(node.folder.with_extension("toml"));
        serve.envs(node.environment.iter().map(|(name, value)| (name, value)));
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(node.folder.with_extension("log"))?;
        serve
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        node.process = Some(self.world.on(Machine::Node(number), || {
            Process::spawn("gw-gateway", &mut serve)
        })?);
        let deadline = Instant::now() + SETTLED_WITHIN;
        // The first start of the first node makes the token.
        let token = loop {
            match fs::read_to_string(node.folder.join("admin.token")) {
                Ok(token) if !token.is_empty() => break token,
                _ => ensure(Instant::now() < deadline, || {
                    format!("node {number} has no admin token")
                })?,
            }
            std::thread::sleep(TICK);
        };
        node.api = AdminApi::new(token.trim());
        Ok(())
    }

    pub(super) fn stop_node(&mut self, number: usize) -> Result<(), Failure> {
        self.nodes[number]
            .process
            .take()
            .map_or(Ok(()), Process::stop)
    }

    pub(super) fn kill_node(&mut self, number: usize) -> Result<(), Failure> {
        self.nodes[number]
            .process
            .take()
            .map_or(Ok(()), Process::kill)
    }

    /// Whether a node has ended by itself.
    pub(super) fn has_ended(&mut self, number: usize) -> Result<bool, Failure> {
        let Some(process) = &mut self.nodes[number].process else {
            return Ok(true);
        };
        Ok(process.wait(Duration::ZERO)?.is_some())
    }

    /// Freezes (`Signal::STOP`) or continues (`Signal::CONT`) a node.
    pub(super) fn signal_node(&self, number: usize, signal: Signal) {
        self.nodes[number]
            .process
            .iter()
            .for_each(|process| process.send_all(signal));
    }

    /// What a node has logged.
    pub(super) fn log(&self, number: usize) -> Result<String, Failure> {
        Ok(fs::read_to_string(
            self.nodes[number].folder.with_extension("log"),
        )?)
    }

    /// Sends a request of the administration API to a node, on its machine.
    pub(super) fn administer(
        &self,
        node: usize,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<Reply, Failure> {
        self.world.on(Machine::Node(node), || {
            self.nodes[node].api.exchange(ADMIN_URL, method, path, body)
        })
    }

    /// Like [`Self::administer`], and fails unless the status is that of a success.
    pub(super) fn change(
        &self,
        node: usize,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<Value, Failure> {
        let reply = self.administer(node, method, path, body)?;
        ensure((200..300).contains(&reply.status), || {
            format!("{method} {path}: {} {}", reply.status, reply.body)
        })?;
        Ok(reply.body)
    }

    /// The region as a node sees it; null if the node does not answer.
    pub(super) fn status(&self, node: usize) -> Value {
        self.administer(node, "GET", "/region", &Value::Null)
            .map_or(Value::Null, |reply| reply.body)
    }

    /// Waits until these nodes know each other as live, and no others, and no service moves.
    pub(super) fn wait_for_members(
        &self,
        nodes: impl IntoIterator<Item = usize>,
    ) -> Result<(), Failure> {
        let nodes: Vec<usize> = nodes.into_iter().collect();
        let deadline = Instant::now() + SETTLED_WITHIN;
        for node in &nodes {
            loop {
                let status = self.status(*node);
                if is_settled(&status, nodes.len()) {
                    break;
                }
                ensure(Instant::now() < deadline, || {
                    format!("node {node} does not have {nodes:?} as members: {status}")
                })?;
                std::thread::sleep(TICK);
            }
        }
        Ok(())
    }

    /// Waits until all nodes are members and all tunnels are open.
    pub(super) fn wait_until_well(&self) -> Result<(), Failure> {
        self.wait_for_members(0..NODES)?;
        self.wait_for_tunnels()
    }
}

/// A member of a JSON object that is a text.
fn text(object: &Value, member: &str) -> String {
    object[member].as_str().unwrap_or_default().to_owned()
}
