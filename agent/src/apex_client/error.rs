//! Errors of exchanges with the gateway.

use std::fmt;
use std::io;
use std::time::Duration;

use gw_shared::error_code::ErrorCode;
use gw_shared::http::{InvalidBody, InvalidHead};
use gw_shared::net::tls::{Remedies, TlsProblem, refused_certificate};
use gw_shared::text::error_line;
use http::StatusCode;
use rustls::{AlertDescription, CertificateError};

use super::CONNECT_LIMIT;
use crate::clock::{WARN_FROM, in_words};
use crate::proxy::ProxyError;
use crate::tls::{self, rustls_error};

/// Why an exchange with the gateway failed.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    #[error(
        "the gateway cannot be reached: the name {host} cannot be resolved: {error}; check that \
         name and this machine's DNS"
    )]
    Resolve { host: String, error: io::Error },
    /// `at` is HOST:PORT, here and below.
    #[error("the gateway cannot be reached: {at}: {error}; {}", connect_advice(.error))]
    Connect { at: String, error: io::Error },
    #[error(
        "the gateway cannot be reached: {at} did not accept a connection within {CONNECT_LIMIT:?}; \
         check the address, and firewalls between here and the gateway"
    )]
    ConnectTimedOut { at: String },
    #[error("the gateway cannot be reached: {0}")]
    Proxy(#[from] ProxyError),
    #[error(
        "the gateway's certificate at {at} is not trusted: {reason}; if a private authority issued \
         it, name that authority's certificate, or this one, with --ca-file when the agent enrolls \
         (for gw-agent-enroll.service: GW_ENROLL_OPTIONS): {} (it is kept as gateway-ca.crt in the \
         state folder)",
        tls::DEVELOPMENT_CA
    )]
    Untrusted { at: String, reason: String },
    #[error(
        "the server at {at} is not the gateway that was asked for: {reason}; check host and port \
         of the gateway, and that its certificate has that name"
    )]
    WrongName { at: String, reason: String },
    #[error(
        "the gateway's certificate at {at} is not valid at the time of this machine's clock: {}; \
         {}",
        refused_certificate(.reason),
        clock_advice(*.ahead)
    )]
    NotValidNow {
        at: String,
        reason: CertificateError,
        /// Seconds by which this machine's clock is ahead of the gateway's, if the gateway has
        /// answered.
        ahead: Option<i64>,
    },
    #[error(
        "{at} does not speak TLS: it is a port for plain HTTP, or of another program; use the \
         HTTPS port of the gateway (`listen` in gateway.toml)"
    )]
    NotTls { at: String },
    #[error(
        "{at} is not a Gw gateway: its TLS does not know the protocol of agents; check host and \
         port of the gateway"
    )]
    NotAGateway { at: String },
    #[error("TLS with {at} failed: {}", explained(.error))]
    Handshake { at: String, error: io::Error },
    #[error("TLS with the gateway failed: {}", explained(.0))]
    Tls(io::Error),
    #[error("the gateway closed the connection before it answered")]
    Closed,
    #[error("the gateway did not answer within {0:?}")]
    TimedOut(Duration),
    #[error("the gateway's answer is not valid HTTP: {0}")]
    Head(#[from] InvalidHead),
    #[error("the gateway's answer is not valid HTTP: {0}")]
    Body(#[from] InvalidBody),
    #[error("the gateway's answer is longer than expected")]
    TooLong,
    #[error(
        "this version of the agent does not understand the gateway's answer: {}; check that the \
         server is a Gw gateway",
        error_line(.0)
    )]
    NotUnderstood(#[from] serde_json::Error),
    #[error("{}", refused(.0))]
    Refused(ErrorReply),
    /// The identity, the authorities or the server name cannot be used for TLS.
    #[error("TLS with the gateway cannot be configured: {0}")]
    Certificates(String),
}

/// An answer with an error status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorReply {
    pub status: StatusCode,
    /// Code of the gateway's error body; `None` if there is no such body or this version does not
    /// know the code.
    pub code: Option<ErrorCode>,
    /// Code and message of the error body as the gateway wrote them; empty if there is no such
    /// body.
    pub text: String,
    /// `Retry-After`, at most ten minutes.
    pub retry_after: Option<Duration>,
}

