//! Several agents of one service, with backends that fail: callers at every distance from the owner
//! notice nothing.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::support::agents::in_process::Agent;
use crate::support::agents::scripted::Recording;
use crate::support::eventually;
use crate::support::peers::caller::{HOST, connect_to};
use crate::support::peers::held_backend::HeldBackend;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::{backend, http2_caller};
use crate::support::processes::nodes::Nodes;
use crate::support::scene::About;
use crate::support::scene::Scene;

/// Requests of each caller.
const REQUESTS: usize = 24;

/// Fields and body of the request with this number, and the bytes of the body.
fn request_of(number: usize) -> (Method, String, Vec<Vec<u8>>, Vec<u8>) {
    let body = |length: usize| -> Vec<u8> {
        (0..length)
            .map(|at| b'a' + ((at + number) % 23) as u8)
            .collect()
    };
    match number % 6 {
        0 => (Method::GET, "\r\n".to_owned(), vec![], vec![]),
        1 => (
            Method::POST,
            "Content-Length: 11\r\n\r\n".to_owned(),
            vec![body(11)],
            body(11),
        ),
        2 => (
            Method::POST,
            "Content-Length: 65536\r\n\r\n".to_owned(),
            vec![body(65_536)],
            body(65_536),
        ),
        3 => {
            let whole = body(30_000);
            let pieces = whole.chunks(9_000).map(<[u8]>::to_vec).collect();
            (
                Method::POST,
                "Content-Length: 30000\r\n\r\n".to_owned(),
                pieces,
                whole,
            )
        }
        4 => {
            let whole = body(4_000);
            let chunk = [b"fa0\r\n", &whole[..], b"\r\n0\r\nx-check: 7\r\n\r\n"].concat();
            (
                Method::POST,
                "Transfer-Encoding: chunked\r\nTrailer: x-check\r\n\r\n".to_owned(),
                vec![chunk],
                whole,
            )
        }
        _ => {
            let whole = body(300_000);
            let pieces = whole.chunks(100_000).map(<[u8]>::to_vec).collect();
            (
                Method::POST,
                "Content-Length: 300000\r\n\r\n".to_owned(),
                pieces,
                whole,
            )
        }
    }
}

/// Sends requests on one HTTP/1.1 connection; panics if one fails.
fn call(about: &About, caller: usize) {
    let mut peer = connect_to(about, HOST, &[b"http/1.1"], None);
    for number in 0..REQUESTS {
        let (method, rest, pieces, body) = request_of(number);
        let key = &about.service_key;
        let head = format!(
            "{method} / HTTP/1.1\r\nHost: {HOST}\r\nX-Gw-Service-Key: {key}\r\n\
             X-Number: {caller}.{number}\r\n"
        );
        peer.send(head + &rest);
        for piece in pieces {
            peer.send(piece);
            thread::yield_now();
        }
        let response = peer.response_to(&method);
        assert_eq!(
            response.status,
            200,
            "{caller}.{number}: {}",
            String::from_utf8_lossy(&response.body)
        );
        assert!(response.body == body, "{caller}.{number}");
    }
}

/// As [`call`], on one HTTP/2 connection.
fn call_by_http2(about: &About, caller: usize) {
    on_a_reactor(async {
        let connection = http2_caller::connect_to(about, &h2::client::Builder::new()).await;
        for number in 0..REQUESTS {
            let (method, rest, _, body) = request_of(number);
            let mut request = connection
                .request(&method, "/")
                .header("x-number", format!("{caller}.{number}"));
            if rest.starts_with("Content-Length") {
                request = request.header("content-length", body.len());
            }
            let (response, mut upload) = connection.begin(request, body.is_empty()).await;
            let has_trailers = rest.starts_with("Transfer-Encoding");
            for (at, piece) in body.chunks(20_000).enumerate() {
                let is_last = (at + 1) * 20_000 >= body.len() && !has_trailers;
                upload
                    .send_data(Bytes::copy_from_slice(piece), is_last)
                    .unwrap();
            }
            if has_trailers {
                let name = HeaderName::from_static("x-check");
                upload
                    .send_trailers(HeaderMap::from_iter([(
                        name,
                        HeaderValue::from_static("7"),
                    )]))
                    .unwrap();
            }
            let response = http2_caller::whole(response).await;
            assert_eq!(
                response.status,
                200,
                "{caller}.{number}: {}",
                String::from_utf8_lossy(&response.body)
            );
            assert!(response.body == body, "{caller}.{number}");
        }
    });
}

