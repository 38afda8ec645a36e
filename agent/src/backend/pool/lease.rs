//! Backend connections that are leased to requests.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use gw_shared::http::caller_connection::CallerConnection;
use gw_shared::http::{BodyDecoder, Fields, Framing, RequestHead, UpgradeProtocol};
use http::Method;
use http::uri::Authority;

use super::host_mapping::HostMapping;
use super::{Backend, Origin};
use crate::backend::ResponseError;
use crate::backend::config::{Address, BackendProtocol, HostHeader, HttpVersions};
use crate::backend::exchange::{RequestHalf, ResponseHalf};
use crate::backend::h1::Http1Connection;
use crate::backend::h2::ReservedStream;
use crate::telemetry::trace::BackendConnection;

/// A backend connection leased to one request.
pub(crate) struct Lease<'a> {
    pub(super) backend: &'a Backend,
    pub(in crate::backend) origin: Rc<Origin>,
    pub(super) host: HostHeader,
    /// The connection has served other requests, and the backend may be closing it.
    pub(super) is_reused: bool,
    /// The connection is private to this connection of a caller.
    pub(in crate::backend) caller: Option<CallerConnection>,
    pub(super) connection: LeasedConnection,
    pub(super) _active: ActiveRequest<'a>,
}

pub(in crate::backend) enum LeasedConnection {
    Http1(Box<Http1Connection>),
    Http2(ReservedStream),
}

/// Counts a running request at its backend until dropped.
pub(super) struct ActiveRequest<'a>(&'a Cell<u32>);

impl Drop for ActiveRequest<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl<'a> ActiveRequest<'a> {
    pub(super) fn new(requests: &'a Cell<u32>) -> Self {
        requests.set(requests.get() + 1);
        Self(requests)
    }
}

fn http1_exchange<'a>(
    connection: &'a Http1Connection,
    framing: Framing,
    upgrade: Option<&'a UpgradeProtocol>,
) -> (RequestHalf<'a>, ResponseHalf<'a>) {
    connection.begin();
    let response = ResponseHalf::Http1(connection, BodyDecoder::new(Framing::None));
    (
        RequestHalf::Http1 {
            connection,
            framing,
            upgrade,
        },
        response,
    )
}

