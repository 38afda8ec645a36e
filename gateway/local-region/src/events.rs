//! Events that parts are waited for with: signals to stop, and ends of processes.

use std::io;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::Error;

/// How a start waits.
pub trait Wait {
    /// Waits for the next event, at most for `within`.
    fn wait(&mut self, within: Duration) -> Event;

    /// Calls `look` until it returns a value. Fails with [`Error::Stopped`] after a signal to stop,
    /// and with [`Error::Late`] after `within`, with `what` was waited for.
    fn until<T>(
        &mut self,
        what: &'static str,
        within: Duration,
        mut look: impl FnMut() -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        const INTERVAL: Duration = Duration::from_millis(20);
        let deadline = Instant::now() + within;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                return Err(Error::Late {
                    what,
                    seconds: within.as_secs(),
                });
            }
            if self.wait(INTERVAL) == Event::Stop {
                return Err(Error::Stopped);
            }
        }
    }
}

/// Waits without a look at signals, which end this process.
pub struct Sleep;

impl Wait for Sleep {
    fn wait(&mut self, within: Duration) -> Event {
        std::thread::sleep(within);
        Event::TimedOut
    }
}

/// Events of this process.
pub struct Events {
    runtime: Runtime,
    signals: Signals,
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
    child: Signal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// SIGINT, SIGTERM or SIGHUP.
    Stop,
    /// At least one child process may have ended.
    ChildEnded,
    TimedOut,
}

impl Events {
    /// Registers the signals. They no longer end the process by default.
    pub fn listen() -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let signals = {
            let _entered = runtime.enter();
            Signals {
                interrupt: signal(SignalKind::interrupt())?,
                terminate: signal(SignalKind::terminate())?,
                hang_up: signal(SignalKind::hangup())?,
                child: signal(SignalKind::child())?,
            }
        };
        Ok(Self { runtime, signals })
    }

    /// Waits for the next event without a limit.
    pub fn wait_for_any(&mut self) -> Event {
        self.runtime.block_on(self.signals.next())
    }
}

impl Wait for Events {
    fn wait(&mut self, within: Duration) -> Event {
        let next = self.signals.next();
        self.runtime
            .block_on(async { tokio::time::timeout(within, next).await })
            .unwrap_or(Event::TimedOut)
    }
}

impl Signals {
    async fn next(&mut self) -> Event {
        tokio::select! {
            biased;
            _ = self.interrupt.recv() => Event::Stop,
            _ = self.terminate.recv() => Event::Stop,
            _ = self.hang_up.recv() => Event::Stop,
            _ = self.child.recv() => Event::ChildEnded,
        }
    }
}
