//! An HTTP/1.1 connection to a backend.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};

use bytes::{Bytes, BytesMut};
use gw_shared::http::body::{self, BodyDecoder};
use gw_shared::http::head::{self as heads, Framing, HeadScanner, ResponseHead};
use gw_shared::http::{Connection, Part};
use gw_shared::tunnel::response::HEAD as HEAD_LIMITS;
use http::header::{self, HeaderMap};
use http::uri::PathAndQuery;
use http::{Method, StatusCode};

use super::ResponseError;
use super::buffers::BoundedBuffers;
use super::stream::Stream;

/// A connection that serves one request at a time. The request body can be sent while the response is read.
pub(crate) struct Http1Connection {
    stream: Stream,
    buffer: RefCell<BytesMut>,
    /// A byte of the current response has arrived.
    answered: Cell<bool>,
    /// Bytes that had been sent before the current request.
    sent_before: Cell<u64>,
    buffers: BoundedBuffers,
}

impl Http1Connection {
    /// `receive_limit` is the limit of the receive buffer, set when the socket connected.
    pub(super) fn new(stream: Stream, receive_limit: Option<usize>) -> Self {
        let buffers = BoundedBuffers::new(stream.socket(), receive_limit);
        Self { stream, buffer: RefCell::default(), answered: Cell::new(false), sent_before: Cell::new(0), buffers }
    }

    /// Adjusts the limit of the kernel buffers. Called before an idle connection serves another request.
    pub(super) fn fit_buffers(&self) {
        self.buffers.fit(self.stream.socket());
    }

    /// Whether no unread bytes and no end of the stream have arrived.
    pub(super) fn is_quiet(&self) -> bool {
        self.buffer.borrow().is_empty() && self.stream.is_quiet()
    }

    /// Whether the connection failed with `error` before the backend read the whole current request.
    pub(super) fn failed_before_request_was_read(&self, error: &io::Error) -> bool {
        // Closing a socket with unread bytes sends a reset; without unread bytes it sends a FIN. The same segment
        // acknowledges what the backend's kernel has received; it has not received unacknowledged bytes.
        let (socket, before) = (self.stream.socket(), self.sent_before.get());
        let unread = error.kind() == io::ErrorKind::ConnectionReset;
        let received = socket.sent() > before && socket.was_acknowledged_beyond(before);
        !self.answered.get() && (unread || !received)
    }

    pub(super) fn reset_when_dropped(&self) {
        self.stream.socket().reset_when_dropped();
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
        headers: &HeaderMap,
        framing: Framing,
        connection: Connection<'_>,
    ) -> io::Result<()> {
        self.answered.set(false);
        self.sent_before.set(self.stream.socket().sent());
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
            self.send(&mut [start, data, body::CHUNK_END].map(IoSlice::new)).await
        } else {
            self.send(&mut [IoSlice::new(data)]).await
        }
    }

    /// Ends the request body, or the sending direction of an upgraded connection.
    pub(super) async fn finish(&self, framing: Framing, trailers: Option<&HeaderMap>) -> io::Result<()> {
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
    pub(super) async fn response_head(&self, method: &Method) -> Result<ResponseHead, ResponseError> {
        let mut scanner = HeadScanner::default();
        let end = loop {
            let end = scanner.find_end(&mut self.buffer.borrow_mut(), HEAD_LIMITS)?;
            match end {
                Some(end) => break end,
                None if self.receive().await? == 0 => {
                    return Err(ResponseError::Reset(io::ErrorKind::UnexpectedEof.into()));
                }
                None => {}
            }
        };
        let bytes = self.buffer.borrow_mut().split_to(end).freeze();
        let mut head = heads::parse_response(&bytes, method, HEAD_LIMITS)?;
        if head.status == StatusCode::NO_CONTENT || head.status.is_informational() {
            // There is no body (RFC 9112 §6.3), but a backend that announces one may send it.
            let length = heads::content_length(&head.headers)?;
            let announces = length.is_some_and(|length| length > 0);
            head.keep_alive &= !announces && !head.headers.contains_key(header::TRANSFER_ENCODING);
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
            if self.receive().await? == 0 {
                decoder.finish()?;
            }
        }
    }

    /// Receives bytes into the buffer; 0 is the end of the stream.
    async fn receive(&self) -> Result<usize, ResponseError> {
        let received = std::future::poll_fn(|cx| self.stream.poll_recv_buf(cx, &mut self.buffer.borrow_mut())).await;
        let received = received.map_err(ResponseError::Reset)?;
        if received > 0 {
            self.answered.set(true);
        }
        Ok(received)
    }
}