impl Lease<'_> {
    /// Starts an exchange. Over HTTP/2 this sends the request head. `may_move` tells whether the
    /// request is repeated on another connection if this one does not answer.
    pub(crate) fn exchange(
        &self,
        request: &RequestHead,
        may_move: bool,
    ) -> Result<(RequestHalf<'_>, ResponseHalf<'_>), ResponseError> {
        match &self.connection {
            LeasedConnection::Http1(connection) => {
                Ok(http1_exchange(connection, request.framing, None))
            }
            LeasedConnection::Http2(stream) => {
                let (request, response) =
                    stream.request(request, self.authority(request), None, may_move)?;
                Ok((RequestHalf::Http2(request), ResponseHalf::Http2(response)))
            }
        }
    }

    /// Whether the connection can carry this request for an upgrade.
    pub(crate) fn check_upgrade(&self, request: &RequestHead) -> Result<(), ResponseError> {
        let refused = |why: &str| Err(ResponseError::Upgrade(why.to_owned()));
        match &self.connection {
            LeasedConnection::Http2(stream) if !stream.accepts_extended_connect() => {
                refused("it speaks HTTP/2 and does not accept extended CONNECT (RFC 8441)")
            }
            LeasedConnection::Http2(_) if request.method != Method::GET => refused(
                "it speaks HTTP/2, where an upgrade request cannot have a method other than GET \
                 (RFC 8441)",
            ),
            LeasedConnection::Http1(_) | LeasedConnection::Http2(_) => Ok(()),
        }
    }

    /// Starts an exchange that asks for an upgrade: with `Upgrade` (RFC 9110 §7.8), or over HTTP/2
    /// with extended CONNECT (RFC 8441), as far as [`Self::check_upgrade`] allows it.
    pub(crate) fn upgrade_exchange<'b>(
        &'b self,
        request: &RequestHead,
        protocol: &'b UpgradeProtocol,
    ) -> Result<(RequestHalf<'b>, ResponseHalf<'b>), ResponseError> {
        match &self.connection {
            LeasedConnection::Http1(connection) => {
                Ok(http1_exchange(connection, request.framing, Some(protocol)))
            }
            LeasedConnection::Http2(stream) => {
                let protocol = ::h2::ext::Protocol::from(protocol.as_str());
                let (request, response) =
                    stream.request(request, self.authority(request), Some(&protocol), false)?;
                Ok((RequestHalf::Http2(request), ResponseHalf::Http2(response)))
            }
        }
    }

    /// The authority sent to the backend.
    pub(crate) fn authority<'b>(&'b self, request: &'b RequestHead) -> &'b Authority {
        match self.host {
            HostHeader::Preserve => &request.authority,
            HostHeader::Rewrite => &self.backend.endpoint.authority,
        }
    }

    /// Whether the URL of the backend has https.
    pub(crate) fn is_tls(&self) -> bool {
        matches!(self.backend.endpoint.protocol, BackendProtocol::Tls(_))
    }

    /// Whether the request has to be sent over HTTP/1.1 because of `error`, and can be.
    pub(crate) fn needs_http1(&self, error: &ResponseError) -> bool {
        let BackendProtocol::Tls(tls) = &self.backend.endpoint.protocol else {
            return false;
        };
        tls.versions == HttpVersions::Any && matches!(error, ResponseError::Http11Required)
    }

    /// The fields of a response, with the caller's authority in place of the one that was sent to
    /// the backend.
    pub(crate) fn map_back(&self, request: &RequestHead, headers: Fields) -> Fields {
        if self.host == HostHeader::Preserve {
            return headers;
        }
        let mapping = HostMapping {
            sent: self.authority(request),
            default_port: if self.is_tls() { ":443" } else { ":80" },
            of_caller: &request.authority,
        };
        mapping.map_back(headers)
    }

    /// Whether `error` proves that the backend has not processed the request. The connection gets
    /// no further requests then.
    pub(crate) fn is_unprocessed(&self, error: &ResponseError) -> bool {
        let is_unprocessed = matches!(error, ResponseError::Unprocessed { .. });
        if let LeasedConnection::Http2(stream) = &self.connection
            && is_unprocessed
        {
            stream.retire();
        }
        is_unprocessed
    }

    /// Whether `error` is the end of a connection that was open before the request, without any of
    /// a response, or means that the connection does not answer. The backend may have processed the
    /// request.
    pub(crate) fn is_lost(&self, error: &ResponseError) -> bool {
        let is_end = match error {
            // Another error of HTTP/2 is the backend's, and that of this stream alone.
            ResponseError::Reset(error) => !self.is_http2() || error.kind() != io::ErrorKind::Other,
            ResponseError::Gone => true,
            ResponseError::Unanswered => return true,
            _ => false,
        };
        let has_answered = match &self.connection {
            LeasedConnection::Http1(connection) => connection.has_answered(),
            LeasedConnection::Http2(_) => false,
        };
        is_end && self.is_reused && !has_answered
    }

    /// The connection's attributes for a span.
    pub(crate) fn describe(&self) -> BackendConnection {
        let (address, port) = match &self.backend.endpoint.address {
            Address::Tcp { host, port } => (host.clone(), Some(*port)),
            Address::Unix(path) => (path.display().to_string(), None),
        };
        BackendConnection {
            address,
            port,
            is_reused: self.is_reused,
            is_http2: self.is_http2(),
        }
    }

    pub(crate) fn is_http2(&self) -> bool {
        matches!(self.connection, LeasedConnection::Http2(_))
    }

    /// Aborts the exchange. Over HTTP/2, dropping its halves has already reset the stream.
    pub(crate) fn abort(self) {
        if let LeasedConnection::Http1(connection) = &self.connection {
            connection.reset_when_dropped();
        }
    }

    /// Returns a connection to the pool after the complete response was read. Closes one that is
    /// not to serve other requests, and one that is not private although an identity is bound to
    /// it.
    pub(crate) fn give_back(self) {
        let backend = self.backend;
        match (self.connection, self.caller) {
            (LeasedConnection::Http1(connection), Some(CallerConnection::Named(caller))) => {
                backend
                    .private
                    .keep(caller, self.origin, connection, backend.idle_max);
            }
            (LeasedConnection::Http1(connection), None) if !connection.is_bound() => {
                backend.keep(&self.origin, connection);
            }
            _ => {}
        }
    }
}
