//! Callers that speak HTTP/2 (RFC 9113). Each request is a task and goes to the owner of its
//! service, so one connection can carry requests of all tenants that the certificate covers (RFC
//! 9113 §9.1.1).

mod response;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use crate::limits;
use bytes::Bytes;
use futures_util::future::Either;
use gw_base::error::Error;
use gw_interface::rate_limit::Bucket;
use gw_shared::http::framing::{check_values_of_http2, length_of};
use gw_shared::http::head::request_of_http2;
use gw_shared::http::{InvalidBody, InvalidHead, InvalidHeadParts, Part};
use gw_shared::http2::stream::StreamError;
use gw_shared::net::{Closer, TlsStream};
use gw_shared::runtime;
use gw_shared::tunnel::head::broken_off;
use gw_shared::tunnel::window;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::header::{self, HeaderMap};
use http::{Method, Request};
use tokio::sync::Notify;

use self::response::{H2ResponseSink, ResponseStream};
use super::Refusals;
use super::upload_window::UploadWindow;
use crate::connections::ConnectionGuard;
use crate::http_message::{BodyError, CallerGone, Outcome, RequestBody, ResponseSink};
use crate::http2::frame_meter::{CallerStream, Meter, Metered};
use crate::http2::incoming::Incoming;
use crate::peer::Peer;
use crate::route::Router;

fn settings() -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(window::FIRST)
        .initial_connection_window_size(limits::HTTP2_CONNECTION_WINDOW)
        .max_concurrent_streams(limits::HTTP2_STREAMS)
        .max_header_list_size(limits::REQUEST_HEAD.head as u32)
        .received_header_list_size(limits::HTTP2_HEADER_LIST)
        .max_send_buffer_size(limits::HTTP2_SEND_BUFFER)
        .max_local_error_reset_streams(Some(limits::HTTP2_ERROR_RESETS))
        .max_pending_accept_reset_streams(limits::HTTP2_UNSEEN_RESETS)
        .enable_connect_protocol();
    builder
}

/// Serves one connection until either side ends it.
///
/// Not an async function: the future of an async function stores its arguments twice.
pub(crate) fn serve(
    router: Rc<Router>,
    stream: TlsStream,
    peer: Peer,
    guard: ConnectionGuard,
) -> impl Future<Output = ()> {
    let peer_end = stream.socket().closer();
    let upload_window = UploadWindow::new(stream.socket().gauge());
    serve_on(router, stream, peer_end, upload_window, peer, guard)
}

/// Serves a connection whose bytes are those of `stream`.
pub(crate) fn serve_on(
    router: Rc<Router>,
    stream: impl CallerStream,
    peer_end: Closer,
    mut upload_window: UploadWindow,
    peer: Peer,
    guard: ConnectionGuard,
) -> impl Future<Output = ()> {
    guard.expect_by(Instant::now() + limits::HEAD);
    let meter = Rc::new(Meter::new(Instant::now(), guard.unfinished_heads()));
    // Boxed: the connection does not keep the memory of its beginning.
    let handshake =
        Box::pin(settings().handshake::<_, Bytes>(Metered::new(stream, Rc::clone(&meter))));
    async move {
        let mut http2 = match handshake.await {
            Ok(http2) => http2,
            Err(error) => {
                return tracing::debug!(peer = %peer.address(), %error, "HTTP/2 did not begin");
            }
        };
        guard.idle_until(Instant::now() + limits::IDLE);
        let connection = Rc::new(H2Connection::new(&router, peer, guard, meter));
        let mut ending = Ending::default();
        loop {
            let next = std::future::poll_fn(|cx| {
                if let Poll::Ready(reason) = connection.poll_end(cx, &mut ending) {
                    return Poll::Ready(Either::Left(reason));
                }
                upload_window.look(&mut http2, connection.open.get());
                connection.guard.carried();
                let ended = poll_accept_all(&mut http2, &router, &connection, cx);
                connection.turned.notify_waiters();
                ended.map(Either::Right)
            });
            match next.await {
                // Sends GOAWAY; running requests finish.
                Either::Left(EndReason::Goodbye) => http2.graceful_shutdown(),
                Either::Left(EndReason::Abuse(reason)) => {
                    router.observers.counters.abused(reason);
                    tracing::debug!(peer = %connection.peer.address(),
                        "connection ended: too many {reason}");
                    connection.guard.expect_by(Instant::now() + limits::LINGER);
                    http2.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                }
                Either::Right(None) => break,
                Either::Right(Some(error)) => {
                    if error.is_go_away() && error.is_library() {
                        router.observers.counters.abused("http2");
                        ending = Ending::ABUSE;
                    }
                    tracing::debug!(peer = %connection.peer.address(), %error, "HTTP/2 ended");
                    break;
                }
            }
        }
        connection.guard.closes();
        drop(http2);
        if ending.goodbye {
            connection.guard.expect_by(Instant::now() + limits::LINGER);
            // Ends at the limit, whatever the caller sends.
            Box::pin(linger(peer_end)).await;
        }
    }
}

