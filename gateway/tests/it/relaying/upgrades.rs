//! Upgrades to other protocols (RFC 9110 §7.8) and WebSocket over HTTP/2 (RFC 8441).

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc;

use gw_shared::http::ResponseHead;
use h2::ext::Protocol;
use http::Method;

use super::{SWITCHING, response_with};
use crate::support::SOON;
use crate::support::peers::caller::Caller;
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::http2_caller::{Connection, data, on_a_reactor, whole};
use crate::support::peers::{backend, http2_caller};
use crate::support::scene::Scene;

/// A backend that accepts the requested protocol, then echoes every byte twice. It ends its half
/// after the other half has ended.
fn doubling() -> String {
    backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            let protocol = match (head.upgrade, head.target.as_str()) {
                (None, _) => {
                    peer.send(response_with("ordinary"));
                    continue;
                }
                (_, "/refuse") => {
                    peer.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno");
                    continue;
                }
                (_, "/ignore") => {
                    peer.send(response_with("ignored"));
                    continue;
                }
                (Some(protocol), _) => protocol,
            };
            let key = head.headers.get("sec-websocket-key");
            let accept = key.map(accept_of).unwrap_or_default();
            peer.send(format!(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {}\r\n\
                 X-Method: {}\r\n{accept}\r\nhello ",
                protocol.as_str(),
                head.method
            ));
            return double(&mut peer);
        }
    })
}

/// Value of `Sec-WebSocket-Accept` (RFC 6455 §4.2.2).
fn accept_of(key: &http::HeaderValue) -> String {
    use base64::Engine;
    let text = format!(
        "{}258EAFA5-E914-47DA-95CA-C5AB0DC85B11",
        key.to_str().unwrap()
    );
    let digest = aws_lc_rs::digest::digest(
        &aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY,
        text.as_bytes(),
    );
    let accept = base64::engine::general_purpose::STANDARD.encode(digest.as_ref());
    format!("Sec-WebSocket-Accept: {accept}\r\n")
}

fn double(peer: &mut Peer<TcpStream>) {
    while let Ok(byte) = peer.bytes(1) {
        peer.send([byte[0], byte[0]]);
    }
    peer.send("bye");
    drop(peer.stream.shutdown(Shutdown::Write));
}

fn upgrade(scene: &Scene, line: &str, protocol: &str) -> String {
    let fields = format!("Connection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n");
    scene.request(line, &fields)
}

/// Sends a request to switch protocols. Returns the caller, and the head of the response, which
/// accepts it.
fn upgraded(scene: &Scene, line: &str, protocol: &str) -> (Caller, ResponseHead) {
    let mut caller = scene.connect();
    caller.send(upgrade(scene, line, protocol));
    let head = caller.response_head(&Method::GET).unwrap();
    assert_eq!(head.status, 101);
    (caller, head)
}

/// Ends the caller's half of a connection.
fn end(caller: &mut Caller) {
    caller.stream.conn.send_close_notify();
    caller.stream.flush().unwrap();
    caller.stream.sock.shutdown(Shutdown::Write).unwrap();
}

/// A request to switch protocols with this content.
fn with_content(scene: &Scene, line: &str, content: &str) -> String {
    let fields = format!(
        "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {}\r\n\r\n{content}",
        content.len()
    );
    scene.request(line, &fields)
}

/// A scene whose backend is as the daemon of Docker: reads the content of a request to switch
/// protocols, answers 101 and the content, and echoes every byte twice.
fn with_daemon(hand_over: &'static str) -> Scene {
    let backend = backend::start(|mut peer| {
        while let Ok((head, body, _)) = peer.request() {
            if head.upgrade.is_none() {
                peer.send(response_with(str::from_utf8(&body).unwrap()));
                continue;
            }
            peer.send(
                "HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n\
                 Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n",
            );
            peer.send(body);
            return double(&mut peer);
        }
    });
    let plan = Scene::service().agent_to(backend);
    plan.hand_over(hand_over).start()
}

/// Most content of a request to switch protocols.
const CONTENT_MAX: usize = 64 * 1024;

