//! Replays of captured requests.

use std::sync::mpsc::{self, Receiver};

use gw_shared::http::RequestHead;
use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::peers::backend;
use crate::support::scene::Scene;

use crate::support::request_log::{call, capture_bodies, record};

#[test]
fn a_captured_request_is_replayed() {
    let (seen, requests) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                seen.send((head, body)).unwrap();
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        }))
        .start();
    let api = scene.api();
    capture_bodies(&api);
    let fields = "Authorization: Basic eDp5\r\nX-A: 1\r\nContent-Length: 3\r\n\r\nabc";
    let (_, id) = call(&scene, &scene.request("PUT /orders?x=1", fields));
    let original = record(&api, &id);
    let (first, _) = requests.recv_timeout(crate::support::SOON).unwrap();

    let replay = |edits: &Value| api.ask("POST", &format!("/requests/{id}/replay"), edits);
    let again = replay(&json!({}));
    assert_eq!(
        (again.status, &again.body["replayed_from"]),
        (201, &json!(id)),
        "{again:?}"
    );
    assert_eq!(
        again.location,
        format!("/api/v1/requests/{}", again.body["id"].as_str().unwrap())
    );
    assert_eq!(
        (&again.body["status"], &again.body["auth_mode"]),
        (&json!(200), &json!("admin"))
    );
    assert_eq!(
        (&again.body["protocol"], &again.body["agent_id"]),
        (&json!("replay"), &original["agent_id"])
    );
    let (head, body) = requests.recv_timeout(crate::support::SOON).unwrap();
    assert_eq!(
        (head.method.as_str(), head.target.as_str(), body.as_slice()),
        ("PUT", "/orders?x=1", b"abc".as_slice())
    );
    assert_eq!(
        (head.authority, &head.headers["x-a"]),
        (first.authority, &first.headers["x-a"])
    );
    assert!(!head.headers.contains("authorization"));
    assert_eq!(head.headers["x-forwarded-for"], "127.0.0.1");
    assert_eq!(
        head.headers["x-gw-request-id"],
        again.body["id"].as_str().unwrap()
    );

    edits_are_sent(&api, &id, &requests);

    invalid_edits_and_ids_are_refused(&api, &id);
}

fn edits_are_sent(api: &Api, id: &str, requests: &Receiver<(RequestHead, Vec<u8>)>) {
    let replay = |edits: &Value| api.ask("POST", &format!("/requests/{id}/replay"), edits);
    let edits = json!({
        "method": "POST", "target": "/other", "body": "longer than before",
        "set_headers": { "Authorization": "Basic eDp5", "X-A": null },
    });
    assert_eq!(replay(&edits).body["path"], "/other");
    let (head, body) = requests.recv_timeout(crate::support::SOON).unwrap();
    assert_eq!(
        (head.method.as_str(), head.target.as_str()),
        ("POST", "/other")
    );
    assert_eq!(
        (body.as_slice(), head.headers.get("x-a")),
        (b"longer than before".as_slice(), None)
    );
    assert_eq!(head.headers["authorization"], "Basic eDp5");

    let large = "x".repeat(1 << 20);
    assert_eq!(replay(&json!({ "body": large })).status, 201);
    assert_eq!(
        requests.recv_timeout(crate::support::SOON).unwrap().1.len(),
        large.len()
    );
}

fn invalid_edits_and_ids_are_refused(api: &Api, id: &str) {
    let replay = |edits: &Value| api.ask("POST", &format!("/requests/{id}/replay"), edits);
    for (edits, field) in [
        (json!({ "method": "a b" }), "method"),
        (
            json!({ "target": format!("/{}", "x".repeat(8192)) }),
            "target",
        ),
        (
            json!({ "set_headers": { "X-Large": "x".repeat(33_000) } }),
            "headers",
        ),
        (json!({ "target": "http://example.com/" }), "target"),
        (json!({ "set_headers": { "a b": "c" } }), "set_headers"),
    ] {
        let refused = replay(&edits);
        assert_eq!(
            (refused.status, &refused.body["field"]),
            (422, &json!(field))
        );
    }
    assert_eq!(
        api.ask(
            "POST",
            "/requests/019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07/replay",
            &json!({})
        )
        .status,
        404
    );
    let refused = api.get("/requests/not-an-id");
    assert_eq!(refused.status, 404);
    assert!(
        refused.body["detail"]
            .as_str()
            .unwrap()
            .contains("is not a request id: a UUIDv7 like"),
        "{refused:?}"
    );
}

#[test]
fn requests_without_a_complete_capture_are_not_replayed() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let (_, unkept) = call(&scene, &scene.get("/hello"));
    record(&api, &unkept);
    let refused = api.ask("POST", &format!("/requests/{unkept}/replay"), &json!({}));
    assert_eq!(refused.status, 409);
    assert!(
        refused.body["detail"]
            .as_str()
            .unwrap()
            .contains("capture_request_body was off"),
        "{refused:?}"
    );

    capture_bodies(&api);
    let length = (1 << 20) + 1;
    let large = format!("Content-Length: {length}\r\n\r\n{}", "x".repeat(length));
    let (_, truncated) = call(&scene, &scene.request("POST /large", &large));
    record(&api, &truncated);
    let refused = api.ask("POST", &format!("/requests/{truncated}/replay"), &json!({}));
    assert_eq!(refused.status, 409);
    assert!(
        refused.body["detail"]
            .as_str()
            .unwrap()
            .contains("only the first 1048576 bytes"),
        "{refused:?}"
    );
}

#[test]
fn masked_values_must_be_supplied_for_a_replay() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let key = "gw_sk_abc.secret";
    let (_, id) = call(
        &scene,
        &scene.request(
            &format!("GET /hello?key={key}"),
            &format!("X-Key: {key}\r\n\r\n"),
        ),
    );
    assert_eq!(record(&api, &id)["query"], "key=gw_sk_abc.***");
    let replay = |edits: &Value| api.ask("POST", &format!("/requests/{id}/replay"), edits);
    let refused = replay(&json!({ "set_headers": { "x-key": key } }));
    assert_eq!(
        (
            refused.status,
            refused.body["detail"]
                .as_str()
                .unwrap()
                .contains("in the target")
        ),
        (409, true)
    );
    let refused = replay(&json!({ "target": "/hello" }));
    assert_eq!(
        (
            refused.status,
            refused.body["detail"]
                .as_str()
                .unwrap()
                .contains("in x-key")
        ),
        (409, true)
    );
    assert_eq!(
        replay(&json!({ "target": "/hello", "set_headers": { "X-Key": key } })).status,
        201
    );
    assert_eq!(
        replay(&json!({ "target": "/hello", "headers": [] })).status,
        201
    );
}

#[test]
fn rate_limits_apply_to_replays() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let (_, id) = call(&scene, &scene.get("/hello"));
    record(&api, &id);
    let tight = json!({ "burst": 1, "refill_per_minute": 1 });
    assert_eq!(
        api.ask("PATCH", "/accounts/demo/services/echo", &tight)
            .status,
        200
    );
    let replay = || {
        api.ask("POST", &format!("/requests/{id}/replay"), &json!({}))
            .body["code"]
            .clone()
    };
    // The bucket may have been full when its limit was lowered.
    let codes = [replay(), replay()];
    assert_eq!(codes[1], "GW_RATE_LIMIT_EXCEEDED");
}
