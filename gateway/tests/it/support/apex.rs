//! Requests to the regional apex host.

use super::demo::Demo;
use super::peers::caller::{Caller, connect_to};
use super::peers::http1_peer::Response;

pub(crate) const APEX: &str = "eu1.gw.localhost";

/// A connection to the apex, as an HTTPS client opens it.
pub(crate) fn connect(demo: &Demo) -> Caller {
    connect_to(&demo.about, APEX, &[b"http/1.1"], None)
}

/// Sends one request on its own connection; each of `fields` ends in CRLF.
pub(crate) fn ask(demo: &Demo, line: &str, fields: &str, body: &str) -> Response {
    let mut caller = connect(demo);
    caller.send(format!(
        "{line} HTTP/1.1\r\nHost: {APEX}\r\n{fields}Content-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    caller.response()
}

pub(crate) fn post_json(
    demo: &Demo,
    path: &str,
    fields: &str,
    body: &serde_json::Value,
) -> Response {
    ask(
        demo,
        &format!("POST {path}"),
        &format!("Content-Type: application/json\r\n{fields}"),
        &body.to_string(),
    )
}

/// Mints a token for the demo's service.
pub(crate) fn token(demo: &Demo, client_id: &str, client_secret: &str, scope: &str) -> Response {
    let body = serde_json::json!({
        "client_id": client_id,
        "client_secret": client_secret,
        "scope": scope,
    });
    post_json(demo, "/oauth/token", "", &body)
}

/// An access token for the demo's service with the demo's credential.
pub(crate) fn demo_token(demo: &Demo) -> String {
    let about = &demo.about;
    let response = token(
        demo,
        &about.client_id,
        &about.client_secret,
        "account:demo service:echo",
    );
    assert_eq!(response.status, 200, "{}", response.json());
    response.json()["access_token"].as_str().unwrap().to_owned()
}
