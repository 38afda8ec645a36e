//! One service of the agent: keeps a tunnel for it.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::runtime;
use tokio::sync::watch;

use crate::backend::{Backends, Pool};
use crate::forward::slots::Slots;
use crate::supervisor::{Agent, random};
use crate::tunnel::dial;
use crate::tunnel::reconnect::{Successes, displaced_pause};
use crate::tunnel::session::{self, Phase, Session};

/// Within how long the agents of a gateway that is going away come to its successor: not all in one moment.
const SUCCESSOR_WITHIN: Duration = Duration::from_millis(500);

/// Keeps a tunnel for the service at `hostname` until it is told to stop; returns when its last request has ended.
pub(crate) async fn keep_tunnel(agent: Rc<Agent>, hostname: String, backends: Backends, stop: watch::Receiver<bool>) {
    let pool = Rc::new(Pool::new(&backends, agent.config.slots()));
    let observed = agent.observed.enter(&hostname, &pool);
    let mut successes = agent.reconnects.successes();
    let mut backoff = agent.reconnects.backoff();
    // Tunnels that have a successor, or are to have one, and may still have requests.
    let mut ending: Vec<watch::Receiver<Phase>> = Vec::new();
    while !*stop.borrow() {
        ending.retain(|phase| *phase.borrow() != Phase::Ended);
        successes.forget();
        let dialled = agent.reconnects.attempt(dial::dial(&agent, &hostname));
        let pause = match unless_stopped(&stop, dialled).await {
            None => break,
            Some(Err(error)) => {
                observed.failed();
                let retry_after = error.retry_after().unwrap_or_default();
                let retry_in = backoff.next_delay(random()).max(retry_after);
                if error.needs_a_hand() {
                    tracing::error!(service = %hostname, %error, ?retry_in, "no tunnel");
                } else {
                    tracing::warn!(service = %hostname, %error, ?retry_in, "no tunnel");
                }
                if error.is_passing() {
                    Pause::Unreachable { retry_in, at_least: retry_after }
                } else {
                    Pause::For(retry_in)
                }
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
                    displaced: Cell::default(),
                });
                observed.opened(&session);
                runtime::spawn(session::serve(Rc::clone(&session), stream));
                let was_ready = follow(&mut watched, &stop, || {
                    backoff.reset();
                    agent.reconnects.succeeded();
                    successes.forget();
                })
                .await;
                let phase = *watched.borrow();
                if phase != Phase::Ended {
                    ending.push(watched);
                }
                if session.displaced.get() {
                    let retry_in = displaced_pause(random());
                    tracing::error!(
                        service = %hostname, ?retry_in,
                        "another process with this agent's identity took over: a copy of its state folder? Enroll each \
                         agent on its own"
                    );
                    Pause::For(retry_in)
                } else if phase == Phase::GatewayDrains {
                    // The next tunnel is made while the old one goes on: there may be a successor already.
                    Pause::For(SUCCESSOR_WITHIN.mul_f64(random()))
                } else if was_ready {
                    Pause::For(backoff.next_delay(random()))
                } else {
                    Pause::Unreachable { retry_in: backoff.next_delay(random()), at_least: Duration::ZERO }
                }
            }
        };
        let pause = async {
            match pause {
                Pause::For(delay) => runtime::sleep(delay).await,
                Pause::Unreachable { retry_in, at_least } => {
                    runtime::sleep(at_least).await;
                    match news(&mut successes, &mut ending, retry_in.saturating_sub(at_least)).await {
                        News::None => {}
                        News::Success => backoff.reset(),
                        News::TunnelEnded => {
                            backoff.reset();
                            runtime::sleep(backoff.next_delay(random())).await;
                        }
                    }
                }
            }
        };
        unless_stopped(&stop, pause).await;
    }
    for mut phase in ending {
        // An error means that the session is gone, which is an end too.
        let _ = phase.wait_for(|phase| *phase == Phase::Ended).await;
    }
    agent.observed.leave(&hostname, &observed);
}

