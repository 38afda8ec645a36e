//! Keeps a tunnel open for one service of the agent.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use tokio::sync::watch;

use crate::backend::{Backends, Pool};
use crate::backoff::{Backoff, random};
use crate::forward::slots::Slots;
use crate::succession::{AgentEvent, Succession};
use crate::tunnel::dial::{self, DialError};
use crate::tunnel::reconnect::{Successes, displaced_pause};
use crate::tunnel::registry::RegisteredService;
use crate::tunnel::session::{self, Phase, Session};
use crate::tunnel::{AgentContext, RelayedService};

/// Longest pause after a refusal by a node that cannot serve for the moment: the next attempt may
/// reach another node.
const OTHER_NODE_WITHIN: Duration = Duration::from_secs(10);
/// Longest wait for a connection to a backend when the agent starts.
const PROBED_WITHIN: Duration = Duration::from_secs(3);
/// The agents of a draining gateway reconnect to its successor spread over this time.
const SUCCESSOR_WITHIN: Duration = Duration::from_millis(500);

/// Keeps a tunnel for the service at `hostname` until `stop` is true; returns when the last request
/// has ended.
pub(crate) async fn keep_tunnel(
    agent: Rc<AgentContext>,
    hostname: String,
    backends: Backends,
    stop: watch::Receiver<bool>,
) {
    let pool = Rc::new(Pool::new(&hostname, &backends, agent.config.slots()));
    // The user of `gw-agent http` waits for the first request.
    if agent.relayed.is_some() {
        runtime::spawn(warn_of_unreachable(hostname.clone(), Rc::clone(&pool)));
    }
    let service = ServiceTask {
        unannounced: Some(agent.relayed_service(&hostname, &backends)),
        registered: agent.registry.add(&hostname, &pool),
        successes: agent.reconnects.successes(),
        backoff: agent.reconnects.backoff(),
        ending: Vec::new(),
        agent,
        hostname,
        pool: Rc::clone(&pool),
        stop,
    };
    // Boxed: without a running check, it takes little memory.
    let checks = Box::pin(async move { pool.keep_checking().await });
    select(pin!(service.run()), checks).await;
}

/// Logs the backends of a service that take no connection now.
async fn warn_of_unreachable(service: String, pool: Rc<Pool>) {
    for (backend, connected) in pool.probe(PROBED_WITHIN).await {
        if let Err(error) = connected {
            tracing::warn!(
                %service,
                %backend,
                %error,
                "the backend does not take connections: requests are answered with 502 until it \
                 does; start it, or correct its address"
            );
        }
    }
}

/// A service and its tunnels.
struct ServiceTask {
    agent: Rc<AgentContext>,
    hostname: String,
    pool: Rc<Pool>,
    registered: Rc<RegisteredService>,
    /// `None` once a tunnel has been ready.
    unannounced: Option<RelayedService>,
    successes: Successes,
    backoff: Backoff,
    /// Tunnels that are being replaced and may still have requests.
    ending: Vec<watch::Receiver<Phase>>,
    stop: watch::Receiver<bool>,
}

impl ServiceTask {
    /// Keeps a tunnel until the service stops, and waits for the end of the last request.
    async fn run(mut self) {
        let agent = Rc::clone(&self.agent);
        let stop = self.stop.clone();
        while !*stop.borrow() {
            // A tunnel from here would replace that of a successor which is starting.
            if unless_stopped(&stop, agent.succession.wait_until_unexpected())
                .await
                .is_none()
            {
                break;
            }
            self.ending.retain(|phase| *phase.borrow() != Phase::Ended);
            self.successes.ignore_past();
            // Boxed: an open tunnel does not keep the memory of an attempt.
            let dialled = agent
                .reconnects
                .attempt(Box::pin(dial::dial(&agent, &self.hostname)));
            let dialled = async {
                match select(
                    pin!(dialled),
                    pin!(agent.succession.wait_for(Succession::Expected)),
                )
                .await
                {
                    Either::Left((dialled, _)) => Some(dialled),
                    Either::Right(_) => None,
                }
            };
            let pause = match unless_stopped(&stop, dialled).await {
                None => break,
                Some(None) => continue,
                Some(Some(Err(error))) => self.dial_failed(&error),
                Some(Some(Ok(stream))) => self.serve(stream).await,
            };
            unless_stopped(&stop, self.wait(pause)).await;
        }
        for mut phase in self.ending {
            // Fails if the session is gone, which is an end too.
            let _ = phase.wait_for(|phase| *phase == Phase::Ended).await;
        }
        agent.registry.remove(&self.hostname, &self.registered);
    }

