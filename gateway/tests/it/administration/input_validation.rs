//! Inputs that the administration API and the apex refuse: repeated members, and names with
//! misleading characters.

use serde_json::json;

use crate::support::admin_api::Api;
use crate::support::apex::{self};
use crate::support::scene::Scene;

use crate::support::request_log::{call, capture_bodies, record};

/// Asserts that a body that repeats `member` is refused.
fn twice(scene: &Scene, method: &str, path: &str, body: &str, member: &str) {
    let text = Api::of(&scene.about).ask_raw(method, path, body);
    let detail = text.body["detail"].as_str().unwrap_or_default().to_owned();
    assert!(
        matches!(text.status, 400 | 422),
        "{method} {path}: {text:?}"
    );
    assert!(
        detail.contains(&format!("duplicate field `{member}`")),
        "{method} {path}: {detail}"
    );
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
    let api = Api::of(&scene.about);
    capture_bodies(&api);
    let (_, id) = call(
        &scene,
        &scene.request("POST /echo", "Content-Length: 2\r\n\r\nhi"),
    );
    record(&api, &id);
    let agent = api.get("/accounts/demo/agents").body["items"][0]["agent_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let credential = api.get("/accounts/demo/credentials").body["items"][0]["client_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let key = api.get("/accounts/demo/service-keys").body["items"][0]["key_id"]
        .as_str()
        .unwrap()
        .to_owned();
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
    the_apex_refuses_repeated_members(&scene);
}

fn the_apex_refuses_repeated_members(scene: &Scene) {
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
        let response = apex::ask(scene, &format!("POST {path}"), json, body);
        let text = response.json().to_string();
        assert_eq!(response.status, 400, "{path}: {text}");
        assert!(
            text.contains(&format!("duplicate field `{member}`")),
            "{path}: {text}"
        );
    }
}

#[test]
fn names_with_control_or_direction_characters_are_refused() {
    let scene = Scene::service().agent().start();
    let api = Api::of(&scene.about);
    let agent = api.get("/accounts/demo/agents").body["items"][0]["agent_id"]
        .as_str()
        .unwrap()
        .to_owned();
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
            assert_eq!(
                (refused.status, &refused.body["field"]),
                (422, &json!("name")),
                "{name:?} {path}"
            );
            assert!(
                refused.body["detail"]
                    .as_str()
                    .unwrap()
                    .contains("has the character U+"),
                "{refused:?}"
            );
        }
        let token = api.create_enrollment_token("demo", &["echo"]);
        let version = env!("CARGO_PKG_VERSION");
        let body = json!({ "token": token, "name": name, "version": version });
        let refused = apex::post_json(&scene, "/enroll", "", &body);
        assert_eq!(
            (refused.status.as_u16(), refused.code().as_str()),
            (400, "GW_BAD_REQUEST")
        );
        assert!(
            refused.json()["error"]["message"]
                .as_str()
                .unwrap()
                .contains("has the character U+")
        );
    }
}
