//! Requests to the regional apex host.

use super::peers::caller::{Caller, connect_to};
use super::peers::http1_peer::Response;
use super::scene::Scene;

pub(crate) const APEX: &str = "eu1.gw.localhost";

/// A connection to the apex, as an HTTPS client opens it.
pub(crate) fn connect(scene: &Scene) -> Caller {
    connect_to(&scene.about, APEX, &[b"http/1.1"], None)
}

/// Sends one request on its own connection; each of `fields` ends in CRLF.
pub(crate) fn ask(scene: &Scene, line: &str, fields: &str, body: &str) -> Response {
    let mut caller = connect(scene);
    caller.send(format!(
        "{line} HTTP/1.1\r\nHost: {APEX}\r\n{fields}Content-Length: {}\r\n\r\n{body}",
        body.len()
    ));
    caller.response()
}

pub(crate) fn post_json(
    scene: &Scene,
    path: &str,
    fields: &str,
    body: &serde_json::Value,
) -> Response {
    ask(
        scene,
        &format!("POST {path}"),
        &format!("Content-Type: application/json\r\n{fields}"),
        &body.to_string(),
    )
}

/// Mints a token for the scene's service.
pub(crate) fn token(scene: &Scene, client_id: &str, client_secret: &str, scope: &str) -> Response {
    let body = serde_json::json!({
        "client_id": client_id,
        "client_secret": client_secret,
        "scope": scope,
    });
    post_json(scene, "/oauth/token", "", &body)
}

/// An access token for the scene's service with the scene's credential.
pub(crate) fn demo_token(scene: &Scene) -> String {
    let about = &scene.about;
    let response = token(
        scene,
        &about.client_id,
        &about.client_secret,
        "account:demo service:echo",
    );
    assert_eq!(response.status, 200, "{}", response.json());
    response.json()["access_token"].as_str().unwrap().to_owned()
}
