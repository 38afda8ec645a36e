//! Signals of the process: SIGTERM and SIGINT (stop), SIGHUP (reload), SIGUSR2 (replace).

use std::io;

use crate::limits;
use gw_base::process::background::Background;
use gw_control_plane::members::Members;
use gw_shared::command::Failure;
use rustix::process::{Pid, kill_process};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::gateway::Gateway;
use super::takeover::Program;

/// Receiver of the signals that control a gateway.
pub struct Signals {
    background: Background,
    streams: Streams,
}

struct Streams {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
    user_2: Signal,
}

/// Why a gateway ended without being asked to.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Workers panicked too often.
    #[error(
        "workers panicked {} times within {} s: the log has the places; please report it",
        limits::WORKER_PANICS,
        limits::WORKER_PANICS_WITHIN.as_secs()
    )]
    Workers,
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        match error {
            RunError::Io(_) => Self::run(error),
            RunError::Workers => Self::Internal(error.to_string()),
        }
    }
}

enum SignalAction {
    Stop,
    /// The membership has ended: an operator drained the node, another process took its slot, or
    /// the membership failed.
    Left,
    /// Workers panicked too often.
    WorkersFailed,
    Reload,
    Replace,
}

impl Signals {
    /// Registers the signals. They no longer end the process by default.
    pub fn listen(background: &Background) -> io::Result<Self> {
        let background = background.clone();
        let streams = {
            let _entered = background.enter();
            Streams {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
                hang_up: signal(SignalKind::hangup())?,
                user_2: signal(SignalKind::user_defined2())?,
            }
        };
        Ok(Self {
            background,
            streams,
        })
    }

    /// Runs `gateway` until SIGTERM or SIGINT, or until `program` has taken over after SIGUSR2,
    /// then drains it. A further SIGTERM or SIGINT ends the drain at once. SIGHUP reloads the
    /// certificates and reopens the access log. Notifies systemd (sd_notify(3)).
    pub fn run(self, mut gateway: Gateway, program: Option<&Program>) -> Result<(), RunError> {
        let Self {
            background,
            mut streams,
        } = self;
        if gateway.drain.predecessor.is_none() {
            notify(&[NotifyState::Ready]);
        }
        let stopped = until_stopped(&background, &mut streams, &mut gateway, program);
        let successor = stopped.as_ref().ok().copied().flatten();
        // Does not wait for an aborted drain.
        background.block_on(async {
            let drained = tokio::task::spawn_blocking(|| gateway.drain());
            let cut = async {
                if successor.is_some() {
                    // The first signal may have been sent to all processes of the service, to stop
                    // the successor.
                    streams.stop(successor).await;
                }
                streams.stop(successor).await;
            };
            tokio::select! {
                biased;
                // First: forwards a SIGHUP that came during the replacement, also if nothing has to
                // be drained.
                () = cut => Err(io::Error::other("stopped during the drain: running requests were \
                    aborted").into()),
                _ = drained => stopped.map(drop),
            }
        })
    }
}

/// Handles signals until this process has to drain. Returns the successor's process id, if one has
/// taken over. Returns an error if the membership failed.
fn until_stopped(
    background: &Background,
    streams: &mut Streams,
    gateway: &mut Gateway,
    program: Option<&Program>,
) -> Result<Option<u32>, RunError> {
    loop {
        match background.block_on(streams.action(gateway)) {
            SignalAction::Reload => gateway.reload(),
            SignalAction::Stop => {
                notify(&[NotifyState::Stopping]);
                tracing::warn!("stopping after running requests; a second signal aborts them");
                return Ok(None);
            }
            SignalAction::Left => {
                notify(&[NotifyState::Stopping]);
                tracing::warn!("stopping: this node is no member of its region any more");
                // Service managers start the process again after a failure. Not if another process
                // took the slot: the two would end each other in turns.
                let has_failed = gateway
                    .node
                    .members
                    .as_ref()
                    .is_some_and(Members::has_failed);
                return if has_failed {
                    Err(io::Error::other("the membership failed").into())
                } else {
                    Ok(None)
                };
            }
            SignalAction::WorkersFailed => {
                notify(&[NotifyState::Stopping]);
                gateway.drain.within = limits::FAILED_DRAIN;
                return Err(RunError::Workers);
            }
            // One successor at a time.
            SignalAction::Replace => match gateway.replace(program) {
                Ok(successor) => {
                    notify(&[NotifyState::MainPid(successor)]);
                    tracing::warn!(
                        successor,
                        "replaced by a successor; running requests finish here"
                    );
                    return Ok(Some(successor));
                }
                Err(error) => tracing::error!(%error, "not replaced: this process goes on"),
            },
        }
    }
}

impl Streams {
    /// The next event that the process has to react to.
    async fn action(&mut self, gateway: &Gateway) -> SignalAction {
        let left = async {
            match &gateway.node.members {
                Some(members) => members.ended().notified().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            action = self.next() => action,
            () = gateway.workers_failed.notified() => SignalAction::WorkersFailed,
            () = left => SignalAction::Left,
        }
    }

    async fn next(&mut self) -> SignalAction {
        tokio::select! {
            _ = self.interrupt.recv() => SignalAction::Stop,
            _ = self.terminate.recv() => SignalAction::Stop,
            _ = self.hang_up.recv() => SignalAction::Reload,
            _ = self.user_2.recv() => SignalAction::Replace,
        }
    }

    /// Waits for a signal to stop. Forwards SIGHUP to the successor: the service manager may not
    /// know yet that it is the main process.
    async fn stop(&mut self, successor: Option<u32>) {
        loop {
            match (self.next().await, successor) {
                (SignalAction::Stop, _) => return,
                (SignalAction::Reload, Some(successor)) => reload(successor),
                _ => {}
            }
        }
    }
}

/// Sends SIGHUP to the successor. It is a child of this process, which never waits for it: no other
/// process has its id.
fn reload(successor: u32) {
    let id = i32::try_from(successor).ok().and_then(Pid::from_raw);
    if let Some(Err(error)) = id.map(|id| kill_process(id, rustix::process::Signal::HUP)) {
        tracing::warn!(successor, %error,
            "cannot forward SIGHUP to the successor: it did not read the certificates again");
    }
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_of_workers_have_an_exit_code_of_their_own() {
        let Failure::Internal(message) = RunError::Workers.into() else {
            panic!()
        };
        assert!(
            message.starts_with("workers panicked 3 times within 60 s"),
            "{message}"
        );
        assert!(matches!(
            RunError::from(io::Error::other("x")).into(),
            Failure::Run(_)
        ));
    }
}
