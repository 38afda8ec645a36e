//! The supervisor: starts workers, passes messages and signals on, and runs updated programs.
//! Decides by [`Supervision`].

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use gw_shared::identity::program::{ReleaseKeys, SignedProgram};
use gw_shared::process::core_dump;
use gw_shared::process::signal::is_ignored;
use gw_shared::version::Version;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::environment;
use super::messages::{MessageReceiver, ToWorker, send};
use super::settings::{ConfigSource, SupervisorSettings};
use super::supervision::{Action, Blame, Input, Supervision, WorkerNumber};
use crate::program::executable::execute;
use crate::program::stored::{self, UpdateRecord};
use crate::succession::AgentEvent;

/// Time in which the installed program prints its version.
const VERSION_WITHIN: Duration = Duration::from_secs(5);
/// Time in which a killed worker ends.
const KILLED_WITHIN: Duration = Duration::from_secs(2);

/// Name of a stored program that runs.
const NAME: &str = "gw-agent";

/// What the agent does when its terminal is closed (SIGHUP).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hangup {
    /// Uses the configuration as it is now.
    Reload,
    Stop,
}

/// How the agent was started.
pub(super) struct Invocation {
    pub(super) source: ConfigSource,
    /// Arguments of a worker.
    pub(super) of_worker: Vec<OsString>,
    pub(super) hangup: Hangup,
    /// Whether the supervisor ends with [`AgentExit::Deleted`].
    pub(super) can_enroll: bool,
}

/// How an agent has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentExit {
    /// With this exit code.
    Exit(u8),
    /// The gateway has deleted its record: it can serve again after another enrollment.
    Deleted,
}

/// Starts workers and stores what becomes of updates.
pub(super) struct Supervisor {
    settings: SupervisorSettings,
    invocation: Invocation,
    /// The installed program. Its file may have been replaced since this process started.
    installed: PathBuf,
    links: BTreeMap<WorkerNumber, WorkerLink>,
    /// The agent stops because its record was deleted.
    is_deleted: bool,
    inputs: mpsc::UnboundedSender<Input>,
    received: mpsc::UnboundedReceiver<Input>,
}

/// A worker, for its supervisor.
struct WorkerLink {
    messages: OwnedWriteHalf,
    kill: oneshot::Sender<()>,
    /// Ends with the worker.
    ended: JoinHandle<()>,
}

/// A program that is to run.
#[derive(Default)]
struct ChosenProgram {
    /// `None` for the installed program.
    program: Option<SignedProgram>,
    is_proven: bool,
}

impl Supervisor {
    pub(super) fn new(settings: SupervisorSettings, invocation: Invocation) -> io::Result<Self> {
        let (inputs, received) = mpsc::unbounded_channel();
        let installed = std::env::current_exe()?;
        Ok(Self {
            settings,
            invocation,
            installed,
            links: BTreeMap::new(),
            is_deleted: false,
            inputs,
            received,
        })
    }

