//! Several agents of one service, with backends that fail: no request fails, at the owner of the
//! service and at other nodes.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use socket2::{Domain, Socket, Type};

use crate::support::admin_api::Tunnel;
use crate::support::agents::scripted::Recording;
use crate::support::eventually;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http1_peer::{Peer, listen};
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::{backend, http2_caller};
use crate::support::processes::nodes::Nodes;
use crate::support::scene::{About, Scene};

/// Requests of each caller.
const REQUESTS: usize = 24;

/// Fields of the request with this number, the pieces in which its body is sent, and the bytes of
/// the body.
fn request_of(number: usize) -> (Method, String, Vec<Vec<u8>>, Vec<u8>) {
    let body = |length: usize| -> Vec<u8> {
        (0..length)
            .map(|at| b'a' + ((at + number) % 23) as u8)
            .collect()
    };
    let sized = |length: usize, piece: usize| {
        let whole = body(length);
        let fields = format!("Content-Length: {length}\r\n\r\n");
        let pieces = whole.chunks(piece).map(<[u8]>::to_vec).collect();
        (Method::POST, fields, pieces, whole)
    };
    match number % 6 {
        0 => (Method::GET, "\r\n".to_owned(), vec![], vec![]),
        1 => sized(11, 11),
        2 => sized(65_536, 65_536),
        3 => sized(30_000, 9_000),
        4 => {
            let fields = "Transfer-Encoding: chunked\r\nTrailer: x-check\r\n\r\n";
            let whole = body(4_000);
            let chunk = [b"fa0\r\n", &whole[..], b"\r\n0\r\nx-check: 7\r\n\r\n"].concat();
            (Method::POST, fields.to_owned(), vec![chunk], whole)
        }
        _ => sized(300_000, 100_000),
    }
}

/// Asserts that a request was answered with its body.
fn assert_echoed(id: &str, status: StatusCode, echoed: &[u8], body: &[u8]) {
    let text = String::from_utf8_lossy(echoed);
    assert_eq!(status, 200, "{id}: {text}");
    assert!(echoed == body, "{id}");
}

/// Sends requests on one HTTP/1.1 connection; panics if one fails.
fn call(about: &About, caller: usize) {
    let mut peer = connect_to(about, HOST, &[b"http/1.1"], None);
    for number in 0..REQUESTS {
        let (method, rest, pieces, body) = request_of(number);
        let id = format!("{caller}.{number}");
        let key = &about.service_key;
        let head = format!(
            "{method} / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\
             X-Number: {id}\r\n"
        );
        peer.send(head + &rest);
        for piece in pieces {
            peer.send(piece);
            thread::yield_now();
        }
        let response = peer.response_to(&method);
        assert_echoed(&id, response.status, &response.body, &body);
    }
}

/// As [`call`], on one HTTP/2 connection.
fn call_by_http2(about: &About, caller: usize) {
    on_a_reactor(async {
        let connection = http2_caller::connect_to(about, &h2::client::Builder::new()).await;
        for number in 0..REQUESTS {
            let (method, rest, _, body) = request_of(number);
            let id = format!("{caller}.{number}");
            let mut request = connection.request(&method, "/").header("x-number", &id);
            if rest.starts_with("Content-Length") {
                request = request.header("content-length", body.len());
            }
            let (response, mut upload) = connection.begin(request, body.is_empty()).await;
            let has_trailers = rest.starts_with("Transfer-Encoding");
            for (at, piece) in body.chunks(20_000).enumerate() {
                let is_last = (at + 1) * 20_000 >= body.len() && !has_trailers;
                let piece = Bytes::copy_from_slice(piece);
                upload.send_data(piece, is_last).unwrap();
            }
            if has_trailers {
                let mut trailers = HeaderMap::new();
                trailers.insert("x-check", HeaderValue::from_static("7"));
                upload.send_trailers(trailers).unwrap();
            }
            let response = http2_caller::whole(response).await;
            assert_echoed(&id, response.status, &response.body, &body);
        }
    });
}

/// Callers at each of these gateways, half of them by HTTP/2; panics if a request fails, or if a
/// POST reached a backend other than once.
fn call_all(gateways: &[About], callers: usize, backend: &Recording) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for about in gateways {
            for _ in 0..callers {
                scope.spawn(|| {
                    let caller = next.fetch_add(1, Ordering::Relaxed);
                    if caller.is_multiple_of(2) {
                        call(about, caller);
                    } else {
                        call_by_http2(about, caller);
                    }
                });
            }
        }
    });
    let mut counts = BTreeMap::<String, usize>::new();
    for recorded in std::mem::take(&mut *backend.requests.lock().unwrap()) {
        let id = recorded.number;
        let number: usize = id.rsplit('.').next().unwrap().parse().unwrap();
        let (method, _, _, body) = request_of(number);
        assert!(
            recorded.method == method.as_str() && recorded.body == body,
            "{id}"
        );
        let trailer = if number % 6 == 4 { "7" } else { "" };
        assert_eq!(recorded.trailer, trailer, "{id}");
        *counts.entry(id).or_default() += 1;
    }
    assert_eq!(counts.len(), gateways.len() * callers * REQUESTS);
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
}

/// Backends that fail before a byte of a request is sent to them, each with a value that keeps it
/// failing until it is dropped.
fn sick_backends() -> Vec<(&'static str, String, Box<dyn std::any::Any>)> {
    let (socket, refusing) = backend::refusing();
    // A backend that ends each connection at the first byte of the TLS handshake.
    let no_tls = backend::start(|mut peer| drop(peer.bytes(1))).replace("http://", "https://");
    let (unanswering, held) = unanswering();
    vec![
        ("refuses", format!("http://{refusing}"), Box::new(socket)),
        ("fails TLS", no_tls, Box::new(())),
        ("does not answer a connect", unanswering, held),
    ]
}

