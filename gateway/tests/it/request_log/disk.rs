//! Bounds of the request log on the disk, for callers without a key and for accounts.

use gw_shared::id::random_base62;
use serde_json::json;

use crate::support::peers::backend;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::processes::prepared::Prepared;
use crate::support::request_log::{assert_fields, call, capture_bodies, record, replay};
use crate::support::scene::Scene;
use crate::support::{eventually, on_disk};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
const MIB: u64 = 1024 * 1024;

#[test]
fn strangers_do_not_fill_the_disk() {
    const EACH: usize = 500;
    let prepared = Prepared::new();
    let (served, _agent) = prepared.start(&backend::answering(OK));
    let before = on_disk(&prepared.path("data"));
    let mut known = Vec::new();
    // The address is limited after 600 failures, and its requests are refused with another code.
    for connection in 0..9 {
        let mut caller = prepared.connect(served.address);
        let host = match connection {
            0..8 => HOST,
            _ => "eu1.gw.localhost",
        };
        for _ in 0..EACH {
            let target = random_base62(8000);
            caller.send(format!("GET /{target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
            assert_ne!(caller.response().status, 200);
        }
        let mut caller = prepared.connect(served.address);
        caller.send(prepared.get("/known"));
        let response = caller.response();
        assert_eq!(response.status, 200);
        known.push(response.header("x-gw-request-id").to_owned());
    }
    let api = prepared.api(served.admin_address);
    for id in &known {
        record(&api, id);
    }
    let grown = on_disk(&prepared.path("data")) - before;
    assert!(grown < 6 * MIB, "{grown} bytes for {} KiB", 9 * EACH * 8);
    let metrics = served.metrics();
    let left_out = metrics.count_with("gw_service_records_left_out_total", "demo--echo");
    assert!(left_out > 4 * EACH as u64, "{left_out}");
    assert!(metrics.count("gw_apex_records_left_out_total") > 0);
    for name in [
        "gw_request_log_dropped_total",
        "gw_request_log_over_share_total",
    ] {
        assert_eq!(metrics.count(name), 0, "{name}");
    }

    let found = &api.list("/requests?account=demo&code=GW_AUTH_REQUIRED&limit=1")[0];
    let path = found["path"].as_str().unwrap();
    assert!(path.ends_with('\u{2026}'), "{path}");
    assert!(found.to_string().len() < 2048, "{found}");
}

#[test]
fn a_flood_of_one_account_does_not_cost_another_its_records() {
    const MAX: u64 = 64 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::service()
        .agent_to(backend::answering(OK))
        .data_dir(folder.path())
        .configuration(format!("request_log_max_bytes = {MAX}\n"))
        .start();
    let api = scene.api();
    capture_bodies(&api);
    let metric = |name: &str| scene.metrics().count(name);
    let body = random_base62(256 * 1024);
    let post = format!("Content-Length: {}\r\n\r\n{body}", body.len());
    let ids: Vec<String> = (0..30)
        .map(|_| call(&scene, &scene.request("POST /", &post)).1)
        .collect();
    let captured = |id: &String| record(&api, id)["captured_request"].clone();
    assert_eq!(captured(&ids[0])["bytes"], body.len());
    let expected = json!({ "truncated_by": "disk", "bytes": 0 });
    assert_fields(&captured(&ids[29]), &expected);
    let replayed = replay(&api, &ids[29], &json!({}));
    assert_eq!(replayed.status, 409, "{replayed:?}");
    assert_eq!(metric("gw_request_log_over_share_total"), 0);

    let mut caller = scene.connect();
    let mut sent = 0;
    while metric("gw_request_log_over_share_total") == 0 {
        assert!(sent < 5000, "the account has no bound");
        for _ in 0..100 {
            let target = format!("GET /{}", random_base62(8000));
            caller.send(scene.request(&target, "\r\n"));
            assert_eq!(caller.response().status, 200);
        }
        sent += 100;
    }

    api.create_service("quiet", "api");
    let (_, key) = api.create_service_key("quiet", &["api"]);
    let host = "quiet--api.eu1.gw.localhost";
    let tight = json!({ "burst": 1, "refill_per_minute": 1 });
    api.change_service("quiet", "api", &tight);
    let ask = format!("GET / HTTP/1.1\r\nHost: {host}\r\nX-Gw-Service-Key: {key}\r\n\r\n");
    let connect = || connect_to(&scene.about, host, &[b"http/1.1"], None);
    // The first request waits for an agent. All others are refused at once.
    let mut first = connect();
    first.send(&ask);
    let quiet = eventually("requests are refused", || {
        let mut caller = connect();
        caller.send(&ask);
        let response = caller.response();
        let id = response.header("x-gw-request-id").to_owned();
        (response.status == 429).then_some(id)
    });
    assert_eq!(record(&api, &quiet)["account"], "quiet");
    assert_eq!(metric("gw_request_log_dropped_total"), 0);
    // Half of the tenth of the bound that a day may use, the write-ahead logs, and pages that are
    // not full.
    let used = on_disk(&folder.path().join("requests"));
    assert!(used < MAX / 20 + 2 * MAX / 64 + MIB, "{used}");
}
