//! The product under test, started as `gw-gateway demo --nodes 3`.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::Value;

use crate::client::Target;
use crate::demo::{UNLIMITED, first_line};
use crate::failure::{Failure, ensure};
use crate::metrics;
use crate::process::{self, Process};
use crate::procfs::{self, Cpu};

pub(super) const NODES: usize = 3;
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(20);
/// Longest answer of the administration API.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// A running region.
pub(super) struct Region {
    /// Processes that this program has started in place of killed nodes. Dropped before the demo, which has their data.
    restarted: [Option<Process>; NODES],
    /// Processes that have replaced others.
    successors: Vec<u32>,
    /// `None` once it was stopped.
    demo: Option<Process>,
    gateway: PathBuf,
    data: PathBuf,
    admin_token: String,
    ca_file: PathBuf,
    /// Target of requests at the first node.
    target: Target,
    nodes: [Node; NODES],
    http: ureq::Agent,
}

struct Node {
    pid: u32,
    port: u16,
    admin_url: String,
}

/// Used fields of the demo's JSON line.
#[derive(Deserialize)]
struct About {
    tenant_url: String,
    service_key: String,
    ca_file: PathBuf,
    admin_token: String,
    nodes: Vec<AboutNode>,
}

#[derive(Deserialize)]
struct AboutNode {
    port: u16,
    admin_url: String,
    pid: u32,
}

