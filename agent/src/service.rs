//! One service of the agent: keeps a tunnel for it.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::runtime;
use tokio::sync::watch;

use crate::agent::{Agent, random};
use crate::backend::{Backends, Pool};
use crate::dial;
use crate::reconnect::Backoff;
use crate::session::{self, Phase, Session};
use crate::slots::Slots;

/// How long an agent stays away after another one with the same identity took its place.
const REPLACED_PAUSE: Duration = Duration::from_secs(120);
/// Within how long the agents of a gateway that is going away come to its successor: not all in one moment.
const SUCCESSOR_WITHIN: Duration = Duration::from_millis(500);

/// Keeps a tunnel for the service at `hostname` until it is told to stop; returns when its last request has ended.
pub(crate) async fn keep_tunnel(agent: Rc<Agent>, hostname: String, backends: Backends, stop: watch::Receiver<bool>) {
    let pool = Rc::new(Pool::new(&backends, agent.config.slots()));
    let observed = agent.observed.enter(&hostname, &pool);
    let mut backoff = Backoff::new();
    // Tunnels that have a successor, or are to have one, and may still have requests.
    let mut ending: Vec<watch::Receiver<Phase>> = Vec::new();
    while !*stop.borrow() {
        ending.retain(|phase| *phase.borrow() != Phase::Ended);
        let delay = match unless_stopped(&stop, dial::dial(&agent, &hostname)).await {
            None => break,
            Some(Err(error)) => {
                observed.failed();
                let delay = backoff.next_delay(random()).max(error.retry_after().unwrap_or_default());
                if error.needs_a_hand() {
                    tracing::error!(service = %hostname, %error, retry_in = ?delay, "no tunnel");
                } else {
                    tracing::warn!(service = %hostname, %error, retry_in = ?delay, "no tunnel");
                }
                delay
            }
            Some(Ok(stream)) => {
                let (phase, mut watched) = watch::channel(Phase::Starting);
                let session = Rc::new(Session {
                    agent: Rc::clone(&agent),
                    pool: Rc::clone(&pool),
                    slots: Slots::new(agent.config.slots()),
                    counts: Rc::clone(&observed.counts),
                    phase,
                    stop: stop.clone(),
                    quiet: watch::Sender::new(false),
                });
                observed.opened(&session);
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
                    // The next tunnel is made while the old one goes on: there may be a successor already.
                    Phase::GatewayDrains => SUCCESSOR_WITHIN.mul_f64(random()),
                    Phase::Starting | Phase::Ready | Phase::Leaving | Phase::Ended => backoff.next_delay(random()),
                }
            }
        };
        unless_stopped(&stop, runtime::sleep(delay)).await;
    }
    for mut phase in ending {
        // An error means that the session is gone, which is an end too.
        let _ = phase.wait_for(|phase| *phase == Phase::Ended).await;
    }
    agent.observed.leave(&hostname, &observed);
}

/// Follows a tunnel until it needs a successor or the service stops; whether it ever was ready.
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

/// The result of `future`, or `None` as soon as `stop` says true (or nobody is left to say it).
pub(crate) async fn unless_stopped<T>(stop: &watch::Receiver<bool>, future: impl Future<Output = T>) -> Option<T> {
    let mut stop = stop.clone();
    match select(pin!(future), pin!(stop.wait_for(|stop| *stop))).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}