/// Receives what the caller still sends: its own GOAWAY, or bytes that were not read. A socket that
/// is closed before they arrive resets the connection, and the caller may lose the GOAWAY (RFC 9113
/// §9.1).
async fn linger(peer_end: Closer) {
    let _ = runtime::timeout(limits::LINGER, peer_end.linger(limits::LINGER)).await;
}

/// Serves all requests that have arrived, and frees the buffers of a connection without requests.
/// Ready at the end of the connection, with its error.
fn poll_accept_all<S: CallerStream>(
    http2: &mut h2::server::Connection<Metered<S>, Bytes>,
    router: &Rc<Router>,
    connection: &Rc<H2Connection>,
    cx: &mut Context<'_>,
) -> Poll<Option<h2::Error>> {
    loop {
        match http2.poll_accept(cx) {
            Poll::Ready(Some(Ok((request, respond)))) => {
                let router = Rc::clone(router);
                let open = connection.begin();
                runtime::spawn(serve_request(router, request, respond, open));
            }
            Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(error)),
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Pending => {
                if connection.open.get() == 0 {
                    http2.release_buffers();
                }
                return Poll::Pending;
            }
        }
    }
}

/// State that the requests of one connection share.
struct H2Connection {
    peer: Peer,
    guard: ConnectionGuard,
    /// Requests being served.
    open: Cell<usize>,
    /// Bounds the requests that the caller resets.
    resets: RefCell<Bucket>,
    /// Bounds the refusals of unauthenticated requests.
    refusals: RefCell<Refusals>,
    /// The limit that the caller exceeded.
    abuse: Cell<Option<&'static str>>,
    meter: Rc<Meter>,
    driver: RefCell<Option<Waker>>,
    /// Notified when the task of the connection has run.
    turned: Notify,
}

/// Why a connection ends.
enum EndReason {
    Goodbye,
    /// The caller exceeded this limit.
    Abuse(&'static str),
}

/// Which ends of the connection were announced.
#[derive(Default)]
struct Ending {
    goodbye: bool,
    abuse: bool,
}

impl Ending {
    const ABUSE: Self = Self {
        goodbye: true,
        abuse: true,
    };
}

/// A counted request.
struct Open(Rc<H2Connection>);

impl H2Connection {
    fn new(router: &Router, peer: Peer, guard: ConnectionGuard, meter: Rc<Meter>) -> Self {
        Self {
            refusals: RefCell::new(Refusals::new(router, peer.address())),
            peer,
            guard,
            open: Cell::new(0),
            resets: RefCell::new(Bucket::new(limits::HTTP2_RESETS, Instant::now())),
            abuse: Cell::new(None),
            meter,
            driver: RefCell::default(),
            turned: Notify::new(),
        }
    }

    fn begin(self: &Rc<Self>) -> Open {
        self.meter.became_request();
        self.open.set(self.open.get() + 1);
        self.guard.busy();
        Open(Rc::clone(self))
    }

