//! Errors of requests, and their mapping to responses.

use std::time::Duration;

use gw_shared::error_body::{self, ErrorBody, ErrorDetail};
use gw_shared::error_code::{AgentErrorCode, ErrorCode};
use gw_shared::http::InvalidHead;
use gw_shared::http::fields::{X_GW_REQUEST_ID, X_GW_STATUS};
use gw_shared::id::RequestId;
use gw_shared::tunnel::handshake;
use gw_shared::tunnel::response::InvalidResponse;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Response, StatusCode};

pub use overload::Overload;

mod overload;

/// Party that must change something for the request to succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultyParty {
    Caller,
    /// Credentials, keys or settings of the service.
    Policy,
    Agent,
    Backend,
    Gateway,
}

/// Reason why a request was not relayed, or not to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("Rate limit exceeded")]
    RateLimited { retry_after: Duration },
    #[error("send X-Gw-Authorization: Bearer <token> or X-Gw-Service-Key: gw_sk_<id>.<secret>")]
    AuthRequired,
    #[error("send X-Gw-Authorization or X-Gw-Service-Key, one of them, once")]
    AuthAmbiguous,
    #[error("this service does not accept {0}")]
    AuthModeNotAllowed(&'static str),
    #[error("the access token is not valid here: {0}")]
    TokenInvalid(&'static str),
    #[error("the access token is not valid here: its signature or its claims are wrong")]
    TokenForged,
    #[error("the access token cannot be used now: {0}")]
    TokenExpired(&'static str),
    #[error("the access token is for another service")]
    TokenAudienceMismatch,
    #[error(
        "the credential of this access token is deleted, disabled, or no longer allowed to use this service"
    )]
    CredentialRevoked,
    #[error("too many failed attempts to authenticate from this address")]
    AuthRateLimited { retry_after: Duration },
    #[error("no such service key, or wrong secret")]
    ServiceKeyInvalid,
    #[error("this service key does not allow this service")]
    ServiceKeyNotAllowed,
    #[error("no service has this hostname")]
    ServiceNotFound,
    #[error("this service is disabled")]
    ServiceDisabled,
    #[error("{0}")]
    HeadersTooLarge(InvalidHead),
    #[error("the tunnel was lost before the response began")]
    TunnelLost,
    #[error("the agent's answer is not valid on the tunnel")]
    TunnelProtocol,
    #[error("the node of this service cannot be reached; nothing was sent to the backend")]
    NodeUnavailable,
    #[error("the connection to the node of this service was lost before the response began")]
    NodeLost,
    #[error("Concurrent backend request limit exceeded")]
    AgentConcurrencyLimit,
    #[error("{0}")]
    AgentForward(AgentForwardError),
    #[error("no active tunnel: the agent of this service is offline or reconnecting")]
    AgentUnavailable,
    #[error("not valid HTTP: {0}")]
    BadRequest(String),
    #[error("this host is not served here")]
    Misdirected,
    #[error("nothing is served at this path")]
    PathNotFound,
    #[error("this path takes {0} only")]
    MethodNotAllowed(&'static str),
    /// `client` is the kind of client that is limited.
    #[error("Too many requests from this {client}; try again later")]
    ApexRateLimited {
        client: &'static str,
        retry_after: Duration,
    },
    #[error("{0}")]
    InvalidRequest(String),
    #[error("the request body is larger than {0} bytes")]
    BodyTooLarge(usize),
    #[error("this enrollment token is {0}: ask an administrator for a new one")]
    EnrollmentTokenInvalid(&'static str),
    #[error("unknown enrollment, wrong secret, or a key of another agent")]
    EnrollmentInvalid,
    #[error("this agent waits for an administrator to approve it")]
    EnrollmentPending,
    #[error("the certificate request is not usable: {0}")]
    CsrInvalid(String),
    #[error("the gateway is {0}; try again")]
    Overloaded(Overload),
    #[error("a tunnel needs a client certificate issued by this gateway")]
    AgentCertificateRequired,
    #[error("this agent is unknown: its record was deleted; enroll it again with a token")]
    AgentUnknown,
    #[error("this agent is revoked")]
    AgentRevoked,
    #[error(
        "the agent's certificate has expired; within 30 days, request a new one at /csr with its key, \
         after that enroll again"
    )]
    AgentCertificateExpired,
    /// A challenge instead of an error: without client certificates in TLS, the agent signs it.
    #[error("sign the challenge")]
    AgentChallenge { challenge: String },
    #[error("this agent may not serve {0}")]
    AgentNotAllowed(String),
    #[error("too many new tunnels of this service")]
    TunnelRateLimited { retry_after: Duration },
    #[error("{0}")]
    VersionMismatch(String),
}

