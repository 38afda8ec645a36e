//! Processes that end with the one that has started them, also if that one is killed.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{
    Gid, Pid, Signal, Uid, getppid, kill_process, set_parent_process_death_signal,
};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::{Error, Event, User, Wait};

/// Hidden command of `gw-gateway` that runs a part: `demo-part --parent PID PART`.
const COMMAND: &str = "demo-part";
/// Variables of the environment that nodes take over. Others that begin with `GW_` would change the
/// configuration that the demo wrote for them.
const KEPT: [&str; 2] = ["GW_LOG", "GW_DRIVER"];
/// Lines of a log in an error.
const LOG_LINES: usize = 12;

/// Starts parts with the program `gw-gateway`.
#[derive(Debug, Clone)]
pub struct Starter {
    gateway: PathBuf,
}

/// A child process. It is ended on drop.
pub struct Part {
    /// In messages, such as `node 2`.
    pub name: String,
    child: Child,
    log: PathBuf,
    /// Asks it to end after its work.
    stop: Signal,
    /// Ends it at once.
    abort: Signal,
    /// `None` while it runs.
    ended: Option<ExitStatus>,
    /// Its end was logged.
    is_reported: bool,
}

impl Starter {
    /// `gateway` is the path of `gw-gateway`.
    pub fn new(gateway: impl AsRef<Path>) -> Self {
        let gateway = gateway.as_ref();
        // Programs of PostgreSQL start in another folder.
        let gateway = std::path::absolute(gateway).unwrap_or_else(|_| gateway.to_owned());
        Self { gateway }
    }

    /// Starts parts with the program of this process, which is `gw-gateway`.
    pub fn of_this_program() -> Result<Self, Error> {
        std::env::current_exe()
            .map(Self::new)
            .map_err(Error::io("path of this program"))
    }

    /// The command that runs a part. Its process group is its own, so that Ctrl-C reaches only the
    /// demo, which ends its parts in order.
    pub(crate) fn command(&self, part: &str) -> Command {
        let mut command = Command::new(&self.gateway);
        command.args([COMMAND, "--parent", &std::process::id().to_string(), part]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let is_other = text.starts_with("GW_") && !KEPT.contains(&&*text);
            let of_service_manager = text == "NOTIFY_SOCKET" || text.starts_with("LISTEN_");
            if is_other || of_service_manager {
                command.env_remove(&name);
            }
        }
        command
    }

    /// The command that runs a program of PostgreSQL as `user`, without variables that change what
    /// it does.
    pub(crate) fn program(&self, user: Option<User>, program: &Path) -> Command {
        let mut command = self.command("program");
        if let Some(User { id, group }) = user {
            command.args(["--user", &id.to_string(), "--group", &group.to_string()]);
        }
        command.arg("--").arg(program);
        without_variables_of_postgres(&mut command);
        command
    }
}

/// Removes the variables that change what PostgreSQL's programs do. The user of the server may not
/// be allowed to enter the folder of this process.
pub(crate) fn without_variables_of_postgres(command: &mut Command) {
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG"))
    {
        command.env_remove(name);
    }
    command.env("LC_ALL", "C").current_dir("/");
}

