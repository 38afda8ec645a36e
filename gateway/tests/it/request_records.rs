//! What is to be known of a request once it has ended, and requests that are relayed again.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use gw_gateway::config::Config;
use gw_gateway::demo::{Demo, Options};
use gw_gateway::telemetry::request_log::{RequestLog, SearchQuery};
use serde_json::{Value, json};

use crate::admin::Api;
use crate::support::caller::{HOST, connect, get, request};
use crate::support::process::{Running, gw_gateway};
use crate::support::{backend, demo, eventually, setup};

/// The record of the request that was answered with this id, once it is there.
pub(crate) fn record(api: &Api<'_>, id: &str) -> Value {
    eventually("the request is in the log", || {
        let reply = api.get(&format!("/requests/{id}"));
        (reply.status == 200).then_some(reply.body)
    })
}

/// Has the demo's service keep bodies.
pub(crate) fn keep_bodies(api: &Api<'_>) {
    let changes = json!({ "capture_request_body": true, "capture_response_body": true });
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &changes).status, 200);
}

/// Status of what a caller gets for `request`, and the request's id.
pub(crate) fn call(demo: &Demo, request: &str) -> (u16, String) {
    let mut caller = connect(demo);
    caller.send(request);
    let response = caller.response();
    (response.status.as_u16(), response.header("x-gw-request-id").to_owned())
}

#[test]
fn every_request_of_a_service_is_in_the_log() {
    let demo = demo(Some(backend::answering("HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone")));
    let api = Api(&demo);
    let (_, id) = call(&demo, &request(&demo, "POST /orders/7?limit=5&x=%20", "Content-Length: 3\r\n\r\nabc"));
    let relayed = record(&api, &id);
    let agents = api.get("/accounts/demo/agents").body;
    let key = demo.about.service_key.trim_start_matches("gw_sk_").split('.').next().unwrap();
    let expected = json!({
        "id": id, "account": "demo", "service": "echo",
        "method": "POST", "path": "/orders/7", "query": "limit=5&x=%20",
        "caller_address": "127.0.0.1", "protocol": "HTTP/1.1", "auth_mode": "service_key", "caller_id": key,
        "status": 404, "code": null, "ended": "complete", "bytes_in": 3, "bytes_out": 4,
        "agent_id": agents["items"][0]["agent_id"], "replayed_from": null, "trace_id": null,
        "captured_request": null, "captured_response": null,
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&relayed[field], value, "{field}");
    }
    let durations = &relayed["durations_us"];
    let of = |stage: &str| durations[stage].as_u64().unwrap_or_else(|| panic!("{stage}: {durations}"));
    let stages = of("authenticate") + of("wait") + of("agent") + of("backend_first_byte");
    assert!(stages <= of("response_head") && of("response_head") <= of("total"), "{durations}");

    let strangers = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n");
    let (status, id) = call(&demo, &strangers);
    let refused = record(&api, &id);
    assert_eq!((status, &refused["status"], &refused["code"]), (502, &json!(502), &json!("GW_AUTH_REQUIRED")));
    assert_eq!((&refused["agent_id"], &refused["auth_mode"]), (&Value::Null, &Value::Null));
    assert!(refused["bytes_out"].as_u64().unwrap() > 0, "{refused}");

    let found = api.get("/requests?account=demo&service=echo&status=404&path_prefix=/orders").body;
    assert_eq!(found["items"], json!([relayed]));
    assert_eq!(api.get("/requests?account=demo").body["items"].as_array().unwrap().len(), 2);
    assert_eq!(api.get("/requests?account=other").body["items"], json!([]));

    // Of who turns the log off, nothing more is kept.
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &json!({ "request_logging": false })).status, 200);
    let (_, unlogged) = call(&demo, &get(&demo, "/unlogged"));
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &json!({ "request_logging": true })).status, 200);
    let (_, logged) = call(&demo, &get(&demo, "/logged"));
    record(&api, &logged);
    assert_eq!(api.get(&format!("/requests/{unlogged}")).status, 404);
}

