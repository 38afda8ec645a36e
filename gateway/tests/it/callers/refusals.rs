//! Refused requests and their error responses.

use std::cell::Cell;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::join;
use futures_util::stream::FuturesUnordered;
use http::{Method, Request};
use serde_json::json;

use crate::support::agents::in_process;
use crate::support::limits::HTTP2_STREAMS;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http1_peer::Response;
use crate::support::peers::http2_caller::{self, on_a_reactor};
use crate::support::scene::Scene;
use crate::support::{apex, eventually};

const BAD_REQUEST: &str = "400 BadRequest GW_BAD_REQUEST";
const TOO_LARGE: &str = "502 HeadersTooLarge GW_HEADERS_TOO_LARGE";
const AUTH_REQUIRED: &str = "502 AuthDenied GW_AUTH_REQUIRED";
const AMBIGUOUS: &str = "502 AuthDenied GW_AUTH_AMBIGUOUS";

/// Status, `X-Gw-Status` and code of an error response.
fn refusal(response: &Response) -> String {
    let status = response.status.as_u16();
    let gw_status = response.header("x-gw-status");
    format!("{status} {gw_status} {}", response.code())
}

#[test]
fn policy_and_authentication_errors_have_codes() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    // This service has no agent.
    api.create_service("demo", "other");
    let (_, other_key) = api.create_service_key("demo", &["other"]);
    let with = |key: &str| format!("X-Gw-Service-Key: {key}\r\n");
    let key = with(&scene.about.service_key);
    let other_key = with(&other_key);
    let malformed_key = with("gw_sk_x.y");
    let token = "X-Gw-Authorization: Bearer x\r\n";
    let other = "demo--other.eu1.gw.localhost";
    let unknown = "demo--nothing.eu1.gw.localhost";
    let mut caller = scene.connect();
    for (host, fields, expected) in [
        (HOST, "", AUTH_REQUIRED),
        (HOST, "X-Gw-Service-Key:\r\n", AUTH_REQUIRED),
        (HOST, &format!("{key}{token}"), AMBIGUOUS),
        (HOST, &key.repeat(2), AMBIGUOUS),
        (HOST, token, "502 AuthDenied GW_TOKEN_INVALID"),
        (
            HOST,
            &malformed_key,
            "502 AuthDenied GW_SERVICE_KEY_INVALID",
        ),
        (
            HOST,
            &other_key,
            "502 AuthDenied GW_SERVICE_KEY_NOT_ALLOWED",
        ),
        (unknown, &key, "502 PolicyDenied GW_SERVICE_NOT_FOUND"),
        ("eu2.gw.localhost", &key, "421 Misdirected GW_MISDIRECTED"),
        (apex::APEX, "", "404 NotFound GW_NOT_FOUND"),
        (other, &other_key, "504 AgentUnavailable AGENT_UNAVAILABLE"),
    ] {
        let response = caller.ask(format!("GET / HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n"));
        assert_eq!(refusal(&response), expected, "{host} {fields:?}");
    }
}

#[test]
fn disabled_services_and_services_without_key_mode_are_refused() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    let mut caller = scene.connect();
    for (changes, code) in [
        (json!({ "enabled": false }), "GW_SERVICE_DISABLED"),
        (
            json!({ "enabled": true, "modes": ["jwt"] }),
            "GW_AUTH_MODE_NOT_ALLOWED",
        ),
    ] {
        api.change_service("demo", "echo", &changes);
        assert_eq!(caller.ask(scene.get("/")).code(), code);
    }
}

#[test]
fn malformed_http_is_refused_and_the_connection_closed() {
    let scene = Scene::service().agent().start();
    let host = format!("Host: {HOST}\r\n");
    for bad in [
        format!("POST / HTTP/1.1\r\n{host}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
        format!("POST / HTTP/1.1\r\n{host}Content-Length: 1\r\nContent-Length: 1\r\n\r\n"),
        format!("GET / HTTP/1.1\n{host}\n"),
        format!("GET / HTTP/1.1\r\n{host}X: a\r\n b\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{host}X : a\r\n\r\n"),
        format!("GET / HTTP/1.1\r\n{host}{host}\r\n"),
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        format!("GET / HTTP/1.1\r\n{host}X: \0\r\n\r\n"),
        format!("CONNECT {HOST}:443 HTTP/1.1\r\n{host}\r\n"),
        "\x16\x03\x01 nonsense\r\n\r\n".to_owned(),
    ] {
        let mut caller = scene.connect();
        let response = caller.ask(&bad);
        assert_eq!(refusal(&response), BAD_REQUEST, "{bad:?}");
        assert_eq!(response.header("connection"), "close", "{bad:?}");
        assert!(caller.is_closed(), "{bad:?}");
    }
}

#[test]
fn a_malformed_chunk_is_refused_before_the_response_begins() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let body = "Transfer-Encoding: chunked\r\n\r\n3\r\nabcXX";
    let response = caller.ask(scene.request("POST /", body));
    assert_eq!(refusal(&response), BAD_REQUEST);
    assert!(caller.is_closed());
    scene.wait_until_slots_are_free();
}