/// Failed forward as the agent reported it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct AgentForwardError {
    code: AgentErrorCode,
    message: String,
}

impl AgentForwardError {
    pub(crate) fn code(&self) -> AgentErrorCode {
        self.code
    }
}

impl Error {
    /// Error that an agent reported; `code` is `None` if an agent may not send it.
    pub(crate) fn from_agent(code: Option<AgentErrorCode>, message: &str) -> Self {
        match code {
            Some(AgentErrorCode::ConcurrencyLimit) => Self::AgentConcurrencyLimit,
            Some(
                code @ (AgentErrorCode::BackendUnreachable
                | AgentErrorCode::BackendTls
                | AgentErrorCode::BackendReset
                | AgentErrorCode::BackendInvalidResponse),
            ) => {
                let message = if message.is_empty() {
                    "the agent gave no reason"
                } else {
                    message
                };
                Self::AgentForward(AgentForwardError {
                    code,
                    message: message.to_owned(),
                })
            }
            None => Self::TunnelProtocol,
        }
    }

    /// Error of a response that broke off after its head, with the agent's `code`.
    pub(crate) fn broken_response(code: Option<AgentErrorCode>) -> Self {
        Self::from_agent(
            code,
            "the backend's response broke off before any byte of its body arrived",
        )
    }

    /// Error of a response that the agent should have refused.
    pub(crate) fn invalid_response(invalid: InvalidResponse) -> Self {
        let message = format!("the response from the tunnel is not valid: {invalid}");
        Self::AgentForward(AgentForwardError {
            code: AgentErrorCode::BackendInvalidResponse,
            message,
        })
    }

    pub(crate) fn invalid_head(error: InvalidHead) -> Self {
        if error.is_too_large() {
            Self::HeadersTooLarge(error)
        } else {
            Self::BadRequest(error.to_string())
        }
    }