impl GatewayError {
    /// Sorts an error of the handshake with `at` by its remedy.
    pub(super) fn handshake(at: &str, error: io::Error) -> Self {
        let at = at.to_owned();
        let Some(reason) = rustls_error(&error) else {
            return Self::Handshake { at, error };
        };
        let problem = TlsProblem::of(reason);
        let cause = error.to_string();
        match (problem, reason) {
            (TlsProblem::Time, rustls::Error::InvalidCertificate(reason)) => Self::NotValidNow {
                at,
                reason: reason.clone(),
                ahead: None,
            },
            (TlsProblem::Name, _) => Self::WrongName { at, reason: cause },
            (TlsProblem::Issuer | TlsProblem::Certificate, _) => {
                Self::Untrusted { at, reason: cause }
            }
            (TlsProblem::NotTls, _) => Self::NotTls { at },
            (TlsProblem::Protocol, _) => Self::NotAGateway { at },
            _ => Self::Handshake { at, error },
        }
    }

    /// The gateway's refusal, if the gateway answered.
    pub(crate) fn refusal(&self) -> Option<&ErrorReply> {
        match self {
            Self::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// Whether the records of the gateway do not have the requested service for this agent, or not
    /// the agent.
    pub(crate) fn is_not_in_records(&self) -> bool {
        let code = self.refusal().and_then(|refusal| refusal.code);
        matches!(
            code,
            Some(ErrorCode::AgentNotAllowed | ErrorCode::AgentUnknown)
        )
    }

    /// Whether the agent's certificate has expired by the gateway's clock.
    pub(crate) fn is_certificate_expired(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.code == Some(ErrorCode::AgentCertificateExpired),
            Self::Tls(error) | Self::Handshake { error, .. } => {
                let expired = rustls::Error::AlertReceived(AlertDescription::CertificateExpired);
                rustls_error(error).is_some_and(|error| *error == expired)
            }
            _ => false,
        }
    }

    /// Whether the same request may succeed later without any intervention.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Resolve { .. }
            | Self::Connect { .. }
            | Self::ConnectTimedOut { .. }
            | Self::Handshake { .. }
            | Self::Tls(_)
            | Self::Closed
            | Self::TimedOut(_) => true,
            Self::Proxy(error) => error.is_transient(),
            Self::Refused(refusal) => refusal.is_overload() || refusal.status.is_server_error(),
            _ => false,
        }
    }
}

/// An error of a TLS connection with its remedy, if it is one of TLS.
fn explained(error: &io::Error) -> String {
    const INTERCEPTED: &str = "check that it is the HTTPS port of the gateway, and that nothing in \
                               between intercepts TLS";
    const REMEDIES: Remedies = Remedies {
        issuer: INTERCEPTED,
        name: INTERCEPTED,
        certificate: INTERCEPTED,
        client_certificate: "enroll the agent again (`gw-agent enroll --force`) if it does not \
                             renew its certificate by itself",
        not_tls: INTERCEPTED,
        other: INTERCEPTED,
        versions: "TLS 1.3",
    };
    rustls_error(error).map_or_else(|| error.to_string(), |error| REMEDIES.explain(error))
}

fn connect_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "check the port, and that the gateway runs there",
        io::ErrorKind::TimedOut => "check the address, and firewalls between here and the gateway",
        _ => "check the address and this machine's network",
    }
}

/// What to do about a certificate that is not valid now.
fn clock_advice(ahead: Option<i64>) -> String {
    match ahead {
        None => {
            "set this machine's clock (NTP), or renew that certificate at the gateway".to_owned()
        }
        Some(ahead) if ahead.unsigned_abs() < WARN_FROM.as_secs() => {
            "the gateway's clock shows the same time, so renew that certificate at the gateway"
                .to_owned()
        }
        Some(ahead) => {
            let side = if ahead > 0 { "ahead of" } else { "behind" };
            let difference = in_words(Duration::from_secs(ahead.unsigned_abs()));
            format!(
                "this machine's clock is {difference} {side} the gateway's: synchronise both with \
                 NTP"
            )
        }
    }
}

