//! HTTP/2 connections to a backend, shared by requests.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gw_shared::http::Part;
use gw_shared::http::framing::{self, Framing};
use gw_shared::runtime;
use gw_shared::tunnel::stream::{self as streams, Received};
use h2::client::{ResponseFuture, SendRequest};
use h2::ext::Protocol;
use h2::{Reason, RecvStream, SendStream};
use http::header::HeaderMap;
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, Request, Response, Uri, Version};

use super::ResponseError;
use super::connect::{ConnectError, explain_tls, tls_error};
use super::stream::Stream;

/// What a stream can hold at the agent while its caller does not read, in bytes: times the slots is the bound.
const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest there is, so that streams that stand still never stop the others.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Bytes that one stream may have queued for sending.
const STREAM_SEND_BUFFER: usize = 128 * 1024;
const FRAME_SIZE: u32 = 32 * 1024;
/// As much as fits into the tunnel's.
const HEADER_LIST: u32 = 60 * 1024;
/// Requests that callers cancelled and whose last frames may still be under way.
const RESET_STREAMS: usize = 1024;

/// Shorter than what servers allow (nginx 75 s, Envoy an hour): the backend seldom closes first.
const IDLE_FOR: Duration = Duration::from_secs(60);
/// A backend that acknowledges nothing for so long is gone. Long enough for one that is stopped for a while.
const DEAD_AFTER: Duration = Duration::from_secs(60);

/// One connection. It closes when it was dropped here and its last stream has ended.
pub(crate) struct Connection {
    requests: RefCell<SendRequest<Bytes>>,
    scheme: Scheme,
    streams: Cell<u32>,
    last_used: Cell<Instant>,
    /// Ended, or refused a request: not for further ones.
    is_over: Rc<Cell<bool>>,
}

impl Connection {
    /// Begins HTTP/2 and waits until the backend has shown that it speaks it too: its settings count from the first
    /// request on.
    pub(super) async fn start(stream: Stream) -> Result<Rc<Self>, ConnectError> {
        let scheme = if matches!(stream, Stream::Tls(_)) { Scheme::HTTPS } else { Scheme::HTTP };
        if let Err(error) = stream.socket().detect_dead_peer(DEAD_AFTER) {
            tracing::warn!(%error, "cannot set TCP keep-alive on a backend connection");
        }
        let mut builder = h2::client::Builder::new();
        builder
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(FRAME_SIZE)
            .max_header_list_size(HEADER_LIST)
            .max_send_buffer_size(STREAM_SEND_BUFFER)
            .max_concurrent_reset_streams(RESET_STREAMS)
            .max_local_error_reset_streams(None)
            .enable_push(false);
        let (requests, mut driver) = builder.handshake::<_, Bytes>(stream).await.map_err(|error| no_http2(&error))?;
        if let Some(mut ping_pong) = driver.ping_pong() {
            // Settings come first (RFC 9113 §3.4), so they are known once this is answered.
            ping_pong.send_ping(h2::Ping::opaque()).map_err(|error| no_http2(&error))?;
            let answered = std::future::poll_fn(|cx| match Pin::new(&mut driver).poll(cx) {
                Poll::Ready(ended) => Poll::Ready(ended.and(Err(Reason::NO_ERROR.into()))),
                Poll::Pending => ping_pong.poll_pong(cx).map_ok(drop),
            });
            answered.await.map_err(|error| no_http2(&error))?;
        }
        let is_over = Rc::new(Cell::new(false));
        let ended = Rc::clone(&is_over);
        runtime::spawn(async move {
            let error = driver.await.err().map(|error| error.to_string());
            ended.set(true);
            tracing::debug!(error, "backend connection ended");
        });
        let (streams, last_used) = (Cell::new(0), Cell::new(Instant::now()));
        Ok(Rc::new(Self { requests: RefCell::new(requests), scheme, streams, last_used, is_over }))
    }

    fn has_room(&self) -> bool {
        let most = self.requests.borrow().current_max_send_streams();
        !self.is_over.get() && usize::try_from(self.streams.get()).is_ok_and(|streams| streams < most)
    }

