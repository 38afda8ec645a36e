//! Captured bodies of requests, and the audit of access to them.

use std::fs;

use serde_json::{Value, json};

use crate::support::admin_api::Api;
use crate::support::eventually;
use crate::support::lossy_disk::LossyDisk;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::Served;
use crate::support::processes::successor::admin;
use crate::support::request_log::{call, capture_bodies, record};
use crate::support::scene::{About, Scene};

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
    for (backend, code, is_kept) in [
        (format!("http://{address}"), "GW_BACKEND_UNREACHABLE", false),
        (no_tls.replace("http:", "https:"), "GW_BACKEND_TLS", false),
        (answer(""), "GW_BACKEND_RESET", true),
        (
            answer("HTTP/1.1 abc\r\n\r\n"),
            "GW_BACKEND_INVALID_RESPONSE",
            true,
        ),
    ] {
        let scene = Scene::service().agent_to(backend).start();
        let api = scene.api();
        capture_bodies(&api);
        // Some connections reach the owner of the service, others another worker.
        for _ in 0..4 {
            let (_, id) = call(&scene, &scene.request("POST /", BODY));
            let record = record(&api, &id);
            assert_eq!(
                (&record["code"], &record["captured_response"]),
                (&json!(code), &Value::Null)
            );
            assert!(record["agent_id"].is_string(), "{record}");
            let bytes = is_kept.then_some(2);
            assert_eq!(
                record["captured_request"]["bytes"].as_u64(),
                bytes,
                "{code}: {record}"
            );
            let replayed = api.ask("POST", &format!("/requests/{id}/replay"), &json!({}));
            let expected = if is_kept { 201 } else { 409 };
            assert_eq!(replayed.status, expected, "{code}: {replayed:?}");
        }
    }
}

#[test]
fn bodies_of_rate_limited_requests_are_not_captured() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let waiting: Vec<_> = (0..128)
        .map(|_| {
            let mut caller = scene.connect();
            caller.send(scene.get("/slow?ms=30000"));
            caller
        })
        .collect();
    eventually("128 slots in use", || {
        (scene.tunnels()[0].slots_in_use == Some(128)).then_some(())
    });
    let not_kept = |code: &str| {
        let (_, id) = call(&scene, &scene.request("POST /", BODY));
        let record = record(&api, &id);
        assert_eq!(
            (&record["code"], &record["captured_request"]),
            (&json!(code), &Value::Null),
            "{record}"
        );
        let refused = api.ask("POST", &format!("/requests/{id}/replay"), &json!({}));
        assert_eq!(refused.status, 409, "{refused:?}");
    };
    not_kept("GW_AGENT_CONCURRENCY_LIMIT");
    drop(waiting);
    scene.wait_until_slots_are_free();
    let tight = json!({ "burst": 1, "refill_per_minute": 1 });
    assert_eq!(
        api.ask("PATCH", "/accounts/demo/services/echo", &tight)
            .status,
        200
    );
    // The bucket may have been full when its limit was lowered.
    eventually("the bucket is empty", || {
        (call(&scene, &scene.get("/hello")).0 == 429).then_some(())
    });
    not_kept("GW_RATE_LIMIT_EXCEEDED");
    let wide = json!({ "burst": 1000, "refill_per_minute": 60_000 });
    assert_eq!(
        api.ask("PATCH", "/accounts/demo/services/echo", &wide)
            .status,
        200
    );
    let agent = api.get("/accounts/demo/agents").body["items"][0]["agent_id"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(
        api.ask(
            "POST",
            &format!("/accounts/demo/agents/{agent}/revoke"),
            &Value::Null
        )
        .status,
        200
    );
    eventually("the tunnel is gone", || {
        scene.tunnels().is_empty().then_some(())
    });
    eventually("the bucket has a token", || {
        (call(&scene, &scene.get("/hello")).0 == 504).then_some(())
    });
    not_kept("AGENT_UNAVAILABLE");
}

