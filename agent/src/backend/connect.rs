//! New connections to backends.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use gw_shared::error_code::AgentErrorCode;
use gw_shared::net::tls::{Remedies, TlsFailure, TlsProblem};
use gw_shared::net::{Socket, TlsStream, resolve};
use gw_shared::runtime;
use rustls::client::UnbufferedClientConnection;
use rustls_pki_types::ServerName;

use super::buffers;
use super::config::{Address, BackendEndpoint, BackendProtocol, H2, HttpVersions};
use super::stream::BackendStream;
use crate::tls::rustls_error;

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
        /// `None` if the connection broke off.
        problem: Option<TlsProblem>,
    },
    /// The backend answered with something other than HTTP/2.
    #[error("{0}")]
    NotHttp2(String),
}

/// An attempt to connect.
#[derive(Default)]
pub(super) struct Attempt {
    /// The current step, which the error names if the attempt takes too long.
    awaited: RefCell<String>,
}

impl Attempt {
    /// Runs an attempt with a time limit.
    pub(super) async fn within<T>(
        limit: Duration,
        connect: impl AsyncFnOnce(&Self) -> Result<T, ConnectError>,
    ) -> Result<T, ConnectError> {
        let attempt = Self::default();
        let connected = runtime::timeout(limit, connect(&attempt)).await;
        connected.unwrap_or_else(|_| {
            let awaited = attempt.awaited.take();
            Err(ConnectError::Unreachable(format!(
                "no connection within {limit:?}: {awaited}"
            )))
        })
    }

    /// Records the next step. `awaited` is a part of an error message.
    pub(super) fn awaits(&self, awaited: String) {
        self.awaited.replace(awaited);
    }
}

/// A new connection to a backend.
pub(super) struct Dialled {
    pub(super) stream: BackendStream,
    pub(super) is_http2: bool,
    /// Limit of the receive buffer, set when the socket connected.
    pub(super) receive_limit: Option<usize>,
    /// Address of the backend, unless it is that of a Unix socket.
    pub(super) peer: Option<SocketAddr>,
}

impl Dialled {
    /// Names the backend as the peer of an attempt.
    pub(super) fn peer(&self) -> String {
        peer_name(self.peer)
    }
}

fn peer_name(peer: Option<SocketAddr>) -> String {
    peer.map_or_else(|| "the socket".to_owned(), |peer| peer.to_string())
}

