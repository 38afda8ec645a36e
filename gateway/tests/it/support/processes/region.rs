//! A region of several node processes on one PostgreSQL server, with an agent that connects through
//! a balancer.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

use gw_local_region::{Balancer, is_settled};
use serde_json::Value;

use super::postgres::Postgres;
use super::prepared::about;
use super::process::{self, Running, Served};
use crate::support::admin_api::{Api, Reply};
use crate::support::agents::in_process;
use crate::support::gateway::Gateway;
use crate::support::limits::ENGINE_GRACE;
use crate::support::metrics::Metrics;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::gate::{Gate, Target};
use crate::support::scene::About;
use crate::support::{SOON, eventually};

pub(crate) struct Region {
    /// Dropped before the database that they use.
    pub(crate) nodes: Vec<Option<Served>>,
    pub(crate) postgres: Postgres,
    folder: tempfile::TempDir,
    service_key: String,
    token: String,
    balancer: Balancer,
    is_gated: bool,
    /// Further lines of each node's configuration.
    configuration: String,
    /// Connections of each node to PostgreSQL, and of the others to it.
    pub(crate) engine_gates: Vec<Gate>,
    pub(crate) peer_gates: Vec<Gate>,
    /// Ports of the nodes, which no other program can take while a node does not run.
    ports: Vec<socket2::Socket>,
}

impl Region {
    /// Starts a region with the scene's account and service, and `count` nodes that are all
    /// members; `None` if PostgreSQL is not installed and may be missing.
    pub(crate) fn start(count: usize) -> Option<Self> {
        Self::start_with(count, false, "")
    }

    /// As [`Self::start`]; the connections to PostgreSQL and between nodes go through gates.
    pub(crate) fn start_gated(count: usize) -> Option<Self> {
        Self::start_with(count, true, "")
    }

    /// As [`Self::start`] or [`Self::start_gated`], with further lines of configuration.
    pub(crate) fn start_with(count: usize, is_gated: bool, configuration: &str) -> Option<Self> {
        let postgres = Postgres::with_region()?;
        let folder = tempfile::tempdir().unwrap();
        let gateway = Gateway::start(&postgres.config(&folder.path().join("setup")));
        let api = gateway.api();
        api.create_service("demo", "echo");
        let (_, service_key) = api.create_service_key("demo", &["echo"]);
        let token = api.create_enrollment_token("demo", &["echo"]);
        gateway.drain();
        let mut region = Self {
            nodes: Vec::new(),
            postgres,
            folder,
            service_key,
            token,
            balancer: Balancer::start(Vec::new()).unwrap(),
            is_gated,
            configuration: configuration.to_owned(),
            engine_gates: Vec::new(),
            peer_gates: Vec::new(),
            ports: Vec::new(),
        };
        for _ in 0..count {
            region.add();
        }
        region.wait_for_members(count);
        Some(region)
    }

    pub(crate) fn config(&self, node: usize) -> PathBuf {
        self.folder.path().join(format!("node{node}.toml"))
    }

    pub(crate) fn data(&self, node: usize) -> PathBuf {
        self.folder.path().join(format!("node{node}"))
    }

    /// Address at which a node listens for other nodes.
    pub(crate) fn peer_listen(&self, node: usize) -> SocketAddr {
        let text = fs::read_to_string(self.config(node)).unwrap();
        let address = text
            .lines()
            .find_map(|line| line.strip_prefix("peer_listen = "));
        address.unwrap().trim_matches('"').parse().unwrap()
    }

    /// Starts another node. Returns its number.
    pub(crate) fn add(&mut self) -> usize {
        let node = self.nodes.len();
        self.nodes.push(None);
        let [port, peer_port] = [(); 2].map(|()| {
            let (port, held) = gw_local_region::hold(0).unwrap();
            self.ports.push(held);
            port
        });
        let text = self.postgres.config_at(&self.data(node), port) + &self.configuration;
        let listen = format!("peer_listen = \"127.0.0.1:{peer_port}\"\n");
        if !self.is_gated {
            fs::write(self.config(node), text + &listen).unwrap();
            self.balancer.add(([127, 0, 0, 1], port).into());
            self.restart(node);
            return node;
        }
        let engine = Gate::to(Target::Unix(self.postgres.socket()));
        let text = text.replace(
            &self.postgres.url(),
            &format!("postgres://gw@{}/postgres", engine.address),
        );
        let peers = Gate::to(Target::Tcp(([127, 0, 0, 1], peer_port).into()));
        fs::write(
            self.config(node),
            format!("{text}{listen}peer_address = \"{}\"\n", peers.address),
        )
        .unwrap();
        self.engine_gates.push(engine);
        self.peer_gates.push(peers);
        self.balancer.add(([127, 0, 0, 1], port).into());
        self.restart(node);
        node
    }

    /// Starts a node that has ended, on the same ports.
    pub(crate) fn restart(&mut self, node: usize) {
        self.nodes[node] = Some(process::serve(&mut process::serve_command(
            &self.config(node),
        )));
    }

    /// Kills a node, as if its process had crashed.
    pub(crate) fn kill(&mut self, node: usize) {
        self.node(node).process.signal("KILL");
        drop(self.nodes[node].take());
    }

    pub(crate) fn node(&self, node: usize) -> &Served {
        self.nodes[node].as_ref().unwrap()
    }

