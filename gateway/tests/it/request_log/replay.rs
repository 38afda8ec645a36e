//! Replays of captured requests.

use std::sync::mpsc::{self, Receiver};

use gw_shared::http::RequestHead;
use serde_json::json;

use crate::support::SOON;
use crate::support::peers::backend;
use crate::support::request_log::{assert_fields, call, capture_bodies, record, replay};
use crate::support::scene::Scene;

/// A scene that captures, and the requests that its backend receives.
fn scene_with_requests() -> (Scene, Receiver<(RequestHead, Vec<u8>)>) {
    let (seen, requests) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, body, _)) = peer.request() {
                seen.send((head, body)).unwrap();
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        }))
        .start();
    capture_bodies(&scene.api());
    (scene, requests)
}

/// Sends a request with a body; returns its id once it is in the log.
fn captured(scene: &Scene) -> String {
    let fields = "Authorization: Basic eDp5\r\nX-A: 1\r\nContent-Length: 3\r\n\r\nabc";
    let (_, id) = call(scene, &scene.request("PUT /orders?x=1", fields));
    record(&scene.api(), &id);
    id
}

#[test]
fn a_captured_request_is_replayed() {
    let (scene, requests) = scene_with_requests();
    let api = scene.api();
    let id = captured(&scene);
    let (first, _) = requests.recv_timeout(SOON).unwrap();
    let again = replay(&api, &id, &json!({}));
    assert_eq!(again.status, 201, "{again:?}");
    let expected = json!({
        "replayed_from": id,
        "status": 200,
        "auth_mode": "admin",
        "protocol": "replay",
        "agent_id": record(&api, &id)["agent_id"],
    });
    assert_fields(&again.body, &expected);
    let new_id = again.body["id"].as_str().unwrap();
    assert_eq!(again.location, format!("/api/v1/requests/{new_id}"));
    let (head, body) = requests.recv_timeout(SOON).unwrap();
    assert_eq!(head.method, "PUT");
    assert_eq!(head.target.as_str(), "/orders?x=1");
    assert_eq!(body, b"abc");
    assert_eq!(head.authority, first.authority);
    assert_eq!(head.headers["x-a"], first.headers["x-a"]);
    assert!(!head.headers.contains("authorization"));
    assert_eq!(head.headers["x-forwarded-for"], "127.0.0.1");
    assert_eq!(head.headers["x-gw-request-id"], new_id);
}

#[test]
fn edits_of_a_replay_are_sent() {
    let (scene, requests) = scene_with_requests();
    let api = scene.api();
    let id = captured(&scene);
    requests.recv_timeout(SOON).unwrap();
    let edits = json!({
        "method": "POST", "target": "/other", "body": "longer than before",
        "set_headers": { "Authorization": "Basic eDp5", "X-A": null },
    });
    assert_eq!(replay(&api, &id, &edits).body["path"], "/other");
    let (head, body) = requests.recv_timeout(SOON).unwrap();
    assert_eq!(head.method, "POST");
    assert_eq!(head.target.as_str(), "/other");
    assert_eq!(body, b"longer than before");
    assert_eq!(head.headers.get("x-a"), None);
    assert_eq!(head.headers["authorization"], "Basic eDp5");

    let large = json!({ "body": "x".repeat(1 << 20) });
    assert_eq!(replay(&api, &id, &large).status, 201);
    let (_, body) = requests.recv_timeout(SOON).unwrap();
    assert_eq!(body.len(), 1 << 20);
}

#[test]
fn invalid_edits_of_a_replay_are_refused_by_field() {
    let (scene, _requests) = scene_with_requests();
    let id = captured(&scene);
    let long = format!("/{}", "x".repeat(8192));
    let large = json!({ "X-Large": "x".repeat(33_000) });
    for (edits, field) in [
        (json!({ "method": "a b" }), "method"),
        (json!({ "target": long }), "target"),
        (json!({ "set_headers": large }), "headers"),
        (json!({ "target": "http://example.com/" }), "target"),
        (json!({ "set_headers": { "a b": "c" } }), "set_headers"),
    ] {
        let refused = replay(&scene.api(), &id, &edits);
        assert_eq!(refused.status, 422, "{field}: {refused:?}");
        assert_eq!(refused.body["field"], field, "{refused:?}");
    }
}

#[test]
fn ids_that_name_no_request_are_refused() {
    let scene = Scene::service().agent().start();
    let unknown = "019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07";
    assert_eq!(replay(&scene.api(), unknown, &json!({})).status, 404);
    let refused = scene.api().get("/requests/not-an-id");
    assert_eq!(refused.status, 404);
    let detail = refused.body["detail"].as_str().unwrap();
    let expected = "is not a request id: a UUIDv7 like";
    assert!(detail.contains(expected), "{detail}");
}

#[test]
fn requests_without_a_complete_capture_are_not_replayed() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let is_refused = |request: &str, reason: &str| {
        let (_, id) = call(&scene, request);
        record(&api, &id);
        let refused = replay(&api, &id, &json!({}));
        assert_eq!(refused.status, 409);
        let detail = refused.body["detail"].as_str().unwrap();
        assert!(detail.contains(reason), "{detail}");
    };
    is_refused(&scene.get("/hello"), "capture_request_body was off");
    capture_bodies(&api);
    let length = (1 << 20) + 1;
    let large = format!("Content-Length: {length}\r\n\r\n{}", "x".repeat(length));
    let large = scene.request("POST /large", &large);
    is_refused(&large, "only the first 1048576 bytes");
}

#[test]
fn masked_values_must_be_supplied_for_a_replay() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let key = "gw_sk_abc.secret";
    let line = format!("GET /hello?key={key}");
    let (_, id) = call(
        &scene,
        &scene.request(&line, &format!("X-Key: {key}\r\n\r\n")),
    );
    assert_eq!(record(&api, &id)["query"], "key=gw_sk_abc.***");
    for (edits, masked) in [
        (json!({ "set_headers": { "x-key": key } }), "in the target"),
        (json!({ "target": "/hello" }), "in x-key"),
    ] {
        let refused = replay(&api, &id, &edits);
        assert_eq!(refused.status, 409, "{masked}");
        let detail = refused.body["detail"].as_str().unwrap();
        assert!(detail.contains(masked), "{detail}");
    }
    for edits in [
        json!({ "target": "/hello", "set_headers": { "X-Key": key } }),
        json!({ "target": "/hello", "headers": [] }),
    ] {
        assert_eq!(replay(&api, &id, &edits).status, 201, "{edits}");
    }
}

#[test]
fn rate_limits_apply_to_replays() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let (_, id) = call(&scene, &scene.get("/hello"));
    record(&api, &id);
    let tight = json!({ "burst": 1, "refill_per_minute": 1 });
    api.change_service("demo", "echo", &tight);
    // The bucket may have been full when its limit was lowered.
    let replies = [(); 2].map(|()| replay(&api, &id, &json!({})));
    assert_eq!(replies[1].body["code"], "GW_RATE_LIMIT_EXCEEDED");
}