#[test]
fn who_leaves_is_in_the_log_too() {
    let (asked, was_asked) = mpsc::channel();
    let demo = demo(Some(backend::start(move |mut peer| {
        if peer.request().is_ok() {
            asked.send(()).unwrap();
            // Never answers: waits for the connection to end.
            let _ = peer.request();
        }
    })));
    let api = Api(&demo);
    keep_bodies(&api);
    // Some on the service's owner, some across.
    for number in 0..8 {
        let mut caller = connect(&demo);
        caller.send(request(&demo, &format!("POST /slow/{number}"), "Content-Length: 2\r\n\r\nhi"));
        was_asked.recv_timeout(crate::support::SOON).unwrap();
        drop(caller);
        let left = eventually("the request is in the log", || {
            let found = api.get(&format!("/requests?account=demo&path_prefix=/slow/{number}&status=none")).body;
            found["items"].get(0).cloned()
        });
        assert_eq!((&left["ended"], &left["status"]), (&json!("caller_gone"), &Value::Null));
        // What is known of its way is, although no answer told it.
        assert!(left["agent_id"].is_string() && left["durations_us"]["wait"].is_u64(), "{left}");
        assert_eq!(left["captured_request"]["bytes"], 2, "{left}");
    }
}

#[test]
fn what_a_drain_cuts_off_is_in_the_log() {
    let (asked, was_asked) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        if peer.request().is_ok() {
            asked.send(()).unwrap();
            let _ = peer.request();
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let data_dir = Some(folder.path().to_owned());
    let adjust: fn(&mut Config) = |config| config.drain = Duration::ZERO;
    let demo = Demo::start(&Options { data_dir, adjust, ..crate::support::options(Some(backend)) }).unwrap();
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let mut caller = connect(&demo);
            caller.send(get(&demo, "/slow"));
            was_asked.recv_timeout(crate::support::SOON).unwrap();
            caller
        })
        .collect();
    demo.stop();
    for mut caller in callers {
        assert_eq!(caller.response().code(), "GW_RELAY_ERROR");
    }
    let log = RequestLog::open(&folder.path().join("requests")).unwrap();
    let found = log.search(&SearchQuery { status: Some("502".to_owned()), ..SearchQuery::default() }).unwrap();
    assert_eq!(found.items.len(), 4);
}

#[test]
fn an_upgrade_is_recorded_as_callers_saw_it() {
    let demo = demo(Some(backend::start(|mut peer| {
        while let Ok((head, _, _)) = peer.request() {
            if head.target.path() == "/switch" {
                peer.send("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nbye");
                return;
            }
            peer.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno");
        }
    })));
    let api = Api(&demo);
    keep_bodies(&api);
    let upgrade = |path: &str| request(&demo, &format!("GET {path}"), "Connection: upgrade\r\nUpgrade: x\r\n\r\n");
    let mut caller = connect(&demo);
    caller.send(upgrade("/switch"));
    assert_eq!(caller.response_head(&http::Method::GET).unwrap().status, 101);
    drop(caller);
    let switched = eventually("the upgrade is in the log", || {
        api.get("/requests?account=demo&status=101").body["items"].get(0).cloned()
    });
    assert_eq!((&switched["path"], &switched["captured_response"]), (&json!("/switch"), &Value::Null));
    // An answer like any other.
    let (_, id) = call(&demo, &upgrade("/refuse"));
    let refused = record(&api, &id);
    assert_eq!((&refused["status"], &refused["captured_response"]["bytes"]), (&json!(403), &json!(2)));
}

