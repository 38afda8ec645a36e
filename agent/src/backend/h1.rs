//! An HTTP/1.1 connection to a backend.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};

use bytes::{Bytes, BytesMut};
use gw_shared::http::body::{self, BodyDecoder};
use gw_shared::http::head::{self, Framing, HeadLimits, HeadScanner, ResponseHead};
use gw_shared::http::{InvalidBody, InvalidHead, Part};
use gw_shared::net::Socket;
use http::header::HeaderMap;
use http::uri::PathAndQuery;
use http::{Method, StatusCode};

/// Bounds on a backend's response head. They are the backend's owner's: generous, but a bound.
const HEAD_LIMITS: HeadLimits = HeadLimits { head: 60 * 1024, fields: 120, target: 0 };

/// A connection to a backend. One request at a time; its body can be written while the response is read.
pub(crate) struct Connection {
    socket: Socket,
    buffer: RefCell<BytesMut>,
    /// Some byte of the current response has arrived.
    answered: Cell<bool>,
    /// Bytes sent before the current request, and in all.
    sent_before: Cell<u64>,
    sent: Cell<u64>,
}

/// Why there is no (whole) response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResponseError {
    #[error("the backend closed the connection: {0}")]
    Reset(io::Error),
    #[error("the backend's response is not valid HTTP: {0}")]
    Head(#[from] InvalidHead),
    #[error("the backend's response is not valid HTTP: {0}")]
    Body(#[from] InvalidBody),
    #[error("the backend's response is not valid HTTP: it switches protocols unasked")]
    Upgrade,
}

impl Connection {
    pub(crate) fn new(socket: Socket) -> Self {
        Self {
            socket,
            buffer: RefCell::default(),
            answered: Cell::new(false),
            sent_before: Cell::new(0),
            sent: Cell::new(0),
        }
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.buffer.borrow().is_empty() && self.socket.is_quiet()
    }

    /// Whether the backend can have seen something of the current request, or has even answered.
    pub(crate) fn took_the_request(&self) -> bool {
        // A backend that closes tells in the same segment what it has received: what it does not acknowledge there,
        // it did not get.
        self.answered.get() || self.socket.was_acknowledged_beyond(self.sent_before.get())
    }

    async fn send(&self, pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
        self.sent.set(self.sent.get() + pieces.iter().map(|piece| piece.len() as u64).sum::<u64>());
        self.socket.send_all(pieces).await
    }

    /// Sends a request head.
    pub(crate) async fn send_head(
        &self,
        method: &Method,
        target: &PathAndQuery,
        host: &[u8],
        headers: &HeaderMap,
        framing: Framing,
    ) -> io::Result<()> {
        self.answered.set(false);
        self.sent_before.set(self.sent.get());
        let mut out = Vec::with_capacity(1024);
        head::write_request(&mut out, method, target, host, headers, framing);
        self.send(&mut [IoSlice::new(&out)]).await
    }

    /// Sends a piece of the request body.
    pub(crate) async fn send_data(&self, data: &Bytes, framing: Framing) -> io::Result<()> {
        let mut size = [0; 18];
        if framing == Framing::Chunked {
            let start = body::chunk_start(data.len(), &mut size);
            self.send(&mut [start, data, body::CHUNK_END].map(IoSlice::new)).await
        } else {
            self.send(&mut [IoSlice::new(data)]).await
        }
    }

    /// Ends the request body.
    pub(crate) async fn finish(&self, framing: Framing, trailers: Option<&HeaderMap>) -> io::Result<()> {
        if framing != Framing::Chunked {
            return Ok(());
        }
        let mut out = Vec::new();
        body::write_last_chunk(&mut out, trailers);
        self.send(&mut [IoSlice::new(&out)]).await
    }

    /// Reads the final response head; interim ones (1xx) are passed over.
    pub(crate) async fn response_head(&self, method: &Method) -> Result<ResponseHead, ResponseError> {
        let mut scanner = HeadScanner::default();
        loop {
            let end = scanner.find_end(&mut self.buffer.borrow_mut(), HEAD_LIMITS)?;
            let Some(end) = end else {
                self.receive().await.map_err(ResponseError::Reset)?;
                continue;
            };
            let bytes = self.buffer.borrow_mut().split_to(end).freeze();
            let head = head::parse_response(&bytes, method, HEAD_LIMITS)?;
            if head.status == StatusCode::SWITCHING_PROTOCOLS {
                return Err(ResponseError::Upgrade);
            }
            if !head.status.is_informational() {
                return Ok(head);
            }
        }
    }

    /// Receives something; the end of the stream is an error.
    async fn receive(&self) -> io::Result<()> {
        let received = std::future::poll_fn(|cx| self.socket.poll_recv_buf(cx, &mut self.buffer.borrow_mut())).await?;
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.answered.set(true);
        Ok(())
    }
}

/// Reads one response body.
pub(crate) struct Body<'a> {
    connection: &'a Connection,
    decoder: BodyDecoder,
}

impl<'a> Body<'a> {
    pub(crate) fn new(connection: &'a Connection, framing: Framing) -> Self {
        Self { connection, decoder: BodyDecoder::new(framing) }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.decoder.is_done()
    }

    pub(crate) async fn part(&mut self) -> Result<Part, ResponseError> {
        loop {
            let part = self.decoder.decode(&mut self.connection.buffer.borrow_mut())?;
            if let Some(part) = part {
                return Ok(part);
            }
            match self.connection.receive().await {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.decoder.finish()?,
                Err(error) => return Err(ResponseError::Reset(error)),
            }
        }
    }
}