    /// Records and logs a failed attempt. Returns the pause before the next one.
    fn dial_failed(&mut self, error: &DialError) -> Pause {
        self.registered.failed();
        if error.is_deleted() {
            self.agent.events.send(AgentEvent::Deleted);
        }
        let retry_after = error.retry_after().unwrap_or_default();
        let delay = self.backoff.next_delay(random());
        let retry_in = retry_pause(delay, retry_after, error.is_of_one_node());
        if error.needs_intervention() {
            tracing::error!(service = %self.hostname, %error, ?retry_in, "cannot open a tunnel");
        } else {
            tracing::warn!(service = %self.hostname, %error, ?retry_in, "cannot open a tunnel");
        }
        if error.is_transient() {
            Pause::Unreachable {
                retry_in,
                at_least: retry_after,
            }
        } else {
            Pause::For(retry_in)
        }
    }

    /// Serves a tunnel until it needs a replacement. Returns the pause before the next attempt.
    async fn serve(&mut self, stream: TlsStream) -> Pause {
        // The gateway tells if they exist.
        self.pool.set_other_tunnels(false);
        let (phase, mut watched) = watch::channel(Phase::Starting);
        let session = Rc::new(Session {
            agent: Rc::clone(&self.agent),
            pool: Rc::clone(&self.pool),
            slots: Slots::new(self.agent.config.slots()),
            counts: Rc::clone(&self.registered.counts),
            phase,
            stop: self.stop.clone(),
            no_more_requests: watch::Sender::new(false),
            displaced: Cell::default(),
        });
        self.registered.opened(&session);
        runtime::spawn(session::serve(Rc::clone(&session), stream));
        let displaced = || {
            tracing::error!(
                service = %self.hostname,
                "another process with this agent's identity has a newer tunnel, possibly with a \
                 copy of the state folder; this one stays open as a reserve; enroll every agent \
                 separately"
            );
        };
        let was_ready = follow(&mut watched, &self.stop, displaced, || {
            self.backoff.reset();
            if self.agent.reconnects.record_success() {
                self.agent.events.send(AgentEvent::Connected);
            }
            self.successes.ignore_past();
            if let (Some(service), Some(relayed)) = (self.unannounced.take(), &self.agent.relayed) {
                // Fails if the receiver is gone.
                let _ = relayed.send(service);
            }
        })
        .await;
        let phase = *watched.borrow();
        if phase != Phase::Ended {
            self.ending.push(watched);
        }
        if session.displaced.get() && self.agent.succession.has_successor() {
            Pause::Succeeded
        } else if session.displaced.get() {
            let retry_in = displaced_pause(random());
            tracing::warn!(service = %self.hostname, ?retry_in, "the reserve tunnel has ended");
            Pause::For(retry_in)
        } else if phase == Phase::GatewayDrains {
            // The old tunnel stays open meanwhile: the gateway's successor may already be running.
            Pause::For(SUCCESSOR_WITHIN.mul_f64(random()))
        } else if was_ready {
            Pause::For(self.backoff.next_delay(random()))
        } else {
            Pause::Unreachable {
                retry_in: self.backoff.next_delay(random()),
                at_least: Duration::ZERO,
            }
        }
    }

    async fn wait(&mut self, pause: Pause) {
        match pause {
            Pause::For(delay) => runtime::sleep(delay).await,
            Pause::Succeeded => self.agent.succession.wait_for(Succession::None).await,
            Pause::Unreachable { retry_in, at_least } => {
                runtime::sleep(at_least).await;
                let rest = retry_in.saturating_sub(at_least);
                match wait_for_gateway(&mut self.successes, &mut self.ending, rest).await {
                    PauseEnd::Timeout => {}
                    PauseEnd::OtherTunnelReady => self.backoff.reset(),
                    PauseEnd::DrainedTunnelEnded => {
                        self.backoff.reset();
                        runtime::sleep(self.backoff.next_delay(random())).await;
                    }
                }
            }
        }
    }
}

/// The pause after a failed attempt with this delay of the backoff.
fn retry_pause(delay: Duration, retry_after: Duration, is_of_one_node: bool) -> Duration {
    let delay = if is_of_one_node {
        delay.min(OTHER_NODE_WITHIN)
    } else {
        delay
    };
    delay.max(retry_after)
}

/// Pause before the next attempt.
enum Pause {
    For(Duration),
    /// The successor of this process has replaced the tunnel: none is opened unless the successor
    /// fails.
    Succeeded,
    /// The gateway cannot be reached or has no capacity. A [`PauseEnd`] event ends the pause early,
    /// but not before `at_least`, which the gateway requested.
    Unreachable {
        retry_in: Duration,
        at_least: Duration,
    },
}

/// Why a pause ended.
#[derive(Debug, PartialEq, Eq)]
enum PauseEnd {
    Timeout,
    /// A tunnel of another service is ready.
    OtherTunnelReady,
    /// The last tunnel to a draining gateway has ended, so its successor may start listening.
    DrainedTunnelEnded,
}

