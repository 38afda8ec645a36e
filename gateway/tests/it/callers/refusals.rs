//! Refused requests and their error responses.

use std::cell::Cell;
use std::io::ErrorKind;
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::join;
use futures_util::stream::FuturesUnordered;
use http::{Method, Request};
use serde_json::json;

use crate::support::agents::in_process;
use crate::support::limits::HTTP2_STREAMS;
use crate::support::peers::backend;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::peers::http2_caller::{self, on_a_reactor};
use crate::support::scene::Scene;
use crate::support::{SOON, apex, eventually};

#[test]
fn policy_and_authentication_errors_have_codes() {
    let scene = Scene::service().agent().start();
    let key = scene.about.service_key.clone();
    let api = scene.api();
    api.create_service("demo", "other");
    let (_, other_key) = api.create_service_key("demo", &["other"]);
    let mut caller = scene.connect();
    let mut code = |host: &str, fields: &str| {
        caller.send(format!("GET / HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n"));
        let response = caller.response();
        format!(
            "{} {} {}",
            response.status.as_u16(),
            response.header("x-gw-status"),
            response.code()
        )
    };
    let with = |key: &str| format!("X-Gw-Service-Key: {key}\r\n");
    assert_eq!(code(HOST, ""), "502 AuthDenied GW_AUTH_REQUIRED");
    assert_eq!(
        code(HOST, "X-Gw-Service-Key:\r\n"),
        "502 AuthDenied GW_AUTH_REQUIRED"
    );
    let both = format!("{}X-Gw-Authorization: Bearer x\r\n", with(&key));
    assert_eq!(code(HOST, &both), "502 AuthDenied GW_AUTH_AMBIGUOUS");
    assert_eq!(
        code(HOST, &with(&key).repeat(2)),
        "502 AuthDenied GW_AUTH_AMBIGUOUS"
    );
    assert_eq!(
        code(HOST, "X-Gw-Authorization: Bearer x\r\n"),
        "502 AuthDenied GW_TOKEN_INVALID"
    );
    assert_eq!(
        code(HOST, &with("gw_sk_x.y")),
        "502 AuthDenied GW_SERVICE_KEY_INVALID"
    );
    assert_eq!(
        code(HOST, &with(&other_key)),
        "502 AuthDenied GW_SERVICE_KEY_NOT_ALLOWED"
    );
    let unknown = "demo--nothing.eu1.gw.localhost";
    assert_eq!(
        code(unknown, &with(&key)),
        "502 PolicyDenied GW_SERVICE_NOT_FOUND"
    );
    assert_eq!(
        code("eu2.gw.localhost", &with(&key)),
        "421 Misdirected GW_MISDIRECTED"
    );
    assert_eq!(code("eu1.gw.localhost", ""), "404 NotFound GW_NOT_FOUND");
    // The other service exists and has no agent.
    let other_host = "demo--other.eu1.gw.localhost";
    assert_eq!(
        code(other_host, &with(&other_key)),
        "504 AgentUnavailable AGENT_UNAVAILABLE"
    );
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
        caller.send(scene.get("/"));
        assert_eq!(caller.response().code(), code);
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
        caller.send(&bad);
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.code().as_str()),
            (400, "GW_BAD_REQUEST"),
            "{bad:?}"
        );
        assert_eq!(response.header("connection"), "close");
        assert!(caller.is_closed(), "{bad:?}");
    }
}

#[test]
fn a_malformed_chunk_is_refused_before_the_response_begins() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", "Transfer-Encoding: chunked\r\n\r\n3\r\nabcXX"));
    let response = caller.response();
    assert_eq!(
        (response.status.as_u16(), response.code().as_str()),
        (400, "GW_BAD_REQUEST")
    );
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
            caller.send(scene.request(
                "POST /",
                &format!("Transfer-Encoding: chunked\r\n\r\n{body}"),
            ));
            let response = caller.response();
            if is_valid {
                assert_eq!(
                    (response.status.as_u16(), &response.json()["body"]),
                    (200, &"abc".into()),
                    "{body:?}"
                );
                continue;
            }
            assert_eq!(
                (response.status.as_u16(), response.code().as_str()),
                (400, "GW_BAD_REQUEST"),
                "{body:?}"
            );
            assert!(caller.is_closed(), "{body:?}");
        }
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn malformed_chunk_extensions_of_backends_are_refused() {
    for (extension, is_valid) in CHUNK_EXTENSIONS {
        let scene = Scene::service()
            .agent_to(backend::start(move |mut peer| {
                while let Ok((head, ..)) = peer.request() {
                    let chunk = if head.target == "/first" {
                        format!("3{extension}")
                    } else {
                        "3".to_owned()
                    };
                    peer.send(format!(
                        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}\r\nabc\r\n"
                    ));
                    peer.send(format!("0{extension}\r\n\r\n"));
                }
            }))
            .start();
        for target in ["/first", "/last"] {
            let mut caller = scene.connect();
            caller.send(scene.get(target));
            match caller.try_response(&Method::GET) {
                Ok(response) if is_valid => assert_eq!(response.body, b"abc", "{extension:?}"),
                Ok(response) => assert_eq!(
                    response.code(),
                    "GW_BACKEND_INVALID_RESPONSE",
                    "{extension:?}"
                ),
                // The head was relayed before the malformed line arrived.
                Err(error) => {
                    assert!(
                        !is_valid && error.kind() == ErrorKind::ConnectionReset,
                        "{extension:?}: {error}"
                    );
                }
            }
        }
    }
}