    /// Runs the agent in a worker until it ends.
    pub(super) async fn run(mut self) -> io::Result<AgentExit> {
        let mut signals = listen(self.invocation.hangup)?;
        let ChosenProgram { program, is_proven } = self.choose(Version::own());
        let (mut supervision, mut actions) = Supervision::new(program, is_proven, Instant::now());
        loop {
            for action in actions {
                if let Some(code) = self.act(action).await {
                    return Ok(if self.is_deleted {
                        AgentExit::Deleted
                    } else {
                        AgentExit::Exit(code)
                    });
                }
            }
            let due = async {
                match supervision.deadline() {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            let input = tokio::select! {
                // The sender is this supervisor.
                input = self.received.recv() => input.unwrap_or(Input::Stop),
                signal = signals.recv() => self.signalled(signal).await,
                () = due => Input::Time,
            };
            if let Input::Exited { worker, .. } = input {
                self.links.remove(&worker);
            }
            let input = self.ends_if_deleted(input);
            actions = supervision.handle(input, Instant::now());
        }
    }

    /// Stops the agent, once, when its record was deleted and it can enroll again.
    fn ends_if_deleted(&mut self, input: Input) -> Input {
        let event = match &input {
            Input::Event { event, .. } => Some(event),
            _ => None,
        };
        if event != Some(&AgentEvent::Deleted) || !self.invocation.can_enroll || self.is_deleted {
            return input;
        }
        tracing::warn!(
            "the gateway does not know this agent any more: enrolling again with the token"
        );
        self.is_deleted = true;
        Input::Stop
    }

    async fn signalled(&mut self, signal: Option<ReceivedSignal>) -> Input {
        match signal {
            Some(ReceivedSignal::Stop) | None => {
                self.is_deleted = false;
                self.invocation.can_enroll = false;
                tracing::warn!(
                    "stopping after running requests have ended; a second signal aborts them"
                );
                Input::Stop
            }
            Some(ReceivedSignal::Hangup) => {
                self.is_deleted = false;
                self.invocation.can_enroll = false;
                tracing::warn!("SIGHUP: stopping after running requests have ended");
                Input::Hangup
            }
            Some(ReceivedSignal::Replace(why)) => {
                tracing::info!("{why}");
                match SupervisorSettings::load(&self.invocation.source, environment) {
                    Ok(SupervisorSettings {
                        release_keys,
                        core_dumps,
                        ..
                    }) => {
                        self.settings.release_keys = release_keys;
                        if let Err(error) = core_dump::allow(core_dumps) {
                            tracing::error!(%error, core_dumps,
                                "cannot change whether core dumps are allowed");
                        }
                    }
                    // The new worker exits with the same error.
                    Err(error) => tracing::debug!(%error, "the configuration is not used"),
                }
                let installed = self.installed_version().await;
                Input::Replace(self.choose(installed).program)
            }
            Some(ReceivedSignal::Detach) => Input::Detach,
        }
    }
}

#[derive(Clone, Copy)]
enum ReceivedSignal {
    Stop,
    Hangup,
    Replace(&'static str),
    Detach,
}

/// Receives the signals of the supervisor.
fn listen(hangup: Hangup) -> io::Result<mpsc::UnboundedReceiver<ReceivedSignal>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let hangup = match hangup {
        Hangup::Reload => ReceivedSignal::Replace("SIGHUP: using the configuration as it is now"),
        Hangup::Stop => ReceivedSignal::Hangup,
    };
    let mut meanings = vec![
        (SignalKind::interrupt(), ReceivedSignal::Stop),
        (SignalKind::terminate(), ReceivedSignal::Stop),
        (
            SignalKind::user_defined2(),
            ReceivedSignal::Replace("SIGUSR2: replacing the agent's process"),
        ),
        (SignalKind::user_defined1(), ReceivedSignal::Detach),
    ];
    if !is_ignored(SignalKind::hangup().as_raw_value())? {
        meanings.push((SignalKind::hangup(), hangup));
    }
    for (kind, meaning) in meanings {
        let mut signal = signal(kind)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while signal.recv().await.is_some() && sender.send(meaning).is_ok() {}
        });
    }
    Ok(receiver)
}

impl Supervisor {
    /// The program that is to run. Removes stored programs that are not newer than the installed
    /// one.
    fn choose(&self, installed: Version) -> ChosenProgram {
        let Some(keys) = &self.settings.release_keys else {
            return ChosenProgram::default();
        };
        let record = self.settings.state.updates().unwrap_or_else(|error| {
            tracing::error!(%error,
                "cannot read the record of updates: using the installed program");
            UpdateRecord::default()
        });
        if let Some(program) = record.current {
            if program.supersedes(installed) {
                match self.read(&program, keys) {
                    Ok(_) => {
                        return ChosenProgram {
                            program: Some(program),
                            is_proven: record.is_proven,
                        };
                    }
                    Err(error) => {
                        tracing::error!(
                            error,
                            "the updated program cannot be used: using the installed one"
                        );
                    }
                }
            }
            self.use_installed();
        }
        if let Some(floor) = record.floor.filter(|floor| *floor > installed) {
            tracing::warn!(
                %installed, %floor,
                "the installed program is older than this agent's signed programs may be; install \
                 a newer package"
            );
        }
        ChosenProgram::default()
    }

    /// Reads and checks a stored program. Raises the lowest version that may run to the minimum of
    /// this program.
    fn read(&self, program: &SignedProgram, keys: &ReleaseKeys) -> Result<Vec<u8>, String> {
        let state = &self.settings.state;
        let floor = state.updates().map_err(|error| error.to_string())?.floor;
        program
            .verify_floor(floor)
            .map_err(|error| error.to_string())?;
        let content = stored::read(state, program, keys)?;
        if program.minimum > floor {
            self.record(|record| record.raise_floor(program.minimum));
        }
        Ok(content)
    }

    /// Forgets the chosen program, so that a gateway can offer it again, and removes all stored
    /// ones.
    fn use_installed(&self) {
        self.record(|record| record.current = None);
        stored::remove_others(&self.settings.state, None);
    }

