//! HTTP/2 connections to a backend, shared by concurrent requests.

mod ping;
mod response;

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use gw_shared::http::framing::{self, Framing};
use gw_shared::http::{Fields, RequestHead};
use gw_shared::http2::stream as streams;
use gw_shared::net::Acknowledger;
use gw_shared::runtime;
use gw_shared::tunnel::response::HEAD as HEAD_LIMITS;
use h2::client::SendRequest;
use h2::ext::Protocol;
use h2::{Ping, PingPong, Reason, SendStream};
use http::header;
use http::uri::{Authority, Scheme};
use http::{Method, Request, Uri, Version};
use tokio::sync::Notify;

use self::ping::{Look, Silence, Verdict};
use self::response::AwaitedHead;
pub(super) use self::response::Http2Response;
use super::ResponseError;
use super::connect::{Attempt, ConnectError, explain_tls};
use super::life::Lifetime;
use super::stream::{BackendStream, ReadToEnd};
use crate::tls::rustls_error;

/// Bytes that a stream can buffer at the agent while its caller does not read. The number of slots
/// bounds the streams.
const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest window, so that stalled streams do not stall others.
const CONNECTION_WINDOW: u32 = (1 << 31) - 1;
/// Bytes that one stream may have queued for sending.
const STREAM_SEND_BUFFER: usize = 128 * 1024;
const FRAME_SIZE: u32 = 32 * 1024;
/// Header list size of the largest head: each field counts 32 bytes and its text (RFC 9113 §6.5.2),
/// and so does `:status`.
const HEADER_LIST: u32 = (HEAD_LIMITS.head + 32 * (HEAD_LIMITS.fields + 2)) as u32;
/// Cancelled requests whose last frames may still arrive.
const RESET_STREAMS: usize = 1024;

/// Shorter than the idle timeouts of common servers (nginx 75 s, Envoy one hour), so that the
/// backend rarely closes first.
const IDLE_FOR: Duration = Duration::from_secs(60);

/// A connection. It closes after it has been dropped and its last stream has ended.
pub(crate) struct Http2Connection {
    requests: RefCell<SendRequest<Bytes>>,
    scheme: Scheme,
    streams: Cell<u32>,
    last_used: Cell<Instant>,
    state: Rc<ConnectionState>,
    acknowledger: Rc<Acknowledger>,
    silence: RefCell<Silence>,
    ping_pong: RefCell<Option<PingPong>>,
    /// Gone once the connection has ended.
    lifetime: Weak<Lifetime>,
    /// Bytes that had arrived at the last look.
    received: Cell<u64>,
}

/// State that the tasks of one connection share.
#[derive(Default)]
pub(super) struct ConnectionState {
    /// The connection has ended or refused a request, and gets no further requests.
    is_retired: Cell<bool>,
    /// Requests without a response head.
    awaited: Cell<u32>,
    /// HEADERS or DATA have arrived since the last look.
    has_message: Cell<bool>,
    /// Notified when a PING is not answered: requests that can be repeated go to another
    /// connection.
    unanswered: Notify,
}

impl ConnectionState {
    /// Excludes the connection from further requests; running ones continue.
    pub(super) fn retire(&self) {
        self.is_retired.set(true);
    }
}

impl Http2Connection {
    /// Starts HTTP/2 and waits for the backend's SETTINGS, so that its limits apply from the first
    /// request on.
    pub(super) async fn start(
        stream: BackendStream,
        lifetime: Lifetime,
    ) -> Result<Rc<Self>, ConnectError> {
        let scheme = if matches!(stream, BackendStream::Tls(_)) {
            Scheme::HTTPS
        } else {
            Scheme::HTTP
        };
        let acknowledger = Rc::new(stream.socket().acknowledger());
        let state = Rc::<ConnectionState>::default();
        let stream = ReadToEnd::new(stream, Rc::clone(&state));
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
        let (requests, mut driver) = builder
            .handshake::<_, Bytes>(stream)
            .await
            .map_err(|error| start_error(&error, &scheme))?;
        let mut ping_pong = driver.ping_pong();
        if let Some(ping_pong) = &mut ping_pong {
            // SETTINGS come first (RFC 9113 §3.4), so they are known once the ping is answered.
            ping_pong
                .send_ping(Ping::opaque())
                .map_err(|error| start_error(&error, &scheme))?;
            let answered = std::future::poll_fn(|cx| match Pin::new(&mut driver).poll(cx) {
                Poll::Ready(ended) => Poll::Ready(ended.and(Err(Reason::NO_ERROR.into()))),
                Poll::Pending => ping_pong.poll_pong(cx).map_ok(drop),
            });
            answered
                .await
                .map_err(|error| start_error(&error, &scheme))?;
        }
        let ended = Rc::clone(&state);
        let lifetime = Rc::new(lifetime);
        let watched = Rc::downgrade(&lifetime);
        runtime::spawn(async move {
            let error = driver.await.err().map(|error| error.to_string());
            drop(lifetime);
            ended.retire();
            tracing::debug!(error, "backend connection ended");
        });
        let streams = Cell::new(0);
        let last_used = Cell::new(Instant::now());
        Ok(Rc::new(Self {
            requests: RefCell::new(requests),
            scheme,
            streams,
            last_used,
            state,
            acknowledger,
            silence: RefCell::default(),
            ping_pong: RefCell::new(ping_pong),
            lifetime: watched,
            received: Cell::default(),
        }))
    }