/// Chunk extensions, and whether RFC 9112 §7.1.1 allows them.
const CHUNK_EXTENSIONS: [(&str, bool); 12] = [
    (";a", true),
    (" ;\ta = b;c", true),
    (";a=\"b \\\";\"", true),
    (";", false),
    (";=x", false),
    (";a=", false),
    (";a b", false),
    (";a=\"b", false),
    (";a=\"b\\", false),
    (";a=\x01", false),
    (";a=\"\x7f\"", false),
    (";a\n", false),
];

#[test]
fn malformed_chunk_extensions_of_callers_are_refused() {
    let scene = Scene::service().agent().start();
    for (extension, is_valid) in CHUNK_EXTENSIONS {
        for body in [
            format!("3{extension}\r\nabc\r\n0\r\n\r\n"),
            format!("3\r\nabc\r\n0{extension}\r\n\r\n"),
        ] {
            let mut caller = scene.connect();
            let rest = format!("Transfer-Encoding: chunked\r\n\r\n{body}");
            let response = caller.ask(scene.request("POST /", &rest));
            if is_valid {
                assert_eq!(response.status, 200, "{body:?}");
                assert_eq!(response.json()["body"], "abc", "{body:?}");
            } else {
                assert_eq!(refusal(&response), BAD_REQUEST, "{body:?}");
                assert!(caller.is_closed(), "{body:?}");
            }
        }
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn malformed_chunk_extensions_of_backends_are_refused() {
    for (extension, is_valid) in CHUNK_EXTENSIONS {
        let backend = backend::start(move |mut peer| {
            while let Ok((head, ..)) = peer.request() {
                let first = if head.target == "/first" {
                    extension
                } else {
                    ""
                };
                peer.send(format!(
                    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3{first}\r\nabc\r\n"
                ));
                peer.send(format!("0{extension}\r\n\r\n"));
            }
        });
        let scene = Scene::service().agent_to(backend).start();
        for target in ["/first", "/last"] {
            let mut caller = scene.connect();
            caller.send(scene.get(target));
            match caller.try_response(&Method::GET) {
                Ok(response) if is_valid => assert_eq!(response.body, b"abc", "{extension:?}"),
                Ok(response) => {
                    let code = response.code();
                    assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE", "{extension:?}");
                }
                // The head was relayed before the malformed line arrived.
                Err(error) => {
                    let is_cut = error.kind() == ErrorKind::ConnectionReset;
                    assert!(!is_valid && is_cut, "{extension:?}: {error}");
                }
            }
        }
    }
}

#[test]
fn heads_over_the_limits_are_refused() {
    let scene = Scene::service().agent().start();
    for (what, target, fields) in [
        ("target", "a".repeat(8 * 1024), String::new()),
        ("number of fields", String::new(), "A: b\r\n".repeat(101)),
        ("length of a field", String::new(), field_of(33 * 1024)),
    ] {
        let request = scene.request(&format!("GET /{target}"), &format!("{fields}\r\n"));
        assert_eq!(refusal(&scene.connect().ask(request)), TOO_LARGE, "{what}");
    }
}

/// A field with a value of this length.
fn field_of(length: usize) -> String {
    format!("A: {}\r\n", "b".repeat(length))
}

#[test]
fn a_head_just_within_the_limits_is_relayed() {
    let scene = Scene::service().agent().start();
    let request = scene.request("GET /", &format!("{}\r\n", field_of(30 * 1024)));
    assert_eq!(scene.connect().ask(request).status, 200);
}

/// The token endpoint has errors of its own (RFC 6749 §5.2).
#[test]
fn a_head_over_the_limits_does_not_reach_the_endpoints_of_the_apex() {
    let scene = Scene::service().start();
    for path in ["/oauth/token", "/enroll"] {
        let response = apex::ask(&scene, &format!("POST {path}"), &field_of(33 * 1024), "");
        assert_eq!(refusal(&response), TOO_LARGE, "{path}");
    }
}

#[test]
fn backend_errors_have_codes() {
    const INVALID: &str = "502 AgentError GW_BACKEND_INVALID_RESPONSE";
    for (answer, expected) in [
        ("", "502 AgentError GW_BACKEND_RESET"),
        ("HTTP/1.1 abc\r\n\r\n", INVALID),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            INVALID,
        ),
        ("HTTP/1.1 101 Switching\r\n\r\n", INVALID),
    ] {
        let backend = backend::start(move |mut peer| {
            drop(peer.request());
            peer.send(answer);
        });
        let scene = Scene::service().agent_to(backend).start();
        let response = scene.connect().ask(scene.get("/"));
        assert_eq!(refusal(&response), expected, "{answer:?}");
    }
}

#[test]
fn an_unreachable_backend_has_a_code() {
    let (_closed, address) = backend::refusing();
    let backend = format!("http://{address}");
    let scene = Scene::service().agent_to(backend).start();
    let response = scene.connect().ask(scene.get("/"));
    assert_eq!(response.code(), "GW_BACKEND_UNREACHABLE");
}

#[test]
fn requests_beyond_the_slots_are_refused() {
    const SLOTS: u32 = 128;
    let backend = HeldBackend::start();
    let scene = Scene::service().agent_to(&backend.url).start();
    let send_held = |_| {
        let mut caller = scene.connect();
        caller.send(scene.get("/held"));
        caller
    };
    let mut waiting: Vec<Caller> = (0..SLOTS).map(send_held).collect();
    eventually("all slots in use", || {
        (scene.tunnels()[0].slots_in_use == Some(SLOTS)).then_some(())
    });
    let mut late = scene.connect();
    let refused = late.ask(scene.get("/"));
    let expected = "502 AgentError GW_AGENT_CONCURRENCY_LIMIT";
    assert_eq!(refusal(&refused), expected);
    let message = &refused.json()["error"]["message"];
    assert_eq!(message, "Concurrent backend request limit exceeded");
    for _ in 0..SLOTS {
        backend.release();
    }
    for caller in &mut waiting {
        assert_eq!(caller.response().status, 200);
    }
    assert_eq!(late.ask(scene.get("/")).status, 200);
}

#[test]
fn small_bodies_of_refused_requests_are_drained() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let body = "x".repeat(10_000);
    let post = format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 10000\r\n\r\n{body}");
    assert_eq!(caller.ask(post).code(), "GW_AUTH_REQUIRED");
    assert_eq!(caller.ask(scene.get("/")).status, 200);
}

