//! Events that a demo of several nodes waits for: signals to stop, and ends of its processes.

use std::io;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::NodesError;

pub(super) struct Events {
    runtime: Runtime,
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
    child: Signal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// SIGINT, SIGTERM or SIGHUP.
    Stop,
    /// At least one child process may have ended.
    ChildEnded,
    TimedOut,
}

impl Events {
    /// Registers the signals. They no longer end the process by default.
    pub(super) fn listen() -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let [interrupt, terminate, hang_up, child] = {
            let _entered = runtime.enter();
            let [interrupt, terminate] =
                [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
            let [hang_up, child] = [SignalKind::hangup(), SignalKind::child()].map(signal);
            [interrupt?, terminate?, hang_up?, child?]
        };
        Ok(Self {
            runtime,
            interrupt,
            terminate,
            hang_up,
            child,
        })
    }

    /// Waits for the next event; without an end if `within` is `None`.
    pub(super) fn wait(&mut self, within: Option<Duration>) -> Event {
        let Self {
            runtime,
            interrupt,
            terminate,
            hang_up,
            child,
        } = self;
        runtime.block_on(async {
            let timeout = async {
                match within {
                    Some(within) => tokio::time::sleep(within).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = interrupt.recv() => Event::Stop,
                _ = terminate.recv() => Event::Stop,
                _ = hang_up.recv() => Event::Stop,
                _ = child.recv() => Event::ChildEnded,
                () = timeout => Event::TimedOut,
            }
        })
    }

    /// Calls `look` until it returns a value. Fails with [`NodesError::Stopped`] after a signal to stop, and with
    /// [`NodesError::Late`] after `within`, with `what` was waited for.
    pub(super) fn until<T>(
        &mut self,
        what: &'static str,
        within: Duration,
        mut look: impl FnMut() -> Result<Option<T>, NodesError>,
    ) -> Result<T, NodesError> {
        const INTERVAL: Duration = Duration::from_millis(20);
        let deadline = Instant::now() + within;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                return Err(NodesError::Late {
                    what,
                    seconds: within.as_secs(),
                });
            }
            if self.wait(Some(INTERVAL)) == Event::Stop {
                return Err(NodesError::Stopped);
            }
        }
    }
}
