//! Programs that a scenario starts: pinned to a core, and gone when the scenario is, however it ends.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::failure::{Failure, ensure};
use crate::procfs;
use crate::report::say;

/// How long a program that was told to stop may take: more than the product's drain and its agent's patience with a
/// dead tunnel, so that slow is told from stuck.
const STOP_WITHIN: Duration = Duration::from_secs(40);
/// Longer is worth a line in the report: the product drains for 10 s.
const STOP_SLOW: Duration = Duration::from_secs(11);
/// How long it may take when the scenario has failed already.
const ABANDON_WITHIN: Duration = Duration::from_secs(3);
const TICK: Duration = Duration::from_millis(10);

/// A running program. Dropping it ends it and everything it started.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    /// The program's own files, removed after its end.
    _folder: Option<TempDir>,
}

impl Process {
    /// Starts what `command` describes. Only the main thread may: see [`command`].
    pub(crate) fn spawn(name: &'static str, command: &mut Command) -> Result<Self, Failure> {
        let child = command.spawn().map_err(|error| Failure::during(format_args!("cannot start {name}"), error))?;
        Ok(Self { name, child, _folder: None })
    }

    /// Gives it a folder that is to live as long as the program.
    pub(crate) fn with_folder(mut self, folder: TempDir) -> Self {
        self._folder = Some(folder);
        self
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// CPU time of the program and its running children.
    pub(crate) fn cpu(&self) -> Duration {
        procfs::tree(self.pid()).into_iter().map(procfs::cpu).sum()
    }

    /// Its status, if it ends within `patience`.
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

    /// Asks the program to end, and expects that it does so in time and says that all was well.
    pub(crate) fn stop(mut self) -> Result<(), Failure> {
        let asked = Instant::now();
        self.terminate();
        let status = self.wait(STOP_WITHIN)?.ok_or_else(|| {
            Failure::new(format!("{} still runs {STOP_WITHIN:?} after it was told to stop", self.name))
        })?;
        ensure(status.success(), || format!("{} ended with {status} when told to stop", self.name))?;
        if asked.elapsed() > STOP_SLOW {
            let (name, seconds) = (self.name, asked.elapsed().as_secs_f64());
            say(format_args!("note: {name} took {seconds:.0} s to stop"));
        }
        Ok(())
    }

    fn terminate(&self) {
        // Fails when it has ended already.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        let tree = procfs::tree(self.pid());
        self.terminate();
        if matches!(self.wait(ABANDON_WITHIN), Ok(Some(_))) {
            return;
        }
        for pid in tree.into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// The command for `program`, on one core if there is one given.
///
/// The kernel is asked to end the program when the thread that starts it ends, so that not even a killed load test
/// leaves anything running; hence only the main thread may start programs.
pub(crate) fn command(program: &Path, core: Option<usize>) -> Result<Command, Failure> {
    let mut command = Command::new(find("setpriv", "util-linux")?);
    command.args(["--pdeathsig", "TERM", "--"]);
    if let Some(core) = core {
        command.arg(find("taskset", "util-linux")?).args(["-c", &core.to_string()]);
    }
    command.arg(program);
    Ok(command)
}

/// Where a program is, or which Debian package has it.
pub(crate) fn find(program: &str, package: &str) -> Result<PathBuf, Failure> {
    let path = env::var_os("PATH").unwrap_or_default();
    // Servers live where users' search paths often do not look.
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from));
    folders
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| Failure::new(format!("{program} is not installed: apt-get install {package}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        let message = find("no-such-program", "some-package").unwrap_err().to_string();
        assert_eq!(message, "no-such-program is not installed: apt-get install some-package");
    }

    #[test]
    fn a_dropped_process_is_gone() {
        let process = Process::spawn("sleep", Command::new("sleep").arg("60")).unwrap();
        let pid = process.pid();
        drop(process);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}
