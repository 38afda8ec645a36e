//! An open tunnel: the agent's end, which accepts the requests of the gateway.

use std::cell::Cell;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use futures_util::future::{Either, select};
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_shared::text::error_line;
use gw_shared::tunnel::connection::{self, StreamReceiver, StreamSender, Tunnel, TunnelError};
use gw_shared::tunnel::endpoint::{Endpoint, STREAMS_BEYOND_SLOTS};
use gw_shared::tunnel::transport::Transport;
use gw_shared::tunnel::{heartbeat, window};
use tokio::sync::watch;

use crate::backend::Pool;
use crate::forward::slots::{Slot, Slots};
use crate::forward::{self, ForwardError, TunnelRequest};
use crate::telemetry::counts::Counts;
use crate::telemetry::request_scope::RequestScope;
use crate::tunnel::{AgentContext, control_messages};

/// Life-cycle phase of a tunnel. Later phases compare as greater. Only a [reserve](Self::Reserve)
/// goes back, to [`Self::Ready`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Starting,
    /// Registered at the gateway.
    Ready,
    /// Another process with this identity has a newer tunnel, which gets the requests. The gateway
    /// uses this one again when the newer one has ended.
    Reserve,
    /// The gateway drains: the agent opens another tunnel, and this one stays open until the
    /// gateway closes it.
    GatewayDrains,
    /// Another tunnel of this process or of its successor has replaced this one.
    Replaced,
    /// No request is left, and the agent ends the tunnel.
    Closing,
    Ended,
}

/// Time limit for the gateway to confirm that it sends no more requests.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for the gateway to close an idle tunnel.
const CLOSED_WITHIN: Duration = Duration::from_secs(1);

/// State of an open tunnel.
pub(crate) struct Session {
    pub(crate) agent: Rc<AgentContext>,
    pub(crate) pool: Rc<Pool>,
    pub(crate) slots: Slots,
    pub(crate) counts: Rc<Counts>,
    pub(crate) phase: watch::Sender<Phase>,
    /// True when the agent stops, or when the service is no longer assigned to it.
    pub(crate) stop: watch::Receiver<bool>,
    /// True when the gateway has confirmed that it sends no more requests.
    pub(crate) no_more_requests: watch::Sender<bool>,
    /// A newer tunnel of this identity gets the requests. Unlike [`Phase::Replaced`], which an idle
    /// tunnel leaves at once, this flag stays set.
    pub(crate) displaced: Cell<bool>,
}

impl Session {
    /// The gateway uses the tunnel for requests, at first or again.
    pub(super) fn used(&self) {
        if self.enter(Phase::Ready) {
            self.displaced.set(false);
        }
    }

    /// A newer tunnel of this identity has replaced this one.
    pub(super) fn replaced(&self) {
        self.displaced.set(true);
        let is_done = *self.stop.borrow() || *self.phase.borrow() >= Phase::GatewayDrains;
        let is_followed = is_done || self.agent.succession.has_successor();
        self.enter(if is_followed {
            Phase::Replaced
        } else {
            Phase::Reserve
        });
    }

    /// Enters a later phase, or returns from the reserve. Returns whether the phase has changed.
    pub(super) fn enter(&self, phase: Phase) -> bool {
        self.phase.send_if_modified(|now| {
            let is_next = phase > *now || (*now == Phase::Reserve && phase == Phase::Ready);
            if is_next {
                *now = phase;
            }
            is_next
        })
    }
}

/// Serves a tunnel until it ends.
pub(crate) async fn serve(session: Rc<Session>, tunnel: TlsStream) {
    let result = run(&session, tunnel).await;
    let error = result.err().map(|error| error_line(&error));
    tracing::info!(error, "tunnel ended");
    session.phase.send_replace(Phase::Ended);
}

async fn run(session: &Rc<Session>, stream: TlsStream) -> Result<(), TunnelError> {
    if let Err(error) = stream.socket().detect_dead_peer(heartbeat::TCP_DEAD_AFTER) {
        tracing::warn!(%error,
            "cannot set TCP keep-alive on the tunnel; heartbeats still detect a dead gateway");
    }
    if let Err(error) = stream.socket().limit_unsent(connection::UNSENT) {
        tracing::warn!(%error, "cannot limit the unsent bytes of the tunnel's socket");
    }
    let slots = usize::try_from(session.slots.total()).unwrap_or(usize::MAX);
    let tunnel = Tunnel::new(Endpoint::agent(slots.saturating_add(STREAMS_BEYOND_SLOTS)));
    runtime::spawn(attend(Rc::clone(session), tunnel.clone(), &stream));
    let mut drained = pin!(drained(session));
    let mut close: Option<Close> = None;
    let ended = std::future::poll_fn(|cx| {
        if close.is_none() && drained.as_mut().poll(cx).is_ready() {
            session.phase.send_replace(Phase::Closing);
            close = Some(Close::new(&stream));
        }
        match &mut close {
            Some(close) => close.poll(cx, session, &tunnel, &stream),
            None => poll_serve(cx, session, &tunnel, &stream),
        }
    })
    .await;
    tunnel.with(Endpoint::lose);
    ended
}

