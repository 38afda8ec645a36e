//! Errors of exchanges with the gateway.

use std::fmt;
use std::io;
use std::time::Duration;

use gw_shared::error_code::ErrorCode;
use gw_shared::http::{InvalidBody, InvalidHead};
use gw_shared::identity::enrollment;
use gw_shared::tunnel::text::error_line;
use http::StatusCode;
use rustls::{AlertDescription, CertificateError};

use crate::proxy::ProxyError;
use crate::tls::rustls_error;

/// Why an exchange with the gateway failed.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    #[error("the gateway cannot be reached: {0}")]
    Connect(io::Error),
    #[error("the gateway cannot be reached: {0}")]
    Proxy(#[from] ProxyError),
    #[error(
        "the gateway's certificate is not trusted: {0}; if a private authority issued it, pass that authority's \
         certificate to `gw-agent enroll` with --ca-file"
    )]
    Untrusted(CertificateError),
    #[error(
        "the gateway's certificate is not valid at the time of this machine's clock: {0}; set the clock (NTP), or renew \
         that certificate"
    )]
    NotValidNow(CertificateError),
    #[error("TLS with the gateway failed: {0}")]
    Tls(io::Error),
    #[error("the gateway closed the connection before it answered")]
    Closed,
    #[error("the gateway did not answer within {0:?}")]
    TimedOut(Duration),
    #[error("the gateway's answer is not valid HTTP: {0}")]
    Head(#[from] InvalidHead),
    #[error("the gateway's answer is not valid HTTP: {0}")]
    Body(#[from] InvalidBody),
    #[error("the gateway's answer is longer than {} bytes", enrollment::BODY_MAX)]
    TooLong,
    #[error("this version of the agent does not understand the gateway's answer: {}", error_line(.0))]
    NotUnderstood(#[from] serde_json::Error),
    #[error("the gateway refused the request: {0}")]
    Refused(Refusal),
    /// The identity, the authorities or the server name cannot be used for TLS.
    #[error("TLS with the gateway cannot be configured: {0}")]
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

impl GatewayError {
    /// Sorts an error of the TLS stream by its remedy.
    pub(super) fn tls(error: io::Error) -> Self {
        use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
        match rustls_error(&error) {
            Some(rustls::Error::InvalidCertificate(
                reason @ (Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. }),
            )) => Self::NotValidNow(reason.clone()),
            Some(rustls::Error::InvalidCertificate(reason)) => Self::Untrusted(reason.clone()),
            _ => Self::Tls(error),
        }
    }

    /// The gateway's refusal, if the gateway answered.
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// Whether the agent may not serve the requested service.
    pub(crate) fn is_not_allowed(&self) -> bool {
        self.refusal().is_some_and(|refusal| refusal.code == Some(ErrorCode::AgentNotAllowed))
    }

    /// Whether the agent's certificate has expired by the gateway's clock.
    pub(crate) fn is_certificate_expired(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.code == Some(ErrorCode::AgentCertificateExpired),
            Self::Tls(error) => {
                let expired = rustls::Error::AlertReceived(AlertDescription::CertificateExpired);
                rustls_error(error).is_some_and(|error| *error == expired)
            }
            _ => false,
        }
    }

    /// Whether the same request may succeed later without any intervention.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Tls(_) | Self::Closed | Self::TimedOut(_) => true,
            Self::Proxy(error) => error.is_transient(),
            Self::Refused(refusal) => refusal.is_overload() || refusal.status.is_server_error(),
            _ => false,
        }
    }
}

impl Refusal {
    /// Whether the gateway rejected the request for lack of capacity, without processing it.
    pub(crate) fn is_overload(&self) -> bool {
        matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
    }

    /// Whether a request with the same credential will be refused again.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self.status,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::GONE
        )
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status)?;
        if self.text.is_empty() {
            return Ok(());
        }
        // The answer may come from another server than the gateway, so its text is escaped and bounded.
        write!(f, ", {}", error_line(&self.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tls_error(error: rustls::Error) -> GatewayError {
        GatewayError::tls(io::Error::new(io::ErrorKind::InvalidData, error))
    }

    fn refused(status: u16, code: Option<ErrorCode>) -> GatewayError {
        let status = StatusCode::from_u16(status).unwrap();
        GatewayError::Refused(Refusal { status, code, text: String::new(), retry_after: None })
    }

    #[test]
    fn errors_are_sorted_by_their_remedy() {
        let unknown = tls_error(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer));
        assert!(unknown.to_string().contains("--ca-file") && !unknown.is_transient());
        for reason in [CertificateError::Expired, CertificateError::NotValidYet] {
            let error = tls_error(rustls::Error::InvalidCertificate(reason));
            assert!(error.to_string().contains("clock") && !error.to_string().contains("--ca-file"), "{error}");
            assert!(!error.is_certificate_expired(), "the expired certificate is the gateway's");
        }
        assert!(tls_error(rustls::Error::AlertReceived(AlertDescription::CertificateExpired)).is_certificate_expired());
        assert!(!tls_error(rustls::Error::AlertReceived(AlertDescription::BadCertificate)).is_certificate_expired());
        assert!(refused(401, Some(ErrorCode::AgentCertificateExpired)).is_certificate_expired());
        for (status, transient) in [(429, true), (503, true), (500, true), (401, false), (404, false)] {
            assert_eq!(refused(status, None).is_transient(), transient, "{status}");
        }
    }
}