impl Part {
    /// Starts `command`, with its standard error in the file `log`. `input` is its standard input.
    ///
    /// Must be called by a thread that lives as long as the demo: the kernel takes the end of the
    /// thread that has started a process for the end of its parent.
    pub(crate) fn start(
        name: &str,
        command: &mut Command,
        log: &Path,
        input: Option<&[u8]>,
    ) -> Result<Self, Error> {
        let open = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(log);
        command.stderr(open.map_err(Error::io(log.display()))?);
        if input.is_some() {
            command.stdin(Stdio::piped());
        }
        let mut child = command
            .spawn()
            .map_err(Error::io(format!("cannot start {name}")))?;
        let pipe = child.stdin.take();
        let part = Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
            stop: Signal::TERM,
            abort: Signal::KILL,
            ended: None,
            is_reported: false,
        };
        if let (Some(input), Some(mut pipe)) = (input, pipe) {
            // If it does not read, it has ended or ends; the log says why.
            let _ = pipe.write_all(input);
        }
        Ok(part)
    }

    /// The same part with other signals.
    pub(crate) fn with_signals(mut self, stop: Signal, abort: Signal) -> Self {
        self.stop = stop;
        self.abort = abort;
        self
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the process runs.
    pub fn runs(&mut self) -> bool {
        if self.ended.is_none() {
            // An error means that there is no such process.
            self.ended = self.child.try_wait().unwrap_or(Some(ExitStatus::default()));
        }
        self.ended.is_none()
    }

    /// Fails with the end of the log if the process has ended.
    pub(crate) fn expect_running(&mut self) -> Result<(), Error> {
        if self.runs() {
            Ok(())
        } else {
            Err(self.failure())
        }
    }

    /// Fails with the end of the log if the process has failed.
    pub(crate) fn expect_success(&mut self) -> Result<(), Error> {
        if self.runs() || self.ended.is_some_and(|status| status.success()) {
            Ok(())
        } else {
            Err(self.failure())
        }
    }

    fn failure(&self) -> Error {
        let status = self
            .ended
            .map_or_else(String::new, |status| status.to_string());
        Error::Ended {
            name: self.name.clone(),
            status,
            log: tail(&self.log),
        }
    }

    /// How the process has ended; `None` while it runs, and after it was asked once.
    pub fn newly_ended(&mut self) -> Option<ExitStatus> {
        if self.runs() || self.is_reported {
            return None;
        }
        self.is_reported = true;
        self.ended
    }

    /// Asks the process to end.
    pub fn stop(&mut self) {
        self.signal(self.stop);
    }

    /// Sends a signal, if the process runs.
    pub fn signal(&mut self, signal: Signal) {
        // Not after it was waited for: its id may belong to another process then.
        if self.runs()
            && let Some(id) = i32::try_from(self.id()).ok().and_then(Pid::from_raw)
        {
            // Fails only if it has ended.
            let _ = kill_process(id, signal);
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        const WITHIN: Duration = Duration::from_secs(5);
        self.signal(self.abort);
        let deadline = Instant::now() + WITHIN;
        while self.runs() {
            if Instant::now() >= deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Waits until all `parts` have ended; drops them, which ends them at once, after `within` or after
/// a signal to stop.
pub(crate) fn wait_for_end(
    events: &mut impl Wait,
    mut parts: Vec<Part>,
    within: Duration,
) -> Result<(), Error> {
    let deadline = Instant::now() + within;
    while parts.iter_mut().any(Part::runs) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            for part in parts
                .iter_mut()
                .filter_map(|part| part.runs().then_some(part))
            {
                tracing::warn!(
                    "{} has not ended within {} s: it is killed",
                    part.name,
                    within.as_secs()
                );
            }
            return Ok(());
        }
        if events.wait(left) == Event::Stop {
            return Err(Error::Aborted);
        }
    }
    Ok(())
}

/// The last lines of a log.
fn tail(log: &Path) -> String {
    let text = fs::read(log)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default();
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let last: Vec<String> = lines[lines.len().saturating_sub(LOG_LINES)..]
        .iter()
        .map(|line| format!("  {line}"))
        .collect();
    if last.is_empty() {
        "  (empty)".to_owned()
    } else {
        last.join("\n")
    }
}

/// Makes the kernel send `signal` to this process when the process `parent`, which has started it,
/// has ended. Fails if it has ended already.
pub fn end_with(parent: u32, signal: Signal) -> io::Result<()> {
    set_parent_process_death_signal(Some(signal))?;
    if getppid().map(Pid::as_raw_pid) == i32::try_from(parent).ok() {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "the process {parent}, which this one belongs to, has ended"
        )))
    }
}

/// Becomes the program `program`, as `user`. Returns only if that fails. This process must have a
/// single thread.
pub fn become_program(
    parent: u32,
    user: Option<User>,
    program: &Path,
    arguments: &[std::ffi::OsString],
) -> io::Error {
    let prepare = || {
        if let Some(User { id, group }) = user {
            let uid = Uid::from_raw(id);
            let gid = Gid::from_raw(group);
            set_thread_groups(&[])?;
            set_thread_res_gid(gid, gid, gid)?;
            set_thread_res_uid(uid, uid, uid)?;
        }
        // After the user, because a change of the user takes the signal back. SIGINT is
        // PostgreSQL's fast shutdown.
        end_with(parent, Signal::INT)
    };
    match prepare() {
        Ok(()) => Command::new(program).args(arguments).exec(),
        Err(error) => error,
    }
}

/// Makes an empty log, so that errors show only what was written since.
pub(crate) fn new_log(path: &Path) -> Result<(), Error> {
    let opened = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(path);
    opened.map(drop).map_err(Error::io(path.display()))
}
