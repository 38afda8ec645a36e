//! An HTTP/1.1 connection to a backend.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use gw_shared::http::body::{self, BodyDecoder};
use gw_shared::http::connection_auth::binds_connection;
use gw_shared::http::head::{self as heads, Framing, HeadScanner, ResponseHead};
use gw_shared::http::{ConnectionField, Fields, Part};
use gw_shared::net::Acknowledger;
use gw_shared::tunnel::response::HEAD as HEAD_LIMITS;
use http::header::{self, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use http::{Method, StatusCode};

use super::ResponseError;
use super::buffers::BoundedBuffers;
use super::life::Lifetime;
use super::pool::IDLE_FOR;
use super::stream::BackendStream;

/// A connection that serves one request at a time. The request body can be sent while the response
/// is read.
pub(crate) struct Http1Connection {
    stream: BackendStream,
    buffer: RefCell<BytesMut>,
    /// A byte of the current response has arrived.
    answered: Cell<bool>,
    /// How long the backend keeps the connection open without a request, at least.
    /// `None` before the first response, which announces it for all.
    idle_for: Cell<Option<Duration>>,
    buffers: BoundedBuffers,
    acknowledger: Acknowledger,
    /// Bytes of another protocol follow, and nothing tells whether a message of it is complete.
    is_upgraded: Cell<bool>,
    /// The exchange broke off: an orderly end could pass for the end of its request.
    is_aborted: Cell<bool>,
    /// The backend has bound an identity to the connection, or has begun to.
    is_bound: Cell<bool>,
    lifetime: Lifetime,
}

impl Http1Connection {
    /// `receive_limit` is the limit of the receive buffer, set when the socket connected.
    pub(super) fn new(
        stream: BackendStream,
        receive_limit: Option<usize>,
        lifetime: Lifetime,
    ) -> Self {
        let buffers = BoundedBuffers::new(stream.socket(), receive_limit);
        let acknowledger = stream.socket().acknowledger();
        Self {
            stream,
            buffer: RefCell::default(),
            answered: Cell::new(false),
            idle_for: Cell::default(),
            buffers,
            acknowledger,
            is_upgraded: Cell::new(false),
            is_aborted: Cell::new(false),
            is_bound: Cell::new(false),
            lifetime,
        }
    }

    /// Begins an exchange. Called before its request is sent and its response is read.
    pub(super) fn begin(&self) {
        self.answered.set(false);
    }

    /// The backend has upgraded the connection.
    pub(super) fn upgraded(&self) {
        self.is_upgraded.set(true);
    }

    pub(super) fn is_bound(&self) -> bool {
        self.is_bound.get()
    }

    /// Whether the connection is too old for further requests.
    pub(super) fn is_outdated(&self, now: Instant) -> bool {
        self.lifetime.is_over(now)
    }

    /// Adjusts the limit of the kernel buffers. Called before an idle connection serves another
    /// request.
    pub(super) fn fit_buffers(&self) {
        self.buffers.fit(self.stream.socket());
    }

    /// Whether no unread bytes and no end of the stream have arrived.
    pub(super) fn is_quiet(&self) -> bool {
        self.buffer.borrow().is_empty() && self.stream.is_quiet()
    }

    /// Whether a byte of the current response has arrived.
    pub(super) fn has_answered(&self) -> bool {
        self.answered.get()
    }

    /// How long an idle connection is used again.
    pub(super) fn idle_for(&self) -> Duration {
        self.idle_for.get().unwrap_or(IDLE_FOR)
    }

    pub(super) fn reset_when_dropped(&self) {
        self.is_aborted.set(true);
        self.stream.socket().reset_when_dropped();
    }

    /// Waits until the kernel of the backend has acknowledged all sent bytes.
    pub(super) async fn delivered(&self) {
        self.stream.socket().acknowledged().await;
    }

    async fn send(&self, pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
        self.stream.send_all(pieces).await
    }

    /// Sends a request head.
    pub(super) async fn send_head(
        &self,
        method: &Method,
        target: &PathAndQuery,
        host: &[u8],
        headers: &Fields,
        framing: Framing,
        connection: ConnectionField<'_>,
    ) -> io::Result<()> {
        let mut out = Vec::with_capacity(1024);
        heads::write_request(&mut out, method, target, host, headers, framing, connection);
        self.send(&mut [IoSlice::new(&out)]).await
    }

    /// Sends a piece of the request body.
    pub(super) async fn send_data(&self, data: &Bytes, framing: Framing) -> io::Result<()> {
        // An empty chunk would end the body.
        if data.is_empty() {
            return Ok(());
        }
        let mut size = [0; 18];
        if framing == Framing::Chunked {
            let start = body::chunk_start(data.len(), &mut size);
            self.send(&mut [start, data, body::CHUNK_END].map(IoSlice::new))
                .await
        } else {
            self.send(&mut [IoSlice::new(data)]).await
        }
    }

    /// Ends the request body, or the sending direction of an upgraded connection.
    pub(super) async fn finish(
        &self,
        framing: Framing,
        trailers: Option<&Fields>,
    ) -> io::Result<()> {
        match framing {
            Framing::Chunked => {}
            Framing::UntilClose => return self.stream.end_sending().await,
            Framing::None | Framing::Described(_) | Framing::Length(_) => return Ok(()),
        }
        let mut out = Vec::new();
        body::write_last_chunk(&mut out, trailers);
        self.send(&mut [IoSlice::new(&out)]).await
    }

    /// Reads a response head, interim (1xx) or final.
    pub(super) async fn response_head(
        &self,
        method: &Method,
    ) -> Result<ResponseHead, ResponseError> {
        let mut scanner = HeadScanner::default();
        let head = poll_fn(|cx| {
            let receive = |cx: &mut Context<'_>, buffer: &mut BytesMut| {
                // A server of another protocol may wait for its client now.
                check_beginning(buffer)?;
                self.poll_receive(cx, buffer)
            };
            scanner.poll_head(cx, &mut self.buffer.borrow_mut(), HEAD_LIMITS, receive)
        });
        let head = head
            .await?
            .ok_or_else(|| ResponseError::Reset(io::ErrorKind::UnexpectedEof.into()))?;
        let mut head = heads::parse_response(&head, method, HEAD_LIMITS)?;
        if binds_connection(&head.headers) {
            self.is_bound.set(true);
        }
        if head.status == StatusCode::NO_CONTENT || head.status.is_informational() {
            // There is no body (RFC 9112 §6.3), but a backend that announces one may send it.
            let length = heads::content_length(&head.headers)?;
            let announces = length.is_some_and(|length| length > 0);
            head.keep_alive &= !announces && !head.headers.contains(header::TRANSFER_ENCODING);
        }
        if self.idle_for.get().is_none() && !head.status.is_informational() {
            let announced = head.headers.get(KEEP_ALIVE).and_then(keep_alive_timeout);
            let before_the_backend = announced
                .map(|timeout| timeout.saturating_sub(Duration::from_secs(1)))
                .unwrap_or(IDLE_FOR);
            self.idle_for.set(Some(before_the_backend.min(IDLE_FOR)));
        }
        Ok(head)
    }

    /// Reads the next part of a response body.
    pub(super) async fn part(&self, decoder: &mut BodyDecoder) -> Result<Part, ResponseError> {
        loop {
            let part = decoder.decode(&mut self.buffer.borrow_mut())?;
            if let Some(part) = part {
                return Ok(part);
            }
            if poll_fn(|cx| self.poll_receive(cx, &mut self.buffer.borrow_mut())).await? == 0 {
                decoder.finish()?;
            }
        }
    }

    /// Receives more bytes of an incomplete response into the buffer; 0 is the end of the stream.
    fn poll_receive(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
    ) -> Poll<Result<usize, ResponseError>> {
        let received = self.stream.poll_recv_buf(cx, buffer);
        match received {
            // The backend may keep the rest until the beginning is acknowledged.
            Poll::Pending if self.answered.get() && !self.is_upgraded.get() => {
                self.acknowledger.acknowledge();
            }
            Poll::Ready(Ok(1..)) => self.answered.set(true),
            _ => {}
        }
        received.map_err(ResponseError::of_io)
    }
}

