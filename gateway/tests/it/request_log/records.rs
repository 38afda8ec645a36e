//! Records of finished requests in the request log.

use std::sync::{Arc, mpsc};

use http::Response;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::support::admin_api::Api;
use crate::support::apex::{self, APEX};
use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::peers::caller::HOST;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::{backend, http1_peer, http2_backend, http2_caller};
use crate::support::processes::process::config_text;
use crate::support::request_log::{call, capture_bodies, record};
use crate::support::scene::Scene;

fn set_logging(api: &Api, request_logging: bool) {
    let change = json!({ "request_logging": request_logging });
    let changed = api.ask("PATCH", "/accounts/demo/services/echo", &change);
    assert_eq!(changed.status, 200);
}

#[test]
fn every_request_of_a_service_is_in_the_log() {
    let scene = Scene::service()
        .agent_to(backend::answering(
            "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone",
        ))
        .start();
    let api = scene.api();
    let (_, id) = call(
        &scene,
        &scene.request(
            "POST /orders/7?limit=5&x=%20",
            "Content-Length: 3\r\n\r\nabc",
        ),
    );
    let relayed = record(&api, &id);
    the_record_has_all_fields(&scene, &relayed, &id);

    let strangers = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n");
    let (status, id) = call(&scene, &strangers);
    let refused = record(&api, &id);
    assert_eq!(
        (status, &refused["status"], &refused["code"]),
        (502, &json!(502), &json!("GW_AUTH_REQUIRED"))
    );
    assert_eq!(
        (&refused["agent_id"], &refused["auth_mode"]),
        (&Value::Null, &Value::Null)
    );
    assert!(refused["bytes_out"].as_u64().unwrap() > 0, "{refused}");

    let found = api
        .get("/requests?account=demo&service=echo&status=404&path_prefix=/orders")
        .body;
    assert_eq!(found["items"], json!([relayed]));
    assert_eq!(
        api.get("/requests?account=demo").body["items"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert_eq!(api.get("/requests?account=other").body["items"], json!([]));
    for (retried, found) in [("true", 0), ("false", 2)] {
        let page = api
            .get(&format!("/requests?account=demo&retried={retried}"))
            .body;
        assert_eq!(page["items"].as_array().unwrap().len(), found, "{retried}");
    }

    // With the log turned off, no record is written.
    set_logging(&api, false);
    let (_, unlogged) = call(&scene, &scene.get("/unlogged"));
    set_logging(&api, true);
    let (_, logged) = call(&scene, &scene.get("/logged"));
    record(&api, &logged);
    assert_eq!(api.get(&format!("/requests/{unlogged}")).status, 404);
}

fn the_record_has_all_fields(scene: &Scene, relayed: &Value, id: &str) {
    let api = scene.api();
    let agents = api.get("/accounts/demo/agents").body;
    let key = scene
        .about
        .service_key
        .trim_start_matches("gw_sk_")
        .split('.')
        .next()
        .unwrap();
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
        "caller_id": key,
        "status": 404,
        "code": null,
        "ended": "complete",
        "bytes_in": 3,
        "bytes_taken": 3,
        "bytes_out": 4,
        "agent_id": agents["items"][0]["agent_id"],
        "attempts": [],
        "replayed_from": null,
        "trace_id": null,
        "captured_request": null,
        "captured_response": null,
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&relayed[field], value, "{field}");
    }
    let durations = &relayed["durations_us"];
    let of = |stage: &str| {
        durations[stage]
            .as_u64()
            .unwrap_or_else(|| panic!("{stage}: {durations}"))
    };
    let stages = of("authenticate") + of("wait") + of("agent") + of("backend_first_byte");
    assert!(
        stages <= of("response_head") && of("response_head") <= of("total"),
        "{durations}"
    );
}