/// A connection that has asked for a tunnel of the service at `host`, with the identity in a state
/// directory if there is one.
fn upgrade(scene: &Scene, host: &str, state_dir: Option<&Path>, version: &str) -> Caller {
    let identity = state_dir.map(in_process::identity);
    let mut agent = connect_to(&scene.about, host, &[gw_shared::tunnel::ALPN], identity);
    agent.send(format!(
        "GET /tunnel HTTP/1.1\r\nHost: {host}\r\nConnection: upgrade\r\nUpgrade: gw-tunnel\r\n\
         X-Gw-Version: {version}\r\n\r\n"
    ));
    agent
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

#[test]
fn an_agent_without_a_certificate_gets_no_tunnel() {
    let scene = Scene::service().start();
    let response = upgrade(&scene, HOST, None, VERSION).response();
    let expected = "401 AgentDenied GW_AGENT_CERTIFICATE_REQUIRED";
    assert_eq!(refusal(&response), expected);
}

#[test]
fn agents_of_another_version_get_no_tunnel() {
    let scene = Scene::service().start();
    let response = upgrade(&scene, HOST, None, "0.0.1").response();
    let expected = "426 AgentDenied GW_VERSION_MISMATCH";
    assert_eq!(refusal(&response), expected);
    let message = response.json()["error"]["message"].to_string();
    assert!(
        message.contains("0.0.1") && message.contains(VERSION),
        "{message}"
    );
}

#[test]
fn an_agent_gets_tunnels_only_for_its_own_services() {
    let scene = Scene::service().start();
    scene.api().create_service("demo", "other");
    let state = tempfile::tempdir().unwrap();
    scene.enroll("demo", &["other"], state.path());
    let upgrade = |host| upgrade(&scene, host, Some(state.path()), VERSION);
    let refused = upgrade(HOST).response();
    assert_eq!(refusal(&refused), "403 AgentDenied GW_AGENT_NOT_ALLOWED");
    let accepted = upgrade("demo--other.eu1.gw.localhost").response_head(&Method::GET);
    assert_eq!(accepted.unwrap().status, 101);
}

#[test]
fn a_revoked_agent_gets_no_tunnel() {
    let scene = Scene::service().start();
    let state = tempfile::tempdir().unwrap();
    let agent = scene.enroll("demo", &["echo"], state.path());
    let upgrade = || upgrade(&scene, HOST, Some(state.path()), VERSION);
    let accepted = upgrade().response_head(&Method::GET);
    assert_eq!(accepted.unwrap().status, 101);
    scene.api().revoke_agent("demo", &agent);
    eventually("the revocation reaches all workers", || {
        let response = upgrade().try_response(&Method::GET).ok()?;
        (response.status == 401 && response.code() == "GW_AGENT_REVOKED").then_some(())
    });
}

#[test]
fn a_refused_request_without_its_body_ends_the_connection() {
    let scene = Scene::service().start();
    let mut caller = scene.connect();
    let head = format!("POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 1000\r\n\r\n");
    assert_eq!(caller.ask(head).code(), "GW_AUTH_REQUIRED");
    assert!(caller.is_closed());
}

#[test]
fn a_malformed_trailer_section_ends_the_connection() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let body =
        "Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\n\nGET /next HTTP/1.1\r\nHost: h\r\n\r\n";
    let response = caller.ask(scene.request("POST /", body));
    assert_eq!(refusal(&response), BAD_REQUEST);
    assert_eq!(response.header("connection"), "close");
    assert!(caller.is_closed());
}