/// Connects, including the TLS handshake, in which a backend gets `name`, or the configured server
/// name if it is `None`.
pub(super) async fn dial(
    endpoint: &BackendEndpoint,
    offer: Offer,
    name: Option<&ServerName<'static>>,
    attempt: &Attempt,
) -> Result<Dialled, ConnectError> {
    let Connected {
        socket,
        receive_limit,
        peer,
    } = connect(&endpoint.address, attempt)
        .await
        .map_err(|error| ConnectError::Unreachable(error.to_string()))?;
    let plain = |socket, is_http2| {
        Ok(Dialled {
            stream: BackendStream::Plain(socket),
            is_http2,
            receive_limit,
            peer,
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
    let name = name.unwrap_or(&tls.server_name);
    let session = UnbufferedClientConnection::new(config.clone(), name.clone())
        .map_err(|error| ConnectError::tls(&TlsFailure(error).into()))?;
    let stream = TlsStream::new(socket, session);
    let name = peer_name(peer);
    attempt.awaits(format!("{name} has not completed the TLS handshake"));
    stream
        .handshake()
        .await
        .map_err(|error| ConnectError::tls(&error))?;
    let is_http2 = stream.speaks(H2);
    if tls.versions == HttpVersions::Http2 && !is_http2 {
        return Err(ConnectError::NotHttp2(
            "it does not select HTTP/2 by ALPN; remove `http_version = \"2\"`".to_owned(),
        ));
    }
    Ok(Dialled {
        stream: BackendStream::Tls(stream),
        is_http2,
        receive_limit,
        peer,
    })
}

/// A connected socket, as [`Dialled`] has it.
struct Connected {
    socket: Socket,
    receive_limit: Option<usize>,
    peer: Option<SocketAddr>,
}

async fn connect(address: &Address, attempt: &Attempt) -> io::Result<Connected> {
    match address {
        Address::Tcp { host, port } => {
            attempt.awaits(format!("the name {host} is not resolved"));
            let addresses = resolve::resolve_cached(host, *port).await?;
            let tried = join_texts(&addresses);
            attempt.awaits(format!("no answer from {tried}"));
            let receive_limit = buffers::receive_limit_of_next();
            let socket = resolve::connect_any(&addresses, receive_limit).await?;
            let peer = rustix::net::getpeername(&socket)?;
            Ok(Connected {
                socket,
                receive_limit,
                peer: peer.and_then(|peer| SocketAddr::try_from(peer).ok()),
            })
        }
        Address::Unix(path) => {
            attempt.awaits("the queue of the socket is full".to_owned());
            Ok(Connected {
                socket: Socket::connect_unix(path).await?,
                receive_limit: None,
                peer: None,
            })
        }
    }
}

/// Most addresses that an error names.
const NAMED_ADDRESSES: usize = 8;

/// Lists addresses for an error message.
fn join_texts(addresses: &[SocketAddr]) -> String {
    let mut texts: Vec<String> = addresses
        .iter()
        .take(NAMED_ADDRESSES)
        .map(SocketAddr::to_string)
        .collect();
    if let Some(more @ 1..) = addresses.len().checked_sub(NAMED_ADDRESSES) {
        texts.push(format!("{more} more"));
    }
    texts.join(", ")
}

impl ConnectError {
    fn tls(error: &io::Error) -> Self {
        Self::Tls {
            message: explain_tls(error),
            problem: rustls_error(error).map(TlsProblem::of),
        }
    }

    /// Adds the backend's URL to the message, and the remedy of an unreachable one.
    pub(super) fn at(self, endpoint: &BackendEndpoint) -> Self {
        let name = |message| format!("the backend {endpoint} cannot be reached: {message}");
        match self {
            Self::Unreachable(message) => Self::Unreachable(name(format!(
                "{message}; start it, or correct its address in the agent's configuration"
            ))),
            Self::Tls { message, problem } => Self::Tls {
                message: name(message),
                problem,
            },
            Self::NotHttp2(message) => Self::NotHttp2(name(message)),
        }
    }

    /// Whether the backend refuses the handshake or its certificate is not accepted, which may be
    /// because of the server name.
    pub(super) fn may_be_of_name(&self) -> bool {
        match self {
            Self::Tls { problem, .. } => !matches!(
                problem,
                None | Some(TlsProblem::Protocol | TlsProblem::NotTls | TlsProblem::Version)
            ),
            _ => false,
        }
    }

    /// Whether the backend supports none of the offered application protocols.
    pub(super) fn is_of_protocol(&self) -> bool {
        matches!(
            self,
            Self::Tls {
                problem: Some(TlsProblem::Protocol),
                ..
            }
        )
    }

    pub(crate) fn code(&self) -> AgentErrorCode {
        match self {
            Self::Unreachable(_) => AgentErrorCode::BackendUnreachable,
            Self::Tls { .. } => AgentErrorCode::BackendTls,
            Self::NotHttp2(_) => AgentErrorCode::BackendInvalidResponse,
        }
    }
}

/// Explains an error of TLS, with its remedy.
pub(super) fn explain_tls(error: &io::Error) -> String {
    rustls_error(error).map_or_else(|| format!("TLS: {error}"), |error| REMEDIES.explain(error))
}

/// What to do about errors of TLS with backends.
const REMEDIES: Remedies = Remedies {
    issuer: "set `ca_file` to a PEM file of the authority's certificate, or of this certificate \
             itself",
    name: "set `server_name` to the expected name, or `ca_file` to a PEM file of this certificate \
           itself",
    certificate: "replace it, or set the clock of this machine",
    client_certificate: "set `client_certificate` and `client_key` to ones that it accepts",
    not_tls: "use http:// in its URL, or its port for https",
    other: "see its log, and check that the URL has its port for https",
    versions: "TLS 1.3 and 1.2",
};
