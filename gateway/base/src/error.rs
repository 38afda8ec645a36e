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

use crate::service::rate::Rate;

mod overload;
pub use overload::Overload;

/// Party that must change something for the request to succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultyParty {
    /// The client that sent the request.
    Caller,
    /// Credentials, keys or settings of the service.
    Policy,
    /// The agent of the service, or its tunnel.
    Agent,
    /// The backend behind the agent.
    Backend,
    /// This gateway, or another node of its region.
    Gateway,
}

/// Reason why a request was not relayed, or not to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bucket of the service is empty.
    #[error("Rate limit exceeded")]
    RateLimited {
        /// Time until the next request can succeed.
        retry_after: Duration,
    },
    /// The request has no credential.
    #[error(
        "the request has no credential: send X-Gw-Authorization: Bearer <token> or \
         X-Gw-Service-Key: gw_sk_<id>.<secret>"
    )]
    AuthRequired,
    /// The request has a service key in `Authorization`, and no credential.
    #[error(
        "the service key is in Authorization, which is relayed to the backend; send it as \
         X-Gw-Service-Key: gw_sk_<id>.<secret>"
    )]
    AuthMisplaced,
    /// The request has several credentials, or one of them twice.
    #[error(
        "the request has several credentials: send X-Gw-Authorization or X-Gw-Service-Key, one of \
         them, once"
    )]
    AuthAmbiguous,
    /// The service does not accept this kind of credential, which the text names.
    #[error(
        "this service does not accept {0}: send the other kind of credential, or have an \
         administrator change its modes"
    )]
    AuthModeNotAllowed(&'static str),
    /// The access token is malformed or of another issuer; the text is the reason.
    #[error("the access token is not valid here: {0}")]
    TokenInvalid(&'static str),
    /// The signature of the access token does not verify, or its claims cannot be decoded.
    #[error(
        "the access token is not valid here: its signature or its claims are wrong; send it whole, \
         or request a new one"
    )]
    TokenForged,
    /// The access token has expired or is not valid yet; the text is the reason.
    #[error("the access token cannot be used now: {0}")]
    TokenExpired(&'static str),
    /// The access token has the audience of another service.
    #[error(
        "the access token is for another service: request one with the scope `account:ACCOUNT \
         service:SERVICE` of this one"
    )]
    TokenAudienceMismatch,
    /// The credential of the access token no longer gives access to the service.
    #[error(
        "the credential of this access token is deleted, disabled, or no longer allowed to use \
         this service: have an administrator check it"
    )]
    CredentialRevoked,
    /// Authentication of this client address has failed too often.
    #[error(
        "too many failed attempts to authenticate from this address, which may have {rate}: check \
         the credential, and wait"
    )]
    AuthRateLimited {
        /// Failures that an address may have.
        rate: Rate,
        /// Time until the next request can succeed.
        retry_after: Duration,
    },
    /// The service key is malformed, unknown or disabled, or its secret is wrong.
    #[error(
        "no such service key, or wrong secret: send all of `gw_sk_<id>.<secret>` and nothing else, \
         as it was shown when the key was created, or use a new key"
    )]
    ServiceKeyInvalid,
    /// The service key gives access to other services only.
    #[error(
        "this service key does not allow this service: use a key of this service, or have an \
         administrator add the service to the key"
    )]
    ServiceKeyNotAllowed,
    /// The hostname is one of the region, but no service has it.
    #[error(
        "no service has this hostname: check ACCOUNT--SERVICE before its first dot; `gw-gateway \
         service list ACCOUNT` lists those that exist"
    )]
    ServiceNotFound,
    /// An administrator has disabled the service.
    #[error("this service is disabled: an administrator can enable it")]
    ServiceDisabled,
    /// The head of the request exceeds a limit.
    #[error("{0}")]
    HeadersTooLarge(InvalidHead),
    /// The tunnel ended before the head of the response arrived.
    #[error("the tunnel was lost before the response began")]
    TunnelLost,
    /// The answer of the agent violates the protocol of the tunnel.
    #[error("the agent's answer is not valid on the tunnel")]
    TunnelProtocol,
    /// No connection to the node that owns the service; the request was not sent.
    #[error("the node of this service cannot be reached; nothing was sent to the backend")]
    NodeUnavailable,
    /// The connection to the node that owns the service ended before the head of the response
    /// arrived.
    #[error("the connection to the node of this service was lost before the response began")]
    NodeLost,
    /// The agent already forwards as many requests at once as it may.
    #[error("Concurrent backend request limit exceeded")]
    AgentConcurrencyLimit,
    /// The agent could not forward the request to its backend.
    #[error("{0}")]
    AgentForward(AgentForwardError),
    /// The service has no tunnel that can take the request.
    #[error(
        "no active tunnel: the agent of this service is offline or reconnecting; start it, or ask \
         `gw-agent doctor` on its machine"
    )]
    AgentUnavailable,
    /// The request violates HTTP; the text is the reason.
    #[error("not valid HTTP: {0}")]
    BadRequest(String),
    /// The host of the request is not one of this region (RFC 9110 §15.5.20).
    #[error(
        "this host is not served here: check the URL, its DNS and the Host field; a service is at \
         https://ACCOUNT--SERVICE.REGION.DOMAIN"
    )]
    Misdirected,
    /// The apex has nothing at this path.
    #[error(
        "nothing is served at this path of the apex, where tokens are requested and agents enroll; \
         a service is at https://ACCOUNT--SERVICE.REGION.DOMAIN, and administration at \
         `admin_listen`"
    )]
    PathNotFound,
    /// The apex does not take this method at this path; the text is the value of `Allow`.
    #[error("this path takes {0} only")]
    MethodNotAllowed(&'static str),
    /// A client sends requests to the apex faster than the gateway allows.
    #[error("Too many requests from this {client}, which may send {rate}; wait")]
    ApexRateLimited {
        /// Requests that the client may send.
        rate: Rate,
        /// Kind of the client that is limited, as the message names it.
        client: &'static str,
        /// Time until the next request can succeed.
        retry_after: Duration,
    },
    /// A request that the gateway answers itself is invalid, for example its body; the text is the
    /// reason.
    #[error("{0}")]
    InvalidRequest(String),
    /// The body of a request to the apex is larger than this number of bytes.
    #[error("the request body is larger than {0} bytes")]
    BodyTooLarge(usize),
    /// The enrollment token cannot be used; the text is its state.
    #[error("this enrollment token is {0}: ask an administrator for a new one")]
    EnrollmentTokenInvalid(&'static str),
    /// The enrollment is unknown or has expired, or its proof does not fit the agent.
    #[error("unknown enrollment, wrong secret, or a key of another agent")]
    EnrollmentInvalid,
    /// An administrator has not approved the agent yet.
    #[error("this agent waits for an administrator to approve it")]
    EnrollmentPending,
    /// The certificate signing request is refused; the text is the reason.
    #[error("the certificate request is not usable: {0}")]
    CsrInvalid(String),
    /// The gateway has no room or no time for the request.
    #[error("the gateway is {0}; try again")]
    Overloaded(Overload),
    /// The agent opened a tunnel without a valid client certificate of this gateway.
    #[error("a tunnel needs a client certificate issued by this gateway")]
    AgentCertificateRequired,
    /// The gateway has no record of the agent.
    #[error("this agent is unknown: its record was deleted; enroll it again with a token")]
    AgentUnknown,
    /// An administrator has revoked the agent.
    #[error("this agent is revoked")]
    AgentRevoked,
    /// The certificate of the agent has expired.
    #[error(
        "the agent's certificate has expired; within 30 days, request a new one at /csr with its \
         key, after that enroll again"
    )]
    AgentCertificateExpired,
    /// A challenge instead of an error: without client certificates in TLS, the agent signs it.
    #[error("sign the challenge")]
    AgentChallenge {
        /// Text that the agent signs, sent in `WWW-Authenticate`.
        challenge: String,
    },
    /// The agent may not serve the service with this hostname.
    #[error("this agent may not serve {0}")]
    AgentNotAllowed(String),
    /// The agent opens tunnels of the service faster than the gateway allows.
    #[error(
        "too many new tunnels of this {limited}, which may open {rate}; the agent waits by itself"
    )]
    TunnelRateLimited {
        /// Party that has the limit: `service` or `agent`.
        limited: &'static str,
        /// Tunnels that it may open.
        rate: Rate,
        /// Time until the next request can succeed.
        retry_after: Duration,
    },
    /// The version of the agent is not served; the text is the reason.
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
    /// Returns the code of the failure.
    pub fn code(&self) -> AgentErrorCode {
        self.code
    }
}

