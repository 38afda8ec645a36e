//! TLS connections to the gateway and HTTP/1.1 exchanges on them, for requests to the apex and for
//! opening tunnels.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::BytesMut;
use gw_shared::error_body::ErrorBody;
use gw_shared::error_code::ErrorCode;
use gw_shared::http::{BodyDecoder, Fields, Part, head};
use gw_shared::identity::enrollment;
use gw_shared::net::tls::{TlsFailure, Trusted};
use gw_shared::net::{Socket, TlsStream, resolve};
use gw_shared::runtime;
use gw_shared::tunnel::handshake::HEAD_LIMITS;
use http::header;
use http::{Method, StatusCode};
use rustls::ClientConfig;
use rustls::client::{Resumption, UnbufferedClientConnection};
use rustls_pki_types::{CertificateDer, ServerName};

use super::error::{ErrorReply, GatewayError};
use super::{CONNECT_LIMIT, RESOLVE_LIMIT};
use crate::clock;
use crate::proxy::ProxySettings;
use crate::tls::{self, ClientAuth};

/// Longest pause that a gateway can request with `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// A complete answer.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: Fields,
    body: Vec<u8>,
}

/// Opens a TLS connection to the server `name` at `host` and `port`, through the proxy for that
/// host if there is one. Every call resolves `host`, or the proxy's host, again.
pub(crate) async fn open(
    proxies: &ProxySettings,
    host: &str,
    port: u16,
    name: &str,
    config: Arc<ClientConfig>,
) -> Result<TlsStream, GatewayError> {
    let at = format!("{host}:{port}");
    let error = match connect(proxies, host, port, name, &config).await {
        Ok(stream) => return Ok(stream),
        Err(ConnectionError::Gateway(error)) => return Err(error),
        Err(ConnectionError::Handshake(error)) => error,
    };
    let mut error = GatewayError::handshake(&at, error);
    if let GatewayError::NotValidNow { reason, ahead, .. } = &mut error
        && let Some(valid_at) = tls::time_of_validity(reason)
    {
        // The same server again, with a clock by which its certificate is valid. It only tells its
        // time.
        let mut config = (*config).clone();
        config.time_provider = Arc::new(valid_at);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        if let Ok(stream) = connect(proxies, host, port, name, &Arc::new(config)).await {
            let request = format!(
                "GET /.well-known/jwks.json HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n"
            );
            let reply = exchange(&stream, request.as_bytes(), &mut BytesMut::new()).await;
            let date = reply.ok().and_then(|reply| clock::date(&reply.headers));
            *ahead = date.map(|date| clock::seconds_ahead(SystemTime::now(), date));
        }
    }
    Err(error)
}

/// Why there is no TLS connection.
enum ConnectionError {
    Gateway(GatewayError),
    Handshake(io::Error),
}

impl From<GatewayError> for ConnectionError {
    fn from(error: GatewayError) -> Self {
        Self::Gateway(error)
    }
}

async fn connect(
    proxies: &ProxySettings,
    host: &str,
    port: u16,
    name: &str,
    config: &Arc<ClientConfig>,
) -> Result<TlsStream, ConnectionError> {
    let name = ServerName::try_from(name.to_owned())
        .map_err(|error| GatewayError::Certificates(format!("{name}: {error}")))?;
    let session = UnbufferedClientConnection::new(Arc::clone(config), name)
        .map_err(|error| GatewayError::Certificates(TlsFailure(error).to_string()))?;
    let socket = match proxies.for_host(host, port) {
        Some(proxy) => proxy
            .connect(host, port)
            .await
            .map_err(GatewayError::Proxy)?,
        None => connect_directly(host, port).await?,
    };
    let stream = TlsStream::new(socket, session);
    stream
        .handshake()
        .await
        .map_err(ConnectionError::Handshake)?;
    Ok(stream)
}

async fn connect_directly(host: &str, port: u16) -> Result<Socket, GatewayError> {
    let late = |_| {
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no answer within {RESOLVE_LIMIT:?}"),
        ))
    };
    let addresses = runtime::timeout(RESOLVE_LIMIT, resolve::resolve_cached(host, port))
        .await
        .unwrap_or_else(late);
    let addresses = addresses.map_err(|error| GatewayError::Resolve {
        host: host.to_owned(),
        error,
    })?;
    let at = format!("{host}:{port}");
    match runtime::timeout(CONNECT_LIMIT, resolve::connect_any(&addresses, None)).await {
        Ok(connected) => connected.map_err(|error| GatewayError::Connect { at, error }),
        Err(_) => Err(GatewayError::ConnectTimedOut { at }),
    }
}