    /// Version of the installed program, whose file may have been replaced; that of this process if
    /// the program does not answer.
    async fn installed_version(&self) -> Version {
        let mut command = Command::new(&self.installed);
        command
            .arg("--version")
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let output = tokio::time::timeout(VERSION_WITHIN, command.output()).await;
        let version = output.ok().and_then(Result::ok).and_then(|output| {
            let text = String::from_utf8(output.stdout).ok()?;
            text.split_whitespace().nth(1)?.parse().ok()
        });
        version.unwrap_or_else(Version::own)
    }

    /// Takes an action. Returns the exit code if it is the last one.
    async fn act(&mut self, action: Action) -> Option<u8> {
        match action {
            Action::Start {
                worker,
                program,
                required,
            } => {
                if let Err((error, blame)) = self.start(worker, program.as_ref(), required).await {
                    tracing::error!(error, "cannot start the agent's process");
                    // The receiver is this supervisor.
                    let _ = self.inputs.send(Input::NotStarted {
                        worker,
                        error,
                        blame,
                    });
                }
            }
            Action::Tell { worker, message } => self.tell(worker, &message).await,
            Action::Kill { worker } => {
                if let Some(WorkerLink { kill, ended, .. }) = self.links.remove(&worker) {
                    // Fails if the worker has ended.
                    let _ = kill.send(());
                    let _ = tokio::time::timeout(KILLED_WITHIN, ended).await;
                }
            }
            Action::Choose { program, is_proven } => self.record(|record| {
                record.is_proven = is_proven;
                record.current.clone_from(&program);
            }),
            Action::Prove => self.prove(),
            Action::Fail {
                program,
                error,
                blame,
                worker,
            } => self.fail(program, error, blame, worker).await,
            Action::Exit { code } => return Some(code),
        }
        None
    }

    /// Stores that the chosen program works, and removes the others.
    fn prove(&self) {
        let mut kept = None;
        self.record(|record| {
            record.is_proven = true;
            let current = record.current.as_ref();
            kept = current.map(|program| stored::path(&self.settings.state, program));
            record.raise_floor(current.map(|program| program.version));
        });
        if kept.is_some() {
            stored::remove_others(&self.settings.state, kept.as_deref());
        }
    }

    /// Stores that the program has failed, and tells `worker`.
    async fn fail(
        &mut self,
        program: SignedProgram,
        error: String,
        blame: Blame,
        worker: Option<WorkerNumber>,
    ) {
        tracing::error!(version = %program.version, error, "the agent is not updated");
        let is_refused = blame == Blame::Program;
        if blame != Blame::Other {
            self.record(|record| record.add_failure(&program, &error, is_refused));
        }
        if is_refused {
            stored::remove(&self.settings.state, &program);
        }
        if let Some(worker) = worker {
            let message = ToWorker::UpdateFailed {
                program,
                error,
                is_refused,
            };
            self.tell(worker, &message).await;
        }
    }

    async fn tell(&mut self, worker: WorkerNumber, message: &ToWorker) {
        if let Some(link) = self.links.get_mut(&worker)
            && let Err(error) = send(&mut link.messages, message).await
        {
            // Its exit follows.
            tracing::debug!(worker, %error, "cannot reach a worker");
        }
    }

    fn record(&self, change: impl FnOnce(&mut UpdateRecord)) {
        let state = &self.settings.state;
        let changed = state.updates().and_then(|mut record| {
            change(&mut record);
            state.write_updates(&record)
        });
        if let Err(error) = changed {
            tracing::error!(%error, "cannot store what became of an update");
        }
    }

    /// Starts a worker and the tasks that report its events and its end.
    async fn start(
        &mut self,
        worker: WorkerNumber,
        program: Option<&SignedProgram>,
        required: Vec<String>,
    ) -> Result<(), (String, Blame)> {
        let (link, mut child) = match (program, &self.settings.release_keys) {
            (None, _) => {
                let installed = &self.installed;
                let spawned = self.spawn(installed, installed.as_os_str());
                spawned.map_err(|error| {
                    (format!("{}: {error}", installed.display()), Blame::Unclear)
                })?
            }
            (Some(program), Some(keys)) => self.spawn_stored(program, keys)?,
            (Some(_), None) => {
                let error = "agent.toml turns updates off, and is not in use; mend it and reload \
                             the agent (SIGHUP)";
                return Err((error.to_owned(), Blame::Other));
            }
        };
        let (reader, writer) = link.into_split();
        let (kill, killed) = oneshot::channel();
        let inputs = self.inputs.clone();
        // Both tasks end with the worker. Sending fails if the supervisor is ending.
        tokio::spawn(async move {
            let mut events = MessageReceiver::new(reader);
            while let Some(event) = events.next::<AgentEvent>().await {
                let _ = inputs.send(Input::Event { worker, event });
            }
        });
        let inputs = self.inputs.clone();
        let ended = tokio::spawn(async move {
            let code = exit_code(&mut child, killed).await;
            let _ = inputs.send(Input::Exited { worker, code });
        });
        self.links.insert(
            worker,
            WorkerLink {
                messages: writer,
                kill,
                ended,
            },
        );
        let release_keys = self.settings.release_keys.clone();
        self.tell(
            worker,
            &ToWorker::Start {
                required,
                program: program.cloned(),
                release_keys,
            },
        )
        .await;
        Ok(())
    }