    fn running(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|node| self.nodes[*node].is_some())
    }

    pub(crate) fn admin_token(&self) -> String {
        fs::read_to_string(self.data(0).join("admin.token")).unwrap()
    }

    /// The administration API of a node.
    pub(crate) fn api(&self, node: usize) -> Api {
        Api::at(self.node(node).admin_address, &self.admin_token())
    }

    /// An answer of the administration API of a node.
    pub(crate) fn get(&self, node: usize, path: &str) -> Reply {
        self.api(node).get(path)
    }

    /// Enrolls an agent, each of whose requests goes to another node.
    pub(crate) fn enroll(&self, token: String, state_dir: &std::path::Path) {
        let url = format!("https://eu1.gw.localhost:{}", self.balancer.address.port());
        in_process::enroll_with(token, &url, &self.ca(), state_dir);
    }

    pub(crate) fn service_key(&self) -> &str {
        &self.service_key
    }

    /// Waits until every node has a copy of the records in its data folder that is younger than
    /// this call.
    pub(crate) fn wait_for_copies(&self) {
        let called = SystemTime::now();
        // A node writes a copy after a change.
        let node = self.running().next().unwrap();
        self.api(node).create_enrollment_token("demo", &["echo"]);
        let written = |path: PathBuf| fs::metadata(path).and_then(|file| file.modified());
        eventually("the nodes have copies", || {
            self.running()
                .all(|node| {
                    let written = written(self.data(node).join("records.sealed"));
                    written.is_ok_and(|written| written > called)
                })
                .then_some(())
        });
    }

    /// The region as a node sees it.
    pub(crate) fn status(&self, node: usize) -> Value {
        self.get(node, "/region").body
    }

    /// Waits until every running node knows `count` live nodes and no service moves.
    pub(crate) fn wait_for_members(&self, count: usize) {
        eventually("all nodes know the members", || {
            let is_settled = |node: usize| is_settled(&self.status(node), count);
            self.running().all(is_settled).then_some(())
        });
    }

    /// Waits until every running node has reached PostgreSQL without a failure for so long that it
    /// declares another one dead as soon as that refuses connections. Waits in vain on a machine
    /// that is always too busy for PostgreSQL.
    pub(crate) fn wait_for_trust(&self) {
        let within = ENGINE_GRACE + Duration::from_secs(1);
        let began = Instant::now();
        let mut since = began;
        while since.elapsed() < within && began.elapsed() < SOON {
            let silence = |node| self.status(node)["engine_silence_seconds"].as_f64();
            // With a beat each second, longer silence is a failure.
            let is_heard = |node| silence(node).is_some_and(|seconds| seconds < 1.9);
            if !self.running().all(is_heard) {
                since = Instant::now();
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Lets the balancer pass new connections to these nodes only.
    pub(crate) fn balance_to(&self, nodes: &[usize]) {
        self.balancer
            .set(nodes.iter().map(|node| self.node(*node).address).collect());
    }

    /// The number of the node that owns the scene's service.
    pub(crate) fn owner(&self) -> usize {
        eventually("a node has the tunnel", || {
            self.running()
                .find(|node| self.metric(*node, "gw_tunnels") >= 1.0)
        })
    }

    /// Waits until this node alone has tunnels. After a move, the tunnels of the owner before it
    /// end a moment later.
    pub(crate) fn await_owner(&self, owner: usize) {
        eventually("the owner alone has tunnels", || {
            let is_right =
                |node: usize| (self.metric(node, "gw_tunnels") >= 1.0) == (node == owner);
            self.running().all(is_right).then_some(())
        });
    }

    pub(crate) fn metrics(&self, node: usize) -> Metrics {
        self.node(node).metrics()
    }

    /// The sum of a metric of a node over its labels.
    pub(crate) fn metric(&self, node: usize, name: &str) -> f64 {
        self.metrics(node).sum(name)
    }

    /// Starts the agent, which connects through the balancer.
    pub(crate) fn run_agent(&self, backend: &str) -> Running {
        self.run_agent_in("agent", || self.token.clone(), backend)
    }

    /// State folder of the agent.
    pub(crate) fn agent_folder(&self) -> PathBuf {
        self.folder.path().join("agent")
    }

    /// As [`Self::run_agent`], with another state folder and enrollment token.
    pub(crate) fn run_agent_in(
        &self,
        folder: &str,
        token: impl FnOnce() -> String,
        backend: &str,
    ) -> Running {
        let state = self.folder.path().join(folder);
        if !state.exists() {
            self.enroll(token(), &state);
        }
        let mut agent = process::gw_agent();
        agent
            .arg("run")
            .arg("--state-dir")
            .arg(state)
            .args(["--backend", backend]);
        Running::new(agent.stderr(Stdio::null()).spawn().unwrap())
    }

    pub(crate) fn ca(&self) -> PathBuf {
        self.data(0).join("dev-ca.crt")
    }

    pub(crate) fn about(&self, node: usize) -> About {
        about(self.node(node).address, &self.service_key, self.ca())
    }

    /// A connection of a caller to `node`.
    pub(crate) fn connect(&self, node: usize) -> Caller {
        connect_to(&self.about(node), HOST, &[b"http/1.1"], None)
    }

    /// The status of a request at `node`, and the error code if it failed.
    pub(crate) fn request(&self, node: usize) -> String {
        let mut caller = self.connect(node);
        caller.send(format!(
            "GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {}\r\n\r\n",
            self.service_key
        ));
        let response = caller.response();
        let code = if response.status == 200 {
            String::new()
        } else {
            format!(" {}", response.code())
        };
        format!("{}{code}", response.status.as_u16())
    }
}