#[test]
fn bodies_are_kept_where_that_is_wanted_and_paid_for() {
    let demo = demo(None);
    let api = Api(&demo);
    keep_bodies(&api);
    let credentials = "Authorization: Bearer hidden\r\nCookie: a=hidden\r\nX-Plain: yes\r\n";
    let post = format!("{credentials}Content-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello");
    let (_, id) = call(&demo, &request(&demo, "POST /echo", &post));
    let kept = record(&api, &id);
    assert_eq!(
        (&kept["captured_request"]["bytes"], &kept["captured_request"]["truncated"]),
        (&json!(5), &json!(false))
    );
    assert!(kept["captured_request"]["headers"].as_array().unwrap().contains(&json!(["x-plain", "yes"])), "{kept}");
    assert!(!kept.to_string().contains("hidden"), "{kept}");
    let (headers, body) = api.download(&format!("/requests/{id}/body/request"));
    assert_eq!((body.as_slice(), &headers["content-type"]), (b"hello".as_slice(), &"text/plain".parse().unwrap()));
    assert_eq!(
        (headers["x-gw-truncated"].as_bytes(), headers["content-security-policy"].as_bytes()),
        (b"false".as_slice(), b"sandbox".as_slice())
    );
    let (_, body) = api.download(&format!("/requests/{id}/body/response"));
    assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["body"], "hello");

    let (_, id) = call(&demo, &get(&demo, "/bytes/3000000"));
    let kept = &record(&api, &id)["captured_response"];
    assert_eq!((&kept["bytes"], &kept["truncated"]), (&json!(1 << 20), &json!(true)));
    assert_eq!(kept["truncated_by"], "size");
    let (headers, _) = api.download(&format!("/requests/{id}/body/response"));
    assert_eq!(
        (&headers["x-gw-truncated"], &headers["x-gw-truncated-by"]),
        (&"true".parse().unwrap(), &"size".parse().unwrap())
    );

    // Who is refused is not relayed.
    let (_, id) = call(&demo, &format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 2\r\n\r\nhi"));
    assert_eq!(record(&api, &id)["captured_request"], Value::Null);

    // The plan decides.
    assert_eq!(api.ask("PATCH", "/accounts/demo", &json!({ "capture_allowed": false })).status, 200);
    let (_, id) = call(&demo, &request(&demo, "POST /echo", &post));
    assert_eq!(record(&api, &id)["captured_request"], Value::Null);
    assert_eq!(api.get(&format!("/requests/{id}/body/request")).status, 404);
}

