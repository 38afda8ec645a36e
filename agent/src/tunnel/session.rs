//! An open tunnel: an HTTP/2 connection on which the agent is the server.

use std::cell::Cell;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::select;
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_shared::tunnel::text::error_line;
use gw_shared::tunnel::{control, heartbeat, settings};
use h2::RecvStream;
use h2::server::SendResponse;
use http::Request;
use http::uri::Authority;
use tokio::sync::watch;

use crate::backend::Pool;
use crate::forward::slots::{Slot, Slots};
use crate::forward::{self, ForwardError};
use crate::telemetry::counts::Counts;
use crate::telemetry::request_scope::RequestScope;
use crate::tunnel::flow_control::UploadWindow;
use crate::tunnel::{Agent, control_stream};

/// Life-cycle phase of a tunnel. Later phases compare as greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Starting,
    /// Registered at the gateway.
    Ready,
    /// The gateway drains: the agent opens another tunnel, and this one stays open until the gateway closes it.
    GatewayDrains,
    /// Another tunnel of this identity has replaced this one.
    Replaced,
    /// No request is left, and GOAWAY has been sent.
    GoawaySent,
    Ended,
}

/// Time limit for the gateway to confirm that it sends no more requests.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for the gateway to close an idle tunnel after GOAWAY.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// State of an open tunnel.
pub(crate) struct Session {
    pub(crate) agent: Rc<Agent>,
    pub(crate) pool: Rc<Pool>,
    pub(crate) slots: Slots,
    pub(crate) counts: Rc<Counts>,
    pub(crate) phase: watch::Sender<Phase>,
    /// True when the agent stops, or when the service is no longer assigned to it.
    pub(crate) stop: watch::Receiver<bool>,
    /// True when the gateway has confirmed that it sends no more requests.
    pub(crate) no_more_requests: watch::Sender<bool>,
    /// Another tunnel of this identity has replaced this one. Unlike [`Phase::Replaced`], which an idle tunnel leaves at
    /// once, this flag stays set.
    pub(crate) displaced: Cell<bool>,
}

/// Serves a tunnel until it ends.
pub(crate) async fn serve(session: Rc<Session>, tunnel: TlsStream) {
    let result = run(&session, tunnel).await;
    let error = result.err().map(|error| error_line(&error));
    tracing::info!(error, "tunnel ended");
    session.phase.send_replace(Phase::Ended);
}

async fn run(session: &Rc<Session>, tunnel: TlsStream) -> Result<(), h2::Error> {
    let (closer, last_received) = (tunnel.closer(), tunnel.socket().last_received());
    if let Err(error) = tunnel.socket().detect_dead_peer(heartbeat::TCP_DEAD_AFTER) {
        tracing::warn!(%error, "cannot set TCP keep-alive on the tunnel; HTTP/2 heartbeats still detect a dead gateway");
    }
    if let Err(error) = tunnel.socket().limit_unsent(settings::UNSENT) {
        tracing::warn!(%error, "cannot limit the unsent bytes of the tunnel's socket");
    }
    let (window, buffers) = (Rc::new(UploadWindow::default()), tunnel.socket().buffers());
    let mut connection = settings::server(session.slots.total()).handshake::<_, Bytes>(tunnel).await?;
    if let Some(ping_pong) = connection.ping_pong() {
        runtime::spawn(heartbeat::keep(ping_pong, last_received, closer));
    }
    let mut drained = pin!(drained(session));
    let mut goaway_sent = false;
    let mut close: Option<GracefulClose> = None;
    loop {
        let event = std::future::poll_fn(|cx| {
            if !goaway_sent && drained.as_mut().poll(cx).is_ready() {
                return Poll::Ready(TunnelEvent::Drained);
            }
            loop {
                window.apply(&mut connection);
                match connection.poll_accept(cx) {
                    Poll::Ready(Some(Ok((request, respond)))) => dispatch(session, &window, request, respond),
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(TunnelEvent::Ended(Err(error))),
                    Poll::Ready(None) => return Poll::Ready(TunnelEvent::Ended(Ok(()))),
                    Poll::Pending => break,
                }
            }
            let Some(close) = &mut close else { return Poll::Pending };
            close.poll(cx, session.slots.in_use(), buffers.sent()).map(|()| TunnelEvent::Ended(Ok(())))
        });
        match event.await {
            TunnelEvent::Drained => {
                // Every request has ended: send GOAWAY. A request that crosses it is still served.
                goaway_sent = true;
                close = Some(GracefulClose { quiet: runtime::sleep(CLOSED_WITHIN), sent: buffers.sent() });
                connection.graceful_shutdown();
                session.phase.send_replace(Phase::GoawaySent);
            }
            TunnelEvent::Ended(result) => return result,
        }
    }
}

