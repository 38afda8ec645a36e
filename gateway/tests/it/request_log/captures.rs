//! Captured bodies of requests, and the audit of access to them.

use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::eventually;
use crate::support::lossy_disk::LossyDisk;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::prepared::Prepared;
use crate::support::request_log::{assert_fields, call, capture_bodies, record, replay};
use crate::support::scene::Scene;

const BODY: &str = "Content-Length: 2\r\n\r\nhi";

#[test]
fn bodies_of_requests_that_reached_the_backend_are_captured() {
    let (_closed, address) = backend::refusing();
    let no_tls = backend::start(|mut peer| {
        peer.send("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    });
    let answer = |answer: &'static str| {
        backend::start(move |mut peer| {
            drop(peer.request());
            peer.send(answer);
        })
    };
    let invalid = answer("HTTP/1.1 abc\r\n\r\n");
    for (backend, code, is_kept) in [
        (format!("http://{address}"), "GW_BACKEND_UNREACHABLE", false),
        (no_tls.replace("http:", "https:"), "GW_BACKEND_TLS", false),
        (answer(""), "GW_BACKEND_RESET", true),
        (invalid, "GW_BACKEND_INVALID_RESPONSE", true),
    ] {
        let scene = Scene::service().agent_to(backend).start();
        let api = scene.api();
        capture_bodies(&api);
        // Some connections reach the owner of the service, others another worker.
        for _ in 0..4 {
            let (_, id) = call(&scene, &scene.request("POST /", BODY));
            let record = record(&api, &id);
            assert_fields(&record, &json!({ "code": code, "captured_response": null }));
            assert!(record["agent_id"].is_string(), "{record}");
            let bytes = record["captured_request"]["bytes"].as_u64();
            assert_eq!(bytes, is_kept.then_some(2), "{code}: {record}");
            let replayed = replay(&api, &id, &json!({}));
            let expected = if is_kept { 201 } else { 409 };
            assert_eq!(replayed.status, expected, "{code}: {replayed:?}");
        }
    }
}

/// Sends a request, which the gateway answers with `code`. Its body is not captured.
fn assert_not_captured(scene: &Scene, code: &str) {
    let api = scene.api();
    let (_, id) = call(scene, &scene.request("POST /", BODY));
    let expected = json!({ "code": code, "captured_request": null });
    assert_fields(&record(&api, &id), &expected);
    let refused = replay(&api, &id, &json!({}));
    assert_eq!(refused.status, 409, "{refused:?}");
}

#[test]
fn bodies_of_requests_without_a_slot_are_not_captured() {
    let scene = Scene::service().agent().start();
    capture_bodies(&scene.api());
    let _waiting: Vec<_> = (0..128)
        .map(|_| {
            let mut caller = scene.connect();
            caller.send(scene.get("/slow?ms=30000"));
            caller
        })
        .collect();
    eventually("128 slots in use", || {
        (scene.tunnels()[0].slots_in_use == Some(128)).then_some(())
    });
    assert_not_captured(&scene, "GW_AGENT_CONCURRENCY_LIMIT");
}

#[test]
fn bodies_of_rate_limited_requests_are_not_captured() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let tight = json!({ "burst": 1, "refill_per_minute": 1 });
    api.change_service("demo", "echo", &tight);
    // The bucket may have been full when its limit was lowered.
    eventually("the bucket is empty", || {
        (call(&scene, &scene.get("/hello")).0 == 429).then_some(())
    });
    assert_not_captured(&scene, "GW_RATE_LIMIT_EXCEEDED");
}

#[test]
fn bodies_of_requests_without_an_agent_are_not_captured() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    api.revoke_agent("demo", &scene.tunnels()[0].agent_id);
    scene.wait_for_tunnels(0);
    assert_not_captured(&scene, "AGENT_UNAVAILABLE");
}

/// Audit log entries about `id`, newest first.
fn audited(api: &Api, id: &str) -> Vec<(String, Value)> {
    let entries = api.list("/audit-log").into_iter();
    entries
        .filter(|entry| entry["target"] == id)
        .map(|mut entry| {
            assert_fields(&entry, &json!({ "actor": "admin", "account": "demo" }));
            let action = entry["action"].as_str().unwrap().to_owned();
            (action, entry["detail"].take())
        })
        .collect()
}

#[test]
fn reads_and_replays_of_captures_are_audited() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let (_, id) = call(&scene, &scene.request("POST /echo", BODY));
    record(&api, &id);
    api.get("/requests?account=demo");
    // Reading metadata is not audited.
    assert_eq!(audited(&api, &id), []);
    api.download(&format!("/requests/{id}/body/request"));
    api.download(&format!("/requests/{id}/body/response"));
    let read = |body: &str| ("request.read_body".to_owned(), json!({ "body": body }));
    assert_eq!(audited(&api, &id), [read("response"), read("request")]);
    let edits =
        json!({ "method": "PUT", "set_headers": { "x-secret": "hidden" }, "body": "hidden" });
    assert_eq!(replay(&api, &id, &edits).status, 201);
    let entries = audited(&api, &id);
    let replayed = json!({ "body": "request", "edited": ["method", "headers", "body"] });
    assert_eq!(entries.len(), 3);
    assert_eq!(entries[0], ("request.replay".to_owned(), replayed));
    assert!(!format!("{entries:?}").contains("hidden"));
}

