//! The supervisor: starts workers, passes messages and signals on, and runs updated programs. Decides by [`Supervision`].

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Stdio;
use std::time::Instant;

use futures_util::future::{Either, select};
use gw_shared::identity::program::SignedProgram;
use gw_shared::version::Version;
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use super::messages::{Receiver, ToWorker, send};
use super::supervision::{Action, Input, Supervision, WorkerId};
use crate::config::Config;
use crate::program::stored::{StoredProgram, UpdateRecord};
use crate::succession::Event;

/// Starts workers and stores what becomes of updates.
pub(super) struct Supervisor {
    config: Config,
    /// The installed program. Its file may have been replaced since this process started.
    installed: PathBuf,
    /// Arguments of a worker.
    arguments: Vec<OsString>,
    links: BTreeMap<WorkerId, Link>,
    inputs: mpsc::UnboundedSender<Input>,
}

/// A worker, for its supervisor.
struct Link {
    messages: OwnedWriteHalf,
    kill: oneshot::Sender<()>,
}

/// Runs the agent in a worker until it ends; the exit code. `arguments` are those of a worker.
pub(super) async fn supervise(config: Config, arguments: Vec<OsString>) -> io::Result<u8> {
    let (inputs, mut received) = mpsc::unbounded_channel();
    let mut signals = listen()?;
    let installed = std::env::current_exe()?;
    let mut supervisor = Supervisor { config, installed, arguments, links: BTreeMap::new(), inputs };
    let (mut supervision, mut actions) = Supervision::new(supervisor.choose(), Instant::now());
    loop {
        for action in actions {
            if let Some(code) = supervisor.act(action).await {
                return Ok(code);
            }
        }
        let due = async {
            match supervision.deadline() {
                Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        let input = match select(pin!(received.recv()), select(pin!(signals.recv()), pin!(due))).await {
            // The sender is this supervisor.
            Either::Left((input, _)) => input.unwrap_or(Input::Stop),
            Either::Right((Either::Right(_), _)) => Input::Time,
            Either::Right((Either::Left((signal, _)), _)) => match signal {
                Some(ReceivedSignal::Stop) | None => {
                    tracing::warn!("stopping after running requests have ended; a second signal aborts them");
                    Input::Stop
                }
                Some(ReceivedSignal::Replace(why)) => {
                    tracing::info!("{why}");
                    Input::Replace(supervisor.choose())
                }
                Some(ReceivedSignal::Detach) => Input::Detach,
            },
        };
        actions = supervision.handle(input, Instant::now());
    }
}

#[derive(Clone, Copy)]
enum ReceivedSignal {
    Stop,
    Replace(&'static str),
    Detach,
}

/// Receives the signals of the supervisor.
fn listen() -> io::Result<mpsc::UnboundedReceiver<ReceivedSignal>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let meanings = [
        (SignalKind::interrupt(), ReceivedSignal::Stop),
        (SignalKind::terminate(), ReceivedSignal::Stop),
        (SignalKind::hangup(), ReceivedSignal::Replace("SIGHUP: using the configuration as it is now")),
        (SignalKind::user_defined2(), ReceivedSignal::Replace("SIGUSR2: replacing the agent's process")),
        (SignalKind::user_defined1(), ReceivedSignal::Detach),
    ];
    for (kind, meaning) in meanings {
        let (mut signal, sender) = (signal(kind)?, sender.clone());
        tokio::spawn(async move { while signal.recv().await.is_some() && sender.send(meaning).is_ok() {} });
    }
    Ok(receiver)
}

impl Supervisor {
    /// The stored program that is to run; `None` for the installed one. Removes stored programs that are not newer.
    fn choose(&self) -> Option<SignedProgram> {
        let key = self.config.update.as_ref()?;
        let record = self.config.state.updates().inspect_err(|error| {
            tracing::error!(%error, "cannot read the record of updates: using the installed program");
        });
        let program = record.ok()?.current?;
        if program.version <= Version::own() {
            StoredProgram::remove_others(&self.config.state, None);
            return None;
        }
        match StoredProgram::find(&self.config.state, &program, key) {
            Ok(_) => Some(program),
            Err(error) => {
                tracing::error!(error, "the updated program cannot be used: using the installed one");
                None
            }
        }
    }

    /// Takes an action. Returns the exit code if it is the last one.
    async fn act(&mut self, action: Action) -> Option<u8> {
        match action {
            Action::Start { worker, program, required } => {
                if let Err(error) = self.start(worker, program.as_ref(), required).await {
                    tracing::error!(%error, "cannot start the agent's process");
                    // The receiver is this supervisor.
                    let _ = self.inputs.send(Input::Exited { worker, code: None });
                }
            }
            Action::Tell { worker, message } => self.tell(worker, &message).await,
            Action::Kill { worker } => drop(self.links.remove(&worker).map(|link| link.kill.send(()))),
            Action::Choose { program } => {
                self.record(|record| record.current.clone_from(&program));
                let state = &self.config.state;
                let key = self.config.update.as_ref();
                let kept = program.zip(key).and_then(|(program, key)| StoredProgram::find(state, &program, key).ok());
                StoredProgram::remove_others(state, kept.as_ref().map(|kept| kept.path.as_path()));
            }
            Action::Refuse { program, error } => {
                tracing::error!(version = %program.version, error, "the agent is not updated");
                self.record(|record| record.add_failure(&program, &error));
            }
            Action::Exit { code } => return Some(code),
        }
        None
    }

    async fn tell(&mut self, worker: WorkerId, message: &ToWorker) {
        if let Some(link) = self.links.get_mut(&worker)
            && let Err(error) = send(&mut link.messages, message).await
        {
            // Its exit follows.
            tracing::debug!(worker, %error, "cannot reach a worker");
        }
    }

    fn record(&self, change: impl FnOnce(&mut UpdateRecord)) {
        let state = &self.config.state;
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
        worker: WorkerId,
        program: Option<&SignedProgram>,
        required: Vec<String>,
    ) -> io::Result<()> {
        let stored = match (program, &self.config.update) {
            (Some(program), Some(key)) => {
                Some(StoredProgram::find(&self.config.state, program, key).map_err(io::Error::other)?.path)
            }
            _ => None,
        };
        let path = stored.as_deref().unwrap_or(&self.installed);
        let (link, mut child) = self.spawn(path).map_err(|error| {
            io::Error::new(error.kind(), format!("{}: {error}{}", path.display(), advice(&error, stored.is_some())))
        })?;
        let (reader, writer) = link.into_split();
        let (kill, killed) = oneshot::channel();
        self.links.insert(worker, Link { messages: writer, kill });
        let inputs = self.inputs.clone();
        // Both tasks end with the worker. Sending fails if the supervisor is ending.
        tokio::spawn(async move {
            let mut events = Receiver::new(reader);
            while let Some(event) = events.next::<Event>().await {
                let _ = inputs.send(Input::Event { worker, event });
            }
        });
        let inputs = self.inputs.clone();
        tokio::spawn(async move {
            let code = exit_code(&mut child, killed).await;
            let _ = inputs.send(Input::Exited { worker, code });
        });
        self.tell(worker, &ToWorker::Start { required }).await;
        Ok(())
    }

    fn spawn(&self, path: &Path) -> io::Result<(UnixStream, Child)> {
        let (own, other) = std::os::unix::net::UnixStream::pair()?;
        own.set_nonblocking(true)?;
        let mut command = Command::new(path);
        // A group of its own: Ctrl-C in a terminal reaches the supervisor only.
        command.args(&self.arguments).stdin(Stdio::from(OwnedFd::from(other))).process_group(0);
        let child = command.spawn()?;
        Ok((UnixStream::from_std(own)?, child))
    }
}

/// The exit code of a worker that ends by itself or is killed.
async fn exit_code(child: &mut Child, killed: oneshot::Receiver<()>) -> Option<u8> {
    match select(pin!(child.wait()), killed).await {
        Either::Left((status, _)) => return code(status),
        // The supervisor has dropped its end.
        Either::Right((Err(_), waiting)) => return code(waiting.await),
        Either::Right((Ok(()), _)) => {}
    }
    if let Err(error) = child.start_kill() {
        tracing::error!(%error, "cannot kill a worker");
    }
    code(child.wait().await)
}

fn code(status: io::Result<std::process::ExitStatus>) -> Option<u8> {
    status.ok()?.code()?.try_into().ok()
}

/// What to do about a program that cannot be started.
fn advice(error: &io::Error, is_stored: bool) -> &'static str {
    if is_stored && error.kind() == io::ErrorKind::PermissionDenied {
        "; the state folder must not be mounted with noexec for updates"
    } else {
        ""
    }
}