impl Region {
    /// Starts the product and waits until all nodes serve requests. `backend` is a URL, the demo's echo if `None`.
    pub(super) fn start(gateway: &Path, backend: Option<&str>) -> Result<Self, Failure> {
        ensure(gateway.is_file(), || {
            "the product is not built: cargo build --release -p gw-gateway, or give --gateway PATH".to_owned()
        })?;
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        let data = folder.path().to_owned();
        let mut command = process::command(gateway, &[])?;
        command.args(["demo", "--nodes", &NODES.to_string(), "--json", "--port", "0", "--admin-port", "0"]);
        command.args(["--workers", "1", "--data-dir"]).arg(&data);
        command.args(["--burst", &UNLIMITED.to_string(), "--refill-per-minute", &UNLIMITED.to_string()]);
        if let Some(backend) = backend {
            command.args(["--backend", backend]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut demo = Process::spawn("gw-gateway", &mut command)?.with_folder(folder);
        let about: About = serde_json::from_str(&first_line(&mut demo)?)?;
        let nodes: Vec<Node> =
            about.nodes.into_iter().map(|AboutNode { port, admin_url, pid }| Node { pid, port, admin_url }).collect();
        let http = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(ANSWER_WITHIN));
        let region = Self {
            restarted: Default::default(),
            successors: Vec::new(),
            demo: Some(demo),
            gateway: gateway.to_owned(),
            data,
            admin_token: about.admin_token,
            target: Target::new(&about.tenant_url, &about.ca_file, &about.service_key)?,
            ca_file: about.ca_file,
            nodes: nodes.try_into().map_err(|_| Failure::new("the demo has another number of nodes"))?,
            http: http.build().new_agent(),
        };
        region.wait_for_members(NODES)?;
        Ok(region)
    }

    pub(super) fn stop(mut self) -> Result<(), Failure> {
        self.end_successors();
        self.restarted = Default::default();
        self.demo.take().map_or(Ok(()), Process::stop)
    }

    /// Ends the processes that have replaced others: they are not the demo's children.
    fn end_successors(&mut self) {
        for pid in std::mem::take(&mut self.successors) {
            let _ = self.signal(pid, Signal::TERM);
            let deadline = Instant::now() + SETTLED_WITHIN;
            while procfs::runs(pid) && Instant::now() < deadline {
                std::thread::sleep(TICK);
            }
        }
    }

    /// Target of requests at a node.
    pub(super) fn target(&self, node: usize) -> Target {
        self.target_at(self.nodes[node].port)
    }

    /// Target of requests at another port.
    pub(super) fn target_at(&self, port: u16) -> Target {
        self.target.at_port(port)
    }

    /// Host of the region's own endpoints.
    pub(super) fn apex(&self) -> &str {
        self.target.host.split_once('.').map_or("", |(_, apex)| apex)
    }

    pub(super) fn ca_file(&self) -> &Path {
        &self.ca_file
    }

    /// Tunnels of the nodes that answer.
    pub(super) fn tunnels(&self) -> u64 {
        self.nodes.iter().filter_map(|node| metrics::read(&node.admin_url, "gw_tunnels").ok()).sum()
    }

    pub(super) fn ports(&self) -> [u16; NODES] {
        std::array::from_fn(|node| self.nodes[node].port)
    }

    /// The node that has the tunnel of the demo's service.
    pub(super) fn owner(&self) -> Result<usize, Failure> {
        let deadline = Instant::now() + SETTLED_WITHIN;
        loop {
            for node in 0..NODES {
                if metrics::read(&self.nodes[node].admin_url, "gw_tunnels")? > 0 {
                    return Ok(node);
                }
            }
            ensure(Instant::now() < deadline, || "no node has a tunnel".to_owned())?;
            std::thread::sleep(TICK);
        }
    }

    /// CPU time of the nodes, without agent, backend and PostgreSQL.
    pub(super) fn cpu(&self) -> Duration {
        self.nodes.iter().map(|node| Cpu::of(node.pid)).sum::<Cpu>().total()
    }

    fn signal(&self, pid: u32, signal: Signal) -> Result<(), Failure> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| Failure::new("not a process id"))?;
        kill_process(pid, signal).map_err(|error| Failure::during("a signal", error))
    }

    pub(super) fn kill(&mut self, node: usize) -> Result<(), Failure> {
        self.signal(self.nodes[node].pid, Signal::KILL)?;
        if let Some(mut process) = self.restarted[node].take() {
            process.wait(SETTLED_WITHIN)?;
        }
        Ok(())
    }

    /// Starts a killed node, on its ports and with its data folder.
    pub(super) fn restart(&mut self, node: usize) -> Result<(), Failure> {
        let mut command = process::command(&self.gateway, &[])?;
        command.arg("serve").arg("--config").arg(self.data.join(format!("node-{}.toml", node + 1)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = Process::spawn("gw-gateway", &mut command)?;
        self.nodes[node].pid = process.pid();
        self.restarted[node] = Some(process);
        Ok(())
    }

    /// Replaces the process of a node, and waits until the old one has ended.
    pub(super) fn replace(&mut self, node: usize) -> Result<(), Failure> {
        let old = self.nodes[node].pid;
        self.signal(old, Signal::USR2)?;
        let deadline = Instant::now() + SETTLED_WITHIN;
        let mut successor = None;
        while procfs::runs(old) {
            successor = procfs::tree(old).get(1).copied().or(successor);
            ensure(Instant::now() < deadline, || format!("node {node} is not replaced"))?;
            std::thread::sleep(TICK);
        }
        let successor = successor.ok_or_else(|| Failure::new(format!("node {node} ended without a successor")))?;
        self.nodes[node].pid = successor;
        self.successors.push(successor);
        Ok(())
    }

    /// Stops (`Signal::STOP`) or continues (`Signal::CONT`) all processes of PostgreSQL.
    pub(super) fn signal_engine(&self, signal: Signal) -> Result<(), Failure> {
        let is_engine = |pid: &u32| procfs::name(*pid).is_some_and(|name| name.starts_with("postgres"));
        let engine: Vec<u32> = self.demo.iter().flat_map(|demo| procfs::tree(demo.pid())).filter(is_engine).collect();
        ensure(!engine.is_empty(), || "the demo has no process of PostgreSQL".to_owned())?;
        // Sessions may end between the listing and the signal.
        engine.into_iter().for_each(|pid| drop(self.signal(pid, signal)));
        Ok(())
    }

    /// Sends a request of the administration API to a node; returns status and JSON.
    pub(super) fn administer(
        &self,
        node: usize,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<(u16, Value), Failure> {
        let url = format!("{}/api/v1{path}", self.nodes[node].admin_url);
        let request = http::Request::builder()
            .method(method)
            .uri(&url)
            .header("Authorization", format!("Bearer {}", self.admin_token))
            .header("Content-Type", "application/json");
        let failed = |error: ureq::Error| Failure::during(&url, error);
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let request = request.body(body).map_err(|error| Failure::during(&url, error))?;
        let mut response = self.http.run(request).map_err(failed)?;
        let text = response.body_mut().read_to_string().map_err(failed)?;
        Ok((response.status().as_u16(), serde_json::from_str(&text).unwrap_or(Value::Null)))
    }

    /// The region as a node sees it.
    pub(super) fn status(&self, node: usize) -> Result<Value, Failure> {
        Ok(self.administer(node, "GET", "/region", &Value::Null)?.1)
    }

    /// Waits until all nodes know `count` live nodes and no service moves.
    pub(super) fn wait_for_members(&self, count: usize) -> Result<(), Failure> {
        let deadline = Instant::now() + SETTLED_WITHIN;
        for node in 0..NODES {
            loop {
                // A node that has just started does not answer.
                let status = self.status(node).unwrap_or(Value::Null);
                let rows = status["nodes"].as_array().cloned().unwrap_or_default();
                let live = rows.iter().filter(|row| row["state"] == "live" && row["epoch_lag"] == 0).count();
                if status["standing"] == "member" && status["moving"] == false && live == count {
                    break;
                }
                ensure(Instant::now() < deadline, || format!("node {node} does not have {count} members: {status}"))?;
                std::thread::sleep(TICK);
            }
        }
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.end_successors();
    }
}