#[test]
fn refused_reads_and_replays_of_captures_are_not_audited() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let (_, kept) = call(&scene, &scene.request("POST /echo", BODY));
    let (_, unkept) = call(&scene, &format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
    for id in [&kept, &unkept] {
        record(&api, id);
    }
    let refused = replay(&api, &kept, &json!({ "method": "a b" }));
    assert_eq!(refused.status, 422, "{refused:?}");
    let body = api.get(&format!("/requests/{unkept}/body/request"));
    assert_eq!(body.status, 404, "{body:?}");
    assert_eq!(audited(&api, &kept), []);
    assert_eq!(audited(&api, &unkept), []);
}

const POST: &str = "Authorization: Bearer hidden\r\nCookie: a=hidden\r\nX-Plain: yes\r\n\
                    Content-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello";

#[test]
fn captured_bodies_can_be_downloaded_and_have_no_credentials() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let (_, id) = call(&scene, &scene.request("POST /echo", POST));
    let kept = record(&api, &id);
    let request = &kept["captured_request"];
    assert_fields(request, &json!({ "bytes": 5, "truncated": false }));
    let fields = request["headers"].as_array().unwrap();
    assert!(fields.contains(&json!(["x-plain", "yes"])), "{kept}");
    assert!(!kept.to_string().contains("hidden"), "{kept}");
    let (headers, body) = api.download(&format!("/requests/{id}/body/request"));
    assert_eq!(body, b"hello");
    assert_eq!(headers["content-type"], "text/plain");
    assert_eq!(headers["x-gw-truncated"], "false");
    assert_eq!(headers["content-security-policy"], "sandbox");
    let (_, body) = api.download(&format!("/requests/{id}/body/response"));
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["body"], "hello");
}

#[test]
fn bodies_of_refused_requests_are_not_captured() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let unauthenticated = format!("POST / HTTP/1.1\r\nHost: {HOST}\r\n{BODY}");
    let (_, id) = call(&scene, &unauthenticated);
    assert_eq!(record(&api, &id)["captured_request"], Value::Null);
}

#[test]
fn bodies_are_not_captured_if_the_account_does_not_allow_it() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    api.patch("/accounts/demo", &json!({ "capture_allowed": false }));
    api.await_workers();
    let (_, id) = call(&scene, &scene.request("POST /echo", POST));
    assert_eq!(record(&api, &id)["captured_request"], Value::Null);
    assert_eq!(api.get(&format!("/requests/{id}/body/request")).status, 404);
}

#[test]
fn large_captured_bodies_are_truncated() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let (_, id) = call(&scene, &scene.get("/bytes/3000000"));
    let kept = &record(&api, &id)["captured_response"];
    let expected = json!({ "bytes": 1 << 20, "truncated": true, "truncated_by": "size" });
    assert_fields(kept, &expected);
    let (headers, _) = api.download(&format!("/requests/{id}/body/response"));
    assert_eq!(headers["x-gw-truncated"], "true");
    assert_eq!(headers["x-gw-truncated-by"], "size");
}

const MIB: usize = 1024 * 1024;
/// Bytes of captured bodies of running requests, and of those that wait to be written, as
/// docs/limits.md says.
const RUNNING: usize = 64 * MIB;
const WAITING: usize = 64 * MIB;
/// Length of a body whose buffer grows to nearly twice its size, and a number of requests whose
/// bodies do not fit.
const LARGE: usize = 540 * 1024;
const REQUESTS: usize = 125;
/// Memory of the process that does not depend on captured bodies.
const PROCESS: usize = 16 * MIB;

#[test]
fn captured_bodies_that_are_not_written_are_bounded() {
    let Some(disk) = LossyDisk::mount() else {
        return;
    };
    let backend = HeldBackend::start();
    let prepared = Prepared::new();
    disk.take(&prepared.path("data/requests"));
    let gateway = prepared.serve_with(&prepared.config().replace("workers = 2", "workers = 1"));
    let _agent = prepared.run_agent(gateway.address.port(), &backend.url);
    prepared.wait_for_tunnel(gateway.address);
    let api = prepared.api(gateway.admin_address);
    capture_bodies(&api);
    let body = "b".repeat(LARGE);
    let post = |path: &str| {
        let mut caller = prepared.connect(gateway.address);
        let head = prepared.get(path).replace("GET", "POST");
        let rest = format!("\r\nContent-Length: {LARGE}\r\n\r\n{body}");
        caller.send(head.replace("\r\n\r\n", &rest));
        caller
    };
    post("/").response();
    let before = gateway.resident();
    let mut callers: Vec<Caller> = (0..REQUESTS)
        .map(|_| {
            let caller = post("/held");
            backend.wait_for_held();
            caller
        })
        .collect();
    let growth = || gateway.resident().saturating_sub(before);
    let running = growth();
    let expected = RUNNING * 3 / 4..=2 * RUNNING + PROCESS;
    assert!(expected.contains(&running), "{running}");
    // No memory is left for the body of another request.
    let id = post("/").response().header("x-gw-request-id").to_owned();
    let captured = &record(&api, &id)["captured_request"];
    assert_fields(captured, &json!({ "truncated_by": "memory", "bytes": 0 }));

    let stalled = disk.stall();
    for _ in 0..REQUESTS {
        backend.release();
    }
    for caller in &mut callers {
        assert_eq!(caller.response().status, 200);
    }
    eventually("the queue of the log is full", || {
        let dropped = api.metrics().count("gw_request_log_captures_dropped_total");
        (dropped > 0).then_some(())
    });
    let waiting = growth();
    let expected = WAITING * 3 / 4..=2 * RUNNING + PROCESS;
    assert!(expected.contains(&waiting), "{waiting}");
    drop(stalled);
    eprintln!(
        "{} KiB for running requests, {} KiB for ended ones",
        running / 1024,
        waiting / 1024
    );
}
