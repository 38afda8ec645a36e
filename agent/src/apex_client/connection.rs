//! The agent's TLS connections to its gateway, and HTTP/1.1 exchanges on them.

use std::fmt;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use gw_shared::error_body::ErrorBody;
use gw_shared::error_code::ErrorCode;
use gw_shared::http::{BodyDecoder, HeadScanner, InvalidBody, InvalidHead, Part, head};
use gw_shared::identity::enrollment;
use gw_shared::net::{TlsStream, resolve};
use gw_shared::tunnel::handshake::HEAD_LIMITS;
use gw_shared::tunnel::text::error_line;
use http::header::{self, HeaderMap};
use http::{Method, StatusCode};
use rustls::crypto::aws_lc_rs;
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, RootCertStore};
use rustls_pki_types::{CertificateDer, ServerName};

use crate::identity::key_pair::Identity;

/// Longest pause that a gateway can impose with `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// Why an exchange with the gateway failed.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    #[error("the gateway cannot be reached: {0}")]
    Connect(io::Error),
    #[error(
        "the gateway's certificate is not trusted: {0}; if it is of a private authority, give that authority's \
         certificate to `gw-agent enroll` with --ca-file"
    )]
    Untrusted(CertificateError),
    #[error(
        "the gateway's certificate is not valid now by this machine's clock: {0}; set the clock (NTP), or renew that \
         certificate"
    )]
    NotValidNow(CertificateError),
    #[error("TLS with the gateway: {0}")]
    Tls(io::Error),
    #[error("the gateway closed the connection before it had answered")]
    Closed,
    #[error("the gateway gave no answer within {0:?}")]
    TimedOut(Duration),
    #[error("the gateway's answer: {0}")]
    Head(#[from] InvalidHead),
    #[error("the gateway's answer: {0}")]
    Body(#[from] InvalidBody),
    #[error("the gateway's answer is longer than {} bytes", enrollment::BODY_MAX)]
    TooLong,
    #[error("the gateway's answer is not one that this version understands: {}", error_line(.0))]
    NotUnderstood(#[from] serde_json::Error),
    #[error("the gateway refused: {0}")]
    Refused(Refusal),
    /// Identity, authorities or server name are not fit for TLS.
    #[error("certificates: {0}")]
    Certificates(String),
}

/// An answer with an error status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub status: StatusCode,
    /// Code of the gateway's error body; `None` if there is no such body or this version does not know the code.
    pub code: Option<ErrorCode>,
    /// Code and message of the error body as the gateway wrote them; empty if there is no such body.
    pub text: String,
    /// `Retry-After`, at most ten minutes.
    pub retry_after: Option<Duration>,
}

/// An answer, read to its end.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Vec<u8>,
}

/// Opens a TLS connection to `name`, which `host` and `port` lead to. Looked up anew each time.
pub(crate) async fn open(
    host: &str,
    port: u16,
    name: &str,
    config: Arc<ClientConfig>,
) -> Result<TlsStream, GatewayError> {
    let name = ServerName::try_from(name.to_owned())
        .map_err(|error| GatewayError::Certificates(format!("{name}: {error}")))?;
    let session = ClientConnection::new(config, name).map_err(|error| GatewayError::Certificates(error.to_string()))?;
    let addresses = resolve::resolve(host, port).await.map_err(GatewayError::Connect)?;
    let socket = resolve::connect_any(&addresses, None).await.map_err(GatewayError::Connect)?;
    let stream = TlsStream::new(socket, session);
    stream.handshake().await.map_err(GatewayError::tls)?;
    Ok(stream)
}