/// Waits for `delay` or for a sign that the gateway is available. `ending` are the tunnels of this
/// service that may still have requests.
async fn wait_for_gateway(
    successes: &mut Successes,
    ending: &mut [watch::Receiver<Phase>],
    delay: Duration,
) -> PauseEnd {
    let has_tunnels = !ending.is_empty();
    let all_ended = async {
        for phase in ending {
            // Fails if the session is gone, which is an end too.
            let _ = phase.wait_for(|phase| *phase == Phase::Ended).await;
        }
        if !has_tunnels {
            std::future::pending::<()>().await;
        }
    };
    match select(pin!(successes.pause(delay, random())), pin!(all_ended)).await {
        Either::Left((true, _)) => PauseEnd::OtherTunnelReady,
        Either::Left((false, _)) => PauseEnd::Timeout,
        Either::Right(_) => PauseEnd::DrainedTunnelEnded,
    }
}

/// Follows a tunnel until it needs a replacement or the service stops. Calls `on_ready` once if the
/// tunnel becomes ready, and returns whether it did. Calls `on_reserve` each time the tunnel
/// becomes a reserve.
async fn follow(
    phase: &mut watch::Receiver<Phase>,
    stop: &watch::Receiver<bool>,
    on_reserve: impl Fn(),
    on_ready: impl FnOnce(),
) -> bool {
    let mut on_ready = Some(on_ready);
    loop {
        let now = *phase.borrow_and_update();
        if now >= Phase::Ready
            && now != Phase::Ended
            && let Some(on_ready) = on_ready.take()
        {
            on_ready();
        }
        if now == Phase::Reserve {
            on_reserve();
        }
        if now >= Phase::GatewayDrains
            || unless_stopped(stop, phase.changed())
                .await
                .is_none_or(|change| change.is_err())
        {
            return on_ready.is_none();
        }
    }
}

/// Returns the result of `future`, or `None` as soon as `stop` is true or its sender is dropped.
pub(crate) async fn unless_stopped<T>(
    stop: &watch::Receiver<bool>,
    future: impl Future<Output = T>,
) -> Option<T> {
    let mut stop = stop.clone();
    match select(pin!(future), pin!(stop.wait_for(|stop| *stop))).await {
        Either::Left((output, _)) => Some(output),
        Either::Right(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::block_on;
    use crate::tunnel::reconnect::Reconnects;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn the_pause_after_a_refusal_by_one_node_stays_short() {
        let seconds = Duration::from_secs;
        for (backoff, retry_after, is_of_one_node, expected) in [
            (120, 1, true, 10),
            (120, 1, false, 120),
            (0, 1, true, 1),
            // The gateway decides.
            (0, 60, true, 60),
        ] {
            let pause = retry_pause(seconds(backoff), seconds(retry_after), is_of_one_node);
            assert_eq!(pause, seconds(expected), "{backoff} {retry_after}");
        }
    }

    #[test]
    fn pause_ends_with_the_tunnel_of_a_drained_gateway_but_not_with_its_drain() {
        let reconnects = Reconnects::default();
        block_on(async {
            let mut successes = reconnects.successes();
            let (phase, watched) = watch::channel(Phase::GatewayDrains);
            let mut ending = [watched];
            for ending in [&mut ending[..], &mut []] {
                let short = Duration::from_millis(20);
                let end = wait_for_gateway(&mut successes, ending, short).await;
                assert_eq!(end, PauseEnd::Timeout);
            }
            let (wake, ()) =
                futures_util::join!(wait_for_gateway(&mut successes, &mut ending, LONG), async {
                    phase.send_replace(Phase::Ended);
                });
            assert_eq!(wake, PauseEnd::DrainedTunnelEnded);
        });
    }

    #[test]
    fn on_ready_is_called_once_and_only_for_a_ready_tunnel() {
        let (_stop, stopped) = watch::channel(false);
        let follow_to = |phases: &'static [Phase]| {
            let stopped = stopped.clone();
            let mut calls = 0;
            let displaced = Cell::new(0);
            let was_ready = block_on(async {
                let (phase, mut watched) = watch::channel(Phase::Starting);
                let (was_ready, ()) = futures_util::join!(
                    follow(
                        &mut watched,
                        &stopped,
                        || displaced.set(displaced.get() + 1),
                        || calls += 1
                    ),
                    async {
                        for next in phases {
                            phase.send_replace(*next);
                            runtime::yield_now().await;
                        }
                    }
                );
                was_ready
            });
            (was_ready, calls, displaced.get())
        };
        for (phases, expected) in [
            (
                &[Phase::Ready, Phase::Closing, Phase::Ended][..],
                (true, 1, 0),
            ),
            (&[Phase::Ready, Phase::GatewayDrains], (true, 1, 0)),
            (&[Phase::Ended], (false, 0, 0)),
            (
                &[
                    Phase::Ready,
                    Phase::Reserve,
                    Phase::Ready,
                    Phase::Reserve,
                    Phase::Ended,
                ],
                (true, 1, 2),
            ),
        ] {
            assert_eq!(follow_to(phases), expected, "{phases:?}");
        }
    }
}