#[test]
fn content_of_an_upgrade_comes_before_the_protocol() {
    let largest = "x".repeat(CONTENT_MAX);
    for hand_over in ["always", "never"] {
        let scene = with_daemon(hand_over);
        for content in ["{\"Detach\":false}", &largest].repeat(2) {
            let mut caller = scene.connect();
            // Bytes of the protocol at once behind the content.
            caller.send(with_content(&scene, "POST /exec/1/start", content) + "ab");
            let head = caller.response_head(&Method::GET).unwrap();
            assert_eq!(head.status, 101);
            assert_eq!(head.headers["upgrade"], "tcp");
            assert_eq!(caller.bytes(content.len()).unwrap(), content.as_bytes());
            assert_eq!(caller.bytes(4).unwrap(), b"aabb");
            end(&mut caller);
            assert_eq!(caller.bytes(3).unwrap(), b"bye");
            assert!(caller.is_closed());
        }
        scene.wait_until_slots_are_free();
        scene.stop();
    }
}

#[test]
fn an_upgrade_with_too_much_content_is_an_ordinary_request() {
    let too_large = "x".repeat(CONTENT_MAX + 1);
    for hand_over in ["always", "never"] {
        let scene = with_daemon(hand_over);
        let mut caller = scene.connect();
        for _ in 0..2 {
            let response = caller.ask(with_content(&scene, "POST /", &too_large));
            assert_eq!(response.body, too_large.as_bytes());
        }
        scene.wait_until_slots_are_free();
        scene.stop();
    }
}

#[test]
fn http1_upgrades_end_each_half_separately() {
    for hand_over in ["always", "never"] {
        let plan = Scene::service().agent_to(doubling());
        let scene = plan.hand_over(hand_over).start();
        for (method, protocol) in [
            ("GET", "websocket"),
            ("POST", "SPDY/3.1"),
            ("GET", "anything"),
        ] {
            let (mut caller, head) = upgraded(&scene, &format!("{method} /"), protocol);
            assert_eq!(head.headers["upgrade"], protocol);
            assert_eq!(head.headers["connection"], "upgrade");
            assert_eq!(head.headers["x-method"], method);
            assert!(!head.headers["x-gw-request-id"].is_empty());
            assert_eq!(caller.bytes(6).unwrap(), b"hello ");
            for byte in *b"abc" {
                caller.send([byte]);
                assert_eq!(caller.bytes(2).unwrap(), [byte, byte]);
            }
            assert_eq!(scene.tunnels()[0].in_flight, 1);
            end(&mut caller);
            assert_eq!(caller.bytes(3).unwrap(), b"bye");
            assert!(caller.is_closed());
            scene.wait_until_slots_are_free();
        }
        scene.stop();
    }
}

#[test]
fn the_backend_may_end_its_half_of_an_upgrade_first() {
    let (ended, seen) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        peer.request_head().unwrap();
        peer.send(format!("{SWITCHING}last words"));
        peer.stream.shutdown(Shutdown::Write).unwrap();
        let received = peer.bytes(5).unwrap();
        ended.send((received, peer.is_closed())).unwrap();
    });
    let scene = Scene::service().agent_to(backend).start();
    let (mut caller, _) = upgraded(&scene, "GET /", "x");
    assert_eq!(caller.bytes(10).unwrap(), b"last words");
    assert!(caller.is_closed());
    caller.send("still");
    end(&mut caller);
    assert_eq!(seen.recv_timeout(SOON), Ok((b"still".to_vec(), true)));
    scene.wait_until_slots_are_free();
}

#[test]
fn all_that_a_caller_sends_before_it_ends_its_half_arrives() {
    const SENT: usize = 4 * 1024 * 1024;
    for (hand_over, ends_first) in [
        ("always", false),
        ("always", true),
        ("never", false),
        ("never", true),
    ] {
        let (ended, seen) = mpsc::channel();
        let backend = backend::start(move |mut peer| {
            peer.request_head().unwrap();
            peer.send(SWITCHING);
            if ends_first {
                peer.stream.shutdown(Shutdown::Write).unwrap();
            }
            let received = peer.bytes(SENT).map(|bytes| bytes.len());
            ended.send((received, peer.is_closed())).unwrap();
        });
        let plan = Scene::service().agent_to(backend);
        let scene = plan.hand_over(hand_over).start();
        for _ in 0..4 {
            let (mut caller, _) = upgraded(&scene, "POST /", "x");
            caller.send(vec![b'.'; SENT]);
            end(&mut caller);
            let (received, is_closed) = seen.recv_timeout(SOON).unwrap();
            assert_eq!((received.unwrap(), is_closed), (SENT, true));
            assert!(caller.is_closed());
            scene.wait_until_slots_are_free();
        }
        scene.stop();
    }
}

