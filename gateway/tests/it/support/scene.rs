//! What a test needs before it begins: a gateway in this process with a service, and agents of it.
//!
//! ```text
//! Scene::service().agent().start()               in front of the echo of the demo
//! Scene::service().agent_to(url).slots(1).start()
//! Scene::service().enrolled(&["one", "two"]).start()
//! ```

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

pub(crate) use gw_gateway::demo::About;
use gw_gateway::demo::echo;
use serde_json::json;

use super::admin_api::{Api, Tunnel};
use super::agents::in_process::Agent;
use super::agents::modified_agent::{self, STREAMS};
use super::agents::tunnel_frames::hello;
use super::eventually;
use super::gateway::Gateway;
use super::metrics::Metrics;
use super::peers::caller::{Caller, HOST, connect_to};
use super::processes::prepared::{self, Prepared};

/// A gateway with the service `echo` of the account `demo`, and agents of the service.
pub(crate) struct Scene {
    pub(crate) about: About,
    pub(crate) gateway: Gateway,
    agents: Vec<Agent>,
    /// The folders of the agents' states.
    folder: PathBuf,
    /// Deleted after the gateway and the agents have ended.
    _temporary: Option<tempfile::TempDir>,
}

/// A scene that has not started.
#[derive(Debug, Clone)]
#[must_use]
pub(crate) struct Plan {
    agents: Vec<PlannedAgent>,
    workers: usize,
    /// Burst and refill per minute of the gateway's default.
    rate: (u32, u32),
    hand_over: &'static str,
    /// URL to which gateway and agents export spans, and the share of traces.
    traces: Option<(String, f64)>,
    /// Further lines of the gateway's configuration.
    configuration: String,
    /// A temporary folder if `None`.
    data_dir: Option<PathBuf>,
}

#[derive(Debug, Clone)]
struct PlannedAgent {
    name: String,
    /// `None` if the agent is enrolled and does not run.
    target: Option<Target>,
    /// Environment variables of the agent.
    environment: BTreeMap<&'static str, String>,
}

#[derive(Debug, Clone)]
enum Target {
    Echo,
    Backend(String),
    /// A configuration file, with backends.
    File(PathBuf),
}

impl Scene {
    /// A plan with the gateway and the service, without agents.
    pub(crate) fn service() -> Plan {
        Plan {
            agents: Vec::new(),
            workers: 2,
            rate: (1_000_000, 1_000_000),
            hand_over: "auto",
            traces: None,
            configuration: String::new(),
            data_dir: None,
        }
    }
}

impl Plan {
    /// Adds an agent in front of the echo of the demo.
    pub(crate) fn agent(self) -> Self {
        self.with_agent("agent", Some(Target::Echo))
    }

    /// Adds an agent in front of the backend at this URL.
    pub(crate) fn agent_to(self, backend: impl Into<String>) -> Self {
        self.with_agent("agent", Some(Target::Backend(backend.into())))
    }

    /// Adds an agent with this configuration file.
    pub(crate) fn agent_with(self, file: PathBuf) -> Self {
        self.with_agent("agent", Some(Target::File(file)))
    }

    /// Adds agents that are enrolled and do not run.
    pub(crate) fn enrolled(self, names: &[&str]) -> Self {
        let add = |plan: Self, name: &&str| plan.with_agent(name, None);
        names.iter().fold(self, add)
    }

    fn with_agent(mut self, name: &str, target: Option<Target>) -> Self {
        self.agents.push(PlannedAgent {
            name: name.to_owned(),
            target,
            environment: BTreeMap::new(),
        });
        self
    }

    /// Gives the last agent this number of slots.
    pub(crate) fn slots(self, slots: u32) -> Self {
        self.variable(
            "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS",
            slots.to_string(),
        )
    }

    /// Makes the last agent send this `Host`: `preserve`, the default, or `rewrite`.
    pub(crate) fn host_header(self, mode: &str) -> Self {
        self.variable("GW_HOST_HEADER", mode.to_owned())
    }

    fn variable(mut self, name: &'static str, value: String) -> Self {
        let agent = self.agents.last_mut().expect("the plan has an agent");
        agent.environment.insert(name, value);
        self
    }

    pub(crate) fn workers(self, workers: usize) -> Self {
        Self { workers, ..self }
    }

    pub(crate) fn rate(self, burst: u32, refill_per_minute: u32) -> Self {
        let rate = (burst, refill_per_minute);
        Self { rate, ..self }
    }

