//! One live tunnel: an HTTP/2 connection on which the agent is the server.

use std::cell::{Cell, RefCell};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use gw_shared::tunnel::control::{self, Decoder, ToAgent, ToGateway};
use gw_shared::tunnel::stream::{self, Received};
use gw_shared::tunnel::text::error_line;
use gw_shared::tunnel::unread::UnreadBodies;
use gw_shared::tunnel::window::{self, Demand};
use gw_shared::tunnel::{heartbeat, settings};
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};
use http::uri::Authority;
use http::{Request, Response};
use tokio::sync::watch;

use crate::backend::Pool;
use crate::forward::slots::{Slot, Slots};
use crate::forward::{self, ForwardError};
use crate::supervisor::Agent;
use crate::telemetry::observe::Counts;
use crate::telemetry::request_scope::Passage;

/// How far a tunnel is. Later phases are greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Starting,
    /// Registered at the gateway.
    Ready,
    /// The gateway is going away: another tunnel is wanted, and this one goes on until the gateway ends it.
    GatewayDrains,
    /// Another tunnel of this agent took over.
    Replaced,
    /// No request is left; saying goodbye.
    Leaving,
    Ended,
}

/// How often the agent tells the gateway how it is doing, if that has changed, and what else it has to say.
const STATISTICS_INTERVAL: Duration = Duration::from_secs(1);
/// How long a gateway may take to confirm that it sends no more requests.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(5);
/// How long the gateway may take to answer GOAWAY on a tunnel without requests. One that is gone never does.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);

/// What a tunnel works with.
pub(crate) struct Session {
    pub(crate) agent: Rc<Agent>,
    pub(crate) pool: Rc<Pool>,
    pub(crate) slots: Slots,
    pub(crate) counts: Rc<Counts>,
    pub(crate) phase: watch::Sender<Phase>,
    /// Turns true when the agent is to stop, or the service is no longer its own.
    pub(crate) stop: watch::Receiver<bool>,
    /// Turns true when the gateway has said that it sends no more requests.
    pub(crate) quiet: watch::Sender<bool>,
    /// Another tunnel of this agent took over. Outlasts [`Phase::Replaced`], which a tunnel without requests is in only
    /// for a moment.
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
        tracing::warn!(%error, "cannot set TCP keep-alive on the tunnel; heartbeats still watch it");
    }
    if let Err(error) = tunnel.socket().limit_unsent(settings::UNSENT) {
        tracing::warn!(%error, "cannot bound what the tunnel's socket takes ahead");
    }
    let (windows, buffers) = (Rc::new(Windows::default()), tunnel.socket().buffers());
    let mut connection = settings::server(session.slots.total()).handshake::<_, Bytes>(tunnel).await?;
    if let Some(ping_pong) = connection.ping_pong() {
        runtime::spawn(heartbeat::keep(ping_pong, last_received, closer));
    }
    let mut drained = pin!(drained(session));
    let mut leaving = false;
    let mut goodbye: Option<Goodbye> = None;
    loop {
        let next = std::future::poll_fn(|cx| {
            if !leaving && drained.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Next::Drained);
            }
            loop {
                windows.change(&mut connection);
                match connection.poll_accept(cx) {
                    Poll::Ready(Some(Ok((request, respond)))) => dispatch(session, &windows, request, respond),
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Next::Ended(Err(error))),
                    Poll::Ready(None) => return Poll::Ready(Next::Ended(Ok(()))),
                    Poll::Pending => break,
                }
            }
            let Some(goodbye) = &mut goodbye else { return Poll::Pending };
            goodbye.poll(cx, session.slots.in_use(), buffers.sent()).map(|()| Next::Ended(Ok(())))
        });
        match next.await {
            Next::Drained => {
                // Every request has ended: GOAWAY. One that crossed with it is still served.
                leaving = true;
                goodbye = Some(Goodbye { quiet: runtime::sleep(GOODBYE_WITHIN), sent: buffers.sent() });
                connection.graceful_shutdown();
                session.phase.send_replace(Phase::Leaving);
            }
            Next::Ended(result) => return result,
        }
    }
}

/// Waits for the gateway to close a tunnel after GOAWAY.
struct Goodbye {
    /// Ends after [`GOODBYE_WITHIN`].
    quiet: Pin<Box<dyn Future<Output = ()>>>,
    /// Bytes that had been sent when it began.
    sent: u64,
}

impl Goodbye {
    /// Ready once no request has been running and no byte has been sent for [`GOODBYE_WITHIN`]: a request that crossed
    /// with GOAWAY, and the tail of a response on a slow path, have all the time they take.
    fn poll(&mut self, cx: &mut Context<'_>, requests: u32, sent: u64) -> Poll<()> {
        loop {
            ready!(self.quiet.as_mut().poll(cx));
            if requests == 0 && sent == self.sent {
                return Poll::Ready(());
            }
            *self = Self { quiet: runtime::sleep(GOODBYE_WITHIN), sent };
        }
    }
}

/// What happens to a tunnel besides requests.
enum Next {
    Drained,
    Ended(Result<(), h2::Error>),
}

/// Resolves when no request comes any more and none is left.
async fn drained(session: &Session) {
    let (mut phase, mut quiet) = (session.phase.subscribe(), session.quiet.subscribe());
    let mut stop = session.stop.clone();
    // A gateway that does not confirm is gone, or soon found dead.
    let unconfirmed = async {
        // An error means that nobody is left to stop us, which is a reason to stop.
        let _ = stop.wait_for(|stop| *stop).await;
        runtime::sleep(CONFIRMED_WITHIN).await;
    };
    let replaced = pin!(phase.wait_for(|phase| *phase >= Phase::Replaced));
    let quiet = pin!(quiet.wait_for(|quiet| *quiet));
    select(select(replaced, quiet), pin!(unconfirmed)).await;
    session.slots.all_free().await;
}