/// A listener whose queue of connections is full: further SYNs are dropped.
fn unanswering() -> (String, Box<dyn std::any::Any>) {
    let (listener, address) = backend::refusing();
    listener.listen(0).unwrap();
    let queue = |_| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let _ = socket.connect(&address.into());
        socket
    };
    let queued: Vec<Socket> = (0..4).map(queue).collect();
    (format!("http://{address}"), Box::new((listener, queued)))
}

#[test]
fn a_sick_backend_of_one_agent_costs_no_request() {
    for (what, url, _held) in sick_backends() {
        let scene = Scene::service().enrolled(&["sick", "well"]).start();
        let recording = Recording::start();
        let _sick = scene.run("sick", 128, &url);
        let _well = scene.run("well", 128, &recording.url);
        eprintln!("a backend that {what}");
        // Callers of both workers.
        call_all(std::slice::from_ref(&scene.about), 8, &recording);
        scene.wait_until_idle();
    }
}

#[test]
fn callers_of_every_node_notice_nothing_of_a_sick_backend() {
    for (what, url, _held) in sick_backends() {
        let nodes = Nodes::start_with_agents(3, &["sick", "well"]);
        let recording = Recording::start();
        let (owner, _) = nodes.owner_and_other();
        let _sick = nodes.run_agent_of("sick", 0, &url);
        let _well = nodes.run_agent_of("well", 1, &recording.url);
        eventually("both tunnels are open", || {
            (nodes.tunnels(owner).len() == 2).then_some(())
        });
        eprintln!("a backend that {what}");
        call_all(&[0, 1, 2].map(|node| nodes.about(node)), 4, &recording);
        eventually("no request is in flight", || {
            let is_idle = |tunnel: &Tunnel| tunnel.in_flight == 0;
            nodes.tunnels(owner).iter().all(is_idle).then_some(())
        });
    }
}

#[test]
fn an_upgrade_goes_to_the_other_agent_and_carries_bytes_both_ways() {
    let scene = Scene::service().enrolled(&["sick", "well"]).start();
    let (_socket, refusing) = backend::refusing();
    let echo = backend::start(|mut peer| {
        let (head, content, _) = peer.request().unwrap();
        assert!(head.upgrade.is_some());
        peer.send("HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
        peer.send(content);
        while let Ok(byte) = peer.bytes(1) {
            let _ = peer.stream.write_all(&[byte[0], byte[0]]);
        }
    });
    let _sick = scene.run("sick", 128, &format!("http://{refusing}"));
    let _well = scene.run("well", 128, &echo);
    for number in 0..10 {
        let mut caller = scene.connect();
        // The other agent gets its copy of the content.
        let content = ["", "content"][number % 2];
        let fields = format!(
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nContent-Length: {}\r\n\r\n{content}",
            content.len()
        );
        caller.send(scene.request("GET /", &fields));
        assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
        assert_eq!(caller.bytes(content.len()).unwrap(), content.as_bytes());
        caller.send("ab");
        assert_eq!(caller.bytes(4).unwrap(), b"aabb");
    }
    scene.wait_until_idle();
}

#[test]
fn agents_of_different_size_refuse_nothing_until_all_are_full() {
    let scene = Scene::service().enrolled(&["small", "large"]).start();
    let held = HeldBackend::start();
    let _small = scene.run("small", 1, &held.url);
    let _large = scene.run("large", 16, &held.url);
    eventually("both report their slots", || {
        let report = |tunnel: &Tunnel| tunnel.slots.is_some();
        scene.tunnels().iter().all(report).then_some(())
    });
    for callers in [1, 8, 17] {
        thread::scope(|scope| {
            for _ in 0..callers {
                scope.spawn(|| {
                    let mut caller = scene.connect();
                    for _ in 0..10 {
                        let response = caller.ask(scene.get("/slow"));
                        let text = String::from_utf8_lossy(&response.body);
                        assert_eq!(response.status, 200, "{text}");
                    }
                });
            }
        });
    }
    scene.wait_until_idle();
    let hold = |_| {
        let mut caller = scene.connect();
        caller.send(scene.get("/held"));
        held.wait_for_held();
        caller
    };
    let mut callers: Vec<_> = (0..17).map(hold).collect();
    let mut refused = scene.connect();
    assert_eq!(
        refused.ask(scene.get("/")).code(),
        "GW_AGENT_CONCURRENCY_LIMIT"
    );
    held.release();
    // Any one of the held requests has ended.
    eventually("a slot is free", || {
        (refused.ask(scene.get("/")).status == 200).then_some(())
    });
    (1..17).for_each(|_| held.release());
    for caller in &mut callers {
        assert_eq!(caller.response().status, 200);
    }
}

#[test]
fn an_agent_whose_backend_comes_up_gets_requests_again() {
    let scene = Scene::service().enrolled(&["sick", "well"]).start();
    let (socket, address) = backend::refusing();
    let recording = Recording::start();
    let _sick = scene.run("sick", 128, &format!("http://{address}"));
    let _well = scene.run("well", 128, &recording.url);
    let mut caller = scene.connect();
    for _ in 0..20 {
        assert_eq!(caller.ask(scene.get("/")).status, 200);
    }
    recording.requests.lock().unwrap().clear();
    socket.listen(16).unwrap();
    let listener = TcpListener::from(socket);
    let served = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&served);
    listen(listener, move |connection| {
        let mut peer = Peer::new(connection);
        while peer.request().is_ok() {
            counted.fetch_add(1, Ordering::Relaxed);
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    eventually("the agent gets requests again", || {
        assert_eq!(caller.ask(scene.get("/")).status, 200);
        (served.load(Ordering::Relaxed) > 0).then_some(())
    });
}
