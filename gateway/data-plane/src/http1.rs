//! HTTP/1.1 as callers and the upgrade requests of agents use it, on a TLS connection or in plain
//! text (RFC 9112).

use std::io::{self, IoSlice};
use std::task::{Context, Poll};
use std::time::Instant;

use crate::limits;
use bytes::{Bytes, BytesMut};
use gw_shared::http::head::{self, Framing, HeadLimits, RequestHead};
use gw_shared::http::{ConnectionField, InvalidHead};
use gw_shared::net::{Closer, Socket, TlsStream};
use http::Response;

use crate::connections::ConnectionGuard;
use crate::http_message::dated;

/// A connection that carries HTTP/1.1.
pub(crate) trait Http1Connection {
    /// Receives into `buffer`; returns 0 at the end.
    fn poll_receive(&self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>>;

    /// Ends the sending direction.
    async fn end(&self) -> io::Result<()>;

    fn peer_end(&self) -> Closer;
}

impl Http1Connection for TlsStream {
    fn poll_receive(&self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        self.poll_read_buf(cx, buffer)
    }

    async fn end(&self) -> io::Result<()> {
        self.close().await
    }

    fn peer_end(&self) -> Closer {
        self.closer()
    }
}

impl Http1Connection for Socket {
    fn poll_receive(&self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        self.poll_recv_buf(cx, buffer)
    }

    async fn end(&self) -> io::Result<()> {
        self.shutdown_write();
        Ok(())
    }

    fn peer_end(&self) -> Closer {
        self.closer()
    }
}

/// Reads one request head; `None` when the peer closed the connection or took too long.
pub(crate) async fn read_head(
    stream: &TlsStream,
    buffer: &mut BytesMut,
    guard: &ConnectionGuard,
    head_limits: HeadLimits,
) -> Result<Option<RequestHead>, InvalidHead> {
    read_head_or_refuse(stream, buffer, guard, head_limits)
        .await
        .map_err(|refused| refused.invalid)
}

/// Refused head, with its received bytes.
pub(crate) struct RefusedHead {
    pub(crate) invalid: InvalidHead,
    pub(crate) received: Bytes,
}

/// As [`read_head`]; keeps a head that is refused.
pub(crate) async fn read_head_or_refuse(
    stream: &impl Http1Connection,
    buffer: &mut BytesMut,
    guard: &ConnectionGuard,
    head_limits: HeadLimits,
) -> Result<Option<RequestHead>, RefusedHead> {
    let mut begun = false;
    let received = head::read_head(buffer, head_limits, |cx, buffer| {
        if buffer.is_empty() {
            // An idle connection keeps no buffer.
            *buffer = BytesMut::new();
        } else if !begun {
            begun = true;
            guard.begins_head();
            guard.expect_by(Instant::now() + limits::HEAD);
        }
        // An error of the connection is an end, too.
        stream
            .poll_receive(cx, buffer)
            .map(|received| Ok(received.unwrap_or(0)))
    });
    match received.await {
        Ok(Some(received)) => {
            let parsed = head::parse_request(&received, head_limits);
            parsed
                .map(Some)
                .map_err(|invalid| RefusedHead { invalid, received })
        }
        Ok(None) => Ok(None),
        Err(invalid) => Err(RefusedHead {
            invalid,
            received: buffer.split().freeze(),
        }),
    }
}

/// Writes a whole response.
pub(crate) async fn write_response(
    stream: &TlsStream,
    response: Response<Vec<u8>>,
    connection: ConnectionField<'_>,
) -> io::Result<()> {
    let (head, body) = encoded(response, connection);
    stream
        .write_all(&mut [IoSlice::new(&head), IoSlice::new(&body)])
        .await?;
    stream.flush().await
}

/// The bytes of a whole response after which the connection closes; without its body if it
/// `answers_head`, a request for the head alone.
pub(crate) fn closing_response(response: Response<Vec<u8>>, answers_head: bool) -> Vec<u8> {
    let (mut head, body) = encoded(dated(response), ConnectionField::Close);
    if !answers_head {
        head.extend_from_slice(&body);
    }
    head
}

fn encoded(response: Response<Vec<u8>>, connection: ConnectionField<'_>) -> (Vec<u8>, Vec<u8>) {
    let (parts, body) = response.into_parts();
    let mut out = Vec::new();
    let framing = Framing::Length(body.len() as u64);
    head::write_response(
        &mut out,
        parts.status,
        &parts.headers.into(),
        framing,
        connection,
    );
    (out, body)
}

/// Closes after a response to a request that was not read to its end. Reads and drops data for a
/// while first: closing with unread data resets the connection, which can destroy the response (RFC
/// 9112 §9.6).
pub(crate) async fn linger(stream: &impl Http1Connection, guard: &ConnectionGuard) {
    guard.expect_by(Instant::now() + limits::LINGER);
    guard.closes();
    if stream.end().await.is_ok() {
        guard.discards();
        guard
            .discard(stream.peer_end().linger(limits::DISCARD_PAUSE))
            .await;
    }
}