#[test]
fn requests_of_disconnected_callers_are_in_the_log() {
    let (asked, was_asked) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            if peer.request().is_ok() {
                asked.send(()).unwrap();
                // Never answers: waits for the connection to end.
                let _ = peer.request();
            }
        }))
        .start();
    let api = scene.api();
    capture_bodies(&api);
    // Some connections reach the owner of the service, others another worker.
    for number in 0..8 {
        let mut caller = scene.connect();
        caller.send(scene.request(
            &format!("POST /slow/{number}"),
            "Content-Length: 2\r\n\r\nhi",
        ));
        was_asked.recv_timeout(crate::support::SOON).unwrap();
        drop(caller);
        let left = eventually("the request is in the log", || {
            let found = api
                .get(&format!(
                    "/requests?account=demo&path_prefix=/slow/{number}&status=none"
                ))
                .body;
            found["items"].get(0).cloned()
        });
        assert_eq!(
            (&left["ended"], &left["status"]),
            (&json!("caller_gone"), &Value::Null)
        );
        // Agent and wait time are recorded although no response arrived.
        assert!(
            left["agent_id"].is_string() && left["durations_us"]["wait"].is_u64(),
            "{left}"
        );
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
                let mut stream = respond
                    .send_response(response.body(()).unwrap(), false)
                    .unwrap();
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
            let recorded = record(&api, &id);
            assert_eq!(
                (&recorded["ended"], &recorded["status"], &recorded["code"]),
                (&json!("complete"), &json!(200), &Value::Null),
                "{target}"
            );
        }
    }
}

#[test]
fn requests_cut_by_a_drain_are_in_the_log() {
    let (asked, was_asked) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        if peer.request().is_ok() {
            asked.send(()).unwrap();
            let _ = peer.request();
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let scene = Scene::service()
        .agent_to(backend)
        .data_dir(folder.path())
        .configuration("drain_seconds = 0\n")
        .start();
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let mut caller = scene.connect();
            caller.send(scene.get("/slow"));
            was_asked.recv_timeout(crate::support::SOON).unwrap();
            caller
        })
        .collect();
    scene.stop();
    for mut caller in callers {
        assert_eq!(caller.response().code(), "GW_RELAY_ERROR");
    }
    let again = Gateway::start(&config_text(folder.path(), 0));
    assert_eq!(again.api().list("/requests?status=502").len(), 4);
}

#[test]
fn an_upgrade_is_recorded_with_the_status_that_the_caller_got() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            while let Ok((head, _, _)) = peer.request() {
                if head.target.path() == "/switch" {
                    peer.send(
                    "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n\
                     bye",
                );
                    return;
                }
                peer.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno");
            }
        }))
        .start();
    let api = scene.api();
    capture_bodies(&api);
    let upgrade = |path: &str| {
        scene.request(
            &format!("GET {path}"),
            "Connection: upgrade\r\nUpgrade: x\r\n\r\n",
        )
    };
    let mut caller = scene.connect();
    caller.send(upgrade("/switch"));
    assert_eq!(
        caller.response_head(&http::Method::GET).unwrap().status,
        101
    );
    drop(caller);
    let switched = eventually("the upgrade is in the log", || {
        api.get("/requests?account=demo&status=101").body["items"]
            .get(0)
            .cloned()
    });
    assert_eq!(
        (&switched["path"], &switched["captured_response"]),
        (&json!("/switch"), &Value::Null)
    );
    // A refused upgrade is recorded like other responses.
    let (_, id) = call(&scene, &upgrade("/refuse"));
    let refused = record(&api, &id);
    assert_eq!(
        (&refused["status"], &refused["captured_response"]["bytes"]),
        (&json!(403), &json!(2))
    );
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
    let host = format!("Host: {HOST}\r\n");
    for (head, method, path, code) in refused_heads(&scene) {
        let (status, id) = call(&scene, &head);
        let record = record(&api, &id);
        assert_eq!(
            [
                &record["account"],
                &record["service"],
                &record["method"],
                &record["path"],
                &record["code"]
            ],
            [
                &json!("demo"),
                &json!("echo"),
                &json!(method),
                &json!(path),
                &json!(code)
            ]
        );
        assert_eq!(
            (&record["status"], &record["protocol"]),
            (&json!(status), &json!("HTTP/1.1"))
        );
        assert_eq!(
            (&record["auth_mode"], &record["caller_address"]),
            (&Value::Null, &json!("127.0.0.1"))
        );
        assert!(!record.to_string().contains("secret"), "{record}");
    }
    a_refused_head_of_http2_is_recorded(&scene, &api);
    assert_eq!(
        api.get("/requests?account=demo&service=echo&code=GW_HEADERS_TOO_LARGE")
            .body["items"]
            .as_array()
            .unwrap()
            .len(),
        3
    );

    // The setting of the service applies to refused requests as well.
    set_logging(&api, false);
    let (_, unlogged) = call(&scene, &format!("GET /off HTTP/1.1\n{host}\n"));
    set_logging(&api, true);
    let (_, logged) = call(&scene, &format!("GET /on HTTP/1.1\n{host}\n"));
    record(&api, &logged);
    assert_eq!(api.get(&format!("/requests/{unlogged}")).status, 404);
}