    pub(super) fn has_room(&self) -> bool {
        let mut requests = self.requests.borrow_mut();
        // Fails once GOAWAY was received or the connection has ended. Needs no waker: only handles
        // that sent a request wait.
        let ready = requests.poll_ready(&mut Context::from_waker(Waker::noop()));
        let most = requests.current_max_send_streams();
        matches!(ready, Poll::Ready(Ok(())))
            && !self.state.is_retired.get()
            && usize::try_from(self.streams.get()).is_ok_and(|streams| streams < most)
    }

    /// Excludes the connection from further requests; running ones continue.
    pub(super) fn retire(&self) {
        self.state.retire();
    }

    /// Retires a connection that is too old. Sends a PING if the backend is silent while a request
    /// awaits its response; if it has no answer, retires the connection, lets the requests that may
    /// move do so, and returns `true`. Called once a second.
    fn look(&self) -> bool {
        let Some(lifetime) = self.lifetime.upgrade() else {
            return false;
        };
        if lifetime.is_over(Instant::now()) {
            self.retire();
        }
        // Connections on this machine are not watched.
        let Some(live) = &lifetime.live else {
            return false;
        };
        let look = Look {
            awaits_response: self.state.awaited.get() > 0,
            has_received: self.received.replace(live.received()) != live.received(),
            has_message: self.state.has_message.take(),
        };
        match self.silence.borrow_mut().look(look) {
            Verdict::Waits => false,
            Verdict::SendPing => {
                if let Some(ping_pong) = &mut *self.ping_pong.borrow_mut() {
                    // Takes the answer to the PING before, without which no other is sent.
                    let _ = ping_pong.poll_pong(&mut Context::from_waker(Waker::noop()));
                    // Fails if the connection has ended.
                    let _ = ping_pong.send_ping(Ping::opaque());
                }
                false
            }
            Verdict::Unanswered => {
                self.retire();
                self.state.unanswered.notify_waiters();
                true
            }
        }
    }

    /// Sends a request head. One that `may_move` ends with [`ResponseError::Unanswered`] if the
    /// backend does not answer a PING.
    pub(super) fn request(
        &self,
        head: &RequestHead,
        authority: &Authority,
        protocol: Option<&Protocol>,
        may_move: bool,
    ) -> Result<(SendStream<Bytes>, Http2Response), ResponseError> {
        let uri = Uri::builder()
            .scheme(self.scheme.clone())
            .authority(authority.clone())
            .path_and_query(head.target.clone())
            .build();
        let mut request = Request::new(());
        *request.method_mut() = if protocol.is_some() {
            Method::CONNECT
        } else {
            head.method.clone()
        };
        // Never fails: the parts are valid.
        *request.uri_mut() = uri.map_err(|error| ResponseError::Reset(io::Error::other(error)))?;
        *request.version_mut() = Version::HTTP_2;
        let mut headers = head.headers.clone();
        // HTTP/2 has no such fields (RFC 9113 §8.2.2).
        headers.retain(|name| {
            ![
                header::TRANSFER_ENCODING,
                header::CONNECTION,
                header::UPGRADE,
            ]
            .contains(name)
        });
        // An extended CONNECT is followed by bytes of the protocol, whatever the framing.
        let framing = if protocol.is_some() {
            Framing::None
        } else {
            head.framing
        };
        framing::set_content_length(&mut headers, framing);
        *request.headers_mut() = headers.into();
        if let Some(protocol) = protocol {
            request.extensions_mut().insert(protocol.clone());
        }
        let is_whole = protocol.is_none() && !framing.has_body();
        let sent = self
            .requests
            .borrow()
            .clone()
            .send_request(request, is_whole);
        // An error here means that nothing was sent.
        let (response, stream) = sent.map_err(|error| ResponseError::Unprocessed {
            reason: error.to_string(),
            ends_connection: true,
        })?;
        let awaited = AwaitedHead::new(&self.state, may_move);
        Ok((
            stream,
            Http2Response::new(response, awaited, Rc::clone(&self.acknowledger)),
        ))
    }