    /// `auto`, the default, `always` or `never`.
    pub(crate) fn hand_over(self, hand_over: &'static str) -> Self {
        Self { hand_over, ..self }
    }

    /// Exports this share of traces to a collector.
    pub(crate) fn traces(self, endpoint: impl Into<String>, sample_ratio: f64) -> Self {
        let traces = Some((endpoint.into(), sample_ratio));
        Self { traces, ..self }
    }

    /// Adds lines to the configuration of the gateway.
    pub(crate) fn configuration(mut self, lines: impl AsRef<str>) -> Self {
        self.configuration.push_str(lines.as_ref());
        self
    }

    /// Keeps the state of the gateway in this folder, and those of the agents in folders in it.
    pub(crate) fn data_dir(self, folder: &Path) -> Self {
        let data_dir = Some(folder.to_owned());
        Self { data_dir, ..self }
    }

    /// Starts the gateway, creates the records by its API, and starts the agents. Requests can be
    /// served when this returns.
    pub(crate) fn start(self) -> Scene {
        let temporary = self
            .data_dir
            .is_none()
            .then(|| tempfile::tempdir().unwrap());
        let (folder, data_dir) = match (&self.data_dir, &temporary) {
            (Some(data_dir), _) => (data_dir.clone(), data_dir.clone()),
            (None, folder) => {
                let folder = folder.as_ref().unwrap().path();
                (folder.to_owned(), folder.join("data"))
            }
        };
        let gateway = Gateway::start(&self.text(&data_dir));
        let api = gateway.api();
        api.create_service("demo", "echo");
        let (_, service_key) = api.create_service_key("demo", &["echo"]);
        let (client_id, client_secret) = api.create_credential("demo", &["echo"]);
        let mut scene = Scene {
            about: About {
                client_id,
                client_secret,
                admin_url: format!("http://{}", gateway.admin_address()),
                admin_token: gateway.admin_token(),
                ..prepared::about(gateway.address(), &service_key, gateway.ca_file())
            },
            gateway,
            agents: Vec::new(),
            folder,
            _temporary: temporary,
        };
        for agent in &self.agents {
            scene.enroll("demo", &["echo"], &scene.state_dir(&agent.name));
            if let Some(target) = &agent.target {
                let started = self.start_agent(agent, target, &scene);
                scene.agents.push(started);
            }
        }
        scene.wait_for_tunnels(scene.agents.len());
        scene
    }

    /// The configuration of the gateway.
    fn text(&self, data_dir: &Path) -> String {
        let (burst, refill_per_minute) = self.rate;
        let Self {
            workers, hand_over, ..
        } = self;
        let traces = self.traces.as_ref().map_or_else(String::new, |traces| {
            let (endpoint, sample_ratio) = traces;
            format!("[traces]\nendpoint = \"{endpoint}\"\nsample_ratio = {sample_ratio:?}\n")
        });
        format!(
            "region = \"eu1\"\ndomain = \"gw.localhost\"\ndata_dir = \"{}\"\n\
             listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"\nworkers = {workers}\n\
             burst = {burst}\nrefill_per_minute = {refill_per_minute}\n\
             hand_over = \"{hand_over}\"\n{}{traces}",
            data_dir.display(),
            self.configuration,
        )
    }

    fn start_agent(&self, agent: &PlannedAgent, target: &Target, scene: &Scene) -> Agent {
        let traces = |name: &str| {
            let (endpoint, sample_ratio) = self.traces.as_ref()?;
            match name {
                "OTEL_EXPORTER_OTLP_ENDPOINT" => Some(endpoint.clone()),
                "OTEL_TRACES_SAMPLER_ARG" => Some(sample_ratio.to_string()),
                _ => None,
            }
        };
        let environment = |name: &str| {
            let said = agent.environment.get(name).cloned();
            said.or_else(|| traces(name))
        };
        let (file, backends) = match target {
            Target::Echo => (None, vec![format!("http://{}", echo::start().unwrap())]),
            Target::Backend(url) => (None, vec![url.clone()]),
            Target::File(path) => (Some(path.as_path()), Vec::new()),
        };
        let state = scene.state_dir(&agent.name);
        Agent::start_of(file, state, &backends, environment)
    }

    /// Leaves the records to processes that the test starts. The agents do not run.
    pub(crate) fn prepare(self) -> Prepared {
        let scene = self.start();
        let key = scene.about.service_key.clone();
        let folder = scene._temporary.expect("the folder is a temporary one");
        scene.gateway.drain();
        Prepared::of(folder, key)
    }
}