/// Wait before the next attempt.
enum Pause {
    For(Duration),
    /// The gateway cannot be reached, or has no room: [`News`] end the pause, though not before `at_least`, which the
    /// gateway asked for.
    Unreachable {
        retry_in: Duration,
        at_least: Duration,
    },
}

/// Events that end the pause before a reconnect.
#[derive(Debug, PartialEq, Eq)]
enum News {
    None,
    /// A tunnel of another service is ready.
    Success,
    /// The last tunnel to a gateway that was going away has ended: its successor may be there from now on.
    TunnelEnded,
}

/// Waits for `delay`, or until there are news. `ending` are the tunnels of this service that may still have requests.
async fn news(successes: &mut Successes, ending: &mut [watch::Receiver<Phase>], delay: Duration) -> News {
    let has_tunnels = !ending.is_empty();
    let all_ended = async {
        for phase in ending {
            // An error means that the session is gone, which is an end too.
            let _ = phase.wait_for(|phase| *phase == Phase::Ended).await;
        }
        if !has_tunnels {
            std::future::pending::<()>().await;
        }
    };
    match select(pin!(successes.pause(delay, random())), pin!(all_ended)).await {
        Either::Left((true, _)) => News::Success,
        Either::Left((false, _)) => News::None,
        Either::Right(_) => News::TunnelEnded,
    }
}

/// Follows a tunnel until it needs a successor or the service stops; whether it ever was ready, on which `on_ready` is
/// called once.
async fn follow(phase: &mut watch::Receiver<Phase>, stop: &watch::Receiver<bool>, on_ready: impl FnOnce()) -> bool {
    let mut on_ready = Some(on_ready);
    loop {
        let now = *phase.borrow_and_update();
        if now >= Phase::Ready
            && now != Phase::Ended
            && let Some(on_ready) = on_ready.take()
        {
            on_ready();
        }
        if now >= Phase::GatewayDrains
            || unless_stopped(stop, phase.changed()).await.is_none_or(|change| change.is_err())
        {
            return on_ready.is_none();
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

#[cfg(test)]
mod tests {
    use gw_shared::runtime::Driver;

    use super::*;
    use crate::tunnel::reconnect::Reconnects;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn the_end_of_a_drained_gateway_is_news_and_its_drain_is_not() {
        let reconnects = Reconnects::default();
        Driver::choose()
            .unwrap()
            .block_on(async {
                let mut successes = reconnects.successes();
                let (phase, watched) = watch::channel(Phase::GatewayDrains);
                let mut ending = [watched];
                assert_eq!(news(&mut successes, &mut ending, Duration::from_millis(20)).await, News::None);
                assert_eq!(news(&mut successes, &mut [], Duration::from_millis(20)).await, News::None);
                let (heard, ()) = futures_util::join!(news(&mut successes, &mut ending, LONG), async {
                    phase.send_replace(Phase::Ended);
                });
                assert_eq!(heard, News::TunnelEnded);
            })
            .unwrap();
    }

    #[test]
    fn a_tunnel_counts_as_ready_once_and_only_if_it_was() {
        let (_stop, stopped) = watch::channel(false);
        let follow_to = |phases: &'static [Phase]| {
            let (stopped, mut calls) = (stopped.clone(), 0);
            let was_ready = Driver::choose().unwrap().block_on(async {
                let (phase, mut watched) = watch::channel(Phase::Starting);
                let (was_ready, ()) = futures_util::join!(follow(&mut watched, &stopped, || calls += 1), async {
                    for next in phases {
                        phase.send_replace(*next);
                        runtime::yield_now().await;
                    }
                });
                was_ready
            });
            (was_ready.unwrap(), calls)
        };
        assert_eq!(follow_to(&[Phase::Ready, Phase::Leaving, Phase::Ended]), (true, 1));
        assert_eq!(follow_to(&[Phase::Ready, Phase::GatewayDrains]), (true, 1));
        assert_eq!(follow_to(&[Phase::Ended]), (false, 0));
    }
}