    /// Whether the backend accepts extended CONNECT (RFC 8441).
    pub(super) fn accepts_extended_connect(&self) -> bool {
        self.requests
            .borrow()
            .is_extended_connect_protocol_enabled()
    }
}

const CLOSED_EARLY: &str = "it closed the connection before the HTTP/2 settings arrived";

fn start_error(error: &h2::Error, scheme: &Scheme) -> ConnectError {
    match error.get_io() {
        Some(io) if rustls_error(io).is_some() => ConnectError::Tls {
            message: explain_tls(io),
            problem: None,
        },
        Some(io) => ConnectError::Unreachable(format!("{CLOSED_EARLY}: {io}")),
        None if error.reason() == Some(Reason::NO_ERROR) => {
            ConnectError::Unreachable(CLOSED_EARLY.to_owned())
        }
        None if *scheme == Scheme::HTTPS => ConnectError::NotHttp2(format!(
            "it does not speak HTTP/2, although it has selected it: {error}; set `http_version = \
             \"1.1\"`"
        )),
        None => ConnectError::NotHttp2(format!(
            "it does not speak HTTP/2: {error}; use http:// in its URL, or its port for HTTP/2"
        )),
    }
}

/// A connection with one stream reserved on it.
pub(crate) struct ReservedStream(Rc<Http2Connection>);

impl ReservedStream {
    fn new(connection: &Rc<Http2Connection>) -> Self {
        connection.streams.set(connection.streams.get() + 1);
        Self(Rc::clone(connection))
    }
}

impl std::ops::Deref for ReservedStream {
    type Target = Http2Connection;

    fn deref(&self) -> &Http2Connection {
        &self.0
    }
}

impl Drop for ReservedStream {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get() - 1);
        self.0.last_used.set(Instant::now());
    }
}

/// The connections to one backend.
#[derive(Default)]
pub(super) struct Http2Connections {
    open: RefCell<Vec<Rc<Http2Connection>>>,
    /// Held while a connection is being opened, so that concurrent requests share it.
    opening: tokio::sync::Mutex<()>,
    /// The last failed attempt and its time. Requests that waited for it fail with the same error.
    failed: RefCell<Option<(Instant, ConnectError)>>,
}

impl Http2Connections {
    /// Reserves a stream on an open connection that has capacity.
    pub(super) fn reserve(&self) -> Option<ReservedStream> {
        let mut open = self.open.borrow_mut();
        open.retain(|connection| !connection.state.is_retired.get());
        open.iter()
            .find(|connection| connection.has_room())
            .map(ReservedStream::new)
    }

    /// Reserves a stream on a connection opened by `open`, or by a concurrent call, which is waited
    /// for within `limit`. `is_shared` tells whether the connections of this backend can be shared,
    /// as far as that is known.
    pub(super) async fn reserve_or_open<T>(
        &self,
        limit: Duration,
        is_shared: impl Fn() -> bool,
        open: impl Future<Output = Result<NewConnection<T>, ConnectError>>,
    ) -> Result<NewConnection<T>, ConnectError> {
        let arrived = Instant::now();
        let opening = Attempt::within(limit, async |attempt| {
            attempt.awaits("another request has not connected either".to_owned());
            Ok(self.opening.lock().await)
        });
        let opening = opening.await?;
        if let Some(stream) = self.reserve() {
            return Ok(NewConnection::Http2(stream));
        }
        if let Some((when, error)) = &*self.failed.borrow()
            && *when >= arrived
        {
            return Err(error.clone());
        }
        let opening = is_shared().then_some(opening);
        let opened = open.await;
        drop(opening);
        if let Err(error) = &opened {
            self.failed.replace(Some((Instant::now(), error.clone())));
        }
        opened
    }

