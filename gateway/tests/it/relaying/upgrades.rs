//! Upgrades to other protocols (RFC 9110 §7.8) and WebSocket over HTTP/2 (RFC 8441).

use std::io::Write;
use std::net::{Shutdown, TcpStream};

use h2::ext::Protocol;
use http::Method;

use crate::support::peers::caller::Caller;
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::http2_caller::{data, on_a_reactor};
use crate::support::peers::{backend, http2_caller};
use crate::support::scene::Scene;

/// A backend that accepts the requested protocol, then echoes every byte twice. It ends its half
/// after the other half has ended.
fn doubling() -> String {
    backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            let Some(protocol) = head.upgrade else {
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nordinary");
                continue;
            };
            if head.target == "/refuse" {
                peer.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno");
                continue;
            }
            if head.target == "/ignore" {
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nignored");
                continue;
            }
            let accept = head
                .headers
                .get("sec-websocket-key")
                .map(accept_of)
                .unwrap_or_default();
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
    scene.request(
        line,
        &format!("Connection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n"),
    )
}

/// A request to switch protocols with this content.
fn with_content(scene: &Scene, line: &str, content: &str) -> String {
    let fields = format!(
        "Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {}\r\n\r\n{content}",
        content.len()
    );
    scene.request(line, &fields)
}

/// A backend as the daemon of Docker: reads the content of a request to switch protocols, answers
/// 101 and the content, and echoes every byte twice.
fn daemon() -> String {
    backend::start(|mut peer| {
        while let Ok((head, body, _)) = peer.request() {
            if head.upgrade.is_none() {
                peer.send(format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                ));
                peer.send(body);
                continue;
            }
            peer.send(
                "HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n\
                 Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n",
            );
            peer.send(body);
            return double(&mut peer);
        }
    })
}

#[test]
fn content_of_an_upgrade_comes_before_the_protocol() {
    const MOST: usize = 64 * 1024;
    let largest = "x".repeat(MOST);
    let too_large = "x".repeat(MOST + 1);
    for hand_over in ["always", "never"] {
        let scene = Scene::service()
            .agent_to(daemon())
            .workers(2)
            .hand_over(hand_over)
            .start();
        for content in ["{\"Detach\":false}", &largest] {
            for _ in 0..2 {
                let mut caller = scene.connect();
                // Bytes of the protocol at once behind the content.
                caller.send(with_content(&scene, "POST /exec/1/start", content) + "ab");
                let head = caller.response_head(&Method::GET).unwrap();
                assert_eq!(
                    (head.status.as_u16(), &head.headers["upgrade"]),
                    (101, &http::HeaderValue::from_static("tcp"))
                );
                assert_eq!(caller.bytes(content.len()).unwrap(), content.as_bytes());
                assert_eq!(caller.bytes(4).unwrap(), b"aabb");
                end(&mut caller);
                assert_eq!(caller.bytes(3).unwrap(), b"bye");
                assert!(caller.is_closed());
            }
        }
        let mut caller = scene.connect();
        for _ in 0..2 {
            caller.send(with_content(&scene, "POST /", &too_large));
            assert_eq!(caller.response().body, too_large.as_bytes());
        }
        scene.wait_until_slots_are_free();
        scene.stop();
    }
}

fn end(caller: &mut Caller) {
    caller.stream.conn.send_close_notify();
    caller.stream.flush().unwrap();
    caller.stream.sock.shutdown(Shutdown::Write).unwrap();
}

