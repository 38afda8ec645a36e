//! A gateway and agents as separate processes, each with its own copy of its program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::client::Target;
use crate::demo::UNLIMITED;
use crate::enrolled::{TUNNELS_WITHIN, output};
use crate::failure::{Failure, ensure};
use crate::machine::process::Process;
use crate::machine::{process, procfs};
use crate::{metrics, sink};

pub(super) const GATEWAY: &str = "gw-gateway";
pub(super) const AGENT: &str = "gw-agent";
/// Timeout for a start and for a replacement of the gateway.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(5);

pub(super) struct Installation {
    gateway: Option<Process>,
    /// Process that has replaced `gateway`; not a child of this process.
    successor: Option<u32>,
    /// Target of requests.
    pub(super) target: Target,
    base_url: String,
    admin_url: String,
    admin_token: String,
    backend: String,
    folder: TempDir,
}

impl Installation {
    /// Copies the programs beside `gateway`, starts a gateway and creates a service.
    pub(super) fn start(gateway: &Path) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        for program in [GATEWAY, AGENT] {
            let path = gateway.with_file_name(program);
            let copied = fs::copy(&path, folder.path().join(program));
            copied.map_err(|error| {
                Failure::during(format_args!("copying {}", path.display()), error)
            })?;
        }
        fs::create_dir(folder.path().join("agent-programs"))?;
        let [port, admin_port] = process::free_ports()?;
        let configuration = format!(
            "region = \"eu1\"\ndomain = \"gw.localhost\"\nlisten = \"127.0.0.1:{port}\"\n\
             admin_listen = \"127.0.0.1:{admin_port}\"\nworkers = 1\ndata_dir = {data:?}\n\
             agent_programs = {programs:?}\nagent_versions = \"previous\"\n",
            data = folder.path().join("data"),
            programs = folder.path().join("agent-programs"),
        );
        fs::write(folder.path().join("gateway.toml"), configuration)?;
        let admin_url = format!("http://127.0.0.1:{admin_port}");
        let process = serve(folder.path(), &admin_url)?;
        let admin_token = fs::read_to_string(folder.path().join("data/admin.token"))?
            .trim()
            .to_owned();
        let base_url = format!("https://eu1.gw.localhost:{port}");
        let rate = UNLIMITED.to_string();
        let create = [
            "service",
            "create",
            "demo",
            "echo",
            "--create-account",
            "--with-key",
            "--burst",
            &rate,
        ];
        let create = [&create[..], &["--refill-per-minute", &rate]].concat();
        let created = administer(folder.path(), &admin_url, &admin_token, &create)?;
        let key = created["service_key"]
            .as_str()
            .ok_or_else(|| Failure::new("no service key"))?;
        let url = format!("https://demo--echo.eu1.gw.localhost:{port}");
        let target = Target::new(&url, &folder.path().join("data/dev-ca.crt"), key)?;
        let backend = format!("http://{}", sink::start()?);
        Ok(Self {
            gateway: Some(process),
            successor: None,
            target,
            base_url,
            admin_url,
            admin_token,
            backend,
            folder,
        })
    }

    /// Path of a file of the installation.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs the command-line client and parses its output.
    pub(super) fn administer(&self, arguments: &[&str]) -> Result<Value, Failure> {
        administer(
            self.folder.path(),
            &self.admin_url,
            &self.admin_token,
            arguments,
        )
    }

    /// Enrolls agents. `more` are further lines of their configuration.
    pub(super) fn enroll(&self, agents: usize, more: &str) -> Result<(), Failure> {
        let uses = agents.to_string();
        let created = self.administer(&[
            "enrollment-token",
            "create",
            "demo",
            "--service",
            "echo",
            "--uses",
            &uses,
        ])?;
        let token = created["token"]
            .as_str()
            .ok_or_else(|| Failure::new("no enrollment token"))?;
        fs::write(
            self.path("agent.toml"),
            format!("backend = {:?}\n{more}", self.backend),
        )?;
        for number in 0..agents {
            let mut enroll = Command::new(self.path(AGENT));
            enroll
                .args(["enroll", "--gateway", &self.base_url, "--ca-file"])
                .arg(self.path("data/dev-ca.crt"));
            enroll
                .arg("--state-dir")
                .arg(self.state(number))
                .env("GW_ENROLLMENT_TOKEN", token);
            output(&mut enroll)?;
        }
        Ok(())
    }

    fn state(&self, agent: usize) -> PathBuf {
        self.path(&format!("agent-{agent}"))
    }

    /// Starts an enrolled agent.
    pub(super) fn start_agent(&self, number: usize) -> Result<Process, Failure> {
        let mut run = process::command(&self.path(AGENT), &[])?;
        run.arg("run")
            .arg("--config")
            .arg(self.path("agent.toml"))
            .arg("--state-dir")
            .arg(self.state(number));
        run.stdin(Stdio::null())
            .stderr(fs::File::create(self.path(&format!("agent-{number}.log")))?);
        Process::spawn(AGENT, &mut run)
    }

    pub(super) fn wait_for_tunnels(&self, count: u64) -> Result<(), Failure> {
        let has_all =
            || metrics::read(&self.admin_url, "gw_tunnels").is_ok_and(|tunnels| tunnels == count);
        wait_until(TUNNELS_WITHIN, "not all tunnels are open", has_all)
    }

    /// Stops the gateway and starts it again. Returns the time of both together.
    pub(super) fn restart_gateway(&mut self) -> Result<Duration, Failure> {
        let began = Instant::now();
        self.gateway.take().map_or(Ok(()), Process::stop)?;
        self.gateway = Some(serve(self.folder.path(), &self.admin_url)?);
        Ok(began.elapsed())
    }

    /// Puts another program in place of `program`, under the same name.
    pub(super) fn install(&self, program: &str, path: &Path) -> Result<(), Failure> {
        let new = self.path("new-program");
        fs::copy(path, &new).map_err(|error| Failure::during(path.display(), error))?;
        Ok(fs::rename(new, self.path(program))?)
    }

    /// Replaces the gateway's process, and waits until the old one has ended.
    pub(super) fn replace_gateway(&mut self) -> Result<(), Failure> {
        let Some(mut process) = self.gateway.take() else {
            return Err(Failure::new("the gateway does not run"));
        };
        let old = process.pid();
        signal(old, Signal::USR2)?;
        let mut successor = None;
        let ended = || {
            successor = procfs::tree(old).get(1).copied().or(successor);
            matches!(process.wait(Duration::ZERO), Ok(Some(_)))
        };
        wait_until(SETTLED_WITHIN, "the gateway is not replaced", ended)?;
        self.successor = Some(
            successor.ok_or_else(|| Failure::new("the gateway has ended without a successor"))?,
        );
        Ok(())
    }

    /// Stops agents and gateway.
    pub(super) fn stop(mut self, agents: Vec<Process>) -> Result<(), Failure> {
        agents.into_iter().try_for_each(Process::stop)?;
        self.end_successor();
        self.gateway.take().map_or(Ok(()), Process::stop)
    }

    fn end_successor(&mut self) {
        if let Some(pid) = self.successor.take() {
            // Fails if it has ended already.
            let _ = signal(pid, Signal::TERM);
            let _ = wait_until(SETTLED_WITHIN, "the successor still runs", || {
                !procfs::runs(pid)
            });
        }
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        self.end_successor();
    }
}

