//! One request and its response on a backend connection of either HTTP version.

use std::io;
use std::task::{Context, Poll};

use ::h2::SendStream;
use bytes::Bytes;
use gw_shared::http::{
    BodyDecoder, ConnectionField, Fields, Framing, Part, RequestHead, ResponseHead, UpgradeProtocol,
};
use gw_shared::http2::stream as streams;
use gw_shared::runtime;
use http::uri::Authority;
use http::{Method, StatusCode};

use super::ResponseError;
use super::h1::Http1Connection;
use super::h2::{self, Http2Response};

/// The sending half of an exchange.
pub(crate) enum RequestHalf<'a> {
    /// After an upgrade the framing is [`Framing::UntilClose`].
    Http1 {
        connection: &'a Http1Connection,
        framing: Framing,
        /// The protocol that the request asks to upgrade to.
        upgrade: Option<&'a UpgradeProtocol>,
    },
    Http2(SendStream<Bytes>),
}

/// The receiving half of an exchange.
pub(crate) enum ResponseHalf<'a> {
    Http1(&'a Http1Connection, BodyDecoder),
    Http2(Http2Response),
}

/// An interim or final response head.
pub(crate) struct BackendHead {
    pub(crate) status: StatusCode,
    /// Includes fields that frame the message.
    pub(crate) headers: Fields,
    pub(crate) framing: Framing,
    /// The connection can serve another request afterwards.
    pub(crate) keep_alive: bool,
}

impl RequestHalf<'_> {
    /// Sends the head. Over HTTP/2 the exchange has already sent it.
    pub(crate) async fn head(
        &self,
        request: &RequestHead,
        authority: &Authority,
    ) -> io::Result<()> {
        let Self::Http1 {
            connection,
            framing,
            upgrade,
        } = self
        else {
            return Ok(());
        };
        let host = authority.as_str().as_bytes();
        let kind = upgrade.map_or(ConnectionField::Persists, ConnectionField::Upgrade);
        connection
            .send_head(
                &request.method,
                &request.target,
                host,
                &request.headers,
                *framing,
                kind,
            )
            .await
    }

    pub(crate) async fn data(&mut self, data: Bytes) -> io::Result<()> {
        match self {
            Self::Http1 {
                connection,
                framing,
                ..
            } => connection.send_data(&data, *framing).await,
            Self::Http2(stream) => streams::send(stream, data, false)
                .await
                .map_err(|_| io::ErrorKind::BrokenPipe.into()),
        }
    }

    pub(crate) async fn finish(&mut self, trailers: Option<Fields>) -> io::Result<()> {
        match self {
            Self::Http1 {
                connection,
                framing,
                ..
            } => connection.finish(*framing, trailers.as_ref()).await,
            Self::Http2(stream) => h2::finish(stream, trailers),
        }
    }

    /// Waits until the kernel of the backend has acknowledged all sent bytes: a reset would discard
    /// the others. Over HTTP/2, gives the connection one turn to write them.
    pub(crate) async fn delivered(&self) {
        match self {
            Self::Http1 { connection, .. } => connection.delivered().await,
            Self::Http2(_) => runtime::yield_now().await,
        }
    }

    /// Ready once the backend has reset the stream of the request, with or without an error (RFC
    /// 9113 §8.1). Over HTTP/1.1 only a write shows that the backend reads no more.
    pub(crate) fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Http1 { .. } => Poll::Pending,
            Self::Http2(stream) => stream.poll_reset(cx).map(|_| ()),
        }
    }

    /// Whether the backend can report that it has not processed the request, which is sent again
    /// then.
    pub(crate) fn reports_unprocessed(&self) -> bool {
        matches!(self, Self::Http2(_))
    }

    /// The backend has upgraded the connection: bytes without framing follow until one side ends.
    pub(crate) fn upgraded(&mut self) {
        if let Self::Http1 { framing, .. } = self {
            *framing = Framing::UntilClose;
        }
    }
}

impl ResponseHalf<'_> {
    /// Reads the next head, interim (1xx) or final.
    pub(crate) async fn head(&mut self, method: &Method) -> Result<BackendHead, ResponseError> {
        match self {
            Self::Http1(connection, decoder) => {
                let ResponseHead {
                    status,
                    headers,
                    framing,
                    keep_alive,
                    ..
                } = connection.response_head(method).await?;
                *decoder = BodyDecoder::of_response(framing);
                Ok(BackendHead {
                    status,
                    headers,
                    framing,
                    keep_alive,
                })
            }
            Self::Http2(exchange) => exchange.head(method).await,
        }
    }

    /// See [`RequestHalf::upgraded`].
    pub(crate) fn upgraded(&mut self) {
        if let Self::Http1(connection, decoder) = self {
            connection.upgraded();
            *decoder = BodyDecoder::new(Framing::UntilClose);
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        match self {
            Self::Http1(_, decoder) => decoder.is_done(),
            Self::Http2(exchange) => exchange.is_done(),
        }
    }

    /// Reads the next part of the body. The caller [releases](Self::release) data once it has been
    /// relayed.
    pub(crate) async fn part(&mut self) -> Result<Part, ResponseError> {
        match self {
            Self::Http1(connection, decoder) => connection.part(decoder).await,
            Self::Http2(exchange) => exchange.part().await,
        }
    }

    pub(crate) fn release(&mut self, bytes: usize) {
        if let Self::Http2(exchange) = self {
            exchange.release(bytes);
        }
    }
}