    /// Takes no further requests; those it has go on.
    pub(super) fn retire(&self) {
        self.is_over.set(true);
    }

    /// Begins a request; nothing of its body is sent yet.
    pub(super) fn request(
        &self,
        parts: &Parts,
        authority: &Authority,
        protocol: Option<&Protocol>,
        framing: Framing,
    ) -> Result<(SendStream<Bytes>, Exchange), ResponseError> {
        let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let uri = Uri::builder().scheme(self.scheme.clone()).authority(authority.clone()).path_and_query(path).build();
        let mut request = Request::new(());
        *request.method_mut() = if protocol.is_some() { Method::CONNECT } else { parts.method.clone() };
        // Built from valid parts.
        *request.uri_mut() = uri.map_err(|error| ResponseError::Reset(io::Error::other(error)))?;
        *request.version_mut() = Version::HTTP_2;
        *request.headers_mut() = parts.headers.clone();
        framing::set_content_length(request.headers_mut(), framing);
        if let Some(protocol) = protocol {
            request.extensions_mut().insert(protocol.clone());
        }
        // Bytes after an extended CONNECT are no body.
        let is_whole = protocol.is_none() && !framing.has_body();
        let sent = self.requests.borrow().clone().send_request(request, is_whole);
        // Fails before anything is sent.
        let (response, stream) = sent.map_err(|error| ResponseError::Unprocessed(error.to_string()))?;
        Ok((stream, Exchange { response, body: None, is_done: false }))
    }

    /// Whether it takes requests for other protocols (RFC 8441).
    pub(super) fn takes_protocols(&self) -> bool {
        self.requests.borrow().is_extended_connect_protocol_enabled()
    }
}

fn no_http2(error: &h2::Error) -> ConnectError {
    match error.get_io() {
        Some(io) if tls_error(io).is_some() => ConnectError::Tls { message: explain_tls(io), nothing_in_common: false },
        Some(io) => ConnectError::Unreachable(format!("it closed the connection before HTTP/2 had begun: {io}")),
        None => ConnectError::NotHttp2(format!("it does not speak HTTP/2: {error}")),
    }
}

/// A connection with a request's place on it.
pub(crate) struct Place(Rc<Connection>);

impl Place {
    fn new(connection: &Rc<Connection>) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        Self(Rc::clone(connection))
    }
}

impl std::ops::Deref for Place {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get() - 1);
        self.0.last_used.set(Instant::now());
    }
}

/// The connections to one backend.
#[derive(Default)]
pub(super) struct Connections {
    open: RefCell<Vec<Rc<Connection>>>,
    /// Held by whoever opens another: all who come meanwhile use that one.
    opening: tokio::sync::Mutex<()>,
    /// The last attempt that failed, and when: those who waited for it need not fail one after the other.
    failed: RefCell<Option<(Instant, ConnectError)>>,
}

impl Connections {
    /// A place on a connection that is open and has room.
    pub(super) fn place(&self) -> Option<Place> {
        let mut open = self.open.borrow_mut();
        open.retain(|connection| !connection.is_over.get());
        open.iter().find(|connection| connection.has_room()).map(Place::new)
    }

    /// A place on a connection that `open` opens, or somebody else just did.
    /// `shares` says whether what is opened can be shared at all, as far as it is known when it is asked.
    pub(super) async fn place_or<T>(
        &self,
        shares: impl Fn() -> bool,
        open: impl Future<Output = Result<Opened<T>, ConnectError>>,
    ) -> Result<Opened<T>, ConnectError> {
        let came = Instant::now();
        let only_one = self.opening.lock().await;
        if let Some(place) = self.place() {
            return Ok(Opened::Http2(place));
        }
        if let Some((when, error)) = &*self.failed.borrow()
            && *when >= came
        {
            return Err(error.clone());
        }
        let only_one = shares().then_some(only_one);
        let opened = open.await;
        drop(only_one);
        if let Err(error) = &opened {
            self.failed.replace(Some((Instant::now(), error.clone())));
        }
        opened
    }

    pub(super) fn keep(&self, connection: &Rc<Connection>) -> Place {
        self.open.borrow_mut().push(Rc::clone(connection));
        Place::new(connection)
    }

