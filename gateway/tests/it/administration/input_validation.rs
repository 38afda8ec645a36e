//! Inputs that the administration API and the apex refuse: repeated members, and names with
//! misleading characters.

use serde_json::json;

use super::assert_says;
use crate::support::apex;
use crate::support::scene::Scene;

use crate::support::request_log::{call, capture_bodies, record};

/// Asserts that a body that repeats `member` is refused.
fn twice(scene: &Scene, method: &str, path: &str, body: &str, member: &str) {
    let reply = scene.api().ask_raw(method, path, body);
    let is_refused = matches!(reply.status, 400 | 422);
    assert!(is_refused, "{method} {path}: {reply:?}");
    let detail = reply.body["detail"].as_str().unwrap();
    assert_says(detail, &[&format!("duplicate field `{member}`")]);
}

/// The id of the only record of the account `demo` in a collection.
fn only(scene: &Scene, collection: &str, id: &str) -> String {
    let records = scene.api().list(&format!("/accounts/demo/{collection}"));
    records[0][id].as_str().unwrap().to_owned()
}

/// Method, path, body and repeated member of requests to change records.
fn changes_of_records(
    credential: &str,
    key: &str,
    agent: &str,
) -> [(&'static str, String, &'static str, &'static str); 10] {
    let off = r#"{"enabled":true,"enabled":false}"#;
    [
        (
            "POST",
            "/accounts".to_owned(),
            r#"{"id":"acme","id":"acmf"}"#,
            "id",
        ),
        (
            "PATCH",
            "/accounts/demo".to_owned(),
            r#"{"capture_allowed":true,"capture_allowed":false}"#,
            "capture_allowed",
        ),
        (
            "POST",
            "/accounts/demo/services".to_owned(),
            r#"{"id":"a","burst":1,"burst":2}"#,
            "burst",
        ),
        (
            "PATCH",
            "/accounts/demo/services/echo".to_owned(),
            off,
            "enabled",
        ),
        (
            "POST",
            "/accounts/demo/credentials".to_owned(),
            r#"{"name":"a","allowed_services":[],"name":"b"}"#,
            "name",
        ),
        (
            "PATCH",
            format!("/accounts/demo/credentials/{credential}"),
            off,
            "enabled",
        ),
        (
            "POST",
            "/accounts/demo/service-keys".to_owned(),
            r#"{"name":"a","allowed_services":[],"name":"b"}"#,
            "name",
        ),
        (
            "PATCH",
            format!("/accounts/demo/service-keys/{key}"),
            off,
            "enabled",
        ),
        (
            "POST",
            "/accounts/demo/enrollment-tokens".to_owned(),
            r#"{"services":["echo"],"services":["echo"]}"#,
            "services",
        ),
        (
            "PATCH",
            format!("/accounts/demo/agents/{agent}"),
            r#"{"name":"a","name":"b"}"#,
            "name",
        ),
    ]
}

#[test]
fn every_endpoint_refuses_repeated_members() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let request = scene.request("POST /echo", "Content-Length: 2\r\n\r\nhi");
    let (_, id) = call(&scene, &request);
    record(&api, &id);
    let agent = only(&scene, "agents", "agent_id");
    let credential = only(&scene, "credentials", "client_id");
    let key = only(&scene, "service-keys", "key_id");
    for (method, path, body, member) in changes_of_records(&credential, &key, &agent) {
        twice(&scene, method, &path, body, member);
    }
    for (method, path, body, member) in [
        (
            "POST",
            "/signing-keys/rotate".to_owned(),
            r#"{"immediately":false,"immediately":true}"#,
            "immediately",
        ),
        (
            "POST",
            format!("/requests/{id}/replay"),
            r#"{"set_headers":{"x-a":"1","x-a":"2"}}"#,
            "x-a",
        ),
        (
            "POST",
            format!("/requests/{id}/replay"),
            r#"{"headers":[{"name":"a","name":"b","value":"1"}]}"#,
            "name",
        ),
    ] {
        twice(&scene, method, &path, body, member);
    }
}

#[test]
fn the_apex_refuses_repeated_members() {
    let scene = Scene::service().start();
    let json = "Content-Type: application/json\r\n";
    for (path, body, member) in [
        ("/oauth/token", r#"{"scope":"a","scope":"b"}"#, "scope"),
        ("/oauth/token", r#"{"other":"a","other":"b"}"#, "other"),
        (
            "/enroll",
            r#"{"token":"a","token":"b","name":"c","version":"d"}"#,
            "token",
        ),
        ("/csr", r#"{"csr":"a","csr":"b"}"#, "csr"),
    ] {
        let response = apex::ask(&scene, &format!("POST {path}"), json, body);
        let text = response.json().to_string();
        assert_eq!(response.status, 400, "{path}: {text}");
        assert_says(&text, &[&format!("duplicate field `{member}`")]);
    }
}

#[test]
fn names_with_control_or_direction_characters_are_refused() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let agent = only(&scene, "agents", "agent_id");
    for name in [
        "a\u{202e}b",
        "a\u{2066}b",
        "\u{200f}ab",
        "a\u{2028}b",
        "a\u{9b}b",
        "a\u{61c}b",
    ] {
        for (method, path, body) in [
            (
                "POST",
                "/accounts/demo/credentials".to_owned(),
                json!({ "name": name, "allowed_services": ["echo"] }),
            ),
            (
                "POST",
                "/accounts/demo/service-keys".to_owned(),
                json!({ "name": name, "allowed_services": ["echo"] }),
            ),
            (
                "PATCH",
                format!("/accounts/demo/agents/{agent}"),
                json!({ "name": name }),
            ),
        ] {
            let refused = api.ask(method, &path, &body);
            assert_eq!(refused.status, 422, "{name:?} {path}");
            assert_eq!(refused.body["field"], "name", "{name:?} {path}");
            let detail = refused.body["detail"].as_str().unwrap();
            assert_says(detail, &["has the character U+"]);
        }
        let token = api.create_enrollment_token("demo", &["echo"]);
        let version = env!("CARGO_PKG_VERSION");
        let body = json!({ "token": token, "name": name, "version": version });
        let refused = apex::post_json(&scene, "/enroll", "", &body);
        assert_eq!(refused.status, 400);
        assert_eq!(refused.code(), "GW_BAD_REQUEST");
        let error = &refused.json()["error"];
        assert_says(
            error["message"].as_str().unwrap(),
            &["has the character U+"],
        );
    }
}