    /// Adds a connection and reserves a stream on it.
    pub(super) fn add(&self, connection: &Rc<Http2Connection>) -> ReservedStream {
        self.open.borrow_mut().push(Rc::clone(connection));
        ReservedStream::new(connection)
    }

    /// Closes connections that have been idle for too long.
    pub(super) fn prune(&self) {
        let is_used = |connection: &Rc<Http2Connection>| {
            connection.streams.get() > 0 || connection.last_used.get().elapsed() < IDLE_FOR
        };
        self.open
            .borrow_mut()
            .retain(|connection| !connection.state.is_retired.get() && is_used(connection));
    }

    /// Looks at each connection. Returns the number of those on which a PING was not answered.
    pub(super) fn look(&self) -> usize {
        let open = self.open.borrow();
        open.iter().filter(|connection| connection.look()).count()
    }

    /// Number of connections with requests.
    pub(super) fn in_use(&self) -> usize {
        self.open
            .borrow()
            .iter()
            .filter(|connection| connection.streams.get() > 0)
            .count()
    }

    /// Number of connections without requests.
    pub(super) fn idle(&self) -> usize {
        self.open
            .borrow()
            .iter()
            .filter(|connection| connection.streams.get() == 0)
            .count()
    }
}

/// A new connection, by the HTTP version it speaks.
pub(super) enum NewConnection<T> {
    Http1(T),
    Http2(ReservedStream),
}

/// Ends the request body.
pub(super) fn finish(stream: &mut SendStream<Bytes>, trailers: Option<Fields>) -> io::Result<()> {
    streams::finish(stream, trailers).map_err(|_| io::ErrorKind::BrokenPipe.into())
}

#[cfg(test)]
mod tests {
    use gw_shared::http::Part;
    use gw_shared::net::Socket;
    use h2::server::SendResponse;
    use http::Response;
    use tokio::sync::mpsc;

    use super::*;
    use crate::testing::{block_on, connect};

    /// Otherwise the connection would be asked with PINGs when nothing is due.
    #[test]
    fn a_head_is_awaited_until_it_has_arrived_or_the_caller_has_gone() {
        let state = Rc::new(ConnectionState::default());
        let [first, second] = [true, false].map(|may_move| AwaitedHead::new(&state, may_move));
        assert_eq!(state.awaited.get(), 2);
        drop(first);
        assert_eq!(state.awaited.get(), 1);
        drop(second);
        assert_eq!(state.awaited.get(), 0);
    }

    #[test]
    fn a_head_without_its_body_is_acknowledged_once() {
        block_on(async {
            let (socket, backend) = connect().await;
            let backend = BackendStream::Plain(Socket::from_fd(backend.into()).unwrap());
            let (accepted, mut responds) = mpsc::unbounded_channel();
            runtime::spawn(async move {
                let mut backend = h2::server::handshake(backend).await.unwrap();
                while let Some(Ok((_, respond))) = backend.accept().await {
                    accepted.send(respond).unwrap();
                }
            });
            let socket = BackendStream::Plain(socket);
            let connection = Http2Connection::start(socket, Lifetime::default()).await;
            let connection = connection.unwrap();
            let request = Bytes::from_static(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n");
            let request = gw_shared::tunnel::head::parse_request(&request, true).unwrap();
            let authority = Authority::from_static("localhost");
            for calls in 0..3 {
                let begin = || {
                    let begun = connection.request(&request, &authority, None, false);
                    begun.unwrap().1
                };

                let mut response = begin();
                let mut respond: SendResponse<Bytes> = responds.recv().await.unwrap();
                let mut body = respond.send_response(Response::new(()), false).unwrap();
                body.send_data(Bytes::from_static(b"whole"), true).unwrap();
                response.head(&Method::GET).await.unwrap();
                let part = response.part().await.unwrap();
                assert_eq!(part, Part::Data(Bytes::from_static(b"whole")));
                assert_eq!(connection.acknowledger.calls(), calls);

                let mut response = begin();
                let mut respond = responds.recv().await.unwrap();
                let mut body = respond.send_response(Response::new(()), false).unwrap();
                response.head(&Method::GET).await.unwrap();
                for piece in ["head", "and", "body"] {
                    assert!(futures_util::poll!(std::pin::pin!(response.part())).is_pending());
                    body.send_data(Bytes::from(piece), false).unwrap();
                    let part = response.part().await.unwrap();
                    assert_eq!(part, Part::Data(Bytes::from(piece)));
                }
                assert_eq!(connection.acknowledger.calls(), calls + 1);
            }
        });
    }
}