fn refused(refusal: &ErrorReply) -> String {
    if refusal.text.is_empty() {
        return format!(
            "the server at the gateway's address answered {refusal}, and not as a Gw gateway does; \
             check host and port of the gateway, and proxies in front of it"
        );
    }
    format!("the gateway refused the request: {refusal}")
}

impl ErrorReply {
    /// Whether the gateway rejected the request for lack of capacity, without processing it.
    pub(crate) fn is_overload(&self) -> bool {
        matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        )
    }

    /// Whether a request with the same credential will be refused again.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self.status,
            StatusCode::UNAUTHORIZED
                | StatusCode::FORBIDDEN
                | StatusCode::NOT_FOUND
                | StatusCode::GONE
        )
    }
}

impl fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.status)?;
        if self.text.is_empty() {
            return Ok(());
        }
        // The answer may come from another server than the gateway, so its text is escaped and
        // bounded.
        write!(f, ", {}", error_line(&self.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tls_error(error: rustls::Error) -> GatewayError {
        GatewayError::handshake("gw:443", io::Error::new(io::ErrorKind::InvalidData, error))
    }

    fn refused(status: u16, code: Option<ErrorCode>) -> GatewayError {
        let status = StatusCode::from_u16(status).unwrap();
        GatewayError::Refused(ErrorReply {
            status,
            code,
            text: String::new(),
            retry_after: None,
        })
    }

    #[test]
    fn advice_about_certificates_depends_on_the_difference_of_the_clocks() {
        for (ahead, expected) in [
            (None, "or renew"),
            (Some(-29), "the same time, so renew"),
            (Some(90), "clock is 90 seconds ahead of the gateway's"),
            (Some(-3 * 86_400), "clock is 3 days behind the gateway's"),
        ] {
            let advice = clock_advice(ahead);
            assert!(advice.contains(expected), "{ahead:?}: {advice}");
        }
    }

    fn certificate_error(error: CertificateError) -> GatewayError {
        tls_error(rustls::Error::InvalidCertificate(error))
    }

    #[test]
    fn errors_of_the_gateways_certificate_name_their_remedy() {
        for (error, part, names_ca_file) in [
            (CertificateError::UnknownIssuer, "--ca-file", true),
            (CertificateError::Expired, "clock", false),
            (CertificateError::NotValidYet, "clock", false),
            (CertificateError::NotValidForName, "gw:443", false),
        ] {
            let error = certificate_error(error);
            let text = error.to_string();
            assert!(text.contains(part), "{text}");
            assert_eq!(text.contains("--ca-file"), names_ca_file, "{text}");
            assert!(!error.is_certificate_expired(), "{text}");
        }
        assert!(!certificate_error(CertificateError::UnknownIssuer).is_transient());
    }

    #[test]
    fn a_server_without_tls_is_named() {
        let invalid = rustls::InvalidMessage::InvalidContentType;
        let plain = tls_error(rustls::Error::InvalidMessage(invalid));
        let text = plain.to_string();
        assert!(text.starts_with("gw:443 does not speak TLS"), "{text}");
        assert!(!plain.is_transient());
    }

    #[test]
    fn an_expired_certificate_of_the_agent_is_recognised() {
        // The alert for a refused client certificate arrives after the handshake.
        let alert = |alert| {
            let error = rustls::Error::AlertReceived(alert);
            GatewayError::Tls(io::Error::new(io::ErrorKind::InvalidData, error))
        };
        assert!(alert(AlertDescription::CertificateExpired).is_certificate_expired());
        assert!(!alert(AlertDescription::BadCertificate).is_certificate_expired());
        assert!(refused(401, Some(ErrorCode::AgentCertificateExpired)).is_certificate_expired());
    }

    #[test]
    fn refusals_are_transient_by_their_status() {
        for (status, transient) in [
            (429, true),
            (503, true),
            (500, true),
            (401, false),
            (404, false),
        ] {
            assert_eq!(refused(status, None).is_transient(), transient, "{status}");
        }
    }
}