#[test]
fn a_kept_request_is_relayed_again() {
    let (seen, requests) = mpsc::channel();
    let demo = demo(Some(backend::start(move |mut peer| {
        while let Ok((head, body, _)) = peer.request() {
            seen.send((head, body)).unwrap();
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
    })));
    let api = Api(&demo);
    keep_bodies(&api);
    let fields = "Authorization: Basic eDp5\r\nX-A: 1\r\nContent-Length: 3\r\n\r\nabc";
    let (_, id) = call(&demo, &request(&demo, "PUT /orders?x=1", fields));
    let original = record(&api, &id);
    let (first, _) = requests.recv_timeout(crate::support::SOON).unwrap();

    let replay = |edits: &Value| api.ask("POST", &format!("/requests/{id}/replay"), edits);
    let again = replay(&json!({}));
    assert_eq!((again.status, &again.body["replayed_from"]), (201, &json!(id)), "{again:?}");
    assert_eq!(again.location, format!("/api/v1/requests/{}", again.body["id"].as_str().unwrap()));
    assert_eq!((&again.body["status"], &again.body["auth_mode"]), (&json!(200), &json!("admin")));
    assert_eq!((&again.body["protocol"], &again.body["agent_id"]), (&json!("replay"), &original["agent_id"]));
    let (head, body) = requests.recv_timeout(crate::support::SOON).unwrap();
    assert_eq!(
        (head.method.as_str(), head.target.as_str(), body.as_slice()),
        ("PUT", "/orders?x=1", b"abc".as_slice())
    );
    assert_eq!((head.authority, &head.headers["x-a"]), (first.authority, &first.headers["x-a"]));
    assert!(!head.headers.contains_key("authorization"));
    assert_eq!(head.headers["x-forwarded-for"], "127.0.0.1");
    assert_eq!(head.headers["x-gw-request-id"], again.body["id"].as_str().unwrap());

    let edits = json!({
        "method": "POST", "target": "/other", "body": "longer than before",
        "set_headers": { "Authorization": "Basic eDp5", "X-A": null },
    });
    assert_eq!(replay(&edits).body["path"], "/other");
    let (head, body) = requests.recv_timeout(crate::support::SOON).unwrap();
    assert_eq!((head.method.as_str(), head.target.as_str()), ("POST", "/other"));
    assert_eq!((body.as_slice(), head.headers.get("x-a")), (b"longer than before".as_slice(), None));
    assert_eq!(head.headers["authorization"], "Basic eDp5");

    let large = "x".repeat(1 << 20);
    assert_eq!(replay(&json!({ "body": large })).status, 201);
    assert_eq!(requests.recv_timeout(crate::support::SOON).unwrap().1.len(), large.len());

    for (edits, field) in [
        (json!({ "method": "a b" }), "method"),
        (json!({ "target": format!("/{}", "x".repeat(8192)) }), "target"),
        (json!({ "set_headers": { "X-Large": "x".repeat(33_000) } }), "headers"),
        (json!({ "target": "http://example.com/" }), "target"),
        (json!({ "set_headers": { "a b": "c" } }), "set_headers"),
    ] {
        let refused = replay(&edits);
        assert_eq!((refused.status, &refused.body["field"]), (422, &json!(field)));
    }
    assert_eq!(api.ask("POST", "/requests/019aa5c2-7e30-7c3b-8f11-2d5a4c9e1b07/replay", &json!({})).status, 404);
    let refused = api.get("/requests/not-an-id");
    assert_eq!(refused.status, 404);
    assert!(refused.body["detail"].as_str().unwrap().contains("is not a request id: a UUIDv7 like"), "{refused:?}");
}

#[test]
fn what_was_not_kept_whole_is_not_relayed_again() {
    let demo = demo(None);
    let api = Api(&demo);
    let (_, unkept) = call(&demo, &get(&demo, "/hello"));
    record(&api, &unkept);
    let refused = api.ask("POST", &format!("/requests/{unkept}/replay"), &json!({}));
    assert_eq!(refused.status, 409);
    assert!(refused.body["detail"].as_str().unwrap().contains("capture_request_body was off"), "{refused:?}");

    keep_bodies(&api);
    let length = (1 << 20) + 1;
    let large = format!("Content-Length: {length}\r\n\r\n{}", "x".repeat(length));
    let (_, truncated) = call(&demo, &request(&demo, "POST /large", &large));
    record(&api, &truncated);
    let refused = api.ask("POST", &format!("/requests/{truncated}/replay"), &json!({}));
    assert_eq!(refused.status, 409);
    assert!(refused.body["detail"].as_str().unwrap().contains("only the first 1048576 bytes"), "{refused:?}");
}

#[test]
fn what_was_masked_is_to_be_given_again() {
    let demo = demo(None);
    let api = Api(&demo);
    keep_bodies(&api);
    let key = "gw_sk_abc.secret";
    let (_, id) = call(&demo, &request(&demo, &format!("GET /hello?key={key}"), &format!("X-Key: {key}\r\n\r\n")));
    assert_eq!(record(&api, &id)["query"], "key=gw_sk_abc.***");
    let replay = |edits: &Value| api.ask("POST", &format!("/requests/{id}/replay"), edits);
    let refused = replay(&json!({ "set_headers": { "x-key": key } }));
    assert_eq!((refused.status, refused.body["detail"].as_str().unwrap().contains("in the target")), (409, true));
    let refused = replay(&json!({ "target": "/hello" }));
    assert_eq!((refused.status, refused.body["detail"].as_str().unwrap().contains("in x-key")), (409, true));
    assert_eq!(replay(&json!({ "target": "/hello", "set_headers": { "X-Key": key } })).status, 201);
    assert_eq!(replay(&json!({ "target": "/hello", "headers": [] })).status, 201);
}

#[test]
fn limits_count_for_replays() {
    let demo = demo(None);
    let api = Api(&demo);
    keep_bodies(&api);
    let (_, id) = call(&demo, &get(&demo, "/hello"));
    record(&api, &id);
    let tight = json!({ "burst": 1, "refill_per_minute": 1 });
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &tight).status, 200);
    let replay = || api.ask("POST", &format!("/requests/{id}/replay"), &json!({})).body["code"].clone();
    // Its bucket may have been full when it became small.
    let codes = [replay(), replay()];
    assert_eq!(codes[1], "GW_RATE_LIMIT_EXCEEDED");
}

