//! Records of finished requests in the request log.

use std::sync::Arc;

use http::Response;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::support::apex::{self, APEX};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::peers::caller::HOST;
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::{backend, http1_peer, http2_backend, http2_caller};
use crate::support::processes::process::config_text;
use crate::support::request_log::{assert_fields, call, capture_bodies, record};
use crate::support::scene::Scene;

/// A scene with a backend that answers 404.
fn scene_without_pages() -> Scene {
    let backend = "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone";
    Scene::service()
        .agent_to(backend::answering(backend))
        .start()
}

/// A request without a key.
fn unauthenticated() -> String {
    format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n")
}

fn post_order(scene: &Scene) -> String {
    let fields = "Content-Length: 3\r\n\r\nabc";
    scene.request("POST /orders/7?limit=5&x=%20", fields)
}

#[test]
fn a_refused_request_is_recorded_without_an_agent() {
    let scene = Scene::service().agent().start();
    let (status, id) = call(&scene, &unauthenticated());
    assert_eq!(status, 502);
    let refused = record(&scene.api(), &id);
    let expected = json!({
        "status": 502,
        "code": "GW_AUTH_REQUIRED",
        "agent_id": null,
        "auth_mode": null,
    });
    assert_fields(&refused, &expected);
    assert!(refused["bytes_out"].as_u64().unwrap() > 0, "{refused}");
}

#[test]
fn requests_are_found_by_their_fields() {
    let scene = scene_without_pages();
    let api = scene.api();
    let [relayed, _] = [post_order(&scene), unauthenticated()].map(|request| {
        let (_, id) = call(&scene, &request);
        record(&api, &id)
    });
    let one = "account=demo&service=echo&status=404&path_prefix=/orders";
    assert_eq!(api.list(&format!("/requests?{one}")), [relayed]);
    for (query, count) in [
        ("account=demo", 2),
        ("account=other", 0),
        ("account=demo&retried=true", 0),
        ("account=demo&retried=false", 2),
    ] {
        let found = api.list(&format!("/requests?{query}"));
        assert_eq!(found.len(), count, "{query}");
    }
}

#[test]
fn the_request_log_of_a_service_can_be_turned_off() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let set_logging = |is_on: bool| {
        api.change_service("demo", "echo", &json!({ "request_logging": is_on }));
    };
    for (name, request) in [
        ("relayed", scene.get("/hello")),
        (
            "refused head",
            format!("GET / HTTP/1.1\nHost: {HOST}\r\n\n"),
        ),
    ] {
        set_logging(false);
        let (_, unlogged) = call(&scene, &request);
        set_logging(true);
        let (_, logged) = call(&scene, &request);
        record(&api, &logged);
        let reply = api.get(&format!("/requests/{unlogged}"));
        assert_eq!(reply.status, 404, "{name}");
    }
}

#[test]
fn the_record_of_a_relayed_request_has_all_fields() {
    let scene = scene_without_pages();
    let api = scene.api();
    let (_, id) = call(&scene, &post_order(&scene));
    let relayed = record(&api, &id);
    let key = scene.about.service_key.trim_start_matches("gw_sk_");
    let expected = json!({
        "id": id,
        "account": "demo",
        "service": "echo",
        "method": "POST",
        "path": "/orders/7",
        "query": "limit=5&x=%20",
        "caller_address": "127.0.0.1",
        "protocol": "HTTP/1.1",
        "auth_mode": "service_key",
        "caller_id": key.split('.').next().unwrap(),
        "status": 404,
        "code": null,
        "ended": "complete",
        "bytes_in": 3,
        "bytes_taken": 3,
        "bytes_out": 4,
        "agent_id": api.agents("demo")[0]["agent_id"],
        "attempts": [],
        "replayed_from": null,
        "trace_id": null,
        "captured_request": null,
        "captured_response": null,
    });
    assert_fields(&relayed, &expected);
    let durations = &relayed["durations_us"];
    let of = |stage: &str| {
        let duration = durations[stage].as_u64();
        duration.unwrap_or_else(|| panic!("{stage}: {durations}"))
    };
    let stages = of("authenticate") + of("wait") + of("agent") + of("backend_first_byte");
    assert!(stages <= of("response_head"), "{durations}");
    assert!(of("response_head") <= of("total"), "{durations}");
}

