//! Error codes of the gateway and the agent, as error bodies (`error.code`) and the tunnel carry
//! them.

/// Defines [`ErrorCode`] with the text of each code beside its name.
macro_rules! error_codes {
    ($($(#[$attribute:meta])* $name:ident = $text:literal,)*) => {
        /// Reason for an error response of the gateway.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum ErrorCode {
            $($(#[$attribute])* $name,)*
        }

        impl ErrorCode {
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The code's text on the wire.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

error_codes! {
    RateLimitExceeded = "GW_RATE_LIMIT_EXCEEDED",
    AuthRequired = "GW_AUTH_REQUIRED",
    AuthAmbiguous = "GW_AUTH_AMBIGUOUS",
    AuthModeNotAllowed = "GW_AUTH_MODE_NOT_ALLOWED",
    AuthRateLimited = "GW_AUTH_RATE_LIMITED",
    TokenInvalid = "GW_TOKEN_INVALID",
    TokenExpired = "GW_TOKEN_EXPIRED",
    TokenAudienceMismatch = "GW_TOKEN_AUDIENCE_MISMATCH",
    CredentialRevoked = "GW_CREDENTIAL_REVOKED",
    ServiceKeyInvalid = "GW_SERVICE_KEY_INVALID",
    ServiceKeyNotAllowed = "GW_SERVICE_KEY_NOT_ALLOWED",
    ServiceNotFound = "GW_SERVICE_NOT_FOUND",
    ServiceDisabled = "GW_SERVICE_DISABLED",
    HeadersTooLarge = "GW_HEADERS_TOO_LARGE",
    RelayError = "GW_RELAY_ERROR",
    /// The only code without the prefix `GW_`.
    AgentUnavailable = "AGENT_UNAVAILABLE",
    AgentConcurrencyLimit = "GW_AGENT_CONCURRENCY_LIMIT",
    BackendUnreachable = "GW_BACKEND_UNREACHABLE",
    BackendTls = "GW_BACKEND_TLS",
    BackendReset = "GW_BACKEND_RESET",
    BackendInvalidResponse = "GW_BACKEND_INVALID_RESPONSE",
    BadRequest = "GW_BAD_REQUEST",
    BodyTooLarge = "GW_BODY_TOO_LARGE",
    MethodNotAllowed = "GW_METHOD_NOT_ALLOWED",
    Misdirected = "GW_MISDIRECTED",
    NodeUnavailable = "GW_NODE_UNAVAILABLE",
    NotFound = "GW_NOT_FOUND",
    Overloaded = "GW_OVERLOADED",
    CsrInvalid = "GW_CSR_INVALID",
    EnrollmentTokenInvalid = "GW_ENROLLMENT_TOKEN_INVALID",
    EnrollmentInvalid = "GW_ENROLLMENT_INVALID",
    EnrollmentPending = "GW_ENROLLMENT_PENDING",
    AgentCertificateRequired = "GW_AGENT_CERTIFICATE_REQUIRED",
    AgentCertificateExpired = "GW_AGENT_CERTIFICATE_EXPIRED",
    AgentChallenge = "GW_AGENT_CHALLENGE",
    AgentUnknown = "GW_AGENT_UNKNOWN",
    AgentRevoked = "GW_AGENT_REVOKED",
    AgentNotAllowed = "GW_AGENT_NOT_ALLOWED",
    VersionMismatch = "GW_VERSION_MISMATCH",
}

impl ErrorCode {
    /// Parses the text of a code; `None` if there is no such code.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|code| code.as_str() == text)
    }
}

/// Reason why an agent failed to forward a request: the codes that REFUSED and RESET may carry on a
/// tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentErrorCode {
    ConcurrencyLimit,
    BackendUnreachable,
    BackendTls,
    BackendReset,
    BackendInvalidResponse,
}

impl AgentErrorCode {
    pub const ALL: [Self; 5] = [
        Self::ConcurrencyLimit,
        Self::BackendUnreachable,
        Self::BackendTls,
        Self::BackendReset,
        Self::BackendInvalidResponse,
    ];

    /// Parses the code of a REFUSED or RESET; `None` if an agent may not send it.
    pub fn parse(code: &[u8]) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|known| code == known.as_str().as_bytes())
    }

    /// The code's text on the wire.
    pub const fn as_str(self) -> &'static str {
        self.error_code().as_str()
    }

    /// Code of the response that the gateway sends to the client.
    pub const fn error_code(self) -> ErrorCode {
        match self {
            Self::ConcurrencyLimit => ErrorCode::AgentConcurrencyLimit,
            Self::BackendUnreachable => ErrorCode::BackendUnreachable,
            Self::BackendTls => ErrorCode::BackendTls,
            Self::BackendReset => ErrorCode::BackendReset,
            Self::BackendInvalidResponse => ErrorCode::BackendInvalidResponse,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_code_is_unique_and_parses_back() {
        let texts: HashSet<_> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(texts.len(), ErrorCode::ALL.len());
        for &code in ErrorCode::ALL {
            assert_eq!(ErrorCode::parse(code.as_str()), Some(code));
            let is_usual = |byte: u8| byte.is_ascii_uppercase() || byte == b'_';
            assert!(code.as_str().bytes().all(is_usual), "{code:?}");
        }
        for unknown in ["", "GW_", "gw_auth_required", "GW_AUTH_REQUIRED ", "GW_X"] {
            assert_eq!(ErrorCode::parse(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn an_agent_can_report_its_own_codes_only() {
        for &code in ErrorCode::ALL {
            let parsed = AgentErrorCode::parse(code.as_str().as_bytes());
            let mut all = AgentErrorCode::ALL.into_iter();
            let own = all.find(|own| own.error_code() == code);
            assert_eq!(parsed, own, "{code:?}");
        }
        assert_eq!(AgentErrorCode::parse(b"GW_X"), None);
        assert_eq!(AgentErrorCode::parse(b"\xff"), None);
    }
}
