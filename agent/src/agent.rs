//! The agent's thread: one reactor, one task per service that keeps its tunnel.

use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use gw_shared::runtime::{self, Driver, DriverError};
use tokio::sync::watch;

use crate::backend::{Backend, Pool};
use crate::config::Config;
use crate::dial;
use crate::reconnect::Backoff;
use crate::session::{self, Phase, Session};
use crate::slots::{self, Slots};

/// How long an agent stays away after another one with the same identity took its place.
const REPLACED_PAUSE: Duration = Duration::from_secs(120);

/// A running agent. Dropping it stops the agent too, without waiting for its requests to end.
pub struct AgentHandle {
    /// `None` only while draining.
    thread: Option<JoinHandle<()>>,
    stop: watch::Sender<bool>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("agent thread: {0}")]
    Thread(#[from] io::Error),
}

/// Starts an agent on a thread of its own. It runs until [`AgentHandle::drain`], whatever its gateway does.
pub fn start(config: Config) -> Result<AgentHandle, StartError> {
    let driver = Driver::choose()?;
    runtime::raise_open_file_limit();
    driver.log();
    let (stop, stopped) = watch::channel(false);
    let thread = std::thread::Builder::new().name("gw-agent".into()).spawn(move || {
        if let Err(error) = driver.block_on(run(config, stopped)) {
            tracing::error!(%error, "the agent's reactor did not start");
        }
    })?;
    Ok(AgentHandle { thread: Some(thread), stop })
}

impl AgentHandle {
    /// Takes no new requests, finishes those that run, ends the tunnels, then returns.
    pub fn drain(mut self) {
        self.stop.send_replace(true);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the agent's thread panicked");
        }
    }
}

impl Drop for AgentHandle {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

async fn run(config: Config, stop: watch::Receiver<bool>) {
    if let Err(default) = config.slots {
        tracing::warn!("{} is not a positive number: using {default}", slots::VARIABLE);
    }
    let config = Rc::new(config);
    let services = config
        .backends
        .iter()
        .map(|(hostname, backend)| keep_tunnel(Rc::clone(&config), hostname.clone(), backend.clone(), stop.clone()));
    join_all(services).await;
}

/// Keeps a tunnel for one service until the agent stops.
async fn keep_tunnel(config: Rc<Config>, hostname: String, backend: Backend, stop: watch::Receiver<bool>) {
    let pool = Rc::new(Pool::new(backend, config.slots()));
    let mut backoff = Backoff::new();
    // Tunnels that were asked to end and still have requests.
    let mut ending: Vec<watch::Receiver<Phase>> = Vec::new();
    while !*stop.borrow() {
        ending.retain(|phase| *phase.borrow() != Phase::Ended);
        let dialled = unless_stopped(&stop, dial::dial(&config.state, &config.enrollment, &hostname)).await;
        let delay = match dialled {
            None => break,
            Some(Err(error)) => {
                let delay = backoff.next_delay(random());
                tracing::warn!(service = %hostname, %error, retry_in = ?delay, "no tunnel");
                delay
            }
            Some(Ok(stream)) => {
                let (phase, mut watched) = watch::channel(Phase::Starting);
                let (pool, slots) = (Rc::clone(&pool), Slots::new(config.slots()));
                let session =
                    Rc::new(Session { pool, slots, phase, stop: stop.clone(), quiet: watch::Sender::new(false) });
                runtime::spawn(session::serve(session, stream));
                let was_ready = follow(&mut watched, &stop).await;
                if was_ready {
                    backoff.reset();
                }
                let phase = *watched.borrow();
                ending.push(watched);
                match phase {
                    Phase::Replaced => {
                        tracing::error!(
                            service = %hostname,
                            "another agent with this identity took over; enroll each agent on its own"
                        );
                        REPLACED_PAUSE
                    }
                    // `GatewayDrains`: the next tunnel is made while the old one finishes its requests. Not at once
                    // either, so that the agents of a gateway do not all come to its successor together.
                    Phase::Starting | Phase::Ready | Phase::GatewayDrains | Phase::Leaving | Phase::Ended => {
                        backoff.next_delay(random())
                    }
                }
            }
        };
        unless_stopped(&stop, runtime::sleep(delay)).await;
    }
    for mut phase in ending {
        // An error means that the session is gone, which is an end too.
        let _ = phase.wait_for(|phase| *phase == Phase::Ended).await;
    }
}

/// Follows a tunnel until it needs a successor or the agent stops; whether it ever was ready.
async fn follow(phase: &mut watch::Receiver<Phase>, stop: &watch::Receiver<bool>) -> bool {
    let mut was_ready = false;
    loop {
        let now = *phase.borrow_and_update();
        was_ready |= now >= Phase::Ready && now != Phase::Ended;
        if now >= Phase::GatewayDrains
            || unless_stopped(stop, phase.changed()).await.is_none_or(|change| change.is_err())
        {
            return was_ready;
        }
    }
}

async fn unless_stopped<T>(stop: &watch::Receiver<bool>, future: impl Future<Output = T>) -> Option<T> {
    let mut stop = stop.clone();
    match select(pin!(future), pin!(stop.wait_for(|stop| *stop))).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

/// Even between 0 and 1.
fn random() -> f64 {
    let mut bytes = [0; 4];
    // Without randomness the delays are the longest there are, which does no harm.
    if aws_lc_rs::rand::fill(&mut bytes).is_err() {
        return 1.0;
    }
    f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
}