    /// Status, `X-Gw-Status`, code and fault of the error's response.
    pub fn outcome(&self) -> (StatusCode, &'static str, ErrorCode, FaultyParty) {
        use FaultyParty::{Agent, Backend, Caller, Gateway, Policy};
        const LIMITED: (StatusCode, &str) = (StatusCode::TOO_MANY_REQUESTS, "RateLimited");
        const DENIED: (StatusCode, &str) = (StatusCode::BAD_GATEWAY, "AuthDenied");
        const POLICY: (StatusCode, &str) = (StatusCode::BAD_GATEWAY, "PolicyDenied");
        const RELAY: (StatusCode, &str) = (StatusCode::BAD_GATEWAY, "RelayError");
        const AGENT: (StatusCode, &str) = (StatusCode::BAD_GATEWAY, "AgentError");
        let ((status, gw_status), code, fault) = match self {
            Self::RateLimited { .. } => (LIMITED, ErrorCode::RateLimitExceeded, Caller),
            Self::AuthRequired => (DENIED, ErrorCode::AuthRequired, Caller),
            Self::AuthAmbiguous => (DENIED, ErrorCode::AuthAmbiguous, Caller),
            Self::AuthModeNotAllowed(_) => (DENIED, ErrorCode::AuthModeNotAllowed, Policy),
            Self::TokenInvalid(_) | Self::TokenForged => (DENIED, ErrorCode::TokenInvalid, Caller),
            Self::TokenExpired(_) => (DENIED, ErrorCode::TokenExpired, Caller),
            Self::TokenAudienceMismatch => (DENIED, ErrorCode::TokenAudienceMismatch, Caller),
            Self::CredentialRevoked => (DENIED, ErrorCode::CredentialRevoked, Policy),
            Self::AuthRateLimited { .. } => (LIMITED, ErrorCode::AuthRateLimited, Caller),
            Self::ApexRateLimited { .. } => (LIMITED, ErrorCode::RateLimitExceeded, Caller),
            Self::TunnelRateLimited { .. } => (LIMITED, ErrorCode::RateLimitExceeded, Agent),
            Self::ServiceKeyInvalid => (DENIED, ErrorCode::ServiceKeyInvalid, Caller),
            Self::ServiceKeyNotAllowed => (DENIED, ErrorCode::ServiceKeyNotAllowed, Policy),
            Self::ServiceNotFound => (POLICY, ErrorCode::ServiceNotFound, Policy),
            Self::ServiceDisabled => (POLICY, ErrorCode::ServiceDisabled, Policy),
            Self::HeadersTooLarge(_) => (
                (StatusCode::BAD_GATEWAY, "HeadersTooLarge"),
                ErrorCode::HeadersTooLarge,
                Caller,
            ),
            Self::TunnelLost | Self::TunnelProtocol => (RELAY, ErrorCode::RelayError, Agent),
            Self::NodeLost => (RELAY, ErrorCode::RelayError, Gateway),
            Self::NodeUnavailable => (
                (StatusCode::SERVICE_UNAVAILABLE, "NodeUnavailable"),
                ErrorCode::NodeUnavailable,
                Gateway,
            ),
            Self::AgentConcurrencyLimit => (AGENT, ErrorCode::AgentConcurrencyLimit, Agent),
            Self::AgentForward(error) => (AGENT, error.code.error_code(), Backend),
            Self::AgentUnavailable => (
                (StatusCode::GATEWAY_TIMEOUT, "AgentUnavailable"),
                ErrorCode::AgentUnavailable,
                Agent,
            ),
            Self::BadRequest(_) | Self::InvalidRequest(_) => (
                (StatusCode::BAD_REQUEST, "BadRequest"),
                ErrorCode::BadRequest,
                Caller,
            ),
            Self::CsrInvalid(_) => (
                (StatusCode::BAD_REQUEST, "BadRequest"),
                ErrorCode::CsrInvalid,
                Caller,
            ),
            Self::BodyTooLarge(_) => (
                (StatusCode::PAYLOAD_TOO_LARGE, "BadRequest"),
                ErrorCode::BodyTooLarge,
                Caller,
            ),
            Self::MethodNotAllowed(_) => (
                (StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
                ErrorCode::MethodNotAllowed,
                Caller,
            ),
            Self::EnrollmentTokenInvalid(_) => (
                (StatusCode::UNAUTHORIZED, "AgentDenied"),
                ErrorCode::EnrollmentTokenInvalid,
                Agent,
            ),
            Self::EnrollmentInvalid => (
                (StatusCode::UNAUTHORIZED, "AgentDenied"),
                ErrorCode::EnrollmentInvalid,
                Agent,
            ),
            Self::EnrollmentPending => (
                (StatusCode::CONFLICT, "AgentDenied"),
                ErrorCode::EnrollmentPending,
                Policy,
            ),
            Self::Misdirected => (
                (StatusCode::MISDIRECTED_REQUEST, "Misdirected"),
                ErrorCode::Misdirected,
                Caller,
            ),
            Self::PathNotFound => (
                (StatusCode::NOT_FOUND, "NotFound"),
                ErrorCode::NotFound,
                Caller,
            ),
            Self::Overloaded(reason) => {
                let terms = reason.terms();
                ((terms.status, "Overloaded"), terms.code, Gateway)
            }
            Self::AgentCertificateRequired => (
                (StatusCode::UNAUTHORIZED, "AgentDenied"),
                ErrorCode::AgentCertificateRequired,
                Agent,
            ),
            Self::AgentCertificateExpired => (
                (StatusCode::UNAUTHORIZED, "AgentDenied"),
                ErrorCode::AgentCertificateExpired,
                Agent,
            ),
            Self::AgentChallenge { .. } => (
                (StatusCode::UNAUTHORIZED, "AgentDenied"),
                ErrorCode::AgentChallenge,
                Agent,
            ),
            Self::AgentUnknown => (
                (StatusCode::UNAUTHORIZED, "AgentDenied"),
                ErrorCode::AgentUnknown,
                Policy,
            ),
            Self::AgentRevoked => (
                (StatusCode::UNAUTHORIZED, "AgentDenied"),
                ErrorCode::AgentRevoked,
                Policy,
            ),
            Self::AgentNotAllowed(_) => (
                (StatusCode::FORBIDDEN, "AgentDenied"),
                ErrorCode::AgentNotAllowed,
                Policy,
            ),
            Self::VersionMismatch(_) => (
                (StatusCode::UPGRADE_REQUIRED, "AgentDenied"),
                ErrorCode::VersionMismatch,
                Agent,
            ),
        };
        (status, gw_status, code, fault)
    }

    /// Seconds of `Retry-After`, rounded up and at least 1 (RFC 9110 §10.2.3), if the error has one.
    pub(crate) fn retry_after_seconds(&self) -> Option<u64> {
        match self {
            Self::RateLimited { retry_after }
            | Self::AuthRateLimited { retry_after }
            | Self::ApexRateLimited { retry_after, .. }
            | Self::TunnelRateLimited { retry_after } => {
                Some((retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0)).max(1))
            }
            Self::Overloaded(reason) => Some(reason.terms().retry_after),
            Self::NodeUnavailable => Some(1),
            _ => None,
        }
    }