#[test]
fn heads_over_the_limits_are_refused() {
    let scene = Scene::service().agent().start();
    for (line, fields) in [
        ("GET /".to_owned() + &"a".repeat(8 * 1024), String::new()),
        ("GET /".to_owned(), "A: b\r\n".repeat(101)),
        (
            "GET /".to_owned(),
            format!("A: {}\r\n", "b".repeat(33 * 1024)),
        ),
    ] {
        let mut caller = scene.connect();
        caller.send(scene.request(&line, &format!("{fields}\r\n")));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.code().as_str()),
            (502, "GW_HEADERS_TOO_LARGE")
        );
        assert_eq!(response.header("x-gw-status"), "HeadersTooLarge");
    }
    let mut caller = scene.connect();
    caller.send(scene.request("GET /", &format!("A: {}\r\n\r\n", "b".repeat(30 * 1024))));
    assert_eq!(caller.response().status, 200);
    // The token endpoint has errors of its own (RFC 6749 §5.2), which such a head does not reach.
    for path in ["/oauth/token", "/enroll"] {
        let field = format!("A: {}\r\n", "b".repeat(33 * 1024));
        let response = apex::ask(&scene, &format!("POST {path}"), &field, "");
        assert_eq!(
            (response.status.as_u16(), response.code().as_str()),
            (502, "GW_HEADERS_TOO_LARGE"),
            "{path}"
        );
    }
}

#[test]
fn backend_errors_have_codes() {
    for (answer, code) in [
        ("", "GW_BACKEND_RESET"),
        ("HTTP/1.1 abc\r\n\r\n", "GW_BACKEND_INVALID_RESPONSE"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            "GW_BACKEND_INVALID_RESPONSE",
        ),
        (
            "HTTP/1.1 101 Switching\r\n\r\n",
            "GW_BACKEND_INVALID_RESPONSE",
        ),
    ] {
        let scene = Scene::service()
            .agent_to(backend::start(move |mut peer| {
                drop(peer.request());
                peer.send(answer);
            }))
            .start();
        let mut caller = scene.connect();
        caller.send(scene.get("/"));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.code().as_str()),
            (502, code),
            "{answer:?}"
        );
        assert_eq!(response.header("x-gw-status"), "AgentError");
    }
}

#[test]
fn an_unreachable_backend_has_a_code() {
    let (_closed, address) = backend::refusing();
    let scene = Scene::service()
        .agent_to(format!("http://{address}"))
        .start();
    let mut caller = scene.connect();
    caller.send(scene.get("/"));
    assert_eq!(caller.response().code(), "GW_BACKEND_UNREACHABLE");
}

#[test]
fn requests_beyond_the_slots_are_refused() {
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, ..)) = peer.request() {
                if head.target == "/held" {
                    // Waits until the sender is dropped, which releases all requests.
                    let _ = held.lock().unwrap().recv_timeout(2 * SOON);
                }
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
            }
        }))
        .start();
    let mut waiting: Vec<_> = (0..128)
        .map(|_| {
            let mut caller = scene.connect();
            caller.send(scene.get("/held"));
            caller
        })
        .collect();
    eventually("128 slots in use", || {
        (scene.tunnels()[0].slots_in_use == Some(128)).then_some(())
    });
    let mut late = scene.connect();
    late.send(scene.get("/"));
    let response = late.response();
    assert_eq!(
        (response.status.as_u16(), response.header("x-gw-status")),
        (502, "AgentError")
    );
    assert_eq!(response.code(), "GW_AGENT_CONCURRENCY_LIMIT");
    assert_eq!(
        response.json()["error"]["message"],
        "Concurrent backend request limit exceeded"
    );
    drop(release);
    for caller in &mut waiting {
        assert_eq!(caller.response().status, 200);
    }
    late.send(scene.get("/"));
    assert_eq!(late.response().status, 200);
}