#[test]
fn a_certificate_of_another_authority_gets_no_tunnel() {
    let scene = Scene::service().agent().start();
    let key = rcgen::KeyPair::generate().unwrap();
    let parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
    let certificate = parameters.self_signed(&key).unwrap();
    let key = key.serialize_der().try_into().unwrap();
    let identity = Some((certificate.der().clone(), key));
    let alpn = [gw_shared::tunnel::ALPN];
    let mut stranger = connect_to(&scene.about, HOST, &alpn, identity);
    // In TLS 1.3 the client learns of the refusal with its first read.
    let _ = stranger.try_send("GET /tunnel HTTP/1.1\r\n");
    assert!(stranger.try_response(&Method::GET).is_err());
    assert_eq!(scene.tunnels().len(), 1);
}

#[test]
fn refusals_of_one_account_leave_in_their_time_and_delay_no_other() {
    const CONNECTIONS: usize = 20;
    let backend = backend::answering("HTTP/1.1 204 No Content\r\n\r\n");
    let scene = &Scene::service().agent_to(backend).workers(1).start();
    // A service without an agent.
    let api = scene.api();
    api.create_service("flood", "none");
    let (_, key) = api.create_service_key("flood", &["none"]);
    let refused =
        || Request::get("https://flood--none.eu1.gw.localhost/").header("x-gw-service-key", &key);
    // Whether a request of another account, sent after all of these, is answered before the last
    // refusal.
    let is_answered_before = || {
        on_a_reactor(async {
            let mut connections = Vec::new();
            for _ in 0..CONNECTIONS {
                connections.push(http2_caller::connect(scene).await);
            }
            let mut refusals = FuturesUnordered::new();
            let began = Instant::now();
            for connection in &connections {
                for _ in 0..HTTP2_STREAMS {
                    let (response, _) = connection.begin(refused(), true).await;
                    refusals.push(response);
                }
            }
            let left = Cell::new(0);
            let all = async {
                while let Some(refusal) = refusals.next().await {
                    assert_eq!(refusal.unwrap().status(), 504);
                    left.set(left.get() + 1);
                }
                began.elapsed()
            };
            let other = async {
                let other = http2_caller::connect(scene).await;
                assert_eq!(other.get("/").await.status, 204);
                left.get()
            };
            let (took, left_before) = join(all, other).await;
            assert!(
                took >= Duration::from_millis(900),
                "{} in {took:?}",
                left.get()
            );
            left_before < left.get()
        })
    };
    assert!((0..5).any(|_| is_answered_before()));
}
