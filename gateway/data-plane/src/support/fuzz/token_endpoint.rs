//! The token endpoint: its requests and their scope.

use ::http::header::{self, HeaderValue};
use gw_shared::http::Fields;
use gw_shared::identity::secret::Secret;

use crate::apex::scope::Scope;
use crate::apex::token::{self, Denial, TokenRequest};

/// `POST /oauth/token`. Lines: `Content-Type`; values of `Authorization`, if any, separated by `|`;
/// the body.
pub fn token_body(data: &[u8]) {
    let mut parts = data.splitn(3, |byte| *byte == b'\n');
    let (Some(content_type), Some(authorizations), Some(body)) =
        (parts.next(), parts.next(), parts.next())
    else {
        return;
    };
    let Ok(content_type) = HeaderValue::from_bytes(content_type) else {
        return;
    };
    let without_authorization = Fields::from_iter([(header::CONTENT_TYPE, content_type)]);
    let mut headers = without_authorization.clone();
    for authorization in authorizations
        .split(|byte| *byte == b'|')
        .filter(|value| !value.is_empty())
    {
        let Ok(authorization) = HeaderValue::from_bytes(authorization) else {
            return;
        };
        headers.append(header::AUTHORIZATION, authorization);
    }

    let in_body = token::parse(&without_authorization, body);
    match &in_body {
        Ok(request) => {
            for (name, value) in fields(request) {
                let Some(value) = value else { continue };
                // An empty grant type counts as sent in JSON only.
                let was_sent = name == "grant_type" && is_json(&without_authorization);
                assert!(
                    !value.is_empty() || was_sent,
                    "an empty {name} counts as omitted"
                );
                assert_repetition_is_refused(name, &without_authorization, body);
            }
        }
        Err(denial) => assert_response(denial),
    }
    match token::parse(&headers, body) {
        // The credentials in `Authorization` may be empty.
        Ok(request) if headers.contains(header::AUTHORIZATION) => {
            let in_body =
                in_body.expect("a body is valid without Authorization if it is valid with it");
            assert_eq!(headers.get_all(header::AUTHORIZATION).count(), 1);
            assert!(request.client_id.is_some() && request.client_secret.is_some());
            assert!(in_body.client_secret.is_none(), "one way to authenticate");
            assert!(in_body.client_id.is_none() || in_body.client_id == request.client_id);
            assert_eq!(
                (in_body.grant_type, in_body.scope),
                (request.grant_type, request.scope)
            );
        }
        Ok(_) => {}
        Err(denial) => assert_response(&denial),
    }
}

fn fields(request: &TokenRequest) -> [(&'static str, Option<&str>); 4] {
    [
        ("grant_type", request.grant_type.as_deref()),
        ("client_id", request.client_id.as_deref()),
        (
            "client_secret",
            request.client_secret.as_ref().map(Secret::reveal),
        ),
        ("scope", request.scope.as_deref()),
    ]
}

fn is_json(headers: &Fields) -> bool {
    headers[header::CONTENT_TYPE]
        .as_bytes()
        .trim_ascii_start()
        .to_ascii_lowercase()
        .starts_with(b"application/json")
}

/// Asserts that a second `name` field is refused (RFC 6749 §3.2).
fn assert_repetition_is_refused(name: &str, headers: &Fields, body: &[u8]) {
    let body = match body.trim_ascii_start().strip_prefix(b"{") {
        Some(members) if is_json(headers) => {
            [format!("{{\"{name}\":\"again\",").as_bytes(), members].concat()
        }
        _ => [body, format!("&{name}=again").as_bytes()].concat(),
    };
    let refused = token::parse(headers, &body);
    assert!(
        matches!(refused, Err(Denial::InvalidRequest(_))),
        "{name} twice: {refused:?}"
    );
}

/// Asserts that the response has only the characters that RFC 6749 §5.2 allows.
fn assert_response(denial: &Denial) {
    let response = denial.response("eu1.example.com");
    assert!(response.status().is_client_error());
    let body: serde_json::Value =
        serde_json::from_slice(response.body()).expect("a refusal is JSON");
    for field in ["error", "error_description"] {
        let text = body[field].as_str().expect("both fields are strings");
        assert!(
            !text.is_empty()
                && text
                    .chars()
                    .all(|c| matches!(c, ' '..='~') && c != '"' && c != '\\'),
            "{text:?}"
        );
    }
}

/// The scope of a token request, as text.
pub fn scope(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(scope) = Scope::parse(text) else {
        return;
    };
    let account = &scope.account;
    let service = &scope.service;
    for written in [
        format!("account:{account} service:{service}"),
        format!(" service:{service}  account:{account}"),
    ] {
        assert_eq!(
            Scope::parse(&written),
            Ok(Scope {
                ignored: false,
                ..scope.clone()
            })
        );
    }
    for more in [
        format!("account:{account}"),
        format!("service:{service}"),
        "x".to_owned(),
        ":y".to_owned(),
    ] {
        assert!(
            Scope::parse(&format!("{text} {more}")).is_err(),
            "with {more:?}"
        );
    }
    // Pairs with other keys are ignored.
    assert_eq!(
        Scope::parse(&format!("{text} x:y")),
        Ok(Scope {
            ignored: true,
            ..scope.clone()
        })
    );
}