/// Audit log entries about `id`, newest first.
fn audited(api: &Api, id: &str) -> Vec<(String, Value)> {
    let entries = api.get("/audit-log").body["items"].clone();
    let entries = entries
        .as_array()
        .unwrap()
        .iter()
        .filter(|entry| entry["target"] == id);
    entries
        .map(|entry| {
            assert_eq!(
                (&entry["actor"], &entry["account"]),
                (&json!("admin"), &json!("demo"))
            );
            (
                entry["action"].as_str().unwrap().to_owned(),
                entry["detail"].clone(),
            )
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
    assert_eq!(
        api.ask("POST", &format!("/requests/{id}/replay"), &edits)
            .status,
        201
    );
    let entries = audited(&api, &id);
    let replayed = json!({ "body": "request", "edited": ["method", "headers", "body"] });
    assert_eq!(
        (entries.len(), &entries[0]),
        (3, &("request.replay".to_owned(), replayed))
    );
    assert!(!format!("{entries:?}").contains("hidden"));
    // Refused replays leave no entries.
    assert_eq!(
        api.ask(
            "POST",
            &format!("/requests/{id}/replay"),
            &json!({ "method": "a b" })
        )
        .status,
        422
    );
    let (_, unkept) = call(&scene, &format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
    record(&api, &unkept);
    assert_eq!(
        api.get(&format!("/requests/{unkept}/body/request")).status,
        404
    );
    assert_eq!(
        (audited(&api, &id).len(), audited(&api, &unkept).len()),
        (3, 0)
    );
}

#[test]
fn bodies_are_captured_if_service_and_account_allow_it() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    capture_bodies(&api);
    let credentials = "Authorization: Bearer hidden\r\nCookie: a=hidden\r\nX-Plain: yes\r\n";
    let post = format!("{credentials}Content-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello");
    let (_, id) = call(&scene, &scene.request("POST /echo", &post));
    let kept = record(&api, &id);
    assert_eq!(
        (
            &kept["captured_request"]["bytes"],
            &kept["captured_request"]["truncated"]
        ),
        (&json!(5), &json!(false))
    );
    assert!(
        kept["captured_request"]["headers"]
            .as_array()
            .unwrap()
            .contains(&json!(["x-plain", "yes"])),
        "{kept}"
    );
    assert!(!kept.to_string().contains("hidden"), "{kept}");
    let (headers, body) = api.download(&format!("/requests/{id}/body/request"));
    assert_eq!(
        (body.as_slice(), &headers["content-type"]),
        (b"hello".as_slice(), &"text/plain".parse().unwrap())
    );
    assert_eq!(
        (
            headers["x-gw-truncated"].as_bytes(),
            headers["content-security-policy"].as_bytes()
        ),
        (b"false".as_slice(), b"sandbox".as_slice())
    );
    let (_, body) = api.download(&format!("/requests/{id}/body/response"));
    assert_eq!(
        serde_json::from_slice::<Value>(&body).unwrap()["body"],
        "hello"
    );

    large_bodies_are_truncated(&scene, &api);

    // A refused request has no capture.
    let (_, id) = call(
        &scene,
        &format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 2\r\n\r\nhi"),
    );
    assert_eq!(record(&api, &id)["captured_request"], Value::Null);

    // The account must allow capture.
    assert_eq!(
        api.ask(
            "PATCH",
            "/accounts/demo",
            &json!({ "capture_allowed": false })
        )
        .status,
        200
    );
    let (_, id) = call(&scene, &scene.request("POST /echo", &post));
    assert_eq!(record(&api, &id)["captured_request"], Value::Null);
    assert_eq!(api.get(&format!("/requests/{id}/body/request")).status, 404);
}

fn large_bodies_are_truncated(scene: &Scene, api: &Api) {
    let (_, id) = call(scene, &scene.get("/bytes/3000000"));
    let kept = &record(api, &id)["captured_response"];
    assert_eq!(
        (&kept["bytes"], &kept["truncated"]),
        (&json!(1 << 20), &json!(true))
    );
    assert_eq!(kept["truncated_by"], "size");
    let (headers, _) = api.download(&format!("/requests/{id}/body/response"));
    assert_eq!(
        (&headers["x-gw-truncated"], &headers["x-gw-truncated-by"]),
        (&"true".parse().unwrap(), &"size".parse().unwrap())
    );
}

const MIB: usize = 1024 * 1024;
/// Bytes of captured bodies of running requests, and of those that wait to be written, as
/// docs/limits.md says.
const RUNNING: usize = 64 * MIB;
const WAITING: usize = 64 * MIB;
/// A body whose buffer has grown to nearly twice its size, and requests with more of them than
/// fit.
const LARGE: usize = 540 * 1024;
const REQUESTS: usize = 125;
/// Memory of the process that does not depend on captured bodies.
const PROCESS: usize = 16 * MIB;

fn about(prepared: &Prepared, gateway: &Served) -> About {
    let token = fs::read_to_string(prepared.path("data/admin.token")).unwrap();
    About {
        admin_url: format!("http://{}", gateway.admin_address),
        admin_token: token.trim().to_owned(),
        ..prepared.about(gateway.address)
    }
}

/// Number of captured bodies that were dropped.
fn dropped_captures(gateway: &Served) -> u64 {
    let (_, metrics) = admin(gateway.admin_address, "/metrics");
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix("gw_request_log_captures_dropped_total "));
    line.unwrap().parse::<u64>().unwrap()
}

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
    let about = about(&prepared, &gateway);
    let api = Api::of(&about);
    capture_bodies(&api);
    let body = "b".repeat(LARGE);
    let post = |path: &str| {
        let mut caller = prepared.connect(gateway.address);
        let head = prepared.get(path).replace("GET", "POST");
        caller.send(head.replace(
            "\r\n\r\n",
            &format!("\r\nContent-Length: {LARGE}\r\n\r\n{body}"),
        ));
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
    assert!(
        (RUNNING * 3 / 4..=2 * RUNNING + PROCESS).contains(&running),
        "{running}"
    );
    // Nothing is left for the body of another request.
    let id = post("/").response().header("x-gw-request-id").to_owned();
    let captured = record(&api, &id)["captured_request"].clone();
    assert_eq!(
        (&captured["truncated_by"], &captured["bytes"]),
        (&json!("memory"), &json!(0))
    );

    let dropped = || dropped_captures(&gateway);
    let stalled = disk.stall();
    for _ in 0..REQUESTS {
        backend.release();
    }
    for caller in &mut callers {
        assert_eq!(caller.response().status, 200);
    }
    eventually("the queue of the log is full", || {
        (dropped() > 0).then_some(())
    });
    let waiting = growth();
    assert!(
        (WAITING * 3 / 4..=2 * RUNNING + PROCESS).contains(&waiting),
        "{waiting}"
    );
    drop(stalled);
    eprintln!(
        "{} KiB for running requests, {} KiB for ended ones",
        running / 1024,
        waiting / 1024
    );
}