/// What callers do.
impl Scene {
    pub(crate) fn connect(&self) -> Caller {
        connect_to(&self.about, HOST, &[b"http/1.1"], None)
    }

    /// A request head for the service, with its key; `rest` is further fields and the body.
    pub(crate) fn request(&self, line: &str, rest: &str) -> String {
        let key = &self.about.service_key;
        format!("{line} HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n{rest}")
    }

    /// A GET without a body.
    pub(crate) fn get(&self, target: &str) -> String {
        self.request(&format!("GET {target}"), "\r\n")
    }
}

/// What operators do.
impl Scene {
    pub(crate) fn api(&self) -> Api {
        self.gateway.api()
    }

    /// Address of the listener for callers.
    pub(crate) fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address().port()
    }

    pub(crate) fn admin_address(&self) -> SocketAddr {
        self.gateway.admin_address()
    }

    /// Address of the metrics of the first agent.
    pub(crate) fn agent_metrics_address(&self) -> Option<SocketAddr> {
        self.agents[0].metrics_address()
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.gateway.metrics()
    }

    pub(crate) fn tunnels(&self) -> Vec<Tunnel> {
        self.gateway.tunnels()
    }

    /// Number of tunnels that have ended, by reason.
    pub(crate) fn tunnels_ended(&self) -> BTreeMap<String, u64> {
        self.metrics().by_label("gw_tunnels_ended_total", "reason")
    }

    /// Number of requests that were left to a task of the owner and have not ended. A request that
    /// waits for a tunnel or a slot is one of them.
    pub(crate) fn left_to_owner(&self) -> u64 {
        self.metrics().count("gw_crossing_requests")
    }

    /// Changes the setting `retries` of the service. Returns once it is in force.
    pub(crate) fn set_retries(&self, retries: bool) {
        let changes = json!({ "retries": retries });
        self.api().change_service("demo", "echo", &changes);
    }

    /// Waits until the gateway counts no request on any tunnel.
    pub(crate) fn wait_until_idle(&self) {
        let is_idle = |tunnel: &Tunnel| tunnel.in_flight == 0;
        eventually("no request is in flight", || {
            self.tunnels().iter().all(is_idle).then_some(())
        });
    }

    /// Waits until both the gateway and the agents count no request on any tunnel.
    pub(crate) fn wait_until_slots_are_free(&self) {
        eventually("all slots free", || {
            let free = |tunnel: &Tunnel| tunnel.in_flight == 0 && tunnel.slots_in_use == Some(0);
            self.tunnels().iter().all(free).then_some(())
        });
    }

    /// Stops the gateway and its agents after the running requests.
    pub(crate) fn stop(self) {
        self.gateway.drain();
        self.agents.into_iter().for_each(Agent::drain);
    }
}

/// What agents do.
impl Scene {
    /// Enrolls an agent for services of `account` into `state_dir`. Returns its id.
    pub(crate) fn enroll(&self, account: &str, services: &[&str], state_dir: &Path) -> String {
        self.gateway.enroll(account, services, state_dir)
    }

    /// The folder with the state of the agent of this name.
    pub(crate) fn state_dir(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Starts an enrolled agent with this number of slots in front of `backend`, and waits for its
    /// tunnel.
    pub(crate) fn run(&self, name: &str, slots: usize, backend: &str) -> Agent {
        let before = self.tunnels().len();
        let agent = Agent::with_slots(self.state_dir(name), backend, slots);
        self.wait_for_tunnels(before + 1);
        agent
    }

    pub(crate) fn wait_for_tunnels(&self, count: usize) {
        eventually("the tunnels are open", || {
            (self.tunnels().len() == count).then_some(())
        });
    }

    /// A tunnel of an enrolled agent that the test controls, which the gateway has registered. An
    /// agent may have several.
    pub(crate) fn tunnel(&self, name: &str) -> modified_agent::Tunnel {
        let before: Vec<u64> = self
            .tunnels()
            .iter()
            .map(|tunnel| tunnel.generation)
            .collect();
        let mut tunnel = prepared::upgraded(&self.about, &self.state_dir(name));
        tunnel.0.send(hello(STREAMS));
        eventually("the tunnel is registered", || {
            let is_new = |tunnel: &Tunnel| !before.contains(&tunnel.generation);
            self.tunnels().iter().any(is_new).then_some(())
        });
        tunnel
    }
}