fn dispatch(
    session: &Rc<Session>,
    windows: &Rc<Windows>,
    mut request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let (session, windows) = (Rc::clone(session), Rc::clone(windows));
    if request.uri().authority().map(Authority::as_str) == Some(control::AUTHORITY) {
        runtime::spawn(async move { converse(&session, &windows, request, respond).await });
        return;
    }
    let tracing = session.agent.tracing.as_ref();
    let passage = Passage::begin(tracing, &session.counts, session.slots.in_use(), &mut request);
    let free = session.slots.take();
    let watched = (!request.body().is_end_stream()).then(|| windows.held.watch(request.body_mut()));
    runtime::spawn(async move {
        match take_unless_full(&session.slots, free).await {
            Some(slot) => forward::forward(&session.pool, slot, passage, request, respond).await,
            None => forward::refuse(&mut respond, &passage, &ForwardError::concurrency_limit()),
        }
        drop(watched);
    });
}

/// The slot that was `free`, or the first of those whose requests were taken back meanwhile: they are given up when the
/// tasks of these requests have had their turn, and one caller's resets must not have another one refused.
async fn take_unless_full(slots: &Slots, free: Option<Slot>) -> Option<Slot> {
    if free.is_some() {
        return free;
    }
    runtime::yield_now().await;
    slots.take()
}

/// The window of uploads: as large as the gateway says, unless backends have stalled with too much already.
struct Windows {
    now: Cell<u32>,
    told: Cell<Option<u32>>,
    held: UnreadBodies,
}

impl Default for Windows {
    fn default() -> Self {
        Self { now: Cell::new(window::FIRST), told: Cell::default(), held: UnreadBodies::default() }
    }
}

impl Windows {
    /// Does what the gateway has asked for. Called before the connection is driven.
    fn change(&self, connection: &mut h2::server::Connection<TlsStream, Bytes>) {
        let Some(told) = self.told.get() else { return };
        let held = self.held.bytes();
        let wanted = Demand { streams: self.held.streams(), unread: &held }.fit(told, window::TUNNEL_BUDGET);
        // Refused while the last SETTINGS are not acknowledged: then it is tried again.
        if wanted == self.now.get() || connection.set_initial_window_size(wanted).is_ok() {
            self.now.set(wanted);
            self.told.set(None);
        }
    }
}

/// Serves the control stream.
async fn converse(
    session: &Rc<Session>,
    windows: &Windows,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let Ok(sender) = respond.send_response(Response::new(()), false) else { return };
    let sender = RefCell::new(sender);
    let hears = hear(session, windows, request.into_body(), &sender);
    let tells = tell(session, &sender);
    select(pin!(hears), pin!(tells)).await;
}

async fn hear(session: &Session, windows: &Windows, mut body: RecvStream, sender: &RefCell<SendStream<Bytes>>) {
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
                    session.quiet.send_replace(true);
                    continue;
                }
                Ok(Some(ToAgent::Services { hostnames })) => {
                    session.agent.desk.services_are(hostnames);
                    continue;
                }
                Ok(Some(ToAgent::Certificate(reply))) => {
                    session.agent.desk.answer(Ok(reply));
                    continue;
                }
                Ok(Some(ToAgent::RenewalRefused { message })) => {
                    session.agent.desk.answer(Err(message));
                    continue;
                }
                Ok(Some(ToAgent::Window { bytes })) => {
                    windows.told.set(Some(bytes));
                    // Wakes whoever drives the connection, who changes the window before anything else is sent.
                    send(sender, &ToGateway::Window);
                    continue;
                }
                Ok(None) => break,
                Err(error) => return tracing::warn!(%error, "control stream"),
            };
            session.phase.send_if_modified(|now| phase > *now && std::mem::replace(now, phase) != phase);
        }
    }
}

/// Reports the slots when they have changed, carries a renewal that waits for a tunnel, and says that we are stopping.
/// Returns when the tunnel is to end.
async fn tell(session: &Session, sender: &RefCell<SendStream<Bytes>>) {
    let (mut stop, mut phase) = (session.stop.clone(), session.phase.subscribe());
    let mut leaving = pin!(phase.wait_for(|phase| *phase >= Phase::Leaving));
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
            && let Some(csr) = session.agent.desk.take_request()
        {
            send(sender, &ToGateway::Renew { csr });
        }
        session.pool.prune();
        let stopping = pin!(stop.wait_for(|stop| *stop));
        let tick = pin!(runtime::sleep(STATISTICS_INTERVAL));
        match select(leaving.as_mut(), select(stopping, tick)).await {
            Either::Left(_) => return,
            Either::Right((Either::Left(_), _)) => break,
            Either::Right((Either::Right(_), _)) => {}
        }
    }
    send(sender, &ToGateway::Drain);
    // An error means that the session is gone, which is an end too.
    let _ = leaving.await;
}

fn send(sender: &RefCell<SendStream<Bytes>>, message: &ToGateway) {
    if let Ok(line) = control::encode(message) {
        // Fails when the tunnel has ended; whoever serves it sees that.
        let _ = sender.borrow_mut().send_data(line, false);
    }
}