    /// Whether the backend may have received part of the request: true once the agent has connected to the backend, and
    /// if the tunnel was lost.
    pub(crate) fn may_have_reached_backend(&self) -> bool {
        match self {
            Self::AgentForward(error) => match error.code {
                AgentErrorCode::BackendReset | AgentErrorCode::BackendInvalidResponse => true,
                AgentErrorCode::ConcurrencyLimit
                | AgentErrorCode::BackendUnreachable
                | AgentErrorCode::BackendTls => false,
            },
            // An error of a malformed request body; malformed heads never get this far.
            Self::TunnelLost | Self::TunnelProtocol | Self::NodeLost | Self::BadRequest(_) => true,
            _ => false,
        }
    }

    /// Whether unauthenticated clients can cause this error, in any number.
    pub(crate) fn is_before_authentication(&self) -> bool {
        let (.., fault) = self.outcome();
        let authenticated = matches!(self, Self::RateLimited { .. } | Self::ServiceDisabled);
        matches!(fault, FaultyParty::Caller | FaultyParty::Policy) && !authenticated
    }

    /// Whether authentication has failed.
    pub(crate) fn is_failed_authentication(&self) -> bool {
        matches!(
            self,
            Self::AuthRequired
                | Self::AuthAmbiguous
                | Self::AuthModeNotAllowed(_)
                | Self::TokenInvalid(_)
                | Self::TokenForged
                | Self::TokenExpired(_)
                | Self::TokenAudienceMismatch
                | Self::CredentialRevoked
                | Self::ServiceKeyInvalid
                | Self::ServiceKeyNotAllowed
        )
    }

    /// Response of the error.
    pub(crate) fn response(&self, request_id: RequestId) -> Response<Vec<u8>> {
        self.response_after(request_id, 1)
    }