    /// Closes what has waited too long.
    pub(super) fn prune(&self) {
        let is_used = |connection: &Rc<Connection>| {
            connection.streams.get() > 0 || connection.last_used.get().elapsed() < IDLE_FOR
        };
        self.open.borrow_mut().retain(|connection| !connection.is_over.get() && is_used(connection));
    }

    /// Connections that have requests.
    pub(super) fn in_use(&self) -> usize {
        self.open.borrow().iter().filter(|connection| connection.streams.get() > 0).count()
    }

    /// Connections without a request.
    pub(super) fn idle(&self) -> usize {
        self.open.borrow().iter().filter(|connection| connection.streams.get() == 0).count()
    }
}

/// What a new connection speaks.
pub(super) enum Opened<T> {
    Http1(T),
    Http2(Place),
}

/// The response's half of an exchange.
pub(crate) struct Exchange {
    response: ResponseFuture,
    body: Option<RecvStream>,
    is_done: bool,
}

impl Exchange {
    /// The next head of a response to a request with `method`: interim ones (1xx) too.
    pub(super) async fn head(&mut self, method: &Method) -> Result<Response<()>, ResponseError> {
        if let Some(interim) = std::future::poll_fn(|cx| self.response.poll_informational(cx)).await {
            let mut interim = interim.map_err(ResponseError::of_http2)?;
            framing::check_values_of_http2(interim.headers())?;
            framing::set_content_length(interim.headers_mut(), Framing::None);
            return Ok(interim);
        }
        let (mut parts, body) = (&mut self.response).await.map_err(ResponseError::of_http2)?.into_parts();
        framing::check_values_of_http2(&parts.headers)?;
        let announced = framing::content_length(&parts.headers)?.map_or(Framing::Chunked, Framing::Length);
        let framing = match announced.of_response(parts.status, method) {
            // The other protocol's half follows, whatever the fields say (RFC 9110 §9.3.6).
            _ if *method == Method::CONNECT && parts.status.is_success() => Framing::UntilClose,
            framing => framing,
        };
        framing::set_content_length(&mut parts.headers, framing);
        // DATA after a response without a body resets the stream.
        self.is_done = matches!(framing, Framing::None | Framing::Described(_));
        self.body = Some(body);
        Ok(Response::from_parts(parts, ()))
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_done || self.body.as_ref().is_some_and(RecvStream::is_end_stream)
    }

    pub(super) async fn part(&mut self) -> Result<Part, ResponseError> {
        let cut_short = || ResponseError::Reset(io::ErrorKind::ConnectionReset.into());
        let body = self.body.as_mut().ok_or_else(cut_short)?;
        let received = std::future::poll_fn(|cx| streams::poll_receive(body, cx)).await.map_err(|_| cut_short())?;
        Ok(match received {
            Received::Data(data) => Part::Data(data),
            Received::Trailers(trailers) => {
                framing::check_values_of_http2(&trailers)?;
                self.is_done = true;
                Part::Trailers(trailers)
            }
            Received::End => {
                self.is_done = true;
                Part::End
            }
        })
    }

    /// `bytes` of the body have been passed on.
    pub(super) fn release(&mut self, bytes: usize) {
        if let Some(body) = &mut self.body {
            streams::release(body, bytes);
        }
    }
}

impl ResponseError {
    fn of_http2(error: h2::Error) -> Self {
        // Both mean that the backend has not begun (RFC 9113 §6.8, §8.7): h2 reports GOAWAY for no other streams.
        let refused = error.is_reset() && error.reason() == Some(Reason::REFUSED_STREAM);
        if error.is_remote() && (refused || error.is_go_away()) {
            return Self::Unprocessed(error.to_string());
        }
        if error.is_remote() || error.is_io() {
            let message = error.to_string();
            return Self::Reset(error.into_io().unwrap_or_else(|| io::Error::other(message)));
        }
        Self::Http2(error)
    }
}

/// Ends the request's body on its stream.
pub(super) fn finish(stream: &mut SendStream<Bytes>, trailers: Option<HeaderMap>) -> io::Result<()> {
    streams::finish(stream, trailers).map_err(|_| io::ErrorKind::BrokenPipe.into())
}
