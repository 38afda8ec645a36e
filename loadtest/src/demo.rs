//! The product under test: `gw-gateway demo`, started and understood.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use serde::Deserialize;
use tempfile::TempDir;

use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::process::{self, Process};

/// A bucket that never runs empty, for scenarios that are about something else.
pub(crate) const UNLIMITED: u32 = 1_000_000_000;
/// Workers where the scenario does not say otherwise: enough for connections to cross between cores.
const WORKERS: usize = 2;
const START_WITHIN: Duration = Duration::from_secs(30);

/// What is said to the demo.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) workers: usize,
    /// Burst and refill per minute; the product's own if not given.
    pub(crate) rate: Option<u32>,
    /// A URL; the demo's echo if not given.
    pub(crate) backend: Option<String>,
    pub(crate) core: Option<usize>,
    pub(crate) slots: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self { workers: WORKERS, rate: Some(UNLIMITED), backend: None, core: None, slots: None }
    }
}

/// A running demo: gateway, agent and (without a backend of our own) echo in one process.
pub(crate) struct Demo {
    process: Process,
    /// Where its requests go, and how.
    pub(crate) target: Target,
    /// Of the region: `https://host:port`.
    pub(crate) base_url: String,
    pub(crate) ca_file: PathBuf,
    /// `http://address:port`
    pub(crate) admin_url: String,
    pub(crate) admin_token: String,
}

/// What of the demo's JSON line is needed here.
#[derive(Deserialize)]
struct About {
    base_url: String,
    tenant_url: String,
    service_key: String,
    ca_file: PathBuf,
    admin_url: String,
    admin_token: String,
}

impl Demo {
    /// Starts the product; it can serve requests when this returns.
    pub(crate) fn start(gateway: &Path, options: &Options) -> Result<Self, Failure> {
        // The demo would make a folder itself, and leave it behind if it had to be killed.
        Self::start_in(tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?, gateway, options)
    }

    /// Starts it with this folder of data.
    pub(crate) fn start_in(folder: TempDir, gateway: &Path, options: &Options) -> Result<Self, Failure> {
        ensure(gateway.is_file(), || {
            "the product is not built: cargo build --release -p gw-gateway, or give --gateway PATH".to_owned()
        })?;
        let mut command = process::command(gateway, options.core)?;
        command.args(["demo", "--json", "--port", "0", "--admin-port", "0", "--workers", &options.workers.to_string()]);
        command.arg("--data-dir").arg(folder.path());
        if let Some(rate) = options.rate {
            command.args(["--burst", &rate.to_string(), "--refill-per-minute", &rate.to_string()]);
        }
        if let Some(backend) = &options.backend {
            command.args(["--backend", backend]);
        }
        // What the caller's environment says must not change what is measured.
        command.env_remove(SLOTS);
        if let Some(slots) = options.slots {
            command.env(SLOTS, slots.to_string());
        }
        if env::var_os(LOG).is_none() {
            // wrk sends the address it connects to as server name, which rustls warns of each time.
            command.env(LOG, "warn,rustls=error");
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = Process::spawn("gw-gateway", &mut command)?.with_folder(folder);
        let about: About = serde_json::from_str(&first_line(&mut process)?)?;
        let target = Target::new(&about.tenant_url, &about.ca_file, &about.service_key)?;
        let About { base_url, ca_file, admin_url, admin_token, .. } = about;
        Ok(Self { process, target, base_url, ca_file, admin_url, admin_token })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Ends it and expects exit code 0.
    pub(crate) fn stop(self) -> Result<(), Failure> {
        self.process.stop()
    }

    /// Its process and its target, apart.
    pub(crate) fn into_parts(self) -> (Process, Target) {
        (self.process, self.target)
    }
}

/// The product's variables for the agent's slots and for its log filter.
const SLOTS: &str = "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS";
const LOG: &str = "GW_LOG";

/// The first line that a program prints. Its output is read on, or it would get stuck or killed by it.
fn first_line(process: &mut Process) -> Result<String, Failure> {
    let stdout = process.take_stdout().ok_or_else(|| Failure::new("gw-gateway has no output"))?;
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new().name("demo-output".into()).spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    })?;
    receiver
        .recv_timeout(START_WITHIN)
        .map_err(|_| Failure::new(format!("gw-gateway demo did not start within {START_WITHIN:?}; see its log above")))
}
