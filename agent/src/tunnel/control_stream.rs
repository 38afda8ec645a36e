//! The control stream of a tunnel: messages between gateway and agent besides requests.

use std::cell::RefCell;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::runtime;
use gw_shared::tunnel::control::{self, Decoder, ToAgent, ToGateway};
use gw_shared::tunnel::stream::{self, Received};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::{Request, Response};

use super::flow_control::UploadWindow;
use super::session::{Phase, Session};

/// Interval at which the agent reports changed statistics and sends a queued certificate request.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Serves the control stream until the tunnel ends.
pub(super) async fn serve(
    session: &Session,
    window: &UploadWindow,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let Ok(sender) = respond.send_response(Response::new(()), false) else { return };
    let sender = RefCell::new(sender);
    let receives = receive(session, window, request.into_body(), &sender);
    let reports = report(session, &sender);
    select(pin!(receives), pin!(reports)).await;
}

/// Handles the gateway's messages.
async fn receive(session: &Session, window: &UploadWindow, mut body: RecvStream, sender: &RefCell<SendStream<Bytes>>) {
    let events = &session.agent.gateway_events;
    let mut decoder = Decoder::default();
    while let Ok(Received::Data(data)) = std::future::poll_fn(|cx| stream::poll_receive(&mut body, cx)).await {
        stream::release(&mut body, data.len());
        decoder.push(&data);
        loop {
            let phase = match decoder.next_message() {
                Ok(Some(ToAgent::Ready { agent_id, generation })) => {
                    tracing::info!(agent_id, generation, "tunnel ready");
                    Phase::Ready
                }
                Ok(Some(ToAgent::Drain)) => Phase::GatewayDrains,
                Ok(Some(ToAgent::Replaced)) => {
                    session.displaced.set(true);
                    Phase::Replaced
                }
                Ok(Some(ToAgent::Drained)) => {
                    session.no_more_requests.send_replace(true);
                    continue;
                }
                Ok(Some(ToAgent::Services { hostnames })) => {
                    events.set_services(hostnames);
                    continue;
                }
                Ok(Some(ToAgent::Certificate(reply))) => {
                    events.answer_certificate_request(Ok(reply));
                    continue;
                }
                Ok(Some(ToAgent::RenewalRefused { message })) => {
                    events.answer_certificate_request(Err(message));
                    continue;
                }
                Ok(Some(ToAgent::Window { bytes })) => {
                    window.request(bytes);
                    // Sending wakes the task that polls the connection, which applies the window first.
                    send(sender, &ToGateway::Window);
                    continue;
                }
                Ok(None) => break,
                Err(error) => return tracing::warn!(%error, "invalid message on the control stream"),
            };
            session.phase.send_if_modified(|now| phase > *now && std::mem::replace(now, phase) != phase);
        }
    }
}

/// Reports statistics when they change, sends queued certificate requests, and sends a drain message when the agent
/// stops. Returns when the tunnel is to end.
async fn report(session: &Session, sender: &RefCell<SendStream<Bytes>>) {
    let (mut stop, mut phase) = (session.stop.clone(), session.phase.subscribe());
    let mut goaway_sent = pin!(phase.wait_for(|phase| *phase >= Phase::GoawaySent));
    let mut reported = None;
    loop {
        let now = (session.slots.in_use(), session.pool.idle());
        if reported != Some(now) {
            reported = Some(now);
            let statistics = ToGateway::Statistics {
                slots: session.slots.total(),
                slots_in_use: now.0,
                backend_connections: u32::try_from(now.1).unwrap_or(u32::MAX) + now.0,
            };
            send(sender, &statistics);
        }
        if *session.phase.borrow() == Phase::Ready
            && let Some(csr) = session.agent.gateway_events.take_certificate_request()
        {
            send(sender, &ToGateway::Renew { csr });
        }
        session.pool.prune();
        let stopping = pin!(stop.wait_for(|stop| *stop));
        let tick = pin!(runtime::sleep(REPORT_INTERVAL));
        match select(goaway_sent.as_mut(), select(stopping, tick)).await {
            Either::Left(_) => return,
            Either::Right((Either::Left(_), _)) => break,
            Either::Right((Either::Right(_), _)) => {}
        }
    }
    send(sender, &ToGateway::Drain);
    // Fails if the session is gone, which is an end too.
    let _ = goaway_sent.await;
}

fn send(sender: &RefCell<SendStream<Bytes>>, message: &ToGateway) {
    if let Ok(line) = control::encode(message) {
        // Fails if the tunnel has ended; the session's own task notices that.
        let _ = sender.borrow_mut().send_data(line, false);
    }
}
