//! Programs started by a scenario: pinned to a core, and ended with the scenario in every case.

use std::env;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::failure::{Failure, ensure};
use crate::machine::procfs;
use crate::machine::procfs::Cpu;
use crate::report::say;

/// Timeout of a stop: longer than the product's drain and the agent's timeout for a dead tunnel, so
/// that a slow stop is not taken for a hang.
const STOP_WITHIN: Duration = Duration::from_secs(40);
/// A longer stop is reported: the product drains for 10 s.
const STOP_SLOW: Duration = Duration::from_secs(11);
/// Timeout of a stop after the scenario has failed.
const ABANDON_WITHIN: Duration = Duration::from_secs(3);
const TICK: Duration = Duration::from_millis(10);

/// A running program. Dropping it ends the program and its children.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    /// Files of the program, removed after its end.
    _folder: Option<TempDir>,
}

impl Process {
    /// Starts what `command` describes. Only the main thread may: see [`command`].
    pub(crate) fn spawn(name: &'static str, command: &mut Command) -> Result<Self, Failure> {
        let child = command
            .spawn()
            .map_err(|error| Failure::during(format_args!("cannot start {name}"), error))?;
        Ok(Self {
            name,
            child,
            _folder: None,
        })
    }

    /// Keeps `folder` until the program has ended.
    pub(crate) fn with_folder(mut self, folder: TempDir) -> Self {
        self._folder = Some(folder);
        self
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// CPU time of the program and its running children.
    pub(crate) fn cpu(&self) -> Cpu {
        procfs::tree(self.pid()).into_iter().map(Cpu::of).sum()
    }

    /// Proportional set size of the program and its children, in bytes.
    pub(crate) fn proportional_memory(&self) -> Result<u64, Failure> {
        procfs::tree(self.pid())
            .into_iter()
            .map(procfs::proportional_memory)
            .sum()
    }

    /// Exit status, if the program ends within `patience`.
    pub(crate) fn wait(&mut self, patience: Duration) -> Result<Option<ExitStatus>, Failure> {
        let deadline = Instant::now() + patience;
        loop {
            let status = self.child.try_wait()?;
            if status.is_some() || Instant::now() >= deadline {
                return Ok(status);
            }
            std::thread::sleep(TICK);
        }
    }

    /// Sends SIGTERM and expects an exit with success in time.
    pub(crate) fn stop(self) -> Result<(), Failure> {
        self.stop_with(Signal::TERM)
    }

    /// Sends `signal` and expects an exit with success in time.
    pub(crate) fn stop_with(mut self, signal: Signal) -> Result<(), Failure> {
        let asked = Instant::now();
        self.send(signal);
        let status = self.wait(STOP_WITHIN)?.ok_or_else(|| {
            Failure::new(format!(
                "{} still runs {STOP_WITHIN:?} after it was told to stop",
                self.name
            ))
        })?;
        ensure(status.success(), || {
            format!("{} ended with {status} when told to stop", self.name)
        })?;
        if asked.elapsed() > STOP_SLOW {
            let name = self.name;
            let seconds = asked.elapsed().as_secs_f64();
            say(format_args!("note: {name} took {seconds:.0} s to stop"));
        }
        Ok(())
    }

    /// Kills the program and its children, and waits until it has ended.
    pub(crate) fn kill(mut self) -> Result<(), Failure> {
        self.send_all(Signal::KILL);
        self.child.wait()?;
        Ok(())
    }

    /// Sends a signal to the program and its running children.
    pub(crate) fn send_all(&self, signal: Signal) {
        procfs::signal_all(&procfs::tree(self.pid()), signal);
    }

    fn send(&self, signal: Signal) {
        // Fails if the program has ended already.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        let tree = procfs::tree(self.pid());
        self.send(Signal::TERM);
        if matches!(self.wait(ABANDON_WITHIN), Ok(Some(_))) {
            return;
        }
        procfs::signal_all(&tree, Signal::KILL);
        let _ = self.child.wait();
    }
}

/// Command for `program`, pinned to `cores` if there are any.
///
/// The kernel ends the program when the thread that started it ends, so that a killed load test
/// leaves no process behind. Therefore only the main thread may start programs.
pub(crate) fn command(program: &Path, cores: &[usize]) -> Result<Command, Failure> {
    let mut command = Command::new(find("setpriv", "util-linux")?);
    command.args(["--pdeathsig", "TERM", "--"]);
    if !cores.is_empty() {
        let list: Vec<String> = cores.iter().map(usize::to_string).collect();
        command
            .arg(find("taskset", "util-linux")?)
            .args(["-c", &list.join(",")]);
    }
    command.arg(program);
    // Without core dumps, only root can read a process's proportional memory.
    command.env("GW_CORE_DUMPS", "true");
    Ok(command)
}

/// Path of a program; the error names its Debian package.
pub(crate) fn find(program: &str, package: &str) -> Result<PathBuf, Failure> {
    let path = env::var_os("PATH").unwrap_or_default();
    // Servers are in folders that are often not in the PATH of a user.
    let folders =
        env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from));
    folders
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| {
            Failure::new(format!(
                "{program} is not installed: apt-get install {package}"
            ))
        })
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

/// Unused ports.
pub(crate) fn free_ports<const COUNT: usize>() -> Result<[u16; COUNT], Failure> {
    let mut ports = [0; COUNT];
    // Holds all ports until all are chosen, so that they differ.
    let mut held = Vec::with_capacity(COUNT);
    for port in &mut ports {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        let message = find("no-such-program", "some-package")
            .unwrap_err()
            .to_string();
        assert_eq!(
            message,
            "no-such-program is not installed: apt-get install some-package"
        );
    }

    #[test]
    fn a_dropped_process_has_ended() {
        let process = Process::spawn("sleep", Command::new("sleep").arg("60")).unwrap();
        let pid = process.pid();
        drop(process);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