#[test]
fn requests_of_disconnected_callers_are_in_the_log() {
    let backend = HeldBackend::start();
    let scene = Scene::service().agent_to(&backend.url).start();
    let api = scene.api();
    capture_bodies(&api);
    // Some connections reach the owner of the service, others another worker.
    for number in 1..=8 {
        let mut caller = scene.connect();
        caller.send(scene.request("POST /held", "Content-Length: 2\r\n\r\nhi"));
        backend.wait_for_held();
        drop(caller);
        let left = eventually("the request is in the log", || {
            let found = api.list("/requests?account=demo&path_prefix=/held&status=none");
            (found.len() == number).then(|| found[0].clone())
        });
        assert_fields(&left, &json!({ "ended": "caller_gone", "status": null }));
        // Agent and wait time are recorded although no response arrived.
        assert!(left["agent_id"].is_string(), "{left}");
        assert!(left["durations_us"]["wait"].is_u64(), "{left}");
        assert_eq!(left["captured_request"]["bytes"], 2, "{left}");
    }
}

/// Over HTTP/1.1 the caller has the whole response once it has as many bytes as were announced.
#[test]
fn a_response_of_announced_length_is_complete_before_its_stream_ends() {
    let was_received = Arc::new(Notify::new());
    let scene = Scene::service()
        .agent_to(http2_backend::start({
            let was_received = Arc::clone(&was_received);
            async move |request, mut respond| {
                let response = Response::builder().header("content-length", 5);
                let response = response.body(()).unwrap();
                let mut stream = respond.send_response(response, false).unwrap();
                stream.send_data("whole".into(), false).unwrap();
                match request.uri().path() {
                    "/reset" => {
                        was_received.notified().await;
                        stream.send_reset(h2::Reason::INTERNAL_ERROR);
                    }
                    _ => std::future::pending().await,
                }
            }
        }))
        .start();
    let api = scene.api();
    // Some connections reach the owner of the service, others another worker.
    for _ in 0..8 {
        let mut caller = scene.connect();
        for target in ["/reset", "/held"] {
            caller.send(scene.get(target));
            let response = caller.response();
            assert_eq!(response.body, b"whole");
            let id = response.header("x-gw-request-id").to_owned();
            if target == "/reset" {
                was_received.notify_one();
            } else {
                caller = scene.connect();
            }
            let expected = json!({ "ended": "complete", "status": 200, "code": null });
            assert_fields(&record(&api, &id), &expected);
        }
    }
}

#[test]
fn requests_cut_by_a_drain_are_in_the_log() {
    let backend = HeldBackend::start();
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::service()
        .agent_to(&backend.url)
        .data_dir(folder.path())
        .configuration("drain_seconds = 0\n")
        .start();
    let callers = [(); 4].map(|()| {
        let mut caller = scene.connect();
        caller.send(scene.get("/held"));
        backend.wait_for_held();
        caller
    });
    scene.stop();
    for mut caller in callers {
        assert_eq!(caller.response().code(), "GW_RELAY_ERROR");
    }
    let again = Gateway::start(&config_text(folder.path(), 0));
    assert_eq!(again.api().list("/requests?status=502").len(), 4);
}