/// Drives the tunnel and starts a task for every stream that the gateway opens. Ready when the
/// connection has ended.
pub(crate) fn poll_serve(
    cx: &mut Context<'_>,
    session: &Rc<Session>,
    tunnel: &Tunnel,
    stream: &impl Transport,
) -> Poll<Result<(), TunnelError>> {
    let driven = tunnel.poll_drive(cx, stream, &mut apply_window);
    // Needs no waker: only this task receives.
    while let Poll::Ready(Some(halves)) =
        tunnel.poll_accept(&mut Context::from_waker(Waker::noop()))
    {
        dispatch(session, halves);
    }
    driven
}

/// Lets the gateway send as far ahead on each stream as it has announced. The endpoint keeps all
/// streams within the budget.
fn apply_window(endpoint: &mut Endpoint) -> Result<(), TunnelError> {
    if let Some(bytes) = endpoint.announced_window() {
        endpoint.set_credit(
            usize::try_from(bytes).unwrap_or(usize::MAX),
            window::TUNNEL_BUDGET,
        );
    }
    Ok(())
}

/// Serves the control messages and the heartbeat until the tunnel ends or is closing.
fn attend(
    session: Rc<Session>,
    tunnel: Tunnel,
    stream: &TlsStream,
) -> impl Future<Output = ()> + use<> {
    let closer = stream.closer();
    let last_received = stream.socket().last_received();
    async move {
        let messages = pin!(control_messages::serve(&session, &tunnel));
        let heartbeat = pin!(heartbeat::until_dead(&tunnel, &last_received));
        match select(messages, heartbeat).await {
            Either::Left((Ok(()), _)) => {}
            Either::Left((Err(error), _)) => {
                tracing::warn!(%error, "closing the tunnel");
                closer.abort();
            }
            Either::Right(((), _)) => closer.abort(),
        }
    }
}

/// Ends a tunnel without requests: sends all frames, then `close_notify`, and waits for the gateway
/// to close.
struct Close {
    /// All frames were sent.
    is_sent: bool,
    /// Ends after [`CLOSED_WITHIN`].
    quiet: Pin<Box<dyn Future<Output = ()>>>,
    /// Bytes that had been sent when `quiet` started.
    sent: u64,
}

impl Close {
    fn new(stream: &TlsStream) -> Self {
        Self {
            is_sent: false,
            quiet: runtime::sleep(CLOSED_WITHIN),
            sent: stream.socket().sent(),
        }
    }

    /// Ready once the gateway has closed, or no request has been running and no byte has been sent
    /// for [`CLOSED_WITHIN`]: the rest of a response on a slow path is not cut off.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        session: &Rc<Session>,
        tunnel: &Tunnel,
        stream: &TlsStream,
    ) -> Poll<Result<(), TunnelError>> {
        if !self.is_sent {
            // Requests can still arrive if the gateway has not confirmed that it sends none.
            if let Poll::Ready(ended) = poll_serve(cx, session, tunnel, stream) {
                return Poll::Ready(ended);
            }
            let is_idle = tunnel.with(|endpoint| endpoint.open_streams()) == 0;
            self.is_sent = is_idle && tunnel.poll_flush(cx, stream)?.is_ready();
        }
        if self.is_sent && stream.poll_close(cx)?.is_ready() {
            // Nothing but the end matters.
            while let Poll::Ready(received) = stream.poll_plaintext(cx, &mut |_| {})? {
                if received == 0 {
                    return Poll::Ready(Ok(()));
                }
            }
        }
        loop {
            ready!(self.quiet.as_mut().poll(cx));
            let sent = stream.socket().sent();
            if session.slots.in_use() == 0 && sent == self.sent {
                return Poll::Ready(Ok(()));
            }
            (self.quiet, self.sent) = (runtime::sleep(CLOSED_WITHIN), sent);
        }
    }
}

/// Resolves when the gateway sends no more requests and none is running.
async fn drained(session: &Session) {
    let mut phase = session.phase.subscribe();
    let mut no_more_requests = session.no_more_requests.subscribe();
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

/// Starts a task for the request of a stream.
fn dispatch(session: &Rc<Session>, halves: (StreamSender, StreamReceiver)) {
    let Some(mut request) = TunnelRequest::read(halves) else {
        return;
    };
    let tracing = session.agent.tracing.as_ref();
    let scope = RequestScope::begin(
        tracing,
        &session.counts,
        session.slots.in_use(),
        &mut request.head,
    );
    let slot = session.slots.take();
    let session = Rc::clone(session);
    runtime::spawn(async move {
        match or_freed_slot(&session.slots, slot).await {
            Some(slot) => forward::forward(&session.pool, slot, scope, request).await,
            None => {
                forward::refuse(&request.sender, &scope, &ForwardError::concurrency_limit());
            }
        }
    });
}

/// Returns `slot`, or else a slot that is freed in this turn of the reactor. The tasks of requests
/// that were reset free their slots when they run next; until then these requests must not cause
/// refusals of others.
async fn or_freed_slot(slots: &Slots, slot: Option<Slot>) -> Option<Slot> {
    if slot.is_some() {
        return slot;
    }
    runtime::yield_now().await;
    slots.take()
}

#[cfg(test)]
mod tests;
