//! Records and captures of requests that are not relayed, and audit of reads of captures.

use gw_gateway::demo::Demo;
use serde_json::{Value, json};

use crate::admin::Api;
use crate::request_records::{call, keep_bodies, record};
use crate::support::apex::{self, APEX};
use crate::support::caller::{self, HOST, get, request};
use crate::support::http2_caller::{self, on_a_reactor};
use crate::support::{backend, demo, eventually, setup, tunnels};

const BODY: &str = "Content-Length: 2\r\n\r\nhi";

#[test]
fn bodies_are_kept_of_requests_that_reached_the_backend() {
    // Bound but not listening: connections are refused and the port stays reserved.
    let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    closed.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
    let port = closed.local_addr().unwrap().as_socket().unwrap().port();
    let no_tls = backend::start(|mut peer| peer.send("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"));
    let answer = |answer: &'static str| {
        backend::start(move |mut peer| {
            drop(peer.request());
            peer.send(answer);
        })
    };
    for (backend, code, is_kept) in [
        (format!("http://127.0.0.1:{port}"), "GW_BACKEND_UNREACHABLE", false),
        (no_tls.replace("http:", "https:"), "GW_BACKEND_TLS", false),
        (answer(""), "GW_BACKEND_RESET", true),
        (answer("HTTP/1.1 abc\r\n\r\n"), "GW_BACKEND_INVALID_RESPONSE", true),
    ] {
        let demo = demo(Some(backend));
        let api = Api(&demo);
        keep_bodies(&api);
        // On the service's owner and across, as the connections come.
        for _ in 0..4 {
            let (_, id) = call(&demo, &request(&demo, "POST /", BODY));
            let record = record(&api, &id);
            assert_eq!((&record["code"], &record["captured_response"]), (&json!(code), &Value::Null));
            assert!(record["agent_id"].is_string(), "{record}");
            let bytes = is_kept.then_some(2);
            assert_eq!(record["captured_request"]["bytes"].as_u64(), bytes, "{code}: {record}");
            let (replayed, expected) =
                (api.ask("POST", &format!("/requests/{id}/replay"), &json!({})), if is_kept { 201 } else { 409 });
            assert_eq!(replayed.status, expected, "{code}: {replayed:?}");
        }
    }
}

#[test]
fn bodies_of_requests_over_a_limit_are_not_kept() {
    let demo = demo(None);
    let api = Api(&demo);
    keep_bodies(&api);
    let waiting: Vec<_> = (0..128)
        .map(|_| {
            let mut caller = caller::connect(&demo);
            caller.send(get(&demo, "/slow?ms=30000"));
            caller
        })
        .collect();
    eventually("128 slots in use", || (tunnels(&demo)[0].slots_in_use == Some(128)).then_some(()));
    let not_kept = |code: &str| {
        let (_, id) = call(&demo, &request(&demo, "POST /", BODY));
        let record = record(&api, &id);
        assert_eq!((&record["code"], &record["captured_request"]), (&json!(code), &Value::Null), "{record}");
        let refused = api.ask("POST", &format!("/requests/{id}/replay"), &json!({}));
        assert_eq!(refused.status, 409, "{refused:?}");
    };
    not_kept("GW_AGENT_CONCURRENCY_LIMIT");
    drop(waiting);
    crate::support::wait_until_slots_are_free(&demo);
    let tight = json!({ "burst": 1, "refill_per_minute": 1 });
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &tight).status, 200);
    // Its bucket may have been full when it became small.
    eventually("the bucket is empty", || (call(&demo, &get(&demo, "/hello")).0 == 429).then_some(()));
    not_kept("GW_RATE_LIMIT_EXCEEDED");
    let wide = json!({ "burst": 1000, "refill_per_minute": 60_000 });
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &wide).status, 200);
    let agent = api.get("/accounts/demo/agents").body["items"][0]["agent_id"].as_str().unwrap().to_owned();
    assert_eq!(api.ask("POST", &format!("/accounts/demo/agents/{agent}/revoke"), &Value::Null).status, 200);
    eventually("the tunnel is gone", || tunnels(&demo).is_empty().then_some(()));
    eventually("the bucket has something", || (call(&demo, &get(&demo, "/hello")).0 == 504).then_some(()));
    not_kept("AGENT_UNAVAILABLE");
}

