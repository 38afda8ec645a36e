//! Opening a tunnel: resolve, connect, TLS, upgrade.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use gw_shared::error_body::ErrorBody;
use gw_shared::http::body::BodyDecoder;
use gw_shared::http::{HeadScanner, InvalidHead, Part};
use gw_shared::net::{TlsStream, resolve};
use gw_shared::runtime;
use gw_shared::tunnel::{self, handshake};
use http::StatusCode;
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use rustls_pki_types::ServerName;

use crate::state::{Enrollment, StateDir, StateError};

/// From name resolution to accepted upgrade.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("the gateway cannot be reached: {0}")]
    Connect(io::Error),
    #[error("TLS with the gateway: {0}")]
    Tls(io::Error),
    #[error("the gateway refused: {status} {code}: {message}")]
    Refused { status: StatusCode, code: String, message: String },
    #[error("the gateway's answer: {0}")]
    Answer(#[from] InvalidHead),
    #[error("the gateway closed the connection before it answered")]
    Closed,
    #[error("no answer within {TIME_LIMIT:?}")]
    TimedOut,
    #[error(transparent)]
    State(#[from] StateError),
    #[error("certificates: {0}")]
    Certificates(String),
}

/// Opens a tunnel for the service at `hostname`. Everything is looked up anew: addresses, certificates.
pub(crate) async fn dial(state: &StateDir, to: &Enrollment, hostname: &str) -> Result<TlsStream, DialError> {
    runtime::timeout(TIME_LIMIT, connect(state, to, hostname)).await.map_err(|_| DialError::TimedOut)?
}

async fn connect(state: &StateDir, to: &Enrollment, hostname: &str) -> Result<TlsStream, DialError> {
    let config = client_config(state)?;
    let name = ServerName::try_from(hostname.to_owned()).map_err(|error| DialError::Certificates(error.to_string()))?;
    let session = ClientConnection::new(config, name).map_err(|error| DialError::Certificates(error.to_string()))?;
    let addresses = resolve::resolve(&to.gateway_host, to.gateway_port).await.map_err(DialError::Connect)?;
    let socket = resolve::connect_any(&addresses).await.map_err(DialError::Connect)?;
    let stream = TlsStream::new(socket, session);
    stream.handshake().await.map_err(DialError::Tls)?;
    upgrade(&stream, hostname).await?;
    Ok(stream)
}

fn client_config(state: &StateDir) -> Result<Arc<ClientConfig>, DialError> {
    let certificates = |error: &dyn std::fmt::Display| DialError::Certificates(error.to_string());
    let identity = state.identity()?;
    let mut roots = RootCertStore::empty();
    match state.gateway_authorities()? {
        Some(authorities) => {
            for authority in authorities {
                roots.add(authority).map_err(|error| certificates(&error))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| certificates(&error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![identity.certificate], identity.key)
        .map_err(|error| certificates(&error))?;
    config.alpn_protocols = vec![tunnel::ALPN.to_vec()];
    Ok(Arc::new(config))
}

async fn upgrade(stream: &TlsStream, hostname: &str) -> Result<(), DialError> {
    let request = handshake::request(hostname);
    stream.write_all(&mut [IoSlice::new(&request)]).await.map_err(DialError::Tls)?;
    stream.flush().await.map_err(DialError::Tls)?;
    let (mut scanner, mut buffer) = (HeadScanner::default(), BytesMut::new());
    let end = loop {
        if let Some(end) = scanner.find_end(&mut buffer, handshake::HEAD_LIMITS)? {
            break end;
        }
        read_more(stream, &mut buffer).await?;
    };
    let head = buffer.split_to(end).freeze();
    match handshake::parse_answer(&head)? {
        Ok(()) => {
            // The gateway speaks first on the new protocol: its beginning may have come along.
            stream.unread(&buffer);
            Ok(())
        }
        Err((status, framing)) => Err(read_refusal(stream, status, BodyDecoder::new(framing), buffer).await),
    }
}

async fn read_more(stream: &TlsStream, buffer: &mut BytesMut) -> Result<(), DialError> {
    // With TLS 1.3 a refused client certificate shows as an alert on the first read.
    match std::future::poll_fn(|cx| stream.poll_read_buf(cx, buffer)).await.map_err(DialError::Tls)? {
        0 => Err(DialError::Closed),
        _ => Ok(()),
    }
}

async fn read_refusal(
    stream: &TlsStream,
    status: StatusCode,
    mut decoder: BodyDecoder,
    mut buffer: BytesMut,
) -> DialError {
    let mut body = Vec::new();
    while body.len() as u64 <= handshake::REFUSAL_MAX {
        match decoder.decode(&mut buffer) {
            Ok(Some(Part::Data(data))) => body.extend_from_slice(&data),
            Ok(None) if read_more(stream, &mut buffer).await.is_ok() => {}
            _ => break,
        }
    }
    match serde_json::from_slice::<ErrorBody>(&body) {
        Ok(ErrorBody { error }) => DialError::Refused { status, code: error.code, message: error.message },
        Err(_) => DialError::Refused { status, code: String::new(), message: String::new() },
    }
}
