//! Signals of the process: stop, reload, replace.

use std::io;

use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::gateway::Gateway;
use super::takeover::Program;

/// The signals that a gateway listens to.
pub struct Signals {
    runtime: tokio::runtime::Runtime,
    heard: Heard,
}

struct Heard {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
    user_2: Signal,
}

enum Wish {
    Stop,
    Reload,
    Replace,
}

impl Signals {
    /// From now on none of them ends the process by itself.
    pub fn listen() -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let heard = {
            let _entered = runtime.enter();
            Heard {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
                hang_up: signal(SignalKind::hangup())?,
                user_2: signal(SignalKind::user_defined2())?,
            }
        };
        Ok(Self { runtime, heard })
    }

    /// Runs until SIGTERM or SIGINT, or until on SIGUSR2 `program` has taken over, then drains; another signal to stop
    /// ends the process at once. On SIGHUP certificates are read again. Tells systemd, if it asked.
    pub fn run(self, mut gateway: Gateway, program: Option<&Program>) -> io::Result<()> {
        let Self { runtime, mut heard } = self;
        let result = runtime.block_on(async {
            if gateway.predecessor.is_none() {
                notify(&[NotifyState::Ready]);
            }
            heard.until_stopped(&mut gateway, program).await;
            let has_successor = gateway.has_successor;
            let drained = tokio::task::spawn_blocking(|| gateway.drain());
            let cut = async {
                if has_successor {
                    // Whoever stops the successor with all of its kind means this process too; it is ending already.
                    heard.stop().await;
                }
                heard.stop().await;
            };
            tokio::select! {
                _ = drained => Ok(()),
                () = cut => Err(io::Error::other("stopped during the drain: running requests were cut")),
            }
        });
        // A drain that was cut short is not waited for.
        runtime.shutdown_background();
        result
    }
}

impl Heard {
    /// Does what signals ask for until this process is to drain.
    async fn until_stopped(&mut self, gateway: &mut Gateway, program: Option<&Program>) {
        loop {
            match self.next().await {
                Wish::Reload => gateway.reload_certificates(),
                Wish::Stop => {
                    notify(&[NotifyState::Stopping]);
                    tracing::warn!("stopping: running requests may end; a second signal cuts them");
                    return;
                }
                // Nothing else is done meanwhile: one successor at a time.
                Wish::Replace => match gateway.hand_over(program) {
                    Ok(successor) => {
                        notify(&[NotifyState::MainPid(successor)]);
                        tracing::warn!(successor, "replaced: running requests may end");
                        return;
                    }
                    Err(error) => tracing::error!(%error, "not replaced: this process goes on"),
                },
            }
        }
    }

    async fn next(&mut self) -> Wish {
        tokio::select! {
            _ = self.interrupt.recv() => Wish::Stop,
            _ = self.terminate.recv() => Wish::Stop,
            _ = self.hang_up.recv() => Wish::Reload,
            _ = self.user_2.recv() => Wish::Replace,
        }
    }

    async fn stop(&mut self) {
        while !matches!(self.next().await, Wish::Stop) {}
    }
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "systemd cannot be told");
    }
}
