use gw_shared::id::RequestIds;

use super::*;

#[test]
fn status_gw_status_and_code_match_the_documentation() {
    let status_of = |error: &Error| {
        let (status, gw_status, code, _) = error.outcome();
        format!("{} {gw_status} {}", status.as_u16(), code.as_str())
    };
    let reported =
        |code: &str, message| Error::from_agent(AgentErrorCode::parse(code.as_bytes()), message);
    let table = [
        (
            Error::RateLimited {
                retry_after: Duration::ZERO,
            },
            "429 RateLimited GW_RATE_LIMIT_EXCEEDED",
        ),
        (Error::AuthRequired, "502 AuthDenied GW_AUTH_REQUIRED"),
        (Error::AuthMisplaced, "502 AuthDenied GW_AUTH_REQUIRED"),
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
fn statuses_have_the_fields_that_they_require() {
    let id = RequestIds::new().next_id();
    let field = |error: &Error, name| {
        let response = error.response(id);
        let value = response.headers().get(name);
        let text = value.map(|value| value.to_str().unwrap().to_owned());
        (response.status().as_u16(), text.unwrap_or_default())
    };
    let challenge = "drawn".to_owned();
    for (error, expected) in [
        (
            Error::AgentChallenge { challenge },
            "Gw-Agent challenge=\"drawn\"",
        ),
        (Error::AgentCertificateRequired, "Gw-Agent"),
        (Error::AgentCertificateExpired, "Gw-Agent"),
        (Error::AgentUnknown, "Gw-Agent"),
        (Error::AgentRevoked, "Gw-Agent"),
        (Error::EnrollmentInvalid, "Bearer"),
    ] {
        let found = field(&error, header::WWW_AUTHENTICATE);
        assert_eq!(found, (401, expected.to_owned()), "{error}");
    }
    assert_eq!(
        field(&Error::MethodNotAllowed("GET, HEAD"), header::ALLOW),
        (405, "GET, HEAD".to_owned())
    );
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
fn a_service_that_limits_names_its_rate() {
    let id = RequestIds::new().next_id();
    let rate = Rate::new(7, 3);
    let detail = |error: Error| {
        let response = error.response_about(id, 1, rate);
        let body: ErrorBody = serde_json::from_slice(response.body()).unwrap();
        body.error.detail
    };
    let retry_after = Duration::from_millis(19_001);
    assert_eq!(
        detail(Error::RateLimited { retry_after }).unwrap(),
        "this service admits 7 at once and 3 per minute, of all callers together: try again in 20 \
         s, or have an administrator raise its burst or refill_per_minute"
    );
    assert_eq!(detail(Error::AgentUnavailable), None);
}

#[test]
fn the_text_names_the_number_of_agents_that_were_tried() {
    let id = RequestIds::new().next_id();
    let text = |error: &Error, agents_tried| {
        let response = error.response_about(id, agents_tried, None);
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