    /// Response of the error of a request for which so many agents were tried. The text names their number if there were
    /// several and the error is that of the last one.
    pub(crate) fn response_after(
        &self,
        request_id: RequestId,
        agents_tried: usize,
    ) -> Response<Vec<u8>> {
        let (status, gw_status, code, fault) = self.outcome();
        let names_agents =
            agents_tried >= 2 && matches!(fault, FaultyParty::Agent | FaultyParty::Backend);
        let body = ErrorBody {
            error: ErrorDetail {
                code: code.as_str().to_owned(),
                message: if names_agents {
                    format!("{self}; {agents_tried} agents were tried")
                } else {
                    self.to_string()
                },
                request_id: request_id.to_string(),
            },
        };
        // Strings always serialize.
        let mut body = serde_json::to_vec(&body).unwrap_or_default();
        body.push(b'\n');
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static(error_body::CONTENT_TYPE),
        );
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(X_GW_STATUS, HeaderValue::from_static(gw_status));
        headers.insert(X_GW_REQUEST_ID, request_id_value(request_id));
        if let Some(seconds) = self.retry_after_seconds() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        match self {
            Self::MethodNotAllowed(allowed) => {
                drop(headers.insert(header::ALLOW, HeaderValue::from_static(allowed)))
            }
            Self::AgentChallenge { challenge } => {
                let field = handshake::challenge_field(challenge);
                headers.extend(
                    HeaderValue::try_from(field)
                        .ok()
                        .map(|field| (header::WWW_AUTHENTICATE, field)),
                );
            }
            _ => {}
        }
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }
}

/// Value of `X-Gw-Request-Id`.
pub(crate) fn request_id_value(id: RequestId) -> HeaderValue {
    let mut buffer = [0; 36];
    // Hexadecimal digits and hyphens are a valid value.
    let mut value = HeaderValue::from_str(id.encode(&mut buffer))
        .unwrap_or_else(|_| HeaderValue::from_static(""));
    // Each value is different: it must not evict others from HPACK's table (RFC 7541 §7.1.3).
    value.set_sensitive(true);
    value
}

#[cfg(test)]
mod tests {
    use gw_shared::id::RequestIds;

    use super::*;

    #[test]
    fn status_gw_status_and_code_match_the_documentation() {
        let status_of = |error: &Error| {
            let (status, gw_status, code, _) = error.outcome();
            format!("{} {gw_status} {}", status.as_u16(), code.as_str())
        };
        let reported = |code: &str, message| {
            Error::from_agent(AgentErrorCode::parse(code.as_bytes()), message)
        };
        let table = [
            (
                Error::RateLimited {
                    retry_after: Duration::ZERO,
                },
                "429 RateLimited GW_RATE_LIMIT_EXCEEDED",
            ),
            (Error::AuthRequired, "502 AuthDenied GW_AUTH_REQUIRED"),
            (Error::AuthAmbiguous, "502 AuthDenied GW_AUTH_AMBIGUOUS"),
            (
                Error::AuthModeNotAllowed("tokens"),
                "502 AuthDenied GW_AUTH_MODE_NOT_ALLOWED",
            ),
            (Error::TokenInvalid("x"), "502 AuthDenied GW_TOKEN_INVALID"),
            (Error::TokenExpired("x"), "502 AuthDenied GW_TOKEN_EXPIRED"),
            (
                Error::TokenAudienceMismatch,
                "502 AuthDenied GW_TOKEN_AUDIENCE_MISMATCH",
            ),
            (
                Error::CredentialRevoked,
                "502 AuthDenied GW_CREDENTIAL_REVOKED",
            ),
            (
                Error::ServiceKeyInvalid,
                "502 AuthDenied GW_SERVICE_KEY_INVALID",
            ),
            (
                Error::ServiceKeyNotAllowed,
                "502 AuthDenied GW_SERVICE_KEY_NOT_ALLOWED",
            ),
            (
                Error::ServiceNotFound,
                "502 PolicyDenied GW_SERVICE_NOT_FOUND",
            ),
            (
                Error::ServiceDisabled,
                "502 PolicyDenied GW_SERVICE_DISABLED",
            ),
            (
                Error::HeadersTooLarge(InvalidHead::HeadTooLarge(1)),
                "502 HeadersTooLarge GW_HEADERS_TOO_LARGE",
            ),
            (Error::TunnelLost, "502 RelayError GW_RELAY_ERROR"),
            (Error::NodeLost, "502 RelayError GW_RELAY_ERROR"),
            (
                Error::NodeUnavailable,
                "503 NodeUnavailable GW_NODE_UNAVAILABLE",
            ),
            (
                Error::AgentConcurrencyLimit,
                "502 AgentError GW_AGENT_CONCURRENCY_LIMIT",
            ),
            (
                reported("GW_BACKEND_UNREACHABLE", "x"),
                "502 AgentError GW_BACKEND_UNREACHABLE",
            ),
            (
                reported("GW_BACKEND_TLS", "x"),
                "502 AgentError GW_BACKEND_TLS",
            ),
            (
                reported("GW_BACKEND_RESET", "x"),
                "502 AgentError GW_BACKEND_RESET",
            ),
            (
                reported("GW_BACKEND_INVALID_RESPONSE", "x"),
                "502 AgentError GW_BACKEND_INVALID_RESPONSE",
            ),
            (
                reported("GW_AUTH_REQUIRED", "forged"),
                "502 RelayError GW_RELAY_ERROR",
            ),
            (
                Error::AgentUnavailable,
                "504 AgentUnavailable AGENT_UNAVAILABLE",
            ),
            (
                Error::BadRequest(String::new()),
                "400 BadRequest GW_BAD_REQUEST",
            ),
            (Error::Misdirected, "421 Misdirected GW_MISDIRECTED"),
            (
                Error::Overloaded(Overload::Draining),
                "503 Overloaded GW_OVERLOADED",
            ),
            (Error::AgentUnknown, "401 AgentDenied GW_AGENT_UNKNOWN"),
            (Error::AgentRevoked, "401 AgentDenied GW_AGENT_REVOKED"),
            (
                Error::VersionMismatch(String::new()),
                "426 AgentDenied GW_VERSION_MISMATCH",
            ),
        ];
        for (error, expected) in table {
            assert_eq!(status_of(&error), expected);
        }
    }