#[test]
fn an_upgrade_is_recorded_with_the_status_that_the_caller_got() {
    const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\n\
                          Upgrade: x\r\n\r\nbye";
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while let Ok((head, _, _)) = peer.request() {
                if head.target.path() == "/switch" {
                    peer.send(SWITCH);
                    return;
                }
                peer.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno");
            }
        }))
        .start();
    let api = scene.api();
    capture_bodies(&api);
    let upgrade = "Connection: upgrade\r\nUpgrade: x\r\n\r\n";
    let mut caller = scene.connect();
    caller.send(scene.request("GET /switch", upgrade));
    let head = caller.response_head(&http::Method::GET).unwrap();
    assert_eq!(head.status, 101);
    drop(caller);
    let switched = eventually("the upgrade is in the log", || {
        api.list("/requests?account=demo&status=101").pop()
    });
    assert_fields(
        &switched,
        &json!({ "path": "/switch", "captured_response": null }),
    );
    // A refused upgrade is recorded like other responses.
    let (_, id) = call(&scene, &scene.request("GET /refuse", upgrade));
    let refused = record(&api, &id);
    assert_eq!(refused["status"], 403);
    assert_eq!(refused["captured_response"]["bytes"], 2);
}

/// Heads that are refused, and the method, path and code in their records.
fn refused_heads(scene: &Scene) -> [(String, &'static str, String, &'static str); 5] {
    let long = "a".repeat(8 * 1024);
    let fields = format!("A: {}\r\n\r\n", "b".repeat(33 * 1024));
    let host = format!("Host: {HOST}\r\n");
    [
        (
            scene.request(&format!("PUT /{long}?x"), "\r\n"),
            "PUT",
            // Requests without an authenticated caller are cut after 512 bytes.
            format!("/{}\u{2026}", &long[..508]),
            "GW_HEADERS_TOO_LARGE",
        ),
        (
            scene.request("GET /many?k=gw_cs_secret", &fields),
            "GET",
            "/many".to_owned(),
            "GW_HEADERS_TOO_LARGE",
        ),
        (
            format!("GET /line HTTP/1.1\n{host}\n"),
            "GET",
            "/line".to_owned(),
            "GW_BAD_REQUEST",
        ),
        (
            format!("GET /\u{e4}\u{1b} HTTP/1.1\r\n{host}X : a\r\n\r\n"),
            "GET",
            "/%C3%A4%1B".to_owned(),
            "GW_BAD_REQUEST",
        ),
        (
            format!("G\u{1}T /x HTTP/1.1\r\n{host}\r\n"),
            "-",
            "/x".to_owned(),
            "GW_BAD_REQUEST",
        ),
    ]
}

#[test]
fn refused_heads_that_name_a_service_are_recorded() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    for (head, method, path, code) in refused_heads(&scene) {
        let (status, id) = call(&scene, &head);
        let record = record(&api, &id);
        let expected = json!({
            "account": "demo",
            "service": "echo",
            "method": method,
            "path": path,
            "code": code,
            "status": status,
            "protocol": "HTTP/1.1",
            "auth_mode": null,
            "caller_address": "127.0.0.1",
        });
        assert_fields(&record, &expected);
        assert!(!record.to_string().contains("secret"), "{record}");
    }
    let too_large = "/requests?account=demo&service=echo&code=GW_HEADERS_TOO_LARGE";
    assert_eq!(api.list(too_large).len(), 2);
}

#[test]
fn a_refused_head_of_http2_is_recorded() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        let large = caller
            .request(&http::Method::POST, "/h2?a=b")
            .header("x", "y".repeat(33 * 1024));
        let response = caller.fetch(large).await;
        let expected = json!({
            "protocol": "HTTP/2",
            "path": "/h2",
            "code": "GW_HEADERS_TOO_LARGE",
            "service": "echo",
        });
        assert_fields(&record(&api, response.header("x-gw-request-id")), &expected);
    });
    let too_large = "/requests?account=demo&service=echo&code=GW_HEADERS_TOO_LARGE";
    assert_eq!(api.list(too_large).len(), 1);
}

