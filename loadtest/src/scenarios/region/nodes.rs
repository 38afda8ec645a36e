//! The product under test, started as `gw-gateway demo --nodes 3`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use gw_local_region::is_settled;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::Value;

use crate::admin_api::AdminApi;
use crate::client::Target;
use crate::demo::{UNLIMITED, first_line};
use crate::failure::{Failure, ensure};
use crate::machine::process::Process;
use crate::machine::procfs::Cpu;
use crate::machine::{process, procfs};
use crate::metrics;

pub(crate) const NODES: usize = 3;
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(20);

/// A running region.
pub(crate) struct Region {
    /// Processes that this program has started in place of killed nodes. Dropped before the demo,
    /// which has their data.
    restarted: [Option<Process>; NODES],
    /// Processes that have replaced others.
    successors: Vec<u32>,
    /// `None` once it was stopped.
    demo: Option<Process>,
    gateway: PathBuf,
    data: PathBuf,
    api: AdminApi,
    ca_file: PathBuf,
    /// Target of requests at the first node.
    target: Target,
    nodes: [Node; NODES],
}

#[derive(Deserialize)]
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
    nodes: Vec<Node>,
}

impl Region {
    /// Starts the product and waits until all nodes serve requests. `backend` is a URL, the demo's
    /// echo if `None`.
    pub(crate) fn start(gateway: &Path, backend: Option<&str>) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        let data = folder.path().to_owned();
        let mut command = process::command(gateway, &[])?;
        command.args([
            "demo",
            "--nodes",
            &NODES.to_string(),
            "--json",
            "--port",
            "0",
            "--admin-port",
            "0",
        ]);
        command.args(["--workers", "1", "--data-dir"]).arg(&data);
        command.args([
            "--burst",
            &UNLIMITED.to_string(),
            "--refill-per-minute",
            &UNLIMITED.to_string(),
        ]);
        if let Some(backend) = backend {
            command.args(["--backend", backend]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut demo = Process::spawn("gw-gateway", &mut command)?.with_folder(folder);
        let about: About = serde_json::from_str(&first_line(&mut demo)?)?;
        let region = Self {
            restarted: Default::default(),
            successors: Vec::new(),
            demo: Some(demo),
            gateway: gateway.to_owned(),
            data,
            api: AdminApi::new(&about.admin_token),
            target: Target::new(&about.tenant_url, &about.ca_file, &about.service_key)?,
            ca_file: about.ca_file,
            nodes: about
                .nodes
                .try_into()
                .map_err(|_| Failure::new("the demo has another number of nodes"))?,
        };
        region.wait_for_members(NODES)?;
        Ok(region)
    }

    pub(crate) fn stop(mut self) -> Result<(), Failure> {
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
    pub(crate) fn target(&self, node: usize) -> Target {
        self.target_at(self.nodes[node].port)
    }

    /// Target of requests at another port.
    pub(crate) fn target_at(&self, port: u16) -> Target {
        self.target.at_port(port)
    }

    /// Host of the region's own endpoints.
    pub(crate) fn apex(&self) -> &str {
        self.target
            .host
            .split_once('.')
            .map_or("", |(_, apex)| apex)
    }

    pub(crate) fn ca_file(&self) -> &Path {
        &self.ca_file
    }

    /// Tunnels of the nodes that answer.
    pub(crate) fn tunnels(&self) -> u64 {
        self.nodes
            .iter()
            .filter_map(|node| metrics::read(&node.admin_url, "gw_tunnels").ok())
            .sum()
    }

    pub(crate) fn admin_token(&self) -> &str {
        self.api.token()
    }

    pub(crate) fn admin_urls(&self) -> [&str; NODES] {
        std::array::from_fn(|node| self.nodes[node].admin_url.as_str())
    }

    pub(super) fn addresses(&self) -> [SocketAddr; NODES] {
        self.ports()
            .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    }

    pub(crate) fn ports(&self) -> [u16; NODES] {
        std::array::from_fn(|node| self.nodes[node].port)
    }

    /// The node that has the tunnel of the demo's service.
    pub(crate) fn owner(&self) -> Result<usize, Failure> {
        let deadline = Instant::now() + SETTLED_WITHIN;
        loop {
            for node in 0..NODES {
                if metrics::read(&self.nodes[node].admin_url, "gw_tunnels")? > 0 {
                    return Ok(node);
                }
            }
            ensure(Instant::now() < deadline, || {
                "no node has a tunnel".to_owned()
            })?;
            std::thread::sleep(TICK);
        }
    }

    /// CPU time of the nodes, without agent, backend and PostgreSQL.
    pub(crate) fn cpu(&self) -> Duration {
        self.nodes
            .iter()
            .map(|node| Cpu::of(node.pid))
            .sum::<Cpu>()
            .total()
    }

    fn signal(&self, pid: u32, signal: Signal) -> Result<(), Failure> {
        let pid = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(|| Failure::new("not a process id"))?;
        kill_process(pid, signal).map_err(|error| Failure::during("a signal", error))
    }

    pub(crate) fn kill(&mut self, node: usize) -> Result<(), Failure> {
        self.signal(self.nodes[node].pid, Signal::KILL)?;
        if let Some(mut process) = self.restarted[node].take() {
            process.wait(SETTLED_WITHIN)?;
        }
        Ok(())
    }

    /// Starts a killed node, on its ports and with its data folder.
    pub(crate) fn restart(&mut self, node: usize) -> Result<(), Failure> {
        let mut command = process::command(&self.gateway, &[])?;
        command
            .arg("serve")
            .arg("--config")
            .arg(self.data.join(format!("node-{}.toml", node + 1)));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = Process::spawn("gw-gateway", &mut command)?;
        self.nodes[node].pid = process.pid();
        self.restarted[node] = Some(process);
        Ok(())
    }

    /// Replaces the process of a node, and waits until the old one has ended.
    pub(crate) fn replace(&mut self, node: usize) -> Result<(), Failure> {
        let old = self.nodes[node].pid;
        self.signal(old, Signal::USR2)?;
        let deadline = Instant::now() + SETTLED_WITHIN;
        let mut successor = None;
        while procfs::runs(old) {
            successor = procfs::tree(old).get(1).copied().or(successor);
            ensure(Instant::now() < deadline, || {
                format!("node {node} is not replaced")
            })?;
            std::thread::sleep(TICK);
        }
        let successor = successor
            .ok_or_else(|| Failure::new(format!("node {node} ended without a successor")))?;
        self.nodes[node].pid = successor;
        self.successors.push(successor);
        Ok(())
    }

    /// Stops (`Signal::STOP`) or continues (`Signal::CONT`) all processes of PostgreSQL.
    pub(crate) fn signal_engine(&self, signal: Signal) -> Result<(), Failure> {
        let is_engine =
            |pid: &u32| procfs::name(*pid).is_some_and(|name| name.starts_with("postgres"));
        let engine: Vec<u32> = self
            .demo
            .iter()
            .flat_map(|demo| procfs::tree(demo.pid()))
            .filter(is_engine)
            .collect();
        ensure(!engine.is_empty(), || {
            "the demo has no process of PostgreSQL".to_owned()
        })?;
        // Sessions may end between the listing and the signal.
        procfs::signal_all(&engine, signal);
        Ok(())
    }

    /// Sends a request of the administration API to a node; returns status and JSON.
    pub(crate) fn administer(
        &self,
        node: usize,
        method: &str,
        path: &str,
        body: &Value,
    ) -> Result<(u16, Value), Failure> {
        self.api
            .ask(&self.nodes[node].admin_url, method, path, body)
    }

    /// The region as a node sees it.
    pub(crate) fn status(&self, node: usize) -> Result<Value, Failure> {
        Ok(self.administer(node, "GET", "/region", &Value::Null)?.1)
    }

    /// Waits until all nodes know `count` live nodes and no service moves.
    pub(crate) fn wait_for_members(&self, count: usize) -> Result<(), Failure> {
        let deadline = Instant::now() + SETTLED_WITHIN;
        for node in 0..NODES {
            loop {
                // A node that has just started does not answer.
                let status = self.status(node).unwrap_or(Value::Null);
                if is_settled(&status, count) {
                    break;
                }
                ensure(Instant::now() < deadline, || {
                    format!("node {node} does not have {count} members: {status}")
                })?;
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