#[test]
fn no_secret_is_written_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let data_dir = Some(folder.path().to_owned());
    let demo = Demo::start(&Options { data_dir, ..crate::support::options(None) }).unwrap();
    let api = Api(&demo);
    // Not of responses: the echo would repeat what it is told.
    assert_eq!(api.ask("PATCH", "/accounts/demo/services/echo", &json!({ "capture_request_body": true })).status, 200);
    let control = demo.gateway().control();
    let (_, key) = setup::service_key(control, "demo", &["echo"]);
    let (client_id, client_secret) = setup::credential(control, "demo", &["echo"]);
    let token = crate::support::apex::token(&demo, &client_id, &client_secret, "account:demo service:echo").json();
    let token = token["access_token"].as_str().unwrap();
    let mut ids = Vec::new();
    // As they belong, and by mistake: wrong, in the query, in a field of another name.
    let good = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n");
    ids.push(call(&demo, &format!("{good}X-Other: {key}\r\nX-Secret: {client_secret}\r\n\r\n")).1);
    ids.push(
        call(&demo, &format!("{}X-Token: {token}\r\n\r\n", good.replace("GET / ", &format!("GET /?t={token} ")))).1,
    );
    ids.push(call(&demo, &format!("{}\r\n", good.replace("GET / ", &format!("GET /?k={key}&s={client_secret} ")))).1);
    ids.push(call(&demo, &format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}x\r\n\r\n")).1);
    ids.push(call(&demo, &format!("GET / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Authorization: Bearer {token}\r\n\r\n")).1);
    ids.iter().for_each(|id| drop(record(&api, id)));
    let secret_of_key = key.split_once('.').unwrap().1;
    let signature = token.rsplit_once('.').unwrap().1;
    for secret in [secret_of_key, client_secret.as_str(), signature] {
        let found = files_with(folder.path(), secret);
        assert!(found.is_empty(), "{secret} is in {found:?}");
    }
}

#[test]
fn no_secret_is_logged_however_much_is() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut demo = gw_gateway()
        .args(["demo", "--json", "--port", "0", "--admin-port", "0", "--data-dir"])
        .arg(folder.path().join("data"))
        .env("GW_LOG", "debug")
        .stdout(Stdio::piped())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut about = String::new();
    BufReader::new(demo.stdout.take().unwrap()).read_line(&mut about).unwrap();
    let mut demo = Running::new(demo);
    let about: Value = serde_json::from_str(&about).unwrap();
    let of = |name: &str| about[name].as_str().unwrap().to_owned();
    let (client_id, client_secret, key) = (of("client_id"), of("client_secret"), of("service_key"));
    let (base, tenant) = (of("base_url"), of("tenant_url"));
    let curl = |arguments: &[&str]| -> String {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--cacert", &of("ca_file")]);
        for url in [&base, &tenant] {
            let name = url.trim_start_matches("https://");
            curl.args(["--resolve", &format!("{name}:127.0.0.1")]);
        }
        let output = curl.args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let form = format!("client_id={client_id}&client_secret={client_secret}&scope=account:demo service:echo");
    let minted: Value = serde_json::from_str(&curl(&["--data", &form, &format!("{base}/oauth/token")])).unwrap();
    let token = minted["access_token"].as_str().unwrap();
    for version in ["--http1.1", "--http2"] {
        let ask = |field: &str, path: &str| curl(&[version, "-H", field, &format!("{tenant}{path}")]);
        assert!(ask(&format!("X-Gw-Service-Key: {key}"), "/hello").contains("\"target\""));
        assert!(ask(&format!("X-Gw-Authorization: Bearer {token}"), "/hello").contains("\"target\""));
        // Wrong, and where they do not belong.
        assert!(ask(&format!("X-Gw-Service-Key: {key}x"), "/").contains("GW_SERVICE_KEY_INVALID"));
        assert!(ask(&format!("X-Gw-Authorization: Bearer {token}x"), "/").contains("GW_TOKEN_INVALID"));
        assert!(ask("Accept: */*", &format!("/?key={key}&secret={client_secret}")).contains("GW_AUTH_REQUIRED"));
    }
    demo.signal("TERM");
    assert_eq!(demo.exit_code(), Some(0));
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("admitting"), "{log}");
    for secret in [key.split_once('.').unwrap().1, client_secret.as_str(), token, &of("admin_token")] {
        let line = log.lines().find(|line| line.contains(secret));
        assert!(line.is_none(), "{line:?}");
    }
}

/// Files under `folder` that have `text` in them.
fn files_with(folder: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files_with(&path, text));
        } else {
            let bytes = fs::read(&path).unwrap();
            if bytes.windows(text.len()).any(|window| window == text.as_bytes()) {
                found.push(path.display().to_string());
            }
        }
    }
    found
}
