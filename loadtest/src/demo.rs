//! The product under test, started as `gw-gateway demo`.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use serde::Deserialize;
use tempfile::TempDir;

use crate::client::Target;
use crate::failure::Failure;
use crate::machine::process;
use crate::machine::process::Process;

/// A rate that is never reached, for scenarios that do not test the rate limit.
pub(crate) const UNLIMITED: u32 = 1_000_000_000;
/// Default number of workers, enough for connections to cross between cores.
const WORKERS: usize = 2;
const START_WITHIN: Duration = Duration::from_secs(90);

/// Options of the demo.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) workers: usize,
    /// Burst and refill per minute; `None` for the product's default.
    pub(crate) rate: Option<u32>,
    /// Backend URL; `None` for the demo's echo.
    pub(crate) backend: Option<String>,
    /// Cores that the demo may use; all if empty.
    pub(crate) cores: Vec<usize>,
    pub(crate) slots: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workers: WORKERS,
            rate: Some(UNLIMITED),
            backend: None,
            cores: Vec::new(),
            slots: None,
        }
    }
}

/// A running demo: gateway, agent and (without another backend) echo in one process.
pub(crate) struct Demo {
    process: Process,
    /// Target of requests to the demo's service.
    pub(crate) target: Target,
    /// URL of the region, `https://host:port`.
    pub(crate) base_url: String,
    pub(crate) ca_file: PathBuf,
    /// `http://address:port`
    pub(crate) admin_url: String,
    pub(crate) admin_token: String,
    client_id: String,
    client_secret: String,
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
}

impl Demo {
    /// Starts the product and waits until it serves requests.
    pub(crate) fn start(gateway: &Path, options: &Options) -> Result<Self, Failure> {
        // A folder created by the demo itself would stay behind after a kill.
        Self::start_in(
            tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?,
            gateway,
            options,
        )
    }

    /// Starts the product with this data folder.
    pub(crate) fn start_in(
        folder: TempDir,
        gateway: &Path,
        options: &Options,
    ) -> Result<Self, Failure> {
        let mut command = process::command(gateway, &options.cores)?;
        command.args([
            "demo",
            "--json",
            "--port",
            "0",
            "--admin-port",
            "0",
            "--workers",
            &options.workers.to_string(),
        ]);
        command.arg("--data-dir").arg(folder.path());
        if let Some(rate) = options.rate {
            command.args([
                "--burst",
                &rate.to_string(),
                "--refill-per-minute",
                &rate.to_string(),
            ]);
        }
        if let Some(backend) = &options.backend {
            command.args(["--backend", backend]);
        }
        // The environment must not change the measured configuration.
        command.env_remove(SLOTS);
        if let Some(slots) = options.slots {
            command.env(SLOTS, slots.to_string());
        }
        if env::var_os(LOG).is_none() {
            // wrk sends its target address as server name, and rustls logs a warning for each
            // connection. Every stop is logged as a warning, too.
            command.env(LOG, "warn,rustls=error,gw_gateway::process::signals=error");
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = Process::spawn("gw-gateway", &mut command)?.with_folder(folder);
        let about: About = serde_json::from_str(&first_line(&mut process)?)?;
        let target = Target::new(&about.tenant_url, &about.ca_file, &about.service_key)?;
        let About {
            base_url,
            ca_file,
            admin_url,
            admin_token,
            client_id,
            client_secret,
            ..
        } = about;
        Ok(Self {
            process,
            target,
            base_url,
            ca_file,
            admin_url,
            admin_token,
            client_id,
            client_secret,
        })
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
        let body: serde_json::Value = serde_json::from_slice(&answer.body)?;
        let token = body["access_token"]
            .as_str()
            .ok_or_else(|| Failure::new(format!("no access token: {body}")))?;
        Ok(self.target.with_token(token.to_owned()))
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

/// Environment variables of the agent's slots and of the log filter.
const SLOTS: &str = "GW_AGENT_MAX_CONCURRENT_BACKEND_REQUESTS";
const LOG: &str = "GW_LOG";

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