#[test]
fn small_bodies_of_refused_requests_are_drained() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let body = "x".repeat(10_000);
    caller.send(format!(
        "POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 10000\r\n\r\n{body}"
    ));
    assert_eq!(caller.response().code(), "GW_AUTH_REQUIRED");
    caller.send(scene.get("/"));
    assert_eq!(caller.response().status, 200);
}

#[test]
fn agents_of_another_version_get_no_tunnel() {
    let scene = Scene::service().agent().start();
    let upgrade = |version: &str| {
        format!(
            "GET /tunnel HTTP/1.1\r\nHost: {HOST}\r\nConnection: upgrade\r\nUpgrade: gw-tunnel\r\n\
             X-Gw-Version: {version}\r\n\r\n"
        )
    };
    let mut stranger = connect_to(&scene.about, HOST, &[gw_shared::tunnel::ALPN], None);
    stranger.send(upgrade(env!("CARGO_PKG_VERSION")));
    let response = stranger.response_to(&Method::GET);
    assert_eq!(
        (response.status.as_u16(), response.code().as_str()),
        (401, "GW_AGENT_CERTIFICATE_REQUIRED")
    );
    let mut older = connect_to(&scene.about, HOST, &[gw_shared::tunnel::ALPN], None);
    older.send(upgrade("0.0.1"));
    let response = older.response_to(&Method::GET);
    assert_eq!(
        (response.status.as_u16(), response.code().as_str()),
        (426, "GW_VERSION_MISMATCH")
    );
    let message = response.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        message.contains("0.0.1") && message.contains(env!("CARGO_PKG_VERSION")),
        "{message}"
    );
}

#[test]
fn an_agent_gets_tunnels_only_for_its_own_services() {
    let scene = Scene::service().agent().start();
    let api = scene.api();
    api.create_service("demo", "other");
    let state = tempfile::tempdir().unwrap();
    let agent = scene.enroll("demo", &["other"], state.path());
    let upgrade = |host: &str| {
        let identity = in_process::identity(state.path());
        let alpn = &[gw_shared::tunnel::ALPN];
        let mut caller = connect_to(&scene.about, host, alpn, Some(identity));
        caller.send(format!(
            "GET /tunnel HTTP/1.1\r\nHost: {host}\r\nConnection: upgrade\r\nUpgrade: gw-tunnel\r\n\
             X-Gw-Version: {}\r\n\r\n",
            env!("CARGO_PKG_VERSION")
        ));
        caller
    };
    let response = upgrade(HOST).response();
    assert_eq!(
        (response.status.as_u16(), response.code().as_str()),
        (403, "GW_AGENT_NOT_ALLOWED")
    );
    let accepted = upgrade("demo--other.eu1.gw.localhost")
        .response_head(&Method::GET)
        .unwrap();
    assert_eq!(accepted.status, 101);
    api.revoke_agent("demo", &agent);
    eventually("the revocation reaches all workers", || {
        let response = upgrade("demo--other.eu1.gw.localhost")
            .try_response(&Method::GET)
            .ok()?;
        (response.status == 401 && response.code() == "GW_AGENT_REVOKED").then_some(())
    });
}

#[test]
fn a_refused_request_without_its_body_ends_the_connection() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    caller.send(format!(
        "POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 1000\r\n\r\n"
    ));
    assert_eq!(caller.response().code(), "GW_AUTH_REQUIRED");
    assert!(caller.is_closed());
}

#[test]
fn a_malformed_trailer_section_ends_the_connection() {
    let scene = Scene::service().agent().start();
    let mut caller = scene.connect();
    let body =
        "Transfer-Encoding: chunked\r\n\r\n0\r\nX: 1\n\nGET /next HTTP/1.1\r\nHost: h\r\n\r\n";
    caller.send(scene.request("POST /", body));
    let response = caller.response();
    assert_eq!(
        (response.code().as_str(), response.header("connection")),
        ("GW_BAD_REQUEST", "close")
    );
    assert!(caller.is_closed());
}

#[test]
fn a_certificate_of_another_authority_gets_no_tunnel() {
    let scene = Scene::service().agent().start();
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(Vec::new())
        .unwrap()
        .self_signed(&key)
        .unwrap();
    let identity = (
        certificate.der().clone(),
        key.serialize_der().try_into().unwrap(),
    );
    let mut stranger = connect_to(
        &scene.about,
        HOST,
        &[gw_shared::tunnel::ALPN],
        Some(identity),
    );
    // In TLS 1.3 the client learns of the refusal with its first read.
    drop(std::io::Write::write_all(
        &mut stranger.stream,
        b"GET /tunnel HTTP/1.1\r\n",
    ));
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