    /// Executes the very bytes that were checked, not the file in the state folder.
    fn spawn_stored(
        &self,
        program: &SignedProgram,
        keys: &ReleaseKeys,
    ) -> Result<(UnixStream, Child), (String, Blame)> {
        let state = &self.settings.state;
        let content = self
            .read(program, keys)
            .map_err(|error| (error, Blame::Other))?;
        let name = format!("{NAME}-{}", program.version);
        let is_root = rustix::process::geteuid().is_root();
        execute(&name, &content, state.path(), is_root, |path| {
            self.spawn(path, NAME.as_ref())
        })
        .map_err(|error| (error.to_string(), Blame::Unclear))
    }

    /// `name` is `argv[0]`.
    fn spawn(&self, path: &Path, name: &OsStr) -> io::Result<(UnixStream, Child)> {
        let (own, other) = std::os::unix::net::UnixStream::pair()?;
        own.set_nonblocking(true)?;
        let mut command = Command::new(path);
        // A group of its own: Ctrl-C in a terminal reaches the supervisor only.
        command
            .arg0(name)
            .args(&self.invocation.of_worker)
            .stdin(Stdio::from(OwnedFd::from(other)))
            .process_group(0);
        let child = command.spawn()?;
        Ok((UnixStream::from_std(own)?, child))
    }
}

/// The exit code of a worker that ends by itself or is killed.
async fn exit_code(child: &mut Child, killed: oneshot::Receiver<()>) -> Option<u8> {
    let status = tokio::select! {
        status = child.wait() => status,
        // The other branch goes on if the supervisor drops its end.
        Ok(()) = killed => {
            if let Err(error) = child.start_kill() {
                tracing::error!(%error, "cannot kill a worker");
            }
            child.wait().await
        }
    };
    code(status)
}

fn code(status: io::Result<std::process::ExitStatus>) -> Option<u8> {
    status.ok()?.code()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::Ed25519KeyPair;
    use gw_shared::identity::program::{ReleaseKey, TARGET};

    use super::*;
    use crate::identity::state::StateDir;
    use crate::program::stored::ReservedFile;

    #[test]
    fn a_program_that_has_served_is_the_lowest_that_may_run() {
        let folder = tempfile::tempdir().unwrap();
        let pair = Ed25519KeyPair::generate().unwrap();
        let state = StateDir::new(folder.path());
        let stored = |version: &str| {
            let program = SignedProgram::sign(version.parse().unwrap(), TARGET, b"program", &pair);
            let file = ReservedFile::new(&state, &program).unwrap();
            file.store(b"program").unwrap();
            let record = UpdateRecord {
                current: Some(program),
                ..state.updates().unwrap()
            };
            state.write_updates(&record).unwrap();
        };
        let release_keys = Some(ReleaseKey::of(&pair).into());
        let settings = SupervisorSettings {
            state: state.clone(),
            release_keys,
            log_format: Default::default(),
            core_dumps: false,
        };
        let source = ConfigSource {
            file: None,
            state_dir: None,
        };
        let invocation = Invocation {
            source,
            of_worker: Vec::new(),
            hangup: Hangup::Stop,
            can_enroll: false,
        };
        let mut supervisor = Supervisor::new(settings, invocation).unwrap();
        let chosen = |supervisor: &Supervisor, version: &str| {
            stored(version);
            let program = supervisor.choose(Version::own()).program;
            program.map(|program| program.version.to_string())
        };
        assert_eq!(chosen(&supervisor, "999.0.1").as_deref(), Some("999.0.1"));
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        assert_eq!(runtime.block_on(supervisor.act(Action::Prove)), None);
        assert_eq!(chosen(&supervisor, "999.0.0"), None);
        assert_eq!(chosen(&supervisor, "999.0.1").as_deref(), Some("999.0.1"));
    }
}