/// Builds a TLS 1.3 configuration that trusts `authorities`, or the system's roots if `None`, and
/// presents `auth` to a gateway that asks for a certificate.
pub(crate) fn client_config(
    authorities: Option<Vec<CertificateDer<'static>>>,
    auth: Option<ClientAuth>,
    alpn: &[u8],
) -> Result<Arc<ClientConfig>, GatewayError> {
    let trusted = match authorities {
        Some(authorities) => Trusted::only(authorities)
            .map_err(|error| GatewayError::Certificates(format!("gateway-ca.crt: {error}")))?,
        None => Trusted::system(),
    };
    let versions = [&rustls::version::TLS13];
    let trusted = tls::shared(trusted);
    let config =
        tls::client_config(&versions, trusted, Vec::new(), auth, &[alpn]).map(|mut config| {
            // Each connection has a configuration of its own, and keeps it: a cache of sessions
            // would never be used.
            config.resumption = Resumption::disabled();
            Arc::new(config)
        });
    config.map_err(|error| GatewayError::Certificates(TlsFailure(error).to_string()))
}

/// As [`exchange_up_to`], for a body of the apex.
pub(crate) async fn exchange(
    stream: &TlsStream,
    request: &[u8],
    buffer: &mut BytesMut,
) -> Result<Reply, GatewayError> {
    exchange_up_to(stream, request, enrollment::BODY_MAX, buffer).await
}

/// Sends a complete request and reads the final response, skipping interim responses other than
/// 101. Its body may have `body_max` bytes. Bytes after the response stay in `buffer`.
pub(crate) async fn exchange_up_to(
    stream: &TlsStream,
    request: &[u8],
    body_max: usize,
    buffer: &mut BytesMut,
) -> Result<Reply, GatewayError> {
    stream
        .write_all(&mut [IoSlice::new(request)])
        .await
        .map_err(GatewayError::Tls)?;
    stream.flush().await.map_err(GatewayError::Tls)?;
    let head = loop {
        let head = head::read_head(buffer, HEAD_LIMITS, |cx, buffer| {
            poll_read(stream, cx, buffer)
        })
        .await?;
        let head = head.ok_or(GatewayError::Closed)?;
        // Only HEAD changes how a response is framed, and no request here uses it.
        let head = head::parse_response(&head, &Method::GET, HEAD_LIMITS)?;
        if !head.status.is_informational() || head.status == StatusCode::SWITCHING_PROTOCOLS {
            break head;
        }
    };
    let mut decoder = BodyDecoder::new(head.framing);
    let mut body = Vec::new();
    loop {
        match decoder.decode(buffer)? {
            Some(Part::Data(data)) => body.extend_from_slice(&data),
            Some(Part::Trailers(_)) => {}
            Some(Part::End) => {
                return Ok(Reply {
                    status: head.status,
                    headers: head.headers,
                    body,
                });
            }
            None => {
                if poll_fn(|cx| poll_read(stream, cx, buffer)).await? == 0 {
                    decoder.finish()?;
                }
            }
        }
        if body.len() > body_max {
            return Err(GatewayError::TooLong);
        }
    }
}

fn poll_read(
    stream: &TlsStream,
    cx: &mut Context<'_>,
    buffer: &mut BytesMut,
) -> Poll<Result<usize, GatewayError>> {
    // With TLS 1.3 the alert for a refused client certificate arrives on the first read.
    stream.poll_read_buf(cx, buffer).map_err(GatewayError::Tls)
}

impl Reply {
    /// The body of a successful answer, or the refusal.
    pub(crate) fn into_body(self) -> Result<Vec<u8>, GatewayError> {
        if self.status.is_success() {
            Ok(self.body)
        } else {
            Err(GatewayError::Refused(self.refusal()))
        }
    }

    /// Reads the answer as a refusal.
    pub(crate) fn refusal(&self) -> ErrorReply {
        let (code, text) = match serde_json::from_slice::<ErrorBody>(&self.body) {
            Ok(ErrorBody { error }) if !error.code.is_empty() => (
                ErrorCode::parse(&error.code),
                format!("{}: {}", error.code, error.message),
            ),
            _ => (None, String::new()),
        };
        let seconds = self
            .headers
            .get(header::RETRY_AFTER)
            .and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let retry_after = seconds.map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
        ErrorReply {
            status: self.status,
            code,
            text,
            retry_after,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(status: u16, retry_after: &'static str, body: &str) -> Reply {
        let retry_after = header::HeaderValue::from_static(retry_after);
        Reply {
            status: StatusCode::from_u16(status).unwrap(),
            headers: Fields::from_iter([(header::RETRY_AFTER, retry_after)]),
            body: body.into(),
        }
    }

    #[test]
    fn refusals_contain_the_gateways_error_and_bounded_retry_after() {
        let body = r#"{"error":{"code":"GW_OVERLOADED","message":"draining","request_id":"x"}}"#;
        let overloaded = "503 Service Unavailable, GW_OVERLOADED: draining";
        let date = "Fri, 31 Dec 1999 23:59:59 GMT";
        for (status, retry_after, body, text, wait) in [
            (503, "7", body, overloaded, Some(Duration::from_secs(7))),
            (
                429,
                "99999999",
                "",
                "429 Too Many Requests",
                Some(RETRY_AFTER_MAX),
            ),
            (404, date, "<html>", "404 Not Found", None),
        ] {
            let refusal = reply(status, retry_after, body).refusal();
            assert_eq!(refusal.to_string(), text);
            assert_eq!(refusal.retry_after, wait, "{text}");
        }
    }
}