    /// Ready once for each reason to end the connection.
    fn poll_end(&self, cx: &mut Context<'_>, ending: &mut Ending) -> Poll<EndReason> {
        if let Some(abuse) = self.abuse()
            && !ending.abuse
        {
            *ending = Ending::ABUSE;
            return Poll::Ready(EndReason::Abuse(abuse));
        }
        let mut driver = self.driver.borrow_mut();
        if !driver
            .as_ref()
            .is_some_and(|driver| driver.will_wake(cx.waker()))
        {
            *driver = Some(cx.waker().clone());
        }
        if !ending.goodbye && self.guard.poll_leave(cx).is_ready() {
            ending.goodbye = true;
            return Poll::Ready(EndReason::Goodbye);
        }
        Poll::Pending
    }

    /// Waits until the connection has sent the frames that are queued now, as far as windows allow.
    async fn send_queued(&self) {
        let turned = self.turned.notified();
        self.driver.borrow().iter().for_each(Waker::wake_by_ref);
        turned.await;
        self.meter.until_not_blocked().await;
    }

    fn abuse(&self) -> Option<&'static str> {
        self.meter.abuse().or_else(|| self.abuse.get())
    }

    fn end_for(&self, abuse: &'static str) {
        self.abuse.set(Some(abuse));
        self.driver.take().into_iter().for_each(Waker::wake);
    }

    fn count_refusal(&self) {
        if !self.refusals.borrow_mut().count() {
            self.end_for("refusals");
        }
    }

    /// Counts a request that the caller reset. A reset costs the gateway more than the caller
    /// (CVE-2023-44487).
    fn count_reset(&self) {
        if self.resets.borrow_mut().take(Instant::now()).is_err() {
            self.end_for("resets");
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let open = self.0.open.get() - 1;
        self.0.open.set(open);
        if open == 0 && self.0.abuse().is_none() {
            self.0.guard.idle_until(Instant::now() + limits::IDLE);
            // The task of the connection frees the buffers. In most cases it also has to send the
            // end of the response.
            if let Some(driver) = &*self.0.driver.borrow() {
                driver.wake_by_ref();
            }
        }
    }
}

async fn serve_request(
    router: Rc<Router>,
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    connection: Open,
) {
    let (parts, mut body) = request.into_parts();
    let is_head = parts.method == Method::HEAD;
    let is_to_be_empty = is_to_be_empty(&parts.method, &parts.headers);
    let has_body = !body.is_end_stream();
    // Before the first wait, in which a head over the limits would be held.
    let head = request_of_http2(parts, has_body, limits::REQUEST_HEAD)
        .map_err(|refused| (refused.0, InvalidHeadParts::of_http2(refused.1)));
    let guard = &connection.0.guard;
    if head.is_ok() && is_to_be_empty && !ends_without_data(&mut body, guard).await {
        // The h2 crate or the caller has reset the stream; otherwise dropping it does.
        return connection.0.count_reset();
    }
    let stream = RefCell::new(ResponseStream::Asked(respond));
    let mut response = H2ResponseSink::new(is_head, &stream, &connection.0.meter, guard);
    let mut body = H2RequestBody {
        body: Incoming::new(body),
        unreleased: 0,
        switched: false,
        stream: &stream,
    };
    let outcome = match head {
        Ok(head) => {
            router
                .serve(head, &connection.0.peer, &mut body, &mut response)
                .await
        }
        Err((invalid, head)) => {
            let error = Error::invalid_head(invalid.clone());
            if let InvalidHead::Malformed(reason) = invalid {
                tracing::debug!(reason, "malformed request of HTTP/2");
                router.observers.counters.refused(&error);
                stream.borrow_mut().reset(Reason::PROTOCOL_ERROR);
                return connection.0.count_refusal();
            }
            router
                .refuse_invalid_head(head, &connection.0.peer, &error, &mut response)
                .await
        }
    };
    match outcome {
        Outcome::Complete => body.discard_rest(&connection.0.guard).await,
        Outcome::Refused => {
            connection.0.count_refusal();
            body.discard_rest(&connection.0.guard).await;
        }
        Outcome::Cut => {
            // RST_STREAM discards queued frames.
            let sent = connection.0.send_queued();
            let sent = runtime::timeout(limits::CUT_BEHIND_A_WRITE, sent).await;
            // If the caller does not read, dropping the stream resets it with CANCEL behind the
            // head.
            if sent.is_ok() {
                stream.borrow_mut().reset(Reason::INTERNAL_ERROR);
            }
        }
        // A caller that has its response may cancel the rest of its request.
        Outcome::CallerGone if response.is_whole() => {}
        Outcome::CallerGone => connection.0.count_reset(),
    }
}

/// Whether a request announces an empty body. Bytes after an extended CONNECT are not a body.
fn is_to_be_empty(method: &Method, headers: &HeaderMap) -> bool {
    *method != Method::CONNECT && length_of(headers.get_all(header::CONTENT_LENGTH)) == Ok(Some(0))
}

/// Waits until a body that was announced as empty has ended, trailers aside, before the request is
/// served: data would contradict the announcement (RFC 9113 §8.1.1). Has the time limit of a head.
async fn ends_without_data(body: &mut RecvStream, guard: &ConnectionGuard) -> bool {
    if body.is_end_stream() {
        return true;
    }
    let ends = async {
        loop {
            match std::future::poll_fn(|cx| body.poll_data(cx)).await {
                None => return true,
                Some(Ok(data)) if data.is_empty() => {}
                Some(Ok(_) | Err(_)) => return false,
            }
        }
    };
    guard.empty_body(ends).await.unwrap_or(false)
}

struct H2RequestBody<'a> {
    body: Incoming,
    /// Bytes of the last returned part; released to the caller's window when the next part is
    /// requested.
    unreleased: usize,
    /// The bytes are of another protocol, which has no trailers (RFC 9113 §8.5).
    switched: bool,
    stream: &'a RefCell<ResponseStream>,
}