    #[test]
    fn retry_after_is_rounded_up_and_at_least_one() {
        let seconds = |millis| {
            Error::RateLimited {
                retry_after: Duration::from_millis(millis),
            }
            .retry_after_seconds()
        };
        assert_eq!(
            [seconds(0), seconds(1), seconds(1000), seconds(1001)],
            [Some(1), Some(1), Some(1), Some(2)]
        );
    }

    #[test]
    fn the_body_has_request_id_and_message() {
        let id = RequestIds::new().next_id();
        let response = Error::RateLimited {
            retry_after: Duration::ZERO,
        }
        .response(id);
        let body: ErrorBody = serde_json::from_slice(response.body()).unwrap();
        assert_eq!(body.error.request_id, id.to_string());
        assert_eq!(response.headers()[X_GW_REQUEST_ID], id.to_string().as_str());
        assert_eq!(body.error.message, "Rate limit exceeded");
        assert_eq!(
            response.headers()[header::CONTENT_LENGTH],
            response.body().len().to_string().as_str()
        );
    }

    #[test]
    fn the_text_names_the_number_of_agents_that_were_tried() {
        let id = RequestIds::new().next_id();
        let text = |error: &Error, agents_tried| {
            let response = error.response_after(id, agents_tried);
            assert_eq!(response.status(), error.response(id).status());
            let body: ErrorBody = serde_json::from_slice(response.body()).unwrap();
            (body.error.code, body.error.message)
        };
        let full = "Concurrent backend request limit exceeded";
        for (agents_tried, message) in [
            (0, full.to_owned()),
            (1, full.to_owned()),
            (3, format!("{full}; 3 agents were tried")),
        ] {
            let expected = ("GW_AGENT_CONCURRENCY_LIMIT".to_owned(), message);
            assert_eq!(text(&Error::AgentConcurrencyLimit, agents_tried), expected);
        }
        let unreachable = Error::from_agent(
            Some(AgentErrorCode::BackendUnreachable),
            "connection refused",
        );
        assert_eq!(
            text(&unreachable, 2).1,
            "connection refused; 2 agents were tried"
        );
        // Not an error of the last agent.
        assert_eq!(
            text(&Error::BadRequest("chunk".to_owned()), 2).1,
            "not valid HTTP: chunk"
        );
    }
}
