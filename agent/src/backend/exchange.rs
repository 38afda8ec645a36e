//! One request and its response on a connection to a backend, whichever version of HTTP that speaks.

use std::io;

use ::h2::SendStream;
use bytes::Bytes;
use gw_shared::http::{BodyDecoder, Connection, Framing, Part, UpgradeProtocol, head};
use gw_shared::tunnel::stream as streams;
use http::header::HeaderMap;
use http::request::Parts;
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};

use super::{ResponseError, h1, h2};

/// What goes to the backend.
pub(crate) enum RequestHalf<'a> {
    /// With [`Framing::UntilClose`] for another protocol that the connection has changed to.
    Http1 {
        connection: &'a h1::Connection,
        framing: Framing,
        /// The protocol that the request asks to switch to.
        upgrade: Option<&'a UpgradeProtocol>,
    },
    Http2(SendStream<Bytes>),
}

/// What comes from it.
pub(crate) enum ResponseHalf<'a> {
    Http1(&'a h1::Connection, BodyDecoder),
    Http2(h2::Exchange),
}

/// An interim or final response head.
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    /// `Content-Length` among them says what the framing does, and nothing else.
    pub(crate) headers: HeaderMap,
    /// The connection can take another request afterwards.
    pub(crate) keep_alive: bool,
}

impl RequestHalf<'_> {
    /// Sends the head, if the exchange did not begin with it.
    pub(crate) async fn head(&self, parts: &Parts, authority: &Authority) -> io::Result<()> {
        let Self::Http1 { connection, framing, upgrade } = self else { return Ok(()) };
        let root = PathAndQuery::from_static("/");
        let target = parts.uri.path_and_query().unwrap_or(&root);
        let (host, asks) = (authority.as_str().as_bytes(), upgrade.map_or(Connection::Persists, Connection::Upgrade));
        connection.send_head(&parts.method, target, host, &parts.headers, *framing, asks).await
    }

    pub(crate) async fn data(&mut self, data: Bytes) -> io::Result<()> {
        match self {
            Self::Http1 { connection, framing, .. } => connection.send_data(&data, *framing).await,
            Self::Http2(stream) => {
                streams::send(stream, data, false).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
            }
        }
    }

    pub(crate) async fn finish(&mut self, trailers: Option<HeaderMap>) -> io::Result<()> {
        match self {
            Self::Http1 { connection, framing, .. } => connection.finish(*framing, trailers.as_ref()).await,
            Self::Http2(stream) => h2::finish(stream, trailers),
        }
    }

    /// The backend has changed to another protocol: bytes from now on, until one side ends.
    pub(crate) fn switched(&mut self) {
        if let Self::Http1 { framing, .. } = self {
            *framing = Framing::UntilClose;
        }
    }
}

impl ResponseHalf<'_> {
    /// Reads the next head, interim ones (1xx) too.
    pub(crate) async fn head(&mut self, method: &Method) -> Result<Head, ResponseError> {
        match self {
            Self::Http1(connection, decoder) => {
                let mut head = connection.response_head(method).await?;
                *decoder = BodyDecoder::new(head.framing);
                head::set_content_length(&mut head.headers, head.framing);
                Ok(Head { status: head.status, headers: head.headers, keep_alive: head.keep_alive })
            }
            Self::Http2(exchange) => {
                let (parts, ()) = exchange.head(method).await?.into_parts();
                Ok(Head { status: parts.status, headers: parts.headers, keep_alive: true })
            }
        }
    }

    /// See [`RequestHalf::switched`].
    pub(crate) fn switched(&mut self) {
        if let Self::Http1(_, decoder) = self {
            *decoder = BodyDecoder::new(Framing::UntilClose);
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        match self {
            Self::Http1(_, decoder) => decoder.is_done(),
            Self::Http2(exchange) => exchange.is_done(),
        }
    }

    /// Reads the next part of the body. Data is to be [released](Self::release) once it has been passed on.
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
