//! Services and enrolled agents beside those of a demo.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::demo::Demo;
use crate::failure::{Failure, ensure};
use crate::machine::process;
use crate::machine::process::Process;
use crate::metrics;

/// Timeout for the tunnels of one agent.
pub(crate) const TUNNELS_WITHIN: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_millis(100);

/// Creates services and returns their ids.
pub(crate) fn create_services(
    demo: &Demo,
    account: &str,
    count: usize,
) -> Result<Vec<String>, Failure> {
    let services: Vec<String> = (0..count)
        .map(|number| format!("service-{number}"))
        .collect();
    let url = format!("{}/api/v1/accounts/{account}/services", demo.admin_url);
    let http = ureq::Agent::new_with_defaults();
    for id in &services {
        let request = http
            .post(&url)
            .header("Authorization", format!("Bearer {}", demo.admin_token));
        request
            .send_json(json!({ "id": id }))
            .map_err(|error| Failure::during(format_args!("creating {id}"), error))?;
    }
    Ok(services)
}

/// Starts an agent for services, which keeps a tunnel for each. All tunnels are open when this
/// returns.
pub(crate) fn connect(
    gateway: &Path,
    demo: &Demo,
    account: &str,
    services: &[String],
    backend: &str,
    cores: &[usize],
) -> Result<Process, Failure> {
    let before = metrics::read(&demo.admin_url, "gw_tunnels")?;
    let process = start(gateway, demo, account, services, backend, cores)?;
    let deadline = Instant::now() + TUNNELS_WITHIN;
    while metrics::read(&demo.admin_url, "gw_tunnels")? < before + services.len() as u64 {
        ensure(Instant::now() < deadline, || {
            format!("not {} tunnels within {TUNNELS_WITHIN:?}", services.len())
        })?;
        std::thread::sleep(TICK);
    }
    Ok(process)
}

/// Enrolls an agent for services of `account` and starts it.
pub(crate) fn start(
    gateway: &Path,
    demo: &Demo,
    account: &str,
    services: &[String],
    backend: &str,
    cores: &[usize],
) -> Result<Process, Failure> {
    let mut create = vec!["enrollment-token", "create", account];
    create.extend(services.iter().flat_map(|service| ["--service", service]));
    let token = administer(gateway, demo, &create)?;
    let token = token["token"]
        .as_str()
        .ok_or_else(|| Failure::new(format!("no token in {token}")))?;
    let enrolled = Enrolled::new(gateway, &demo.base_url, &demo.ca_file, token)?;
    let run = enrolled.command(backend, cores)?;
    enrolled.into_process(run)
}

/// An agent with the state folder that its enrollment has written.
pub(crate) struct Enrolled {
    program: PathBuf,
    folder: TempDir,
}

impl Enrolled {
    /// Enrolls the agent beside `gateway` with the region at `url`.
    pub(crate) fn new(
        gateway: &Path,
        url: &str,
        ca_file: &Path,
        token: &str,
    ) -> Result<Self, Failure> {
        let program = gateway.with_file_name("gw-agent");
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        let mut enroll = Command::new(&program);
        enroll
            .args(["enroll", "--gateway", url, "--ca-file"])
            .arg(ca_file);
        enroll
            .arg("--state-dir")
            .arg(folder.path())
            .env("GW_ENROLLMENT_TOKEN", token);
        output(&mut enroll)?;
        Ok(Self { program, folder })
    }

    /// Command that runs the agent, without its log.
    pub(crate) fn command(&self, backend: &str, cores: &[usize]) -> Result<Command, Failure> {
        let mut run = process::command(&self.program, cores)?;
        run.args(["run", "--backend", backend, "--state-dir"])
            .arg(self.folder.path());
        run.stdin(Stdio::null()).stderr(Stdio::null());
        Ok(run)
    }

    /// Runs the agent until the process is dropped, and removes its state folder then.
    pub(crate) fn into_process(self, mut run: Command) -> Result<Process, Failure> {
        Ok(Process::spawn("gw-agent", &mut run)?.with_folder(self.folder))
    }
}

/// Runs the product's command-line client and parses its JSON output.
pub(crate) fn administer(
    gateway: &Path,
    demo: &Demo,
    arguments: &[&str],
) -> Result<Value, Failure> {
    let mut command = Command::new(gateway);
    command.args(arguments).arg("--json");
    command
        .env("GW_ADMIN_URL", &demo.admin_url)
        .env("GW_ADMIN_TOKEN", &demo.admin_token);
    serde_json::from_slice(&output(&mut command)?)
        .map_err(|error| Failure::during("reading the client's JSON", error))
}

/// Runs a command, and returns its output if it succeeds.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>, Failure> {
    let output = command
        .output()
        .map_err(|error| Failure::during(format!("{command:?}"), error))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.success(), || {
        format!("{command:?}: {}: {said}", output.status)
    })?;
    Ok(output.stdout)
}