/// Callers at each of these gateways, half of them by HTTP/2; panics if a request fails, or if a
/// POST reached a backend other than once.
fn call_all(gateways: &[About], callers: usize, backends: &[&Recording]) {
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
    for recorded in backends
        .iter()
        .flat_map(|backend| std::mem::take(&mut *backend.requests.lock().unwrap()))
    {
        let number: usize = recorded.number.rsplit('.').next().unwrap().parse().unwrap();
        let (method, _, _, body) = request_of(number);
        assert!(
            recorded.method == method.as_str() && recorded.body == body,
            "{}",
            recorded.number
        );
        assert_eq!(
            recorded.trailer,
            if number % 6 == 4 { "7" } else { "" },
            "{}",
            recorded.number
        );
        *counts.entry(recorded.number).or_default() += 1;
    }
    assert_eq!(counts.len(), gateways.len() * callers * REQUESTS);
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
}

/// A backend that fails before a byte of a request is sent to it, and what keeps it so.
fn sick_backends() -> Vec<(&'static str, String, Box<dyn std::any::Any>)> {
    let (socket, refusing) = backend::refusing();
    // It ends each connection when it has the first bytes of the TLS handshake.
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
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into())
        .unwrap();
    socket.listen(0).unwrap();
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().unwrap();
    let queued: Vec<_> = (0..4)
        .map(|_| {
            let socket =
                socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            let _ = socket.connect(&address.into());
            socket
        })
        .collect();
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
        call_all(&[scene.about.clone()], 8, &[&recording]);
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
        call_all(&[0, 1, 2].map(|node| nodes.about(node)), 4, &[&recording]);
        eventually("no request is in flight", || {
            nodes
                .tunnels(owner)
                .iter()
                .all(|tunnel| tunnel.in_flight == 0)
                .then_some(())
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
    let agents: [Agent; 2] = [
        scene.run("small", 1, &held.url),
        scene.run("large", 16, &held.url),
    ];
    eventually("both report their slots", || {
        scene
            .tunnels()
            .iter()
            .all(|tunnel| tunnel.slots.is_some())
            .then_some(())
    });
    for callers in [1, 8, 17] {
        thread::scope(|scope| {
            for _ in 0..callers {
                scope.spawn(|| {
                    let mut caller = scene.connect();
                    for _ in 0..10 {
                        caller.send(scene.request("GET /slow", "\r\n"));
                        let response = caller.response();
                        assert_eq!(
                            response.status,
                            200,
                            "{}",
                            String::from_utf8_lossy(&response.body)
                        );
                    }
                });
            }
        });
    }
    scene.wait_until_idle();
    let mut callers: Vec<_> = (0..17)
        .map(|_| {
            let mut caller = scene.connect();
            caller.send(scene.request("GET /held", "\r\n"));
            held.wait_for_held();
            caller
        })
        .collect();
    let mut refused = scene.connect();
    refused.send(scene.get("/"));
    assert_eq!(refused.response().code(), "GW_AGENT_CONCURRENCY_LIMIT");
    held.release();
    // One of the held requests has ended, whichever.
    eventually("a slot is free", || {
        refused.send(scene.get("/"));
        (refused.response().status == 200).then_some(())
    });
    (1..17).for_each(|_| held.release());
    for caller in &mut callers {
        assert_eq!(caller.response().status, 200);
    }
    drop(agents);
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
        caller.send(scene.get("/"));
        assert_eq!(caller.response().status, 200);
    }
    recording.requests.lock().unwrap().clear();
    socket.listen(16).unwrap();
    let listener = TcpListener::from(socket);
    let served = std::sync::Arc::new(AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&served);
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let counted = std::sync::Arc::clone(&counted);
            thread::spawn(move || {
                let mut peer = crate::support::peers::http1_peer::Peer::new(connection);
                while peer.request().is_ok() {
                    counted.fetch_add(1, Ordering::Relaxed);
                    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
                }
            });
        }
    });
    eventually("the agent gets requests again", || {
        caller.send(scene.get("/"));
        assert_eq!(caller.response().status, 200);
        (served.load(Ordering::Relaxed) > 0).then_some(())
    });
}