#[test]
fn refused_heads_that_name_a_service_are_recorded() {
    let demo = demo(None);
    let api = Api(&demo);
    let long = "a".repeat(8 * 1024);
    let fields = format!("A: {}\r\n\r\n", "b".repeat(33 * 1024));
    let host = format!("Host: {HOST}\r\n");
    for (head, method, path, code) in [
        (request(&demo, &format!("PUT /{long}?x"), "\r\n"), "PUT", format!("/{}", &long[1..]), "GW_HEADERS_TOO_LARGE"),
        (request(&demo, "GET /many?k=gw_cs_secret", &fields), "GET", "/many".to_owned(), "GW_HEADERS_TOO_LARGE"),
        (format!("GET /line HTTP/1.1\n{host}\n"), "GET", "/line".to_owned(), "GW_BAD_REQUEST"),
        (
            format!("GET /\u{e4}\u{1b} HTTP/1.1\r\n{host}X : a\r\n\r\n"),
            "GET",
            "/%C3%A4%1B".to_owned(),
            "GW_BAD_REQUEST",
        ),
        (format!("G\u{1}T /x HTTP/1.1\r\n{host}\r\n"), "-", "/x".to_owned(), "GW_BAD_REQUEST"),
    ] {
        let (status, id) = call(&demo, &head);
        let record = record(&api, &id);
        assert_eq!(
            [&record["account"], &record["service"], &record["method"], &record["path"], &record["code"]],
            [&json!("demo"), &json!("echo"), &json!(method), &json!(path), &json!(code)]
        );
        assert_eq!((&record["status"], &record["protocol"]), (&json!(status), &json!("HTTP/1.1")));
        assert_eq!((&record["auth_mode"], &record["caller_address"]), (&Value::Null, &json!("127.0.0.1")));
        assert!(!record.to_string().contains("secret"), "{record}");
    }
    on_a_reactor(async {
        let caller = http2_caller::connect(&demo).await;
        let large = caller.request(&http::Method::POST, "/h2?a=b").header("x", "y".repeat(33 * 1024));
        let response = caller.fetch(large).await;
        let id = response.header("x-gw-request-id").to_owned();
        let record = record(&api, &id);
        assert_eq!((&record["protocol"], &record["path"]), (&json!("HTTP/2"), &json!("/h2")));
        assert_eq!((&record["code"], &record["service"]), (&json!("GW_HEADERS_TOO_LARGE"), &json!("echo")));
    });
    assert_eq!(
        api.get("/requests?account=demo&service=echo&code=GW_HEADERS_TOO_LARGE").body["items"]
            .as_array()
            .unwrap()
            .len(),
        3
    );

    // The service's setting decides.
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &json!({ "request_logging": false })).status, 200);
    let (_, unlogged) = call(&demo, &format!("GET /off HTTP/1.1\n{host}\n"));
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &json!({ "request_logging": true })).status, 200);
    let (_, logged) = call(&demo, &format!("GET /on HTTP/1.1\n{host}\n"));
    record(&api, &logged);
    assert_eq!(api.get(&format!("/requests/{unlogged}")).status, 404);
}