impl Error {
    /// Error that an agent reported; `code` is `None` if an agent may not send it.
    pub fn from_agent(code: Option<AgentErrorCode>, message: &str) -> Self {
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
    pub fn broken_response(code: Option<AgentErrorCode>) -> Self {
        Self::from_agent(
            code,
            "the backend's response broke off before any byte of its body arrived",
        )
    }

    /// Error of a response that the agent should have refused.
    pub fn invalid_response(invalid: InvalidResponse) -> Self {
        let message = format!("the response from the tunnel is not valid: {invalid}");
        Self::AgentForward(AgentForwardError {
            code: AgentErrorCode::BackendInvalidResponse,
            message,
        })
    }

    /// Error of a request whose head cannot be parsed or exceeds a limit.
    pub fn invalid_head(error: InvalidHead) -> Self {
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
            Self::AuthRequired | Self::AuthMisplaced => (DENIED, ErrorCode::AuthRequired, Caller),
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

    /// Seconds of `Retry-After`, rounded up and at least 1 (RFC 9110 §10.2.3), if the error has
    /// one.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        match self {
            Self::RateLimited { retry_after }
            | Self::AuthRateLimited { retry_after, .. }
            | Self::ApexRateLimited { retry_after, .. }
            | Self::TunnelRateLimited { retry_after, .. } => {
                Some((retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0)).max(1))
            }
            Self::Overloaded(reason) => Some(reason.terms().retry_after),
            Self::NodeUnavailable => Some(1),
            _ => None,
        }
    }

    /// Whether the backend may have received part of the request: true once the agent has connected
    /// to the backend, and if the tunnel was lost.
    pub fn may_have_reached_backend(&self) -> bool {
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
    pub fn is_before_authentication(&self) -> bool {
        let (.., fault) = self.outcome();
        let authenticated = matches!(self, Self::RateLimited { .. } | Self::ServiceDisabled);
        matches!(fault, FaultyParty::Caller | FaultyParty::Policy) && !authenticated
    }

    /// Whether authentication has failed.
    pub fn is_failed_authentication(&self) -> bool {
        matches!(
            self,
            Self::AuthRequired
                | Self::AuthMisplaced
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

    /// Whether the refusal costs its caller nothing and no backend a thing, so that one account can
    /// cause very many.
    pub fn is_cheap(&self) -> bool {
        let is_limit = matches!(
            self,
            Self::RateLimited { .. }
                | Self::AuthRateLimited { .. }
                | Self::AgentConcurrencyLimit
                | Self::AgentUnavailable
        );
        is_limit || self.is_failed_authentication()
    }

    /// What a caller has to know besides the message, of a service with this rate.
    fn detail(&self, rate: Rate) -> Option<String> {
        let seconds = self.retry_after_seconds()?;
        matches!(self, Self::RateLimited { .. }).then(|| {
            format!(
                "this service admits {rate}, of all callers together: try again in {seconds} s, or \
                 have an administrator raise its burst or refill_per_minute"
            )
        })
    }

    /// Response of the error.
    pub fn response(&self, request_id: RequestId) -> Response<Vec<u8>> {
        self.response_about(request_id, 1, None)
    }

    /// Response of the error of a request for which so many agents were tried. The text names their
    /// number if there were several and the error is that of the last one. `rate` is that of the
    /// service, if it is known.
    pub fn response_about(
        &self,
        request_id: RequestId,
        agents_tried: usize,
        rate: Option<Rate>,
    ) -> Response<Vec<u8>> {
        let (status, gw_status, code, fault) = self.outcome();
        let names_agents =
            agents_tried >= 2 && matches!(fault, FaultyParty::Agent | FaultyParty::Backend);
        let body = ErrorBody {
            error: ErrorDetail {
                code: code.as_str().to_owned(),
                message: match names_agents {
                    true => format!("{self}; {agents_tried} agents were tried"),
                    false => self.to_string(),
                },
                detail: rate.and_then(|rate| self.detail(rate)),
                request_id: request_id.to_string(),
            },
        };
        // Strings always serialize.
        let mut body = serde_json::to_vec(&body).unwrap_or_default();
        body.push(b'\n');
        let mut headers = HeaderMap::with_capacity(8);
        let content_type = HeaderValue::from_static(error_body::CONTENT_TYPE);
        headers.insert(header::CONTENT_TYPE, content_type);
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(X_GW_STATUS, HeaderValue::from_static(gw_status));
        headers.insert(X_GW_REQUEST_ID, request_id_value(request_id));
        if let Some(seconds) = self.retry_after_seconds() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        match self {
            Self::MethodNotAllowed(allowed) => {
                drop(headers.insert(header::ALLOW, HeaderValue::from_static(allowed)));
            }
            Self::AgentChallenge { challenge } => {
                let field = HeaderValue::try_from(handshake::challenge_field(challenge)).ok();
                headers.extend(field.map(|field| (header::WWW_AUTHENTICATE, field)));
            }
            // Each 401 names a scheme (RFC 9110 §15.5.2).
            Self::EnrollmentTokenInvalid(_) | Self::EnrollmentInvalid => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ if status == StatusCode::UNAUTHORIZED => {
                let scheme = HeaderValue::from_static(handshake::SCHEME);
                headers.insert(header::WWW_AUTHENTICATE, scheme);
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
pub fn request_id_value(id: RequestId) -> HeaderValue {
    let mut buffer = [0; 36];
    // Hexadecimal digits and hyphens are a valid value.
    let mut value = HeaderValue::from_str(id.encode(&mut buffer))
        .unwrap_or_else(|_| HeaderValue::from_static(""));
    // Each value is different: it must not evict others from HPACK's table (RFC 7541 §7.1.3).
    value.set_sensitive(true);
    value
}

#[cfg(test)]
mod tests;
