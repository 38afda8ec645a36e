//! Agents as processes of their own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::demo::{Demo, SLOTS};
use crate::failure::{Failure, wait_until};
use crate::machine::process::{self, Process, output};

/// Timeout for the tunnels of one agent.
pub(crate) const TUNNELS_WITHIN: Duration = Duration::from_secs(30);

/// What an agent is started with.
#[derive(Clone, Default)]
pub(crate) struct Plan {
    pub(crate) backend: String,
    /// Its default if `None`.
    pub(crate) slots: Option<u32>,
    /// Cores that it may use; all if empty.
    pub(crate) cores: Vec<usize>,
    /// More variables of its environment.
    pub(crate) environment: Vec<(&'static str, String)>,
}

/// An agent with the state folder that its enrollment has written.
pub(crate) struct Agent {
    program: PathBuf,
    plan: Plan,
    // The process ends before its folder is removed.
    process: Option<Process>,
    state: TempDir,
}

impl Plan {
    pub(crate) fn new(backend: impl Into<String>) -> Self {
        Self {
            backend: backend.into(),
            ..Self::default()
        }
    }
}

impl Agent {
    /// Enrolls the agent beside `gateway` with the region at `url`, and starts it.
    pub(crate) fn start(
        gateway: &Path,
        url: &str,
        ca_file: &Path,
        token: &str,
        plan: Plan,
    ) -> Result<Self, Failure> {
        let program = gateway.with_file_name("gw-agent");
        let state = tempfile::Builder::new().prefix("gw-loadtest-").tempdir()?;
        let mut enroll = Command::new(&program);
        enroll
            .args(["enroll", "--gateway", url, "--ca-file"])
            .arg(ca_file)
            .arg("--state-dir")
            .arg(state.path())
            .env("GW_ENROLLMENT_TOKEN", token);
        output(&mut enroll)?;
        let mut agent = Self {
            program,
            plan,
            process: None,
            state,
        };
        agent.run()?;
        Ok(agent)
    }

    /// Starts the process of an agent that has ended.
    pub(crate) fn run(&mut self) -> Result<(), Failure> {
        let Plan {
            backend,
            slots,
            cores,
            environment,
        } = &self.plan;
        let mut run = process::command(&self.program, cores)?;
        run.args(["run", "--backend", backend, "--state-dir"])
            .arg(self.state.path());
        run.envs(slots.map(|slots| (SLOTS, slots.to_string())));
        run.envs(environment.iter().map(|(name, value)| (name, value)));
        run.stdin(Stdio::null()).stderr(Stdio::null());
        self.process = Some(Process::spawn("gw-agent", &mut run)?);
        Ok(())
    }

    /// Stops it as its unit of systemd does before a restart: the worker serves until the next
    /// process has its tunnels.
    pub(crate) fn stop(&mut self) -> Result<(), Failure> {
        let process = self.process.take();
        process.map_or(Ok(()), |process| process.stop_with(Signal::USR1))
    }

    pub(crate) fn kill(&mut self) -> Result<(), Failure> {
        self.process.take().map_or(Ok(()), Process::kill)
    }

    /// Stops all its processes (`Signal::STOP`) or lets them continue (`Signal::CONT`).
    pub(crate) fn signal(&self, signal: Signal) {
        let processes = self.process.iter();
        processes.for_each(|process| process.send_all(signal));
    }

    pub(crate) fn proportional_memory(&self) -> Result<u64, Failure> {
        let processes = self.process.iter();
        processes.map(Process::proportional_memory).sum()
    }
}

/// Starts an agent for services of the demo, which keeps a tunnel for each. All tunnels are open
/// when this returns.
pub(crate) fn connect(
    gateway: &Path,
    demo: &Demo,
    account: &str,
    services: &[String],
    plan: Plan,
) -> Result<Agent, Failure> {
    let expected = demo.tunnels() + services.len() as u64;
    let token = demo.api.enrollment_token(account, services, 1)?;
    let agent = Agent::start(gateway, &demo.base_url, &demo.ca_file, &token, plan)?;
    let otherwise = || format!("not {expected} tunnels within {TUNNELS_WITHIN:?}");
    wait_until(TUNNELS_WITHIN, otherwise, || Ok(demo.tunnels() >= expected))?;
    Ok(agent)
}
