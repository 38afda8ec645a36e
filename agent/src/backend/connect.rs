//! New connections to backends.

use std::io;
use std::time::Duration;

use gw_shared::error_code::AgentErrorCode;
use gw_shared::net::{Socket, TlsStream, resolve};
use gw_shared::runtime;
use rustls::client::UnbufferedClientConnection;
use rustls::{AlertDescription, CertificateError};

use super::buffers;
use super::config::{Address, BackendEndpoint, BackendProtocol, Backends, H2};
use super::stream::BackendStream;
use crate::tls::{self, rustls_error};

/// The HTTP versions that a new connection offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Offer {
    Any,
    /// HTTP/1.1 only, preferred for upgrades.
    Http1,
}

/// Why no connection to a backend could be opened.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("{0}")]
    Unreachable(String),
    #[error("{message}")]
    Tls {
        message: String,
        /// The backend supports none of the offered protocols.
        no_common_protocol: bool,
    },
    /// The backend answered with something other than HTTP/2.
    #[error("{0}")]
    NotHttp2(String),
}

/// A new connection to a backend.
pub(super) struct Dialled {
    pub(super) stream: BackendStream,
    pub(super) is_http2: bool,
    /// Limit of the receive buffer, set when the socket connected.
    pub(super) receive_limit: Option<usize>,
}

/// Connects, including the TLS handshake. No time limit.
pub(super) async fn dial(
    endpoint: &BackendEndpoint,
    offer: Offer,
) -> Result<Dialled, ConnectError> {
    let (socket, receive_limit) = connect(&endpoint.address)
        .await
        .map_err(|error| ConnectError::Unreachable(error.to_string()))?;
    let plain = |socket, is_http2| {
        Ok(Dialled {
            stream: BackendStream::Plain(socket),
            is_http2,
            receive_limit,
        })
    };
    let tls = match &endpoint.protocol {
        BackendProtocol::Http1 => return plain(socket, false),
        BackendProtocol::Http2 => return plain(socket, true),
        BackendProtocol::Tls(tls) => tls,
    };
    let config = if offer == Offer::Any {
        &tls.any
    } else {
        &tls.http1
    };
    let session = UnbufferedClientConnection::new(config.clone(), tls.server_name.clone())
        .map_err(|error| ConnectError::tls(&io::Error::other(error)))?;
    let stream = TlsStream::new(socket, session);
    stream
        .handshake()
        .await
        .map_err(|error| ConnectError::tls(&error))?;
    let is_http2 = stream.speaks(H2);
    Ok(Dialled {
        stream: BackendStream::Tls(stream),
        is_http2,
        receive_limit,
    })
}

impl Backends {
    /// Connects to each backend once. Returns the HTTP version that it speaks, by its URL.
    pub(crate) async fn probe(
        &self,
        within: Duration,
    ) -> Vec<(String, Result<&'static str, ConnectError>)> {
        let mut results = Vec::with_capacity(self.endpoints.len());
        for endpoint in &self.endpoints {
            let late = |_| {
                Err(ConnectError::Unreachable(format!(
                    "no connection within {within:?}"
                )))
            };
            let dialled = runtime::timeout(within, dial(endpoint, Offer::Any))
                .await
                .unwrap_or_else(late);
            let version = |dialled: Dialled| {
                if dialled.is_http2 {
                    "HTTP/2"
                } else {
                    "HTTP/1.1"
                }
            };
            results.push((endpoint.to_string(), dialled.map(version)));
        }
        results
    }
}

/// Connects a socket. Also returns the limit of its receive buffer.
async fn connect(address: &Address) -> io::Result<(Socket, Option<usize>)> {
    match address {
        Address::Tcp { host, port } => {
            let addresses = resolve::resolve_cached(host, *port).await?;
            let receive_limit = buffers::receive_limit_of_next();
            Ok((
                resolve::connect_any(&addresses, receive_limit).await?,
                receive_limit,
            ))
        }
        Address::Unix(path) => Ok((Socket::connect_unix(path).await?, None)),
    }
}

impl ConnectError {
    fn tls(error: &io::Error) -> Self {
        let no_common_protocol = rustls_error(error)
            == Some(&rustls::Error::AlertReceived(
                AlertDescription::NoApplicationProtocol,
            ));
        Self::Tls {
            message: explain_tls(error),
            no_common_protocol,
        }
    }

    /// Adds the backend's URL to the message, and the remedy of an unreachable one.
    pub(super) fn at(self, endpoint: &BackendEndpoint) -> Self {
        let name = |message| format!("the backend {endpoint} cannot be reached: {message}");
        match self {
            Self::Unreachable(message) => Self::Unreachable(name(format!(
                "{message}; start it, or correct its address in the agent's configuration"
            ))),
            Self::Tls {
                message,
                no_common_protocol,
            } => Self::Tls {
                message: name(message),
                no_common_protocol,
            },
            Self::NotHttp2(message) => Self::NotHttp2(name(message)),
        }
    }

    pub(crate) fn code(&self) -> AgentErrorCode {
        match self {
            Self::Unreachable(_) => AgentErrorCode::BackendUnreachable,
            Self::Tls { .. } => AgentErrorCode::BackendTls,
            Self::NotHttp2(_) => AgentErrorCode::BackendInvalidResponse,
        }
    }
}

/// Explains an error of TLS, with a remedy if there is one.
pub(super) fn explain_tls(error: &io::Error) -> String {
    use rustls::Error::{AlertReceived, InvalidCertificate, InvalidMessage};
    match rustls_error(error) {
        // The beginning of a plain text, read as a TLS record.
        Some(InvalidMessage(rustls::InvalidMessage::InvalidContentType)) => {
            "it does not speak TLS; use http:// in its URL, or its port for https".to_owned()
        }
        Some(InvalidCertificate(error)) if tls::is_of_unknown_issuer(error) => {
            "its certificate was issued by an untrusted authority; set `ca_file` to trust a private one".to_owned()
        }
        Some(InvalidCertificate(error)) if tls::is_of_authority(error) => {
            format!("its certificate {}", tls::OF_AUTHORITY)
        }
        Some(InvalidCertificate(error @ CertificateError::NotValidForNameContext { .. })) => {
            format!("its certificate is for another name ({error}); set `server_name` to the expected name")
        }
        Some(InvalidCertificate(error)) => {
            format!("its certificate is not valid: {error}; replace it, or set the clock of this machine")
        }
        Some(AlertReceived(AlertDescription::CertificateRequired)) => {
            "it requires a client certificate: set `client_certificate` and `client_key`".to_owned()
        }
        _ => format!("TLS: {error}"),
    }
}