/// A configuration that trusts `authorities`, or the system's if there are none, and presents `identity` where it is
/// asked for a certificate.
pub(crate) fn client_config(
    authorities: Option<Vec<CertificateDer<'static>>>,
    identity: Option<&Identity>,
    alpn: &[u8],
) -> Result<Arc<ClientConfig>, GatewayError> {
    let unfit = |error: rustls::Error| GatewayError::Certificates(error.to_string());
    let mut roots = RootCertStore::empty();
    match authorities {
        Some(authorities) => {
            for authority in authorities {
                roots.add(authority).map_err(unfit)?;
            }
        }
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(unfit)?
        .with_root_certificates(roots);
    let mut config = match identity {
        Some(identity) => {
            let chain = [&identity.certificate].into_iter().chain(&identity.chain).cloned().collect();
            builder.with_client_auth_cert(chain, identity.key.clone_key()).map_err(unfit)?
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    Ok(Arc::new(config))
}

/// Sends a whole request and reads the final answer; 101 is one, other interim answers are passed over. What comes
/// after it stays in `buffer`.
pub(crate) async fn exchange(stream: &TlsStream, request: &[u8], buffer: &mut BytesMut) -> Result<Reply, GatewayError> {
    stream.write_all(&mut [IoSlice::new(request)]).await.map_err(GatewayError::tls)?;
    stream.flush().await.map_err(GatewayError::tls)?;
    let mut scanner = HeadScanner::default();
    let head = loop {
        let Some(end) = scanner.find_end(buffer, HEAD_LIMITS)? else {
            if read_more(stream, buffer).await? == 0 {
                return Err(GatewayError::Closed);
            }
            continue;
        };
        // No request here is HEAD, the one method that changes how an answer is framed.
        let head = head::parse_response(&buffer.split_to(end).freeze(), &Method::GET, HEAD_LIMITS)?;
        if !head.status.is_informational() || head.status == StatusCode::SWITCHING_PROTOCOLS {
            break head;
        }
    };
    let (mut decoder, mut body) = (BodyDecoder::new(head.framing), Vec::new());
    loop {
        match decoder.decode(buffer)? {
            Some(Part::Data(data)) => body.extend_from_slice(&data),
            Some(Part::Trailers(_)) => {}
            Some(Part::End) => return Ok(Reply { status: head.status, headers: head.headers, body }),
            None => {
                if read_more(stream, buffer).await? == 0 {
                    decoder.finish()?;
                }
            }
        }
        if body.len() > enrollment::BODY_MAX {
            return Err(GatewayError::TooLong);
        }
    }
}

async fn read_more(stream: &TlsStream, buffer: &mut BytesMut) -> Result<usize, GatewayError> {
    // With TLS 1.3 a refused client certificate shows as an alert on the first read.
    std::future::poll_fn(|cx| stream.poll_read_buf(cx, buffer)).await.map_err(GatewayError::tls)
}

impl Reply {
    /// The body of a success; any other answer is a refusal.
    pub(crate) fn into_body(self) -> Result<Vec<u8>, GatewayError> {
        if self.status.is_success() { Ok(self.body) } else { Err(GatewayError::Refused(self.refusal())) }
    }

    /// What an answer that is not the wanted one says.
    pub(crate) fn refusal(&self) -> Refusal {
        let (code, text) = match serde_json::from_slice::<ErrorBody>(&self.body) {
            Ok(ErrorBody { error }) if !error.code.is_empty() => {
                (ErrorCode::parse(&error.code), format!("{}: {}", error.code, error.message))
            }
            _ => (None, String::new()),
        };
        let seconds = self.headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let retry_after = seconds.map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
        Refusal { status: self.status, code, text, retry_after }
    }
}

impl GatewayError {
    fn tls(error: io::Error) -> Self {
        use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
        match rustls_error(&error) {
            Some(rustls::Error::InvalidCertificate(
                reason @ (Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. }),
            )) => Self::NotValidNow(reason.clone()),
            Some(rustls::Error::InvalidCertificate(reason)) => Self::Untrusted(reason.clone()),
            _ => Self::Tls(error),
        }
    }

    /// What the gateway says about a request that it refused.
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// The agent may not serve this service (any more).
    pub(crate) fn says_not_allowed(&self) -> bool {
        self.refusal().is_some_and(|refusal| refusal.code == Some(ErrorCode::AgentNotAllowed))
    }

    /// The gateway holds our certificate for expired, whatever our own clock says.
    pub(crate) fn says_certificate_expired(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.code == Some(ErrorCode::AgentCertificateExpired),
            Self::Tls(error) => {
                let expired = rustls::Error::AlertReceived(AlertDescription::CertificateExpired);
                rustls_error(error).is_some_and(|error| *error == expired)
            }
            _ => false,
        }
    }

    /// The same request may succeed later, without anybody doing anything about it.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Tls(_) | Self::Closed | Self::TimedOut(_) => true,
            Self::Refused(refusal) => refusal.is_overload() || refusal.status.is_server_error(),
            _ => false,
        }
    }
}

fn rustls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

impl Refusal {
    /// The gateway has done nothing about the request, for want of room.
    pub(crate) fn is_overload(&self) -> bool {
        matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status)?;
        if self.text.is_empty() {
            return Ok(());
        }
        // What answers may be another server than a gateway.
        write!(f, ", {}", error_line(&self.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(status: u16, retry_after: &'static str, body: &str) -> Reply {
        let headers = HeaderMap::from_iter([(header::RETRY_AFTER, header::HeaderValue::from_static(retry_after))]);
        Reply { status: StatusCode::from_u16(status).unwrap(), headers, body: body.into() }
    }

    fn tls_error(error: rustls::Error) -> GatewayError {
        GatewayError::tls(io::Error::new(io::ErrorKind::InvalidData, error))
    }

    #[test]
    fn refusals_say_what_the_gateway_said() {
        let body = r#"{"error":{"code":"GW_OVERLOADED","message":"draining","request_id":"x"}}"#;
        let refusal = reply(503, "7", body).refusal();
        assert_eq!(refusal.to_string(), "503 Service Unavailable, GW_OVERLOADED: draining");
        assert_eq!(refusal.retry_after, Some(Duration::from_secs(7)));
        assert_eq!(reply(429, "99999999", "").refusal().retry_after, Some(RETRY_AFTER_MAX));
        let plain = reply(404, "Fri, 31 Dec 1999 23:59:59 GMT", "<html>").refusal();
        assert_eq!((plain.to_string().as_str(), plain.retry_after), ("404 Not Found", None));
    }

    #[test]
    fn errors_are_told_apart_by_what_helps() {
        let unknown = tls_error(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer));
        assert!(unknown.to_string().contains("--ca-file") && !unknown.is_passing());
        for reason in [CertificateError::Expired, CertificateError::NotValidYet] {
            let error = tls_error(rustls::Error::InvalidCertificate(reason));
            assert!(error.to_string().contains("clock") && !error.to_string().contains("--ca-file"), "{error}");
            assert!(!error.says_certificate_expired(), "it is the gateway's own");
        }
        assert!(
            tls_error(rustls::Error::AlertReceived(AlertDescription::CertificateExpired)).says_certificate_expired()
        );
        assert!(!tls_error(rustls::Error::AlertReceived(AlertDescription::BadCertificate)).says_certificate_expired());
        let expired = r#"{"error":{"code":"GW_AGENT_CERTIFICATE_EXPIRED","message":"","request_id":""}}"#;
        assert!(GatewayError::Refused(reply(401, "", expired).refusal()).says_certificate_expired());
        for (status, passing) in [(429, true), (503, true), (500, true), (401, false), (404, false)] {
            assert_eq!(GatewayError::Refused(reply(status, "", "").refusal()).is_passing(), passing, "{status}");
        }
    }
}