#[test]
fn a_disconnected_caller_ends_the_upgraded_backend_connection() {
    let (ended, seen) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        peer.request_head().unwrap();
        peer.send(SWITCHING);
        ended.send(peer.is_closed()).unwrap();
    });
    let scene = Scene::service().agent_to(backend).start();
    drop(upgraded(&scene, "GET /", "x"));
    assert_eq!(seen.recv_timeout(SOON), Ok(true));
    scene.wait_until_slots_are_free();
}

#[test]
fn a_backend_may_refuse_or_ignore_an_upgrade() {
    let scene = Scene::service().agent_to(doubling()).start();
    for (line, status, body) in [("GET /refuse", 403, "no"), ("GET /ignore", 200, "ignored")] {
        let mut caller = scene.connect();
        let response = caller.ask(upgrade(&scene, line, "websocket"));
        assert_eq!(response.status, status, "{line}");
        assert_eq!(response.body, body.as_bytes(), "{line}");
        assert_eq!(response.header("connection"), "close", "{line}");
        assert!(caller.is_closed(), "{line}");
    }
}

/// Another version of HTTP would tunnel requests past the gateway, so it is not offered to the
/// backend.
#[test]
fn an_upgrade_that_the_gateway_ignores_leaves_an_ordinary_request() {
    let scene = Scene::service().agent_to(doubling()).start();
    let mut caller = scene.connect();
    for _ in 0..2 {
        let response = caller.ask(upgrade(&scene, "GET /", "h2c"));
        assert_eq!(response.header("connection"), "");
        assert_eq!(response.body, b"ordinary");
    }
}

/// A request to switch to a WebSocket by extended CONNECT.
fn extended_connect(caller: &Connection, target: &str) -> http::request::Builder {
    caller
        .request(&Method::CONNECT, target)
        .header("sec-websocket-version", "13")
        .extension(Protocol::from_static("websocket"))
}

#[test]
fn http2_callers_upgrade_by_extended_connect() {
    let scene = Scene::service().agent_to(doubling()).start();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        // The SETTINGS of the gateway arrive before the first response.
        assert_eq!(caller.get("/").await.body, b"ordinary");
        assert!(caller.requests.is_extended_connect_protocol_enabled());
        let connect = extended_connect(&caller, "/chat");
        let (response, mut ours) = caller.begin(connect, false).await;
        let (parts, mut theirs) = response.await.unwrap().into_parts();
        assert_eq!(parts.status, 200);
        for gone in ["sec-websocket-accept", "x-gw-upgrade"] {
            assert!(!parts.headers.contains_key(gone), "{gone}");
        }
        assert_eq!(data(&mut theirs).await.unwrap(), "hello ");
        ours.send_data("a".into(), false).unwrap();
        assert_eq!(data(&mut theirs).await.unwrap(), "aa");
        ours.send_data("b".into(), true).unwrap();
        let mut rest = Vec::new();
        while let Some(bytes) = data(&mut theirs).await {
            rest.extend_from_slice(&bytes);
        }
        assert_eq!(rest, b"bbbye");
    });
    scene.wait_until_slots_are_free();
}

#[test]
fn http2_callers_learn_that_a_backend_refuses_or_ignores_an_upgrade() {
    let scene = Scene::service().agent_to(doubling()).start();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        // The SETTINGS of the gateway arrive before the first response.
        assert_eq!(caller.get("/").await.body, b"ordinary");
        let refused = extended_connect(&caller, "/refuse");
        let (response, _ours) = caller.begin(refused, false).await;
        assert_eq!(response.await.unwrap().status(), 403);
        // A 200 response would mean that the backend has accepted the upgrade.
        let ignored = extended_connect(&caller, "/ignore");
        let (response, _ours) = caller.begin(ignored, false).await;
        let response = whole(response).await;
        assert_eq!(response.status, 502);
        let code = &response.json()["error"]["code"];
        assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE");
    });
    scene.wait_until_slots_are_free();
}
