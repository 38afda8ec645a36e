//! Control messages of a tunnel: messages between gateway and agent besides requests.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::runtime;
use gw_shared::text::printable;
use gw_shared::tunnel::connection::Tunnel;
use gw_shared::tunnel::control::{self, InvalidMessage, ToAgent, ToGateway};
use gw_shared::tunnel::cut_reason::CutReason;

use super::session::{Phase, Session};

/// Interval at which the agent reports changed statistics and sends a queued certificate request.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Least time between two reports. A change of the backends' health is reported at once otherwise.
const REPORT_PAUSE: Duration = Duration::from_millis(100);

/// Most bytes of messages that wait for sending: statistics of minutes.
const QUEUE_MAX: usize = 64 * 1024;

/// Longest logged reason for the end of a tunnel.
const REASON_MAX: usize = 100;

/// Handles and sends messages until the tunnel ends or is closing. After an error, the tunnel must
/// end.
pub(super) async fn serve(session: &Session, tunnel: &Tunnel) -> Result<(), InvalidMessage> {
    match select(
        pin!(receive(session, tunnel)),
        pin!(report(session, tunnel)),
    )
    .await
    {
        Either::Left((received, _)) => received,
        Either::Right(_) => Ok(()),
    }
}

/// Handles the gateway's messages.
async fn receive(session: &Session, tunnel: &Tunnel) -> Result<(), InvalidMessage> {
    let agent = &session.agent;
    while let Some(message) = tunnel.message().await {
        match control::decode(&message)? {
            ToAgent::Ready {
                agent_id,
                generation,
            } => {
                tracing::info!(agent_id, generation, "tunnel ready");
                session.used();
            }
            ToAgent::Drain => {
                session.enter(Phase::GatewayDrains);
            }
            ToAgent::Replaced => {
                session.replaced();
                if *session.phase.borrow() == Phase::Replaced {
                    // The tunnel ends after its requests, so it is no reserve.
                    send(tunnel, &ToGateway::Drain);
                }
            }
            ToAgent::Drained => {
                session.no_more_requests.send_replace(true);
            }
            ToAgent::Services { hostnames } => agent.services.set(hostnames),
            ToAgent::Certificate(reply) => agent.certificates.requests.answer(Ok(reply)),
            ToAgent::RenewalWanted {
                authority,
                within_seconds,
            } => {
                session
                    .agent
                    .certificates
                    .renew_within(authority, Duration::from_secs(within_seconds.into()));
            }
            ToAgent::Programs { programs } => session.agent.updates.offered(programs),
            ToAgent::OtherTunnels { exist, retries } => {
                session.pool.set_other_tunnels(exist);
                session.pool.set_retries(retries);
            }
            ToAgent::RenewalRefused { message } => agent.certificates.requests.answer(Err(message)),
            ToAgent::Ended { reason } => {
                let advice = CutReason::parse(&reason).and_then(CutReason::advice);
                let reason = printable(reason.as_bytes(), REASON_MAX);
                tracing::warn!(reason, advice, "the gateway ends the tunnel");
            }
        }
    }
    Ok(())
}

/// Reports statistics when they change, sends queued certificate requests, and sends a drain
/// message when the agent stops. Returns when the tunnel is to end.
async fn report(session: &Session, tunnel: &Tunnel) {
    let mut stop = session.stop.clone();
    let mut phase = session.phase.subscribe();
    let mut closing = pin!(phase.wait_for(|phase| *phase >= Phase::Closing));
    let mut health = session.pool.health();
    let mut reported = None;
    let mut reported_update = None;
    loop {
        let now = (
            session.slots.in_use(),
            session.pool.idle(),
            *health.borrow_and_update(),
        );
        if reported != Some(now) {
            reported = Some(now);
            let statistics = ToGateway::Statistics {
                slots: session.slots.total(),
                slots_in_use: now.0,
                backend_connections: u32::try_from(now.1).unwrap_or(u32::MAX) + now.0,
                backend: now.2,
                standby: session.agent.config.standby,
            };
            send(tunnel, &statistics);
        }
        let update = Some(session.agent.updates.report());
        if reported_update != update {
            reported_update.clone_from(&update);
            update
                .iter()
                .for_each(|update| send(tunnel, &ToGateway::Update(update.clone())));
        }
        if *session.phase.borrow() == Phase::Ready
            && let Some(csr) = session.agent.certificates.requests.take()
        {
            send(tunnel, &ToGateway::Renew { csr });
        }
        session.pool.prune();
        let stopping = pin!(stop.wait_for(|stop| *stop));
        let changed = pin!(async {
            runtime::sleep(REPORT_PAUSE).await;
            // The session keeps the sender.
            let _ = health.changed().await;
        });
        let tick = pin!(runtime::sleep(REPORT_INTERVAL));
        match select(closing.as_mut(), select(stopping, select(changed, tick))).await {
            Either::Left(_) => return,
            Either::Right((Either::Left(_), _)) => break,
            Either::Right((Either::Right(_), _)) => {}
        }
    }
    send(tunnel, &ToGateway::Drain);
    // Fails if the session is gone, which is an end too.
    let _ = closing.await;
}

fn send(tunnel: &Tunnel, message: &ToGateway) {
    if let Ok(message) = control::encode(message) {
        // Fails if the gateway does not read; the heartbeat notices that.
        let _ = tunnel.send_message(message, QUEUE_MAX);
    }
}
