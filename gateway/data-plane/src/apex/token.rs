//! `POST /oauth/token`: access tokens for client credentials (RFC 6749 §4.4). Served on the worker:
//! the directory has everything it needs, and a signature takes about 20 µs (benches/).

use std::borrow::Cow;
use std::net::IpAddr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gw_base::clock::Timestamp;
use gw_base::error::Error;
use gw_base::service::hostname::tenant_label;
use gw_base::strict_json;
use gw_interface::auth::jwt::Claims;
use gw_shared::http::{Fields, RequestHead};
use gw_shared::identity::secret::Secret;
use gw_store::Directory;
use http::header::{self, HeaderValue};
use http::{Method, Response, StatusCode};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};

use super::body::{self, Unanswered};
use super::limits::ApexBucket;
use super::scope::Scope;
use super::{Apex, json};
use crate::http_message::{CallerGone, RequestBody};
use crate::request_scope::{RequestScope, Stage};

/// Request of a client, before any check. Unknown fields are ignored; a field must not appear
/// twice. In a form, fields without a value count as omitted (RFC 6749 §3.2). In JSON, only `null`
/// counts as omitted: an empty string is a value.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct TokenRequest {
    pub(crate) grant_type: Option<String>,
    pub(crate) client_id: Option<String>,
    pub(crate) client_secret: Option<Secret>,
    pub(crate) scope: Option<String>,
}

/// RFC 6749 §5.1
#[derive(Serialize)]
struct TokenResponse {
    access_token: String,
    token_type: &'static str,
    /// Seconds.
    expires_in: u64,
    /// Present if it differs from the requested scope (RFC 6749 §3.3).
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<String>,
}