#[test]
fn requests_to_the_apex_are_recorded_without_what_they_carry() {
    let demo = demo(None);
    let api = Api(&demo);
    let (id, secret) = (&demo.about.client_id, &demo.about.client_secret);
    let secrets = format!("?client_secret={secret}&enrollment_id=en_1&gw_et_a.bcdefgh&token=hidden");
    let token = |secret: &str| {
        let form = format!("client_id={id}&client_secret={secret}&scope=account:demo%20service:echo");
        let fields = "Content-Type: application/x-www-form-urlencoded\r\n";
        apex::ask(&demo, &format!("POST /oauth/token{secrets}"), fields, &form)
    };
    let bad = format!("GET /bad{secrets} HTTP/1.1\nHost: {APEX}\n\n");
    let mut caller = apex::connect(&demo);
    caller.send(bad);
    for (response, status, path, code) in [
        (token(secret), 200, "/oauth/token", Value::Null),
        (token("wrong"), 401, "/oauth/token", json!("invalid_client")),
        (
            apex::ask(&demo, &format!("GET /.well-known/jwks.json{secrets}"), "", ""),
            200,
            "/.well-known/jwks.json",
            Value::Null,
        ),
        (
            apex::ask(&demo, &format!("POST /enroll{secrets}"), "", "{\"token\":\"gw_et_a.hidden\"}"),
            400,
            "/enroll",
            json!("GW_BAD_REQUEST"),
        ),
        (apex::ask(&demo, &format!("GET /nowhere{secrets}"), "", ""), 404, "/nowhere", json!("GW_NOT_FOUND")),
        (caller.response(), 400, "/bad", json!("GW_BAD_REQUEST")),
    ] {
        assert_eq!(response.status, status);
        let record = record(&api, response.header("x-gw-request-id"));
        assert_eq!(
            (&record["status"], &record["path"], &record["code"]),
            (&json!(status), &json!(path), &code),
            "{record}"
        );
        assert_eq!((&record["account"], &record["service"]), (&json!(""), &json!("")));
        assert_eq!(record["query"], "client_secret=***&enrollment_id=en_1&***&token=***");
        assert_eq!((&record["captured_request"], &record["captured_response"]), (&Value::Null, &Value::Null));
    }
    let found = |query: &str| api.get(&format!("/requests{query}")).body["items"].as_array().map_or(0, Vec::len);
    let (_, relayed) = call(&demo, &get(&demo, "/hello"));
    record(&api, &relayed);
    // The demo's own agent has enrolled there, too.
    let at_apex = found("?apex=true");
    assert_eq!([found("") - at_apex, found("?apex=false"), found("?account=demo")], [1, 1, 1]);
    assert_eq!((found("?apex=true&code=invalid_client"), found("?apex=true&path_prefix=/bad")), (1, 1));
    let contradiction = api.get("/requests?account=demo&apex=true");
    assert_eq!((contradiction.status, &contradiction.body["field"]), (422, &json!("apex")));
}

#[test]
fn strangers_do_not_fill_the_log_by_way_of_the_apex() {
    const BURST: usize = 1000;
    const MORE: usize = 200;
    let demo = demo(None);
    let api = Api(&demo);
    let mut caller = apex::connect(&demo);
    let mut ids = Vec::new();
    for _ in 0..BURST + MORE {
        caller.send(format!("GET /.well-known/jwks.json HTTP/1.1\r\nHost: {APEX}\r\n\r\n"));
        ids.push(caller.response().header("x-gw-request-id").to_owned());
    }
    record(&api, &ids[0]);
    let left_out = || -> u64 {
        let reports = demo.gateway().control().reports();
        reports.iter().map(|report| report.totals["apex_records_left_out"]).sum()
    };
    // Some may have been let in meanwhile: two a second.
    eventually("some are left out and counted", || (left_out() > 0).then_some(()));
    assert!(left_out() <= MORE as u64);
    // Those that authenticate are recorded all the same.
    let about = &demo.about;
    let minted = apex::token(&demo, &about.client_id, &about.client_secret, "account:demo service:echo");
    record(&api, minted.header("x-gw-request-id"));
}

/// Entries of the audit log about `id`, the newest first.
fn audited(api: &Api<'_>, id: &str) -> Vec<(String, Value)> {
    let entries = api.get("/audit-log").body["items"].clone();
    let entries = entries.as_array().unwrap().iter().filter(|entry| entry["target"] == id);
    entries
        .map(|entry| {
            assert_eq!((&entry["actor"], &entry["account"]), (&json!("admin"), &json!("demo")));
            (entry["action"].as_str().unwrap().to_owned(), entry["detail"].clone())
        })
        .collect()
}

