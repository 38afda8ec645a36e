//! The product under test, started as `gw-gateway demo`.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde::Deserialize;
use tempfile::TempDir;

use crate::admin_api::{AdminApi, text};
use crate::client::Target;
use crate::failure::Failure;
use crate::machine::process::Process;
use crate::machine::{process, procfs};
use crate::metrics;

/// A rate that is never reached.
pub(crate) const UNLIMITED: u32 = 1_000_000_000;
/// Default number of workers, enough for connections to cross between cores.
const WORKERS: usize = 2;
const START_WITHIN: Duration = Duration::from_secs(90);
/// Environment variables of the agent's slots and of the log filter.
pub(crate) const SLOTS: &str = "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS";
const LOG: &str = "GW_LOG";
const ECHO_THREAD: &str = "gw-echo";

/// Options of the demo.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) workers: usize,
    /// Backend URL; `None` for the demo's echo.
    pub(crate) backend: Option<String>,
    /// Cores that the demo may use; all if empty.
    pub(crate) cores: Vec<usize>,
    pub(crate) slots: Option<u32>,
    /// Nodes of a region; 1 for a single gateway.
    pub(crate) nodes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workers: WORKERS,
            backend: None,
            cores: Vec::new(),
            slots: None,
            nodes: 1,
        }
    }
}

/// A running demo: gateway, agent and (without another backend) echo in one process, or the nodes
/// of a region as processes of their own.
pub(crate) struct Demo {
    process: Process,
    /// Target of requests to the demo's service.
    pub(crate) target: Target,
    /// URL of the region, `https://host:port`.
    pub(crate) base_url: String,
    pub(crate) ca_file: PathBuf,
    /// `http://address:port`
    pub(crate) admin_url: String,
    pub(crate) api: AdminApi,
    /// Nodes of a region; empty for a single gateway.
    pub(crate) nodes: Vec<Node>,
    client_id: String,
    client_secret: String,
}

/// A node of a region.
#[derive(Deserialize)]
pub(crate) struct Node {
    pub(crate) pid: u32,
    pub(crate) port: u16,
    pub(crate) admin_url: String,
}

/// Used fields of the demo's JSON line.
#[derive(Deserialize)]
struct About {
    base_url: String,
    tenant_url: String,
    service_key: String,
    ca_file: PathBuf,
    admin_url: String,
    admin_token: String,
    client_id: String,
    client_secret: String,
    #[serde(default)]
    nodes: Vec<Node>,
}

impl Demo {
    /// Starts the product and waits until it serves requests.
    pub(crate) fn start(gateway: &Path, options: &Options) -> Result<Self, Failure> {
        // A folder created by the demo itself would stay behind after a kill.
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        Self::start_in(folder, gateway, options)
    }

    /// Starts the product with this data folder.
    pub(crate) fn start_in(
        folder: TempDir,
        gateway: &Path,
        options: &Options,
    ) -> Result<Self, Failure> {
        let mut command = command(gateway, options, folder.path())?;
        let mut process = Process::spawn("gw-gateway", &mut command)?.with_folder(folder);
        let about: About = serde_json::from_str(&first_line(&mut process)?)?;
        Ok(Self {
            process,
            target: Target::new(&about.tenant_url, &about.ca_file, &about.service_key)?,
            api: AdminApi::new(&about.admin_url, &about.admin_token),
            base_url: about.base_url,
            ca_file: about.ca_file,
            admin_url: about.admin_url,
            nodes: about.nodes,
            client_id: about.client_id,
            client_secret: about.client_secret,
        })
    }

    /// Target of requests to a service with this key.
    pub(crate) fn target_of(
        &self,
        account: &str,
        service: &str,
        key: &str,
    ) -> Result<Target, Failure> {
        let (_, zone) = self.target.host.split_once('.').unwrap_or_default();
        let host = format!("{account}--{service}.{zone}");
        self.target.for_service(&host, key)
    }

    /// Target of requests with a new access token in place of the service key.
    pub(crate) fn target_with_token(&self) -> Result<Target, Failure> {
        let apex = Target::new(&self.base_url, &self.ca_file, "")?;
        let form = format!(
            "grant_type=client_credentials&client_id={}&client_secret={}&\
             scope=account%3Ademo%20service%3Aecho",
            self.client_id, self.client_secret
        );
        let answer = apex.connect()?.post_form("/oauth/token", &form)?;
        let token = text(&serde_json::from_slice(&answer.body)?, "access_token")?;
        Ok(self.target.with_token(token))
    }

    /// Tunnels of the gateway, or of all nodes that answer.
    pub(crate) fn tunnels(&self) -> u64 {
        let urls = self.nodes.iter().map(|node| &node.admin_url);
        let own = Some(&self.admin_url).filter(|_| self.nodes.is_empty());
        urls.chain(own)
            .filter_map(|url| metrics::read(url, "gw_tunnels").ok())
            .sum()
    }

    /// CPU time of gateway and agent.
    pub(crate) fn cpu_without_echo(&self) -> Duration {
        procfs::cpu(self.pid()).saturating_sub(procfs::cpu_of_threads(self.pid(), ECHO_THREAD))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Stops the demo and expects exit code 0.
    pub(crate) fn stop(self) -> Result<(), Failure> {
        self.process.stop()
    }

    /// Process and target of the demo.
    pub(crate) fn into_parts(self) -> (Process, Target) {
        (self.process, self.target)
    }
}

fn command(gateway: &Path, options: &Options, folder: &Path) -> Result<Command, Failure> {
    let mut command = process::command(gateway, &options.cores)?;
    let unlimited = UNLIMITED.to_string();
    command
        .args(["demo", "--json", "--port", "0", "--admin-port", "0"])
        .args(["--workers", &options.workers.to_string()])
        .args(["--burst", &unlimited, "--refill-per-minute", &unlimited])
        .arg("--data-dir")
        .arg(folder);
    if options.nodes > 1 {
        command.args(["--nodes", &options.nodes.to_string()]);
    }
    if let Some(backend) = &options.backend {
        command.args(["--backend", backend]);
    }
    // The environment must not change the measured configuration.
    command.env_remove(SLOTS);
    command.envs(options.slots.map(|slots| (SLOTS, slots.to_string())));
    if env::var_os(LOG).is_none() {
        // wrk sends its target address as server name, and rustls logs a warning for each
        // connection. Every stop is logged as a warning, too.
        command.env(LOG, "warn,rustls=error,gw_gateway::process::signals=error");
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    Ok(command)
}

/// The first line that a program prints. A thread reads the rest, because a full or closed pipe
/// would stop the program.
pub(crate) fn first_line(process: &mut Process) -> Result<String, Failure> {
    let name = process.name();
    let stdout = process
        .take_stdout()
        .ok_or_else(|| Failure::new(format!("{name} has no output")))?;
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new()
        .name("demo-output".into())
        .spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        })?;
    receiver.recv_timeout(START_WITHIN).map_err(|_| {
        Failure::new(format!(
            "{name} did not start within {START_WITHIN:?}; see its log above"
        ))
    })
}