#[test]
fn http1_upgrades_end_each_half_separately() {
    for hand_over in ["always", "never"] {
        let scene = Scene::service()
            .agent_to(doubling())
            .workers(2)
            .hand_over(hand_over)
            .start();
        for (line, protocol) in [
            ("GET /", "websocket"),
            ("POST /", "SPDY/3.1"),
            ("GET /", "anything"),
        ] {
            let mut caller = scene.connect();
            caller.send(upgrade(&scene, line, protocol));
            let head = caller.response_head(&Method::GET).unwrap();
            let field = |name: &str| {
                head.headers
                    .get(name)
                    .map_or("", |value| value.to_str().unwrap())
            };
            assert_eq!(
                (head.status.as_u16(), field("upgrade"), field("connection")),
                (101, protocol, "upgrade")
            );
            assert!(line.starts_with(field("x-method")) && !field("x-gw-request-id").is_empty());
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
    let (ended, seen) = std::sync::mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            peer.request_head().unwrap();
            peer.send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n\
             last words",
            );
            peer.stream.shutdown(Shutdown::Write).unwrap();
            let received = peer.bytes(5).unwrap();
            ended.send((received, peer.is_closed())).unwrap();
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(upgrade(&scene, "GET /", "x"));
    assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
    assert_eq!(caller.bytes(10).unwrap(), b"last words");
    assert!(caller.is_closed());
    caller.send("still");
    end(&mut caller);
    assert_eq!(
        seen.recv_timeout(crate::support::SOON).unwrap(),
        (b"still".to_vec(), true)
    );
    scene.wait_until_slots_are_free();
}

#[test]
fn all_that_a_caller_sends_before_it_ends_its_half_arrives() {
    const SENT: usize = 4 * 1024 * 1024;
    for hand_over in ["always", "never"] {
        for ends_first in [false, true] {
            let (ended, seen) = std::sync::mpsc::channel();
            let backend = backend::start(move |mut peer| {
                peer.request_head().unwrap();
                peer.send(
                    "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
                );
                if ends_first {
                    peer.stream.shutdown(Shutdown::Write).unwrap();
                }
                let received = peer.bytes(SENT).map(|bytes| bytes.len());
                ended.send((received, peer.is_closed())).unwrap();
            });
            let scene = Scene::service()
                .agent_to(backend)
                .workers(2)
                .hand_over(hand_over)
                .start();
            for _ in 0..4 {
                let mut caller = scene.connect();
                caller.send(upgrade(&scene, "POST /", "x"));
                assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
                caller.send(vec![b'.'; SENT]);
                end(&mut caller);
                let (received, is_closed) = seen.recv_timeout(crate::support::SOON).unwrap();
                assert_eq!((received.unwrap(), is_closed), (SENT, true));
                assert!(caller.is_closed());
                scene.wait_until_slots_are_free();
            }
            scene.stop();
        }
    }
}

#[test]
fn a_disconnected_caller_ends_the_upgraded_backend_connection() {
    let (ended, seen) = std::sync::mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            peer.request_head().unwrap();
            peer.send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            );
            ended.send(peer.is_closed()).unwrap();
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(upgrade(&scene, "GET /", "x"));
    assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
    drop(caller);
    assert!(seen.recv_timeout(crate::support::SOON).unwrap());
    scene.wait_until_slots_are_free();
}

#[test]
fn a_backend_may_refuse_or_ignore_an_upgrade() {
    let scene = Scene::service().agent_to(doubling()).start();
    for (target, status, body) in [("/refuse", 403, "no"), ("/ignore", 200, "ignored")] {
        let mut caller = scene.connect();
        caller.send(upgrade(&scene, &format!("GET {target}"), "websocket"));
        let response = caller.response();
        assert_eq!(
            (response.status.as_u16(), response.body.as_slice()),
            (status, body.as_bytes())
        );
        assert_eq!(response.header("connection"), "close");
        assert!(caller.is_closed());
    }
    // Another version of HTTP would tunnel requests past the gateway, so it is not offered to the
    // backend. What the gateway ignores leaves an ordinary request.
    let mut caller = scene.connect();
    for _ in 0..2 {
        caller.send(upgrade(&scene, "GET /", "h2c"));
        let response = caller.response();
        assert_eq!(
            (response.header("connection"), response.body.as_slice()),
            ("", &b"ordinary"[..])
        );
    }
}

#[test]
fn http2_callers_upgrade_by_extended_connect() {
    let scene = Scene::service().agent_to(doubling()).start();
    on_a_reactor(async {
        let caller = http2_caller::connect(&scene).await;
        // The SETTINGS of the gateway arrive before the first response.
        assert_eq!(caller.get("/").await.body, b"ordinary");
        assert!(caller.requests.is_extended_connect_protocol_enabled());
        let connect = |target: &str| {
            let request = caller
                .request(&Method::CONNECT, target)
                .header("sec-websocket-version", "13");
            request.extension(Protocol::from_static("websocket"))
        };
        let (response, mut ours) = caller.begin(connect("/chat"), false).await;
        let (parts, mut theirs) = response.await.unwrap().into_parts();
        assert_eq!(parts.status, 200);
        assert!(
            !parts.headers.contains_key("sec-websocket-accept")
                && !parts.headers.contains_key("x-gw-upgrade")
        );
        assert_eq!(data(&mut theirs).await.unwrap(), "hello ");
        ours.send_data("a".into(), false).unwrap();
        assert_eq!(data(&mut theirs).await.unwrap(), "aa");
        ours.send_data("b".into(), true).unwrap();
        let mut rest = Vec::new();
        while let Some(bytes) = data(&mut theirs).await {
            rest.extend_from_slice(&bytes);
        }
        assert_eq!(rest, b"bbbye");

        let (response, _ours) = caller.begin(connect("/refuse"), false).await;
        assert_eq!(response.await.unwrap().status(), 403);
        // A 200 response would mean that the backend has accepted the upgrade.
        let (response, _ours) = caller.begin(connect("/ignore"), false).await;
        let response = http2_caller::whole(response).await;
        assert_eq!(response.status, 502);
        assert_eq!(
            response.json()["error"]["code"],
            "GW_BACKEND_INVALID_RESPONSE"
        );
    });
    scene.wait_until_slots_are_free();
}