#[test]
fn reading_and_replaying_what_was_kept_is_audited() {
    let demo = demo(None);
    let api = Api(&demo);
    keep_bodies(&api);
    let (_, id) = call(&demo, &request(&demo, "POST /echo", BODY));
    record(&api, &id);
    api.get("/requests?account=demo");
    // Metadata is no body.
    assert_eq!(audited(&api, &id), []);
    api.download(&format!("/requests/{id}/body/request"));
    api.download(&format!("/requests/{id}/body/response"));
    let read = |body: &str| ("request.read_body".to_owned(), json!({ "body": body }));
    assert_eq!(audited(&api, &id), [read("response"), read("request")]);
    let edits = json!({ "method": "PUT", "set_headers": { "x-secret": "hidden" }, "body": "hidden" });
    assert_eq!(api.ask("POST", &format!("/requests/{id}/replay"), &edits).status, 201);
    let entries = audited(&api, &id);
    let replayed = json!({ "body": "request", "edited": ["method", "headers", "body"] });
    assert_eq!((entries.len(), &entries[0]), (3, &("request.replay".to_owned(), replayed)));
    assert!(!format!("{entries:?}").contains("hidden"));
    // Refused replays leave no entries.
    assert_eq!(api.ask("POST", &format!("/requests/{id}/replay"), &json!({ "method": "a b" })).status, 422);
    let (_, unkept) = call(&demo, &format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
    record(&api, &unkept);
    assert_eq!(api.get(&format!("/requests/{unkept}/body/request")).status, 404);
    assert_eq!((audited(&api, &id).len(), audited(&api, &unkept).len()), (3, 0));
}

#[test]
fn secrets_in_any_encoding_and_the_admin_token_are_masked() {
    let demo = demo(None);
    let api = Api(&demo);
    keep_bodies(&api);
    let admin = &demo.about.admin_token;
    let encoded = |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
    let key = "gw_sk_abcdef.hiddenhidden";
    for (query, kept) in [
        (format!("k={}+b", encoded(key)), format!("k={}***+b", encoded("gw_sk_abcdef."))),
        (format!("k=gw%5Fsk%5Fabcdef%2Ehid{}", encoded("den")), "k=gw%5Fsk%5Fabcdef%2E***".to_owned()),
        (format!("t={admin}&b"), "t=gw_admin.***&b".to_owned()),
        (format!("t=Bearer%20{}", encoded(admin)), "t=Bearer%20gw_admin.***".to_owned()),
    ] {
        let (_, id) = call(&demo, &request(&demo, &format!("GET /hello?{query}"), &format!("X-A: {query}\r\n\r\n")));
        let record = record(&api, &id);
        assert_eq!(record["query"], kept);
        let headers = record["captured_request"]["headers"].as_array().unwrap();
        assert!(headers.contains(&json!(["x-a", kept])), "{headers:?}");
        // Replayed, it would be another request.
        assert_eq!(api.ask("POST", &format!("/requests/{id}/replay"), &json!({})).status, 409);
    }
}

/// A body with one member twice, to an endpoint that takes one.
fn twice(demo: &Demo, method: &str, path: &str, body: &str, member: &str) {
    let text = Api(demo).ask_raw(method, path, body);
    let detail = text.body["detail"].as_str().unwrap_or_default().to_owned();
    assert!(matches!(text.status, 400 | 422), "{method} {path}: {text:?}");
    assert!(detail.contains(&format!("duplicate field `{member}`")), "{method} {path}: {detail}");
}

#[test]
fn a_member_that_is_there_twice_is_refused_by_every_endpoint() {
    let demo = demo(None);
    let api = Api(&demo);
    keep_bodies(&api);
    let (_, id) = call(&demo, &request(&demo, "POST /echo", BODY));
    record(&api, &id);
    let agent = api.get("/accounts/demo/agents").body["items"][0]["agent_id"].as_str().unwrap().to_owned();
    let credential = api.get("/accounts/demo/credentials").body["items"][0]["client_id"].as_str().unwrap().to_owned();
    let key = api.get("/accounts/demo/service-keys").body["items"][0]["key_id"].as_str().unwrap().to_owned();
    let off = r#"{"enabled":true,"enabled":false}"#;
    for (method, path, body, member) in [
        ("POST", "/accounts".to_owned(), r#"{"id":"acme","id":"acmf"}"#, "id"),
        (
            "PATCH",
            "/accounts/demo".to_owned(),
            r#"{"capture_allowed":true,"capture_allowed":false}"#,
            "capture_allowed",
        ),
        ("POST", "/accounts/demo/services".to_owned(), r#"{"id":"a","burst":1,"burst":2}"#, "burst"),
        ("PATCH", "/accounts/demo/services/echo".to_owned(), off, "enabled"),
        ("POST", "/accounts/demo/credentials".to_owned(), r#"{"name":"a","allowed_services":[],"name":"b"}"#, "name"),
        ("PATCH", format!("/accounts/demo/credentials/{credential}"), off, "enabled"),
        ("POST", "/accounts/demo/service-keys".to_owned(), r#"{"name":"a","allowed_services":[],"name":"b"}"#, "name"),
        ("PATCH", format!("/accounts/demo/service-keys/{key}"), off, "enabled"),
        (
            "POST",
            "/accounts/demo/enrollment-tokens".to_owned(),
            r#"{"services":["echo"],"services":["echo"]}"#,
            "services",
        ),
        ("PATCH", format!("/accounts/demo/agents/{agent}"), r#"{"name":"a","name":"b"}"#, "name"),
        ("POST", "/signing-keys/rotate".to_owned(), r#"{"immediately":false,"immediately":true}"#, "immediately"),
        ("POST", format!("/requests/{id}/replay"), r#"{"set_headers":{"x-a":"1","x-a":"2"}}"#, "x-a"),
        ("POST", format!("/requests/{id}/replay"), r#"{"headers":[{"name":"a","name":"b","value":"1"}]}"#, "name"),
    ] {
        twice(&demo, method, &path, body, member);
    }
    let json = "Content-Type: application/json\r\n";
    for (path, body, member) in [
        ("/oauth/token", r#"{"scope":"a","scope":"b"}"#, "scope"),
        ("/oauth/token", r#"{"other":"a","other":"b"}"#, "other"),
        ("/enroll", r#"{"token":"a","token":"b","name":"c","version":"d"}"#, "token"),
        ("/csr", r#"{"csr":"a","csr":"b"}"#, "csr"),
    ] {
        let response = apex::ask(&demo, &format!("POST {path}"), json, body);
        let text = response.json().to_string();
        assert_eq!(response.status, 400, "{path}: {text}");
        assert!(text.contains(&format!("duplicate field `{member}`")), "{path}: {text}");
    }
}

#[test]
fn names_that_look_like_others_are_refused_wherever_they_are_given() {
    let demo = demo(None);
    let api = Api(&demo);
    let agent = api.get("/accounts/demo/agents").body["items"][0]["agent_id"].as_str().unwrap().to_owned();
    for name in ["a\u{202e}b", "a\u{2066}b", "\u{200f}ab", "a\u{2028}b", "a\u{9b}b", "a\u{61c}b"] {
        for (method, path, body) in [
            ("POST", "/accounts/demo/credentials".to_owned(), json!({ "name": name, "allowed_services": ["echo"] })),
            ("POST", "/accounts/demo/service-keys".to_owned(), json!({ "name": name, "allowed_services": ["echo"] })),
            ("PATCH", format!("/accounts/demo/agents/{agent}"), json!({ "name": name })),
        ] {
            let refused = api.ask(method, &path, &body);
            assert_eq!((refused.status, &refused.body["field"]), (422, &json!("name")), "{name:?} {path}");
            assert!(refused.body["detail"].as_str().unwrap().contains("has the character U+"), "{refused:?}");
        }
        let token = setup::enrollment_token(demo.gateway().control(), "demo", &["echo"]);
        let version = env!("CARGO_PKG_VERSION");
        let body = json!({ "token": token, "name": name, "version": version });
        let refused = apex::post_json(&demo, "/enroll", "", &body);
        assert_eq!((refused.status.as_u16(), refused.code().as_str()), (400, "GW_BAD_REQUEST"));
        assert!(refused.json()["error"]["message"].as_str().unwrap().contains("has the character U+"));
    }
}
