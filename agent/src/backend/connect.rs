//! New connections to backends.

use std::io;
use std::time::Duration;

use gw_shared::error_code::AgentErrorCode;
use gw_shared::net::{Socket, TlsStream, resolve};
use gw_shared::runtime;
use rustls::{AlertDescription, CertificateError, ClientConnection};

use super::buffers;
use super::options::{Address, Backends, Endpoint, H2, Protocol};
use super::stream::Stream;

/// What the connection is to speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    Any,
    /// For another protocol than HTTP: HTTP/1.1 where there is a choice.
    Http1,
}

/// Why a backend could not be connected to.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("{0}")]
    Unreachable(String),
    #[error("{message}")]
    Tls {
        message: String,
        /// The backend speaks none of the protocols that were offered.
        nothing_in_common: bool,
    },
    /// It answered, but not as a server of HTTP/2.
    #[error("{0}")]
    NotHttp2(String),
}

/// A new connection to a backend.
pub(super) struct Dialled {
    pub(super) stream: Stream,
    pub(super) is_http2: bool,
    /// Limit of the receive buffer that was set when the socket connected.
    pub(super) receive_limit: Option<usize>,
}

/// Connects, up to and including TLS. No time limit.
pub(super) async fn dial(endpoint: &Endpoint, wanted: Wanted) -> Result<Dialled, ConnectError> {
    let (socket, receive_limit) =
        connect(&endpoint.address).await.map_err(|error| ConnectError::Unreachable(error.to_string()))?;
    let plain = |socket, is_http2| Ok(Dialled { stream: Stream::Plain(socket), is_http2, receive_limit });
    let tls = match &endpoint.protocol {
        Protocol::Http1 => return plain(socket, false),
        Protocol::Http2 => return plain(socket, true),
        Protocol::Tls(tls) => tls,
    };
    let config = if wanted == Wanted::Any { &tls.any } else { &tls.http1 };
    let session = ClientConnection::new(config.clone(), tls.server_name.clone())
        .map_err(|error| ConnectError::tls(&io::Error::other(error)))?;
    let stream = TlsStream::new(socket, session);
    stream.handshake().await.map_err(|error| ConnectError::tls(&error))?;
    let is_http2 = stream.speaks(H2);
    Ok(Dialled { stream: Stream::Tls(stream), is_http2, receive_limit })
}

impl Backends {
    /// Connects to each once and closes it again. Tells what each speaks, by its name.
    pub(crate) async fn try_each(&self, within: Duration) -> Vec<(String, Result<&'static str, ConnectError>)> {
        let mut found = Vec::with_capacity(self.endpoints.len());
        for endpoint in &self.endpoints {
            let late = |_| Err(ConnectError::Unreachable(format!("no connection within {within:?}")));
            let dialled = runtime::timeout(within, dial(endpoint, Wanted::Any)).await.unwrap_or_else(late);
            let speaks = |dialled: Dialled| if dialled.is_http2 { "HTTP/2" } else { "HTTP/1.1" };
            found.push((endpoint.to_string(), dialled.map(speaks)));
        }
        found
    }
}

/// Connects a socket. Returns the limit of its receive buffer, too.
async fn connect(address: &Address) -> io::Result<(Socket, Option<usize>)> {
    match address {
        Address::Tcp { host, port } => {
            let addresses = resolve::resolve_cached(host, *port).await?;
            let receive_limit = buffers::receive_limit_of_next();
            Ok((resolve::connect_any(&addresses, receive_limit).await?, receive_limit))
        }
        Address::Unix(path) => Ok((Socket::connect_unix(path).await?, None)),
    }
}

impl ConnectError {
    fn tls(error: &io::Error) -> Self {
        let nothing_in_common =
            tls_error(error) == Some(&rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol));
        Self::Tls { message: explain_tls(error), nothing_in_common }
    }

    /// The same, with the backend's name: there may be several.
    pub(super) fn of(self, endpoint: &Endpoint) -> Self {
        let name = |message| format!("the backend {endpoint} cannot be reached: {message}");
        match self {
            Self::Unreachable(message) => Self::Unreachable(name(message)),
            Self::Tls { message, nothing_in_common } => Self::Tls { message: name(message), nothing_in_common },
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

/// What of `error` is TLS's.
pub(super) fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Says what went wrong in TLS, and what helps where that is known.
pub(super) fn explain_tls(error: &io::Error) -> String {
    use rustls::Error::{AlertReceived, InvalidCertificate};
    match tls_error(error) {
        // Not signed by the key of any authority here, whatever name its own has.
        Some(InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature)) => {
            "its certificate is of an authority that is not trusted here; `ca_file` names a private one".to_owned()
        }
        Some(InvalidCertificate(error @ CertificateError::NotValidForNameContext { .. })) => {
            format!("its certificate is for another name ({error}); `server_name` says which to expect")
        }
        Some(InvalidCertificate(error)) => format!("its certificate is not valid: {error}"),
        Some(AlertReceived(AlertDescription::CertificateRequired)) => {
            "it wants a certificate of its client: set `client_certificate` and `client_key`".to_owned()
        }
        _ => format!("TLS: {error}"),
    }
}