impl H2RequestBody<'_> {
    fn release(&mut self) {
        let bytes = std::mem::take(&mut self.unreleased);
        if bytes > 0 {
            self.body.release(bytes);
        }
    }
}

impl H2RequestBody<'_> {
    /// Receives the rest of a request after its response: some callers drop the response when the
    /// rest is reset. If the rest is too long, dropping the body resets the stream without an error
    /// (RFC 9113 §8.1).
    async fn discard_rest(mut self, guard: &ConnectionGuard) {
        if !self.is_done() {
            guard
                .discard(self.discard(Some(limits::DISCARD_PAUSE)))
                .await;
        }
    }
}

impl Drop for H2RequestBody<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

impl RequestBody for H2RequestBody<'_> {
    async fn part(&mut self) -> Result<Part, BodyError> {
        self.release();
        match self.body.receive().await {
            Ok(Part::Data(data)) => {
                self.unreleased = data.len();
                Ok(Part::Data(data))
            }
            Ok(Part::Trailers(trailers))
                if self.switched || check_values_of_http2(&trailers).is_err() =>
            {
                self.stream.borrow_mut().reset(Reason::PROTOCOL_ERROR);
                Err(BodyError::Gone)
            }
            Ok(part) => Ok(part),
            Err(StreamError::TrailersTooLarge) => Err(BodyError::Malformed(InvalidBody::Trailers)),
            Err(StreamError::Closed) if self.switched => Ok(Part::Trailers(broken_off())),
            Err(StreamError::Closed) => Err(BodyError::Gone),
        }
    }

    fn is_done(&self) -> bool {
        self.body.is_done()
    }

    async fn gone(&mut self) -> CallerGone {
        // While the next hop does not read the body, received data is gathered in no more memory
        // than its bytes.
        self.body
            .gather_while(std::future::poll_fn(|cx| {
                self.stream.borrow_mut().poll_reset(cx)
            }))
            .await
    }

    fn was_taken_back(&mut self) -> bool {
        self.stream
            .borrow_mut()
            .poll_reset(&mut Context::from_waker(Waker::noop()))
            .is_ready()
    }

    fn is_reset(&mut self) -> bool {
        !self.switched && self.stream.borrow_mut().is_reset()
    }

    fn switch_protocols(&mut self) {
        self.switched = true;
    }
}
