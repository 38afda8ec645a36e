//! Signals of the process: SIGTERM and SIGINT (stop), SIGHUP (reload), SIGUSR2 (replace).

use std::io;
use std::sync::Arc;

use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::gateway::Gateway;
use super::takeover::Program;
use crate::members::Members;

/// Receiver of the signals that control a gateway.
pub struct Signals {
    runtime: tokio::runtime::Runtime,
    streams: Streams,
}

struct Streams {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
    user_2: Signal,
}

enum SignalAction {
    Stop,
    /// The membership has ended: an operator drained the node, another process took its slot, or the membership failed.
    Left,
    Reload,
    Replace,
}

impl Signals {
    /// Registers the signals. They no longer end the process by default.
    pub fn listen() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let streams = {
            let _entered = runtime.enter();
            Streams {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
                hang_up: signal(SignalKind::hangup())?,
                user_2: signal(SignalKind::user_defined2())?,
            }
        };
        Ok(Self { runtime, streams })
    }

    /// Runs `gateway` until SIGTERM or SIGINT, or until `program` has taken over after SIGUSR2, then drains it. A
    /// further SIGTERM or SIGINT ends the drain at once. SIGHUP reloads the certificates and reopens the access log. Notifies systemd
    /// (sd_notify(3)).
    pub fn run(self, mut gateway: Gateway, program: Option<&Program>) -> io::Result<()> {
        let Self { runtime, mut streams } = self;
        let result = runtime.block_on(async {
            if gateway.predecessor.is_none() {
                notify(&[NotifyState::Ready]);
            }
            let stopped = streams.until_stopped(&mut gateway, program).await;
            let has_successor = gateway.has_successor;
            let drained = tokio::task::spawn_blocking(|| gateway.drain());
            let cut = async {
                if has_successor {
                    // The first signal may have been sent to all processes of the service, to stop the successor.
                    streams.stop().await;
                }
                streams.stop().await;
            };
            tokio::select! {
                _ = drained => stopped,
                () = cut => Err(io::Error::other("stopped during the drain: running requests were aborted")),
            }
        });
        // Does not wait for an aborted drain.
        runtime.shutdown_background();
        result
    }
}

impl Streams {
    /// Handles signals until this process has to drain. The error says that nothing asked it to.
    async fn until_stopped(&mut self, gateway: &mut Gateway, program: Option<&Program>) -> io::Result<()> {
        loop {
            let left = gateway.members.as_ref().map(|members| Arc::clone(members.ended()));
            let left = async {
                match left {
                    Some(left) => left.notified().await,
                    None => std::future::pending().await,
                }
            };
            let action = tokio::select! {
                action = self.next() => action,
                () = left => SignalAction::Left,
            };
            match action {
                SignalAction::Reload => gateway.reload(),
                SignalAction::Stop => {
                    notify(&[NotifyState::Stopping]);
                    tracing::warn!("stopping after running requests; a second signal aborts them");
                    return Ok(());
                }
                SignalAction::Left => {
                    notify(&[NotifyState::Stopping]);
                    tracing::warn!("stopping: this node is no member of its region any more");
                    // Service managers start the process again after a failure. Not if another process took the slot: the
                    // two would end each other in turns.
                    let has_failed = gateway.members.as_ref().is_some_and(Members::has_failed);
                    return if has_failed { Err(io::Error::other("the membership failed")) } else { Ok(()) };
                }
                // Blocks: one successor at a time.
                SignalAction::Replace => match gateway.replace(program) {
                    Ok(successor) => {
                        notify(&[NotifyState::MainPid(successor)]);
                        tracing::warn!(successor, "replaced by a successor; running requests finish here");
                        return Ok(());
                    }
                    Err(error) => tracing::error!(%error, "not replaced: this process goes on"),
                },
            }
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

    async fn stop(&mut self) {
        while !matches!(self.next().await, SignalAction::Stop) {}
    }
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}