enum TunnelEvent {
    Drained,
    Ended(Result<(), h2::Error>),
}

/// Waits for the gateway to close a tunnel after GOAWAY.
struct GracefulClose {
    /// Ends after [`CLOSED_WITHIN`].
    quiet: Pin<Box<dyn Future<Output = ()>>>,
    /// Bytes that had been sent when `quiet` started.
    sent: u64,
}

impl GracefulClose {
    /// Ready once no request has been running and no byte has been sent for [`CLOSED_WITHIN`]. A request that crossed
    /// GOAWAY, and the rest of a response on a slow path, are not cut off.
    fn poll(&mut self, cx: &mut Context<'_>, requests: u32, sent: u64) -> Poll<()> {
        loop {
            ready!(self.quiet.as_mut().poll(cx));
            if requests == 0 && sent == self.sent {
                return Poll::Ready(());
            }
            *self = Self { quiet: runtime::sleep(CLOSED_WITHIN), sent };
        }
    }
}

/// Resolves when the gateway sends no more requests and none is running.
async fn drained(session: &Session) {
    let (mut phase, mut no_more_requests) = (session.phase.subscribe(), session.no_more_requests.subscribe());
    let mut stop = session.stop.clone();
    // A gateway that does not confirm is unreachable; the heartbeat detects that later.
    let unconfirmed = async {
        // Fails if the sender is gone, which stops the tunnel too.
        let _ = stop.wait_for(|stop| *stop).await;
        runtime::sleep(CONFIRMED_WITHIN).await;
    };
    let replaced = pin!(phase.wait_for(|phase| *phase >= Phase::Replaced));
    let confirmed = pin!(no_more_requests.wait_for(|no_more| *no_more));
    select(select(replaced, confirmed), pin!(unconfirmed)).await;
    session.slots.all_free().await;
}

/// Starts a task for a stream: the control stream or a request.
fn dispatch(
    session: &Rc<Session>,
    window: &Rc<UploadWindow>,
    mut request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let (session, window) = (Rc::clone(session), Rc::clone(window));
    if request.uri().authority().map(Authority::as_str) == Some(control::AUTHORITY) {
        runtime::spawn(async move { control_stream::serve(&session, &window, request, respond).await });
        return;
    }
    let tracing = session.agent.tracing.as_ref();
    let scope = RequestScope::begin(tracing, &session.counts, session.slots.in_use(), &mut request);
    let slot = session.slots.take();
    let watched = (!request.body().is_end_stream()).then(|| window.unread.watch(request.body_mut()));
    runtime::spawn(async move {
        match or_freed_slot(&session.slots, slot).await {
            Some(slot) => forward::forward(&session.pool, slot, scope, request, respond).await,
            None => forward::refuse(&mut respond, &scope, &ForwardError::concurrency_limit()),
        }
        drop(watched);
    });
}

/// Returns `slot`, or else a slot that is freed in this turn of the reactor. The tasks of requests that were reset free
/// their slots when they run next; until then these requests must not cause refusals of others.
async fn or_freed_slot(slots: &Slots, slot: Option<Slot>) -> Option<Slot> {
    if slot.is_some() {
        return slot;
    }
    runtime::yield_now().await;
    slots.take()
}