/// Responses of the apex to requests with secrets, and their status, path and code.
fn ask_with_secrets(scene: &Scene) -> [(http1_peer::Response, u16, &'static str, Value); 6] {
    let id = &scene.about.client_id;
    let secret = &scene.about.client_secret;
    let secrets =
        format!("?client_secret={secret}&enrollment_id=en_1&gw_et_a.bcdefgh&token=hidden");
    let ask = |line: &str, fields: &str, body: &str| {
        apex::ask(scene, &format!("{line}{secrets}"), fields, body)
    };
    let token = |secret: &str| {
        let form =
            format!("client_id={id}&client_secret={secret}&scope=account:demo%20service:echo");
        let fields = "Content-Type: application/x-www-form-urlencoded\r\n";
        ask("POST /oauth/token", fields, &form)
    };
    let keys = ask("GET /.well-known/jwks.json", "", "");
    let enrollment = ask("POST /enroll", "", "{\"token\":\"gw_et_a.hidden\"}");
    let unknown = ask("GET /nowhere", "", "");
    let mut caller = apex::connect(scene);
    caller.send(format!("GET /bad{secrets} HTTP/1.1\nHost: {APEX}\n\n"));
    let bad_request = json!("GW_BAD_REQUEST");
    [
        (token(secret), 200, "/oauth/token", Value::Null),
        (token("wrong"), 401, "/oauth/token", json!("invalid_client")),
        (keys, 200, "/.well-known/jwks.json", Value::Null),
        (enrollment, 400, "/enroll", bad_request.clone()),
        (unknown, 404, "/nowhere", json!("GW_NOT_FOUND")),
        (caller.response(), 400, "/bad", bad_request),
    ]
}

#[test]
fn requests_to_the_apex_are_recorded_without_secrets_and_bodies() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    for (response, status, path, code) in ask_with_secrets(&scene) {
        assert_eq!(response.status, status);
        let expected = json!({
            "status": status,
            "path": path,
            "code": code,
            "account": "",
            "service": "",
            "query": "client_secret=***&enrollment_id=en_1&***&token=***",
            "captured_request": null,
            "captured_response": null,
        });
        let id = response.header("x-gw-request-id");
        assert_fields(&record(&api, id), &expected);
    }
}

#[test]
fn requests_are_found_by_whether_they_were_to_the_apex() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    for (response, ..) in ask_with_secrets(&scene) {
        record(&api, response.header("x-gw-request-id"));
    }
    let (_, relayed) = call(&scene, &scene.get("/hello"));
    record(&api, &relayed);
    let found = |query: &str| api.list(&format!("/requests{query}")).len();
    assert_eq!(found("?apex=true&code=invalid_client"), 1);
    assert_eq!(found("?apex=true&path_prefix=/bad"), 1);
    // The enrollment of the scene's own agent is in the log as well.
    let at_apex = found("?apex=true");
    assert_eq!(found("") - at_apex, 1);
    assert_eq!(found("?apex=false"), 1);
    assert_eq!(found("?account=demo"), 1);
    let contradiction = api.get("/requests?account=demo&apex=true");
    assert_eq!(contradiction.status, 422);
    assert_eq!(contradiction.body["field"], "apex");
}

#[test]
fn records_of_unauthenticated_apex_requests_are_rate_limited() {
    const BURST: usize = 400;
    const MORE: usize = 200;
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut caller = apex::connect(&scene);
    let mut ids = Vec::new();
    for _ in 0..BURST + MORE {
        caller.send(format!(
            "GET /.well-known/jwks.json HTTP/1.1\r\nHost: {APEX}\r\n\r\n"
        ));
        ids.push(caller.response().header("x-gw-request-id").to_owned());
    }
    record(&api, &ids[0]);
    let left_out = || scene.metrics().count("gw_apex_records_left_out_total");
    // Two records a second are admitted in the meantime.
    eventually("omitted records are counted", || {
        (left_out() > 0).then_some(())
    });
    assert!(left_out() <= MORE as u64);
    // Authenticated requests are still recorded.
    let about = &scene.about;
    let minted = apex::token(
        &scene,
        &about.client_id,
        &about.client_secret,
        "account:demo service:echo",
    );
    record(&api, minted.header("x-gw-request-id"));
}