/// Starts the gateway. It is ready when this returns.
fn serve(folder: &Path, admin_url: &str) -> Result<Process, Failure> {
    let mut command = process::command(&folder.join(GATEWAY), &[])?;
    command
        .arg("serve")
        .arg("--config")
        .arg(folder.join("gateway.toml"));
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("gateway.log"))?;
    command.stdin(Stdio::null()).stderr(log);
    let mut process = Process::spawn(GATEWAY, &mut command)?;
    let mut status = None;
    wait_until(SETTLED_WITHIN, "the gateway is not ready", || {
        status = process.wait(Duration::ZERO).ok().flatten();
        status.is_some() || metrics::read(admin_url, "gw_tunnels").is_ok()
    })?;
    match status {
        Some(status) => Err(Failure::new(format!("the gateway has ended with {status}"))),
        None => Ok(process),
    }
}

fn administer(
    folder: &Path,
    admin_url: &str,
    admin_token: &str,
    arguments: &[&str],
) -> Result<Value, Failure> {
    let mut command = Command::new(folder.join(GATEWAY));
    command
        .args(arguments)
        .arg("--json")
        .env("GW_ADMIN_URL", admin_url)
        .env("GW_ADMIN_TOKEN", admin_token);
    Ok(serde_json::from_slice(&output(&mut command)?)?)
}

fn signal(pid: u32, signal: Signal) -> Result<(), Failure> {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| Failure::new("not a process id"))?;
    kill_process(pid, signal).map_err(|error| Failure::during("a signal", error))
}

fn wait_until(
    within: Duration,
    otherwise: &str,
    mut holds: impl FnMut() -> bool,
) -> Result<(), Failure> {
    let deadline = Instant::now() + within;
    while !holds() {
        ensure(Instant::now() < deadline, || otherwise.to_owned())?;
        std::thread::sleep(TICK);
    }
    Ok(())
}