impl Drop for Http1Connection {
    fn drop(&mut self) {
        if !self.is_aborted.get() {
            self.stream.close_now();
        }
    }
}

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// Time that a backend announces to keep an idle connection open (RFC 2068 §19.7.1.1).
fn keep_alive_timeout(value: &HeaderValue) -> Option<Duration> {
    let mut parameters = value.to_str().ok()?.split(',');
    parameters.find_map(|parameter| {
        let (name, seconds) = parameter.split_once('=')?;
        let is_timeout = name.trim().eq_ignore_ascii_case("timeout");
        let seconds = seconds.trim().parse().ok().filter(|_| is_timeout)?;
        Some(Duration::from_secs(seconds))
    })
}

/// Refuses an incomplete answer that does not begin as one of HTTP/1.1 does (RFC 9112 §4).
fn check_beginning(received: &[u8]) -> Result<(), ResponseError> {
    /// Types of TLS records that a server may send first: alert and handshake (RFC 8446 §5.1).
    const TLS_RECORDS: [u8; 2] = [21, 22];
    const VERSION: &[u8] = b"HTTP/";
    // An empty line may come before the answer.
    if received == b"\r" || VERSION.starts_with(&received[..received.len().min(VERSION.len())]) {
        return Ok(());
    }
    Err(ResponseError::NotHttp(
        if TLS_RECORDS.contains(&received[0]) {
            "it speaks TLS; use https:// in its URL"
        } else {
            "another program listens there; correct the port in its URL"
        },
    ))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use gw_shared::error_code::AgentErrorCode;

    use super::*;
    use crate::testing::{block_on, connect};

    /// Runs a test with a connection and its backend.
    fn with_backend<F: Future<Output = ()>>(test: impl FnOnce(Http1Connection, TcpStream) -> F) {
        block_on(async {
            let (socket, backend) = connect().await;
            let stream = BackendStream::Plain(socket);
            let connection = Http1Connection::new(stream, None, Lifetime::default());
            test(connection, backend).await;
        });
    }

    /// Sends a request and reads its response, of which the backend writes each piece after the one
    /// before has been read.
    async fn exchange(connection: &Http1Connection, backend: &mut TcpStream, pieces: &[&str]) {
        connection.begin();
        let request = &mut [IoSlice::new(b"request")];
        connection.send(request).await.unwrap();
        backend.read_exact(&mut [0; 7]).unwrap();
        let mut read = std::pin::pin!(async {
            loop {
                let head = connection.response_head(&Method::GET).await.unwrap();
                let mut decoder = BodyDecoder::new(head.framing);
                while !decoder.is_done() {
                    connection.part(&mut decoder).await.unwrap();
                }
                if !head.status.is_informational() {
                    break;
                }
            }
        });
        let carried = || connection.stream.socket().buffers().carried();
        for (number, piece) in pieces.iter().enumerate() {
            backend.write_all(piece.as_bytes()).unwrap();
            let target = carried() + piece.len() as u64;
            let until = poll_fn(|cx| match read.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(true),
                Poll::Pending if carried() == target => Poll::Ready(false),
                Poll::Pending => Poll::Pending,
            });
            assert_eq!(until.await, number + 1 == pieces.len());
        }
    }

    #[test]
    fn incomplete_responses_are_acknowledged_once() {
        const NO_CONTENT: &str = "HTTP/1.1 204 No Content\r\n\r\n";
        const LENGTH: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n";
        const CHUNK: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n";
        with_backend(|connection, mut backend| async move {
            let mut before = 0;
            for (pieces, expected) in [
                // Complete when they are read: no system call.
                (&[NO_CONTENT][..], 0),
                (&[&format!("{LENGTH}body")], 0),
                (&[&format!("{CHUNK}0\r\n\r\n")], 0),
                (&[LENGTH, "body"], 1),
                (
                    &[
                        "HTTP/1.1 200 OK\r\n",
                        "Content-Length: 4\r\n\r\n",
                        "bo",
                        "dy",
                    ],
                    1,
                ),
                (&[CHUNK, "0\r\n\r\n"], 1),
                (&["HTTP/1.1 103 Early Hints\r\n\r\n", NO_CONTENT], 1),
                (&[NO_CONTENT], 0),
            ] {
                exchange(&connection, &mut backend, pieces).await;
                let calls = connection.acknowledger.calls();
                assert_eq!(calls - before, expected, "{pieces:?}");
                before = calls;
            }
        });
    }

    #[test]
    fn an_announced_timeout_shortens_the_reuse() {
        for (field, seconds) in [
            ("X: 1", 4),
            ("Keep-Alive: timeout=60", 4),
            ("Keep-Alive: timeout=5, max=100", 4),
            ("Keep-Alive: max=100, Timeout = 3", 2),
            ("Keep-Alive: timeout=x", 4),
            ("Keep-Alive: timeout=1", 0),
            ("Keep-Alive: timeout=0", 0),
        ] {
            with_backend(|connection, mut backend| async move {
                let answer = format!("HTTP/1.1 200 OK\r\n{field}\r\nContent-Length: 0\r\n\r\n");
                for _ in 0..2 {
                    exchange(&connection, &mut backend, &[&answer]).await;
                    let idle_for = connection.idle_for();
                    assert_eq!(idle_for, Duration::from_secs(seconds), "{field}");
                }
            });
        }
    }

    #[test]
    fn answers_of_other_protocols_are_refused_at_once() {
        for (answer, expected) in [
            (&b"SSH-2.0-OpenSSH_9.2\r\n"[..], "another program listens"),
            (b"-ERR unknown command\r\n", "another program listens"),
            (b"\x15\x03\x01\x00\x02\x02F", "it speaks TLS; use https://"),
            (b"\r\n220 mail\r\n", "another program listens"),
        ] {
            with_backend(|connection, mut backend| async move {
                backend.write_all(answer).unwrap();
                let error = connection.response_head(&Method::GET).await.unwrap_err();
                let message = error.message(false);
                assert!(message.contains(expected), "{message}");
                assert_eq!(error.code(), AgentErrorCode::BackendInvalidResponse);
            });
        }
        for incomplete in [&b""[..], b"\r", b"H", b"HTTP/", b"HTTP/1.1 200"] {
            assert!(check_beginning(incomplete).is_ok());
        }
    }

    #[test]
    fn upgraded_connections_are_left_to_the_kernel() {
        with_backend(|connection, mut backend| async move {
            connection.upgraded();
            let mut decoder = BodyDecoder::new(Framing::UntilClose);
            for _ in 0..2 {
                connection.send(&mut [IoSlice::new(b"ping")]).await.unwrap();
                backend.read_exact(&mut [0; 4]).unwrap();
                backend.write_all(b"pong").unwrap();
                let part = connection.part(&mut decoder).await.unwrap();
                assert_eq!(part, Part::Data(Bytes::from_static(b"pong")));
            }
            let next = std::pin::pin!(connection.part(&mut decoder));
            assert!(futures_util::poll!(next).is_pending());
            assert_eq!(connection.acknowledger.calls(), 0);
        });
    }
}