fn a_refused_head_of_http2_is_recorded(scene: &Scene, api: &Api) {
    on_a_reactor(async {
        let caller = http2_caller::connect(scene).await;
        let large = caller
            .request(&http::Method::POST, "/h2?a=b")
            .header("x", "y".repeat(33 * 1024));
        let response = caller.fetch(large).await;
        let id = response.header("x-gw-request-id").to_owned();
        let record = record(api, &id);
        assert_eq!(
            (&record["protocol"], &record["path"]),
            (&json!("HTTP/2"), &json!("/h2"))
        );
        assert_eq!(
            (&record["code"], &record["service"]),
            (&json!("GW_HEADERS_TOO_LARGE"), &json!("echo"))
        );
    });
}

/// Responses of the apex to requests with secrets, and their status, path and code.
fn ask_with_secrets(scene: &Scene) -> [(http1_peer::Response, u16, &'static str, Value); 6] {
    let id = &scene.about.client_id;
    let secret = &scene.about.client_secret;
    let secrets =
        format!("?client_secret={secret}&enrollment_id=en_1&gw_et_a.bcdefgh&token=hidden");
    let token = |secret: &str| {
        let form =
            format!("client_id={id}&client_secret={secret}&scope=account:demo%20service:echo");
        let fields = "Content-Type: application/x-www-form-urlencoded\r\n";
        apex::ask(scene, &format!("POST /oauth/token{secrets}"), fields, &form)
    };
    let bad = format!("GET /bad{secrets} HTTP/1.1\nHost: {APEX}\n\n");
    let mut caller = apex::connect(scene);
    caller.send(bad);
    [
        (token(secret), 200, "/oauth/token", Value::Null),
        (token("wrong"), 401, "/oauth/token", json!("invalid_client")),
        (
            apex::ask(
                scene,
                &format!("GET /.well-known/jwks.json{secrets}"),
                "",
                "",
            ),
            200,
            "/.well-known/jwks.json",
            Value::Null,
        ),
        (
            apex::ask(
                scene,
                &format!("POST /enroll{secrets}"),
                "",
                "{\"token\":\"gw_et_a.hidden\"}",
            ),
            400,
            "/enroll",
            json!("GW_BAD_REQUEST"),
        ),
        (
            apex::ask(scene, &format!("GET /nowhere{secrets}"), "", ""),
            404,
            "/nowhere",
            json!("GW_NOT_FOUND"),
        ),
        (caller.response(), 400, "/bad", json!("GW_BAD_REQUEST")),
    ]
}

#[test]
fn requests_to_the_apex_are_recorded_without_secrets_and_bodies() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    for (response, status, path, code) in ask_with_secrets(&scene) {
        assert_eq!(response.status, status);
        let record = record(&api, response.header("x-gw-request-id"));
        assert_eq!(
            (&record["status"], &record["path"], &record["code"]),
            (&json!(status), &json!(path), &code),
            "{record}"
        );
        assert_eq!(
            (&record["account"], &record["service"]),
            (&json!(""), &json!(""))
        );
        assert_eq!(
            record["query"],
            "client_secret=***&enrollment_id=en_1&***&token=***"
        );
        assert_eq!(
            (&record["captured_request"], &record["captured_response"]),
            (&Value::Null, &Value::Null)
        );
    }
    let found = |query: &str| {
        api.get(&format!("/requests{query}")).body["items"]
            .as_array()
            .map_or(0, Vec::len)
    };
    let (_, relayed) = call(&scene, &scene.get("/hello"));
    record(&api, &relayed);
    // The enrollment of the scene's own agent is in the log as well.
    let at_apex = found("?apex=true");
    assert_eq!(
        [
            found("") - at_apex,
            found("?apex=false"),
            found("?account=demo")
        ],
        [1, 1, 1]
    );
    assert_eq!(
        (
            found("?apex=true&code=invalid_client"),
            found("?apex=true&path_prefix=/bad")
        ),
        (1, 1)
    );
    let contradiction = api.get("/requests?account=demo&apex=true");
    assert_eq!(
        (contradiction.status, &contradiction.body["field"]),
        (422, &json!("apex"))
    );
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