/// Why no token is issued (RFC 6749 §5.2), and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Denial {
    InvalidRequest(String),
    InvalidClient,
    UnsupportedGrantType,
    InvalidScope(String),
    UnauthorizedClient(&'static str),
    RateLimited { seconds: u64 },
    MethodNotAllowed,
    Unavailable(&'static str),
}

const OVERLOADED: Denial = Denial::Unavailable("the gateway is overloaded; try again");

impl Apex {
    pub(super) async fn serve_token(
        &self,
        request_scope: &RequestScope,
        request: &RequestHead,
        body: &mut impl RequestBody,
    ) -> Result<Response<Vec<u8>>, CallerGone> {
        let minted = match self
            .charge_token_request(request, request_scope.client)
            .await
        {
            Ok(()) => match body::read(body).await {
                Ok(body) => match parse(&request.headers, &body) {
                    Ok(token_request) => self.mint(&token_request).await,
                    Err(denial) => Err(denial),
                },
                Err(Unanswered::Refused(error)) => Err(Denial::InvalidRequest(error.to_string())),
                Err(Unanswered::CallerGone) => return Err(CallerGone),
            },
            Err(denial) => Err(denial),
        };
        Ok(match minted {
            Ok(token) => {
                self.counters.tokens_minted.increment();
                let mut response = json(
                    StatusCode::OK,
                    serde_json::to_vec(&token).unwrap_or_default(),
                    "no-store",
                );
                response
                    .headers_mut()
                    .insert(header::PRAGMA, HeaderValue::from_static("no-cache"));
                response
            }
            Err(denial) => {
                self.counters.tokens_denied.increment();
                let (_, code, _) = denial.parts();
                request_scope.note(Stage::RefusedWithCode(code));
                denial.response(self.region.apex())
            }
        })
    }

    async fn charge_token_request(
        &self,
        request: &RequestHead,
        client: IpAddr,
    ) -> Result<(), Denial> {
        if request.method != Method::POST {
            return Err(Denial::MethodNotAllowed);
        }
        self.charge(ApexBucket::Token(client))
            .await
            .map_err(|error| match error.retry_after_seconds() {
                Some(seconds) if matches!(error, Error::ApexRateLimited { .. }) => {
                    Denial::RateLimited { seconds }
                }
                _ => OVERLOADED,
            })
    }

    async fn mint(&self, request: &TokenRequest) -> Result<TokenResponse, Denial> {
        self.freeze.over().await.map_err(|_| OVERLOADED)?;
        mint(
            &self.directory.get(),
            &self.issuer,
            request,
            Timestamp::now(),
            self.token_lifetime,
        )
    }
}

/// Parses a token request from the body and `Authorization`.
pub(crate) fn parse(headers: &Fields, body: &[u8]) -> Result<TokenRequest, Denial> {
    let content_type = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let media_type = content_type
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    let mut request = match media_type.as_str() {
        "application/json" => strict_json::parse::<TokenRequest>(body).map_err(|error| {
            Denial::InvalidRequest(format!("the body is not the expected JSON object: {error}"))
        })?,
        "application/x-www-form-urlencoded" => parse_form(body)?,
        _ => {
            let message =
                "Content-Type must be application/json or application/x-www-form-urlencoded";
            return Err(Denial::InvalidRequest(message.to_owned()));
        }
    };
    // An empty `grant_type` in JSON is an unsupported value, not an omitted one.
    for field in [&mut request.client_id, &mut request.scope] {
        field.take_if(|value| value.is_empty());
    }
    request
        .client_secret
        .take_if(|secret| secret.reveal().is_empty());
    let mut authorizations = headers.get_all(header::AUTHORIZATION);
    let (authorization, None) = (authorizations.next(), authorizations.next()) else {
        return Err(Denial::InvalidRequest(
            "Authorization appears more than once".to_owned(),
        ));
    };
    if let Some(authorization) = authorization {
        let (id, secret) = authorization
            .to_str()
            .ok()
            .and_then(parse_basic)
            .ok_or(Denial::InvalidClient)?;
        // A client uses one authentication method per request (RFC 6749 §2.3).
        if request.client_secret.is_some()
            || request.client_id.as_ref().is_some_and(|other| *other != id)
        {
            let message = "authenticate by Authorization or in the body, not both".to_owned();
            return Err(Denial::InvalidRequest(message));
        }
        (request.client_id, request.client_secret) = (Some(id), Some(secret));
    }
    Ok(request)
}

fn parse_form(body: &[u8]) -> Result<TokenRequest, Denial> {
    let mut request = TokenRequest::default();
    for (name, value) in form_urlencoded::parse(body).filter(|(_, value)| !value.is_empty()) {
        let value = value.into_owned();
        let repeated = match &*name {
            "grant_type" => request.grant_type.replace(value).is_some(),
            "client_id" => request.client_id.replace(value).is_some(),
            "client_secret" => request.client_secret.replace(Secret::new(value)).is_some(),
            "scope" => request.scope.replace(value).is_some(),
            _ => false,
        };
        if repeated {
            return Err(Denial::InvalidRequest(format!(
                "{name} appears more than once"
            )));
        }
    }
    Ok(request)
}

/// `Basic` (RFC 7617) of the form-encoded id and secret (RFC 6749 §2.3.1).
fn parse_basic(authorization: &str) -> Option<(String, Secret)> {
    let (scheme, encoded) = authorization.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (id, secret) = decoded.split_once(':')?;
    let decode = |text: &str| {
        percent_decode_str(&text.replace('+', " "))
            .decode_utf8()
            .ok()
            .map(Cow::into_owned)
    };
    Some((
        decode(id).filter(|id| !id.is_empty())?,
        Secret::new(decode(secret)?),
    ))
}

/// Decides whether the client gets a token, and signs it.
fn mint(
    directory: &Directory,
    issuer: &str,
    request: &TokenRequest,
    now: Timestamp,
    lifetime: Duration,
) -> Result<TokenResponse, Denial> {
    if request
        .grant_type
        .as_ref()
        .is_some_and(|grant_type| grant_type != "client_credentials")
    {
        return Err(Denial::UnsupportedGrantType);
    }
    let missing = |field: &str, form: &str| {
        Denial::InvalidRequest(format!("{field} is missing: send it {form}"))
    };
    const CLIENT: &str = "by HTTP Basic or in the body";
    let client_id = request
        .client_id
        .as_deref()
        .ok_or_else(|| missing("client_id", CLIENT))?;
    let client_secret = request
        .client_secret
        .as_ref()
        .ok_or_else(|| missing("client_secret", CLIENT))?;
    let scope = request
        .scope
        .as_deref()
        .ok_or_else(|| missing("scope", "as account:ACCOUNT service:SERVICE"))?;
    let (client, access) = directory
        .credential(client_id)
        .filter(|(_, access)| access.secret.matches(client_secret.reveal()) && access.enabled)
        .ok_or(Denial::InvalidClient)?;
    let scope = Scope::parse(scope).map_err(|error| Denial::InvalidScope(error.to_string()))?;
    if scope.account != access.account {
        return Err(Denial::InvalidScope(
            "the scope's account is not the credential's: name the one in which the credential was \
             created".to_owned(),
        ));
    }
    let service = tenant_label(&scope.account, &scope.service)
        .and_then(|label| directory.service(&label))
        .filter(|service| access.permits(service))
        .ok_or(Denial::UnauthorizedClient(
            "this credential does not allow this service: correct the scope, or have an \
             administrator add the service to it",
        ))?;
    if !service.settings.modes.jwt {
        return Err(Denial::UnauthorizedClient(
            "this service does not accept access tokens: send a service key, or have an \
             administrator change its modes",
        ));
    }
    let key = directory
        .active_signing_key(now)
        .ok_or(Denial::Unavailable("no signing key is active"))?;
    let claims = Claims::new(issuer, client, service, now, lifetime);
    let access_token = claims.signed_by(key).map_err(|error| {
        tracing::error!(%error, "cannot sign access tokens");
        Denial::Unavailable("the token could not be signed")
    })?;
    let granted = scope.ignored.then_some(claims.scope);
    Ok(TokenResponse {
        access_token,
        token_type: "Bearer",
        expires_in: lifetime.as_secs(),
        scope: granted,
    })
}

impl Denial {
    fn parts(&self) -> (StatusCode, &'static str, &str) {
        match self {
            Self::InvalidRequest(message) => (StatusCode::BAD_REQUEST, "invalid_request", message),
            Self::InvalidClient => (
                StatusCode::UNAUTHORIZED,
                "invalid_client",
                "unknown client, or wrong secret: send both as they were shown when the credential \
                 was created",
            ),
            Self::UnsupportedGrantType => (
                StatusCode::BAD_REQUEST,
                "unsupported_grant_type",
                "grant_type must be client_credentials",
            ),
            Self::InvalidScope(message) => (StatusCode::BAD_REQUEST, "invalid_scope", message),
            Self::UnauthorizedClient(message) => {
                (StatusCode::BAD_REQUEST, "unauthorized_client", message)
            }
            Self::RateLimited { .. } => (
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limit_exceeded",
                "too many token requests from this address: keep tokens until shortly before they \
                 expire",
            ),
            Self::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                "invalid_request",
                "tokens are requested with POST",
            ),
            Self::Unavailable(message) => (
                StatusCode::SERVICE_UNAVAILABLE,
                "temporarily_unavailable",
                message,
            ),
        }
    }

    pub(crate) fn response(&self, realm: &str) -> Response<Vec<u8>> {
        let (status, error, description) = self.parts();
        // A description has no quote and no backslash (RFC 6749 §5.2).
        let description: String = description
            .chars()
            .map(|c| match c {
                '"' | '\\' => '\'',
                ' '..='~' => c,
                _ => '?',
            })
            .collect();
        let body = serde_json::json!({ "error": error, "error_description": description });
        let mut response = json(status, body.to_string().into_bytes(), "no-store");
        let headers = response.headers_mut();
        headers.insert(header::PRAGMA, HeaderValue::from_static("no-cache"));
        match self {
            Self::InvalidClient => {
                let challenge = HeaderValue::try_from(format!("Basic realm=\"{realm}\""));
                headers.extend(
                    challenge
                        .ok()
                        .map(|challenge| (header::WWW_AUTHENTICATE, challenge)),
                );
            }
            Self::RateLimited { seconds } => {
                drop(headers.insert(header::RETRY_AFTER, HeaderValue::from(*seconds)));
            }
            Self::MethodNotAllowed => {
                drop(headers.insert(header::ALLOW, HeaderValue::from_static("POST")));
            }
            Self::Unavailable(_) => drop(headers.insert(header::RETRY_AFTER, HeaderValue::from(1))),
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_as(
        content_type: &'static str,
        authorization: Option<&str>,
        body: &str,
    ) -> Result<TokenRequest, Denial> {
        let mut headers = Fields::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        if let Some(authorization) = authorization {
            headers.append(
                header::AUTHORIZATION,
                HeaderValue::from_str(authorization).unwrap(),
            );
        }
        parse(&headers, body.as_bytes())
    }

    fn fields(request: &TokenRequest) -> [Option<&str>; 4] {
        let secret = request.client_secret.as_ref().map(Secret::reveal);
        [
            request.grant_type.as_deref(),
            request.client_id.as_deref(),
            secret,
            request.scope.as_deref(),
        ]
    }

    #[test]
    fn form_json_and_basic_parse_to_one_request() {
        let expected = [
            Some("client_credentials"),
            Some("a"),
            Some("b c"),
            Some("account:x service:y"),
        ];
        let json = r#"{"grant_type":"client_credentials","client_id":"a","client_secret":"b c",
            "scope":"account:x service:y","audience":"ignored"}"#;
        assert_eq!(
            fields(&parse_as("Application/JSON; charset=utf-8", None, json).unwrap()),
            expected
        );
        let form = "grant_type=client_credentials&client_id=a&client_secret=b+c&\
                    scope=account%3Ax+service%3Ay&x=1";
        assert_eq!(
            fields(&parse_as("application/x-www-form-urlencoded", None, form).unwrap()),
            expected
        );
        let form = "grant_type=client_credentials&scope=account:x%20service:y&client_secret=";
        let basic = format!("basic {}", STANDARD.encode("a:b+c"));
        let parsed = parse_as("application/x-www-form-urlencoded", Some(&basic), form).unwrap();
        assert_eq!(fields(&parsed), expected);
        // Every part of a credential is significant.
        let basic = format!("basic {}", STANDARD.encode("a:b%26c&d=e"));
        let parsed = parse_as("application/x-www-form-urlencoded", Some(&basic), form).unwrap();
        assert_eq!(fields(&parsed)[2], Some("b&c&d=e"));
    }

    #[test]
    fn empty_parameters_of_forms_are_omitted_and_those_of_json_were_sent() {
        let form = "grant_type=&client_id=&client_secret=&scope=&scope=x&client_id=a&client_id=";
        let parsed = parse_as("application/x-www-form-urlencoded", None, form).unwrap();
        assert_eq!(fields(&parsed), [None, Some("a"), None, Some("x")]);
        let parsed = parse_as(
            "application/json",
            None,
            r#"{"grant_type":"","scope":null}"#,
        )
        .unwrap();
        assert_eq!(fields(&parsed), [Some(""), None, None, None]);
        let denial = parse_as("application/json", None, r#"{"x":{"y":1,"y":1}}"#).unwrap_err();
        assert!(
            matches!(&denial, Denial::InvalidRequest(message) if message.contains("duplicate field \
                `y`")),
            "{denial:?}"
        );
    }

    #[test]
    fn malformed_requests_are_named() {
        let message =
            |content_type, authorization, body| match parse_as(content_type, authorization, body) {
                Err(Denial::InvalidRequest(message)) => message,
                other => panic!("{other:?}"),
            };
        let json = "application/json";
        let form = "application/x-www-form-urlencoded";
        assert!(message("text/plain", None, "{}").contains("Content-Type"));
        assert!(message(json, None, "[").contains("JSON"));
        assert!(message(json, None, r#"{"client_id":5}"#).contains("JSON"));
        assert!(
            message(json, None, r#"{"scope":"a","scope":"b"}"#).contains("duplicate field `scope`")
        );
        assert_eq!(
            message(form, None, "scope=a&scope=b"),
            "scope appears more than once"
        );
        let basic = format!("Basic {}", STANDARD.encode("a:b"));
        assert!(message(form, Some(&basic), "client_secret=b").contains("not both"));
        assert!(message(form, Some(&basic), "client_id=other").contains("not both"));
        let empty_id = format!("Basic {}", STANDARD.encode(":b"));
        for bad in ["Bearer x", "Basic", "Basic !", "Basic YQ==", &empty_id] {
            assert_eq!(
                parse_as(form, Some(bad), "").unwrap_err(),
                Denial::InvalidClient,
                "{bad}"
            );
        }
    }

    #[test]
    fn descriptions_keep_to_the_characters_of_rfc_6749() {
        let response = Denial::InvalidScope("\"a\\\u{e4}\" is not known".to_owned()).response("r");
        let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
        assert_eq!(body["error_description"], "'a'?' is not known");
    }
}
