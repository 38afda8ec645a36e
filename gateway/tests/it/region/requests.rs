//! A region of several nodes: requests whose service another node owns.

mod cuts;
mod memory;
mod owner;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use http::Method;

use crate::support::agents::in_process::{Agent, Identity};
use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::http1_peer::{Peer, Response, fields};
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::node_peer::certificate;
use crate::support::peers::{backend, http2_caller, node_peer};
use crate::support::processes::nodes::Nodes;
use crate::support::scene::About;
use crate::support::{SOON, eventually};

/// A backend that answers by path: see the tests.
fn any_path() -> String {
    backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            if head.upgrade.is_some() {
                let (content, _) = peer.body(head.framing).unwrap();
                peer.send(
                    "HTTP/1.1 101 X\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                     X-Echo: twice\r\n\r\nhello ",
                );
                peer.send(content);
                return double(&mut peer);
            }
            match head.target.path() {
                "/hints" => {
                    peer.send("HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n");
                    if head.expects_continue {
                        peer.send("HTTP/1.1 100 Continue\r\n\r\n");
                    }
                }
                "/cut" => {
                    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nbegin");
                    return;
                }
                _ => {}
            }
            let Ok((body, trailers)) = peer.body(head.framing) else {
                return;
            };
            match head.target.path() {
                "/none" => peer.send("HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n"),
                "/same" => peer.send("HTTP/1.1 304 Not Modified\r\nETag: \"a\"\r\n\r\n"),
                "/empty" => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
                "/head" => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"),
                "/whole" => {
                    peer.send(format!(
                        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                        body.len()
                    ));
                    peer.send(body);
                }
                _ => {
                    peer.send(
                        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-check\r\n\r\n",
                    );
                    for piece in body.chunks(100_000) {
                        peer.send(format!("{:x}\r\n", piece.len()));
                        peer.send(piece);
                        peer.send("\r\n");
                    }
                    let check = trailers
                        .get("x-check")
                        .map_or("none", |value| value.to_str().unwrap());
                    peer.send(format!("0\r\nx-check: {check}\r\n\r\n"));
                }
            }
        }
    })
}

fn double(peer: &mut Peer<TcpStream>) {
    while let Ok(byte) = peer.bytes(1) {
        peer.send([byte[0], byte[0]]);
    }
    peer.send("bye");
    drop(peer.stream.shutdown(Shutdown::Write));
}

/// Two nodes with an agent in front of `backend`; also returns the owner of the service and the
/// other node.
fn with_agent(backend: &str) -> (Nodes, Agent, usize, usize) {
    let nodes = Nodes::start(2);
    let (owner, other) = nodes.owner_and_other();
    let agent = nodes.run_agent(other, backend);
    nodes.wait_for_tunnel(owner);
    (nodes, agent, owner, other)
}

/// Waits until no request is left on any tunnel or link.
fn wait_until_idle(nodes: &Nodes, owner: usize) {
    eventually("no request is left", || {
        let metrics = nodes.metrics(owner);
        let served = metrics.sum("gw_node_requests") + metrics.sum("gw_crossing_requests");
        let on_tunnels: usize = nodes
            .tunnels(owner)
            .iter()
            .map(|tunnel| tunnel.in_flight)
            .sum();
        (served == 0.0 && on_tunnels == 0).then_some(())
    });
}

/// Bytes that a node has charged for relayed requests.
fn charged(nodes: &Nodes, node: usize) -> usize {
    nodes.metrics(node).count("gw_relay_memory_bytes") as usize
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 253) as u8).collect()
}

#[test]
fn a_short_body_is_charged_before_it_arrives() {
    const LENGTH: usize = 60_000;
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    let body = pattern(LENGTH);
    let mut caller = nodes.connect(other);
    caller.send(nodes.request("POST /whole", &format!("Content-Length: {LENGTH}\r\n\r\n")));
    caller.send(&body[..1000]);
    eventually("the body is charged", || {
        (charged(&nodes, other) >= LENGTH).then_some(())
    });
    assert_eq!(charged(&nodes, owner), 0, "the request was not sent");
    caller.send(&body[1000..]);
    assert_eq!(caller.response().body, body);
    eventually("nothing is charged", || {
        (charged(&nodes, other) + charged(&nodes, owner) == 0).then_some(())
    });
}

/// Status and code of an error of the gateway, such as `502 GW_RELAY_ERROR`.
fn error(response: &Response) -> String {
    format!("{} {}", response.status.as_u16(), response.code())
}

/// The response to a request on a new connection to `node`.
fn ask(nodes: &Nodes, node: usize, line: &str, rest: &str) -> Response {
    nodes.connect(node).ask(nodes.request(line, rest))
}

/// Sends a body of this length. Returns whether the backend sends it back.
fn is_echoed(nodes: &Nodes, caller: &mut Caller, path: &str, length: usize) -> bool {
    let body = pattern(length);
    let head = format!("Content-Length: {length}\r\n\r\n");
    caller.send(nodes.request(&format!("POST {path}"), &head));
    caller.send(&body);
    let response = caller.response();
    response.status == 200 && response.body == body
}

/// Sends a request with a trailer, which the backend sends back.
#[track_caller]
fn assert_trailers_pass(nodes: &Nodes, caller: &mut Caller) {
    caller.send(nodes.request("POST /chunked", "Transfer-Encoding: chunked\r\n\r\n"));
    caller.send("5\r\nhello\r\n0\r\nx-check: 7\r\n\r\n");
    let response = caller.response();
    assert_eq!(response.body, b"hello");
    assert_eq!(response.trailers["x-check"], "7");
}

/// Requests that the owner and another node have sent to other nodes. The first request is counted
/// when the owner has answered.
fn crossing(nodes: &Nodes, owner: usize, other: usize) -> [u64; 2] {
    [owner, other].map(|node| nodes.total(node, "requests_crossing_nodes"))
}

#[test]
fn requests_at_any_node_reach_the_backend() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    for node in [owner, other] {
        let mut caller = nodes.connect(node);
        for length in [0, 1, 65_536, 65_537, 3_000_000] {
            for path in ["/whole", "/chunked"] {
                let is_echoed = is_echoed(&nodes, &mut caller, path, length);
                assert!(is_echoed, "{path} {length} at node {node}");
            }
        }
    }
    assert_eq!(crossing(&nodes, owner, other), [0, 10]);
    wait_until_idle(&nodes, owner);
}

#[test]
fn responses_without_a_body_pass_without_fields_of_nodes() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    for node in [owner, other] {
        let mut caller = nodes.connect(node);
        for (method, path, status) in [
            (Method::GET, "/none", 204),
            (Method::GET, "/same", 304),
            (Method::GET, "/empty", 200),
            (Method::HEAD, "/head", 200),
            (Method::OPTIONS, "/chunked", 200),
        ] {
            caller.send(nodes.request(&format!("{method} {path}"), "\r\n"));
            let response = caller.response_to(&method);
            assert_eq!(response.status, status, "{path} at node {node}");
            assert_eq!(response.body, b"", "{path} at node {node}");
            assert!(!response.header("x-gw-request-id").is_empty());
            let mut names = fields(&response.headers).into_keys();
            let is_of_nodes = |name: String| name.starts_with("x-gw-node");
            assert!(!names.any(is_of_nodes), "{path}: {response:?}");
        }
    }
    assert_eq!(crossing(&nodes, owner, other), [0, 5]);
    wait_until_idle(&nodes, owner);
}

#[test]
fn trailers_pass() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    assert_trailers_pass(&nodes, &mut nodes.connect(other));
    wait_until_idle(&nodes, owner);
}

#[test]
fn interim_responses_pass() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    let mut caller = nodes.connect(other);
    let head = "Content-Length: 5\r\nExpect: 100-continue\r\n\r\n";
    caller.send(nodes.request("POST /hints", head));
    for status in [103, 100] {
        assert_eq!(caller.response_head(&Method::POST).unwrap().status, status);
    }
    caller.send("later");
    assert_eq!(caller.response().body, b"later");
    wait_until_idle(&nodes, owner);
}

#[test]
fn http2_callers_are_served() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    on_a_reactor(async {
        let caller =
            http2_caller::connect_to(&nodes.about(other), &h2::client::Builder::new()).await;
        assert_eq!(caller.get("/none").await.status, 204);
        let (response, mut upload) = caller
            .begin(caller.request(&Method::POST, "/chunked"), false)
            .await;
        upload.send_data("some ".into(), false).unwrap();
        upload.send_data("text".into(), false).unwrap();
        let trailers = std::iter::once((
            http::HeaderName::from_static("x-check"),
            "9".parse().unwrap(),
        ))
        .collect();
        upload.send_trailers(trailers).unwrap();
        assert_eq!(http2_caller::whole(response).await.body, b"some text");
        let short = caller
            .request(&Method::POST, "/whole")
            .header("content-length", 3);
        let (response, mut upload) = caller.begin(short, false).await;
        upload.send_data("abc".into(), false).unwrap();
        upload.send_trailers(http::HeaderMap::new()).unwrap();
        assert_eq!(http2_caller::whole(response).await.body, b"abc");
    });
    wait_until_idle(&nodes, owner);
}

#[test]
fn protocols_are_switched_and_each_half_ends_separately() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    for content in ["", "content "] {
        let mut caller = nodes.connect(other);
        let fields = format!(
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\
             Content-Length: {}\r\n\r\n{content}",
            content.len()
        );
        caller.send(nodes.request("GET /", &fields));
        switched(&mut caller, content);
    }
    wait_until_idle(&nodes, owner);
}

/// Uses a connection whose request to switch protocols was sent with this content.
fn switched(caller: &mut Caller, content: &str) {
    let head = caller.response_head(&Method::GET).unwrap();
    assert_eq!(head.status, 101);
    assert_eq!(head.headers["x-echo"], "twice");
    assert_eq!(caller.bytes(6).unwrap(), b"hello ");
    assert_eq!(caller.bytes(content.len()).unwrap(), content.as_bytes());
    for byte in *b"abc" {
        caller.send([byte]);
        assert_eq!(caller.bytes(2).unwrap(), [byte, byte]);
    }
    caller.stream.conn.send_close_notify();
    caller.stream.flush().unwrap();
    caller.stream.sock.shutdown(Shutdown::Write).unwrap();
    assert_eq!(caller.bytes(3).unwrap(), b"bye");
    assert!(caller.is_closed());
}

#[test]
fn a_caller_that_leaves_cancels_its_request_at_the_backend() {
    let (arrived, arrivals) = mpsc::channel();
    let (left, seen) = mpsc::channel();
    let (nodes, _agent, owner, other) = with_agent(&backend::start(move |mut peer| {
        while let Ok(head) = peer.request_head() {
            if head.target.path() == "/hang" {
                arrived.send(()).unwrap();
                if peer.body(head.framing).is_ok() {
                    left.send(peer.is_closed()).unwrap();
                }
                return;
            }
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    }));
    for rest in [
        "\r\n",
        "Content-Length: 3\r\n\r\nabc",
        "Content-Length: 1000000\r\n\r\nabc",
    ] {
        let mut caller = nodes.connect(other);
        caller.send(nodes.request("POST /hang", rest));
        arrivals.recv_timeout(SOON).unwrap();
        drop(caller);
        if !rest.contains("1000000") {
            assert!(
                seen.recv_timeout(SOON).unwrap(),
                "the backend sees the end of {rest:?}"
            );
        }
        wait_until_idle(&nodes, owner);
    }
}

#[test]
fn a_slow_reader_holds_up_the_backend() {
    const LENGTH: u64 = 400_000_000;
    let (nodes, _agent, owner, other) = with_agent(&backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            if head.target.path() == "/small" {
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
                continue;
            }
            peer.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {LENGTH}\r\n\r\n"
            ));
            let mut body = io::repeat(7).take(LENGTH);
            // Fails once the caller has gone.
            let _ = io::copy(&mut body, &mut peer.stream);
        }
    }));
    let mut caller = nodes.connect(other);
    caller.send(nodes.request("GET /", "\r\n"));
    let head = caller.response_head(&Method::GET).unwrap();
    assert_eq!(head.status, 200);
    // Held bytes stay within windows, however long the caller does not read. Each response on the
    // same tunnel gives the stalled one a turn to send a frame of 16 KiB: without windows, these
    // turns would send 16 MiB.
    eventually("the tunnel holds bytes", || {
        (nodes.tunnels(owner)[0].held_bytes > 0).then_some(())
    });
    let mut others = nodes.connect(other);
    for _ in 0..1024 {
        let response = others.ask(nodes.request("GET /small", "\r\n"));
        assert_eq!(response.body, b"ok");
        let held = nodes.tunnels(owner)[0].held_bytes;
        assert!(held <= 8 << 20, "{held}");
    }
    drop(caller);
    wait_until_idle(&nodes, owner);
}

#[test]
fn a_response_that_breaks_off_is_cut() {
    let (nodes, _agent, owner, other) = with_agent(&any_path());
    let mut caller = nodes.connect(other);
    caller.send(nodes.request("GET /cut", "\r\n"));
    assert!(caller.try_response(&Method::GET).is_err());
    wait_until_idle(&nodes, owner);
}

/// ALPN of links.
const LINK: &[u8] = b"gw-peer/2";

/// The first frame of a link to `node` with this certificate, or nothing if the node ends the
/// connection.
fn first_frame(nodes: &Nodes, node: usize, alpn: &[u8], identity: Option<Identity>) -> Vec<u8> {
    let mut stream = node_peer::connect(nodes, node, alpn, identity);
    let mut frame = vec![0; 12];
    match stream.read_exact(&mut frame) {
        Ok(()) => frame,
        Err(_) => Vec::new(),
    }
}

#[test]
fn only_nodes_can_open_links() {
    let nodes = Nodes::start(2);
    let of_node = || Some(node_peer::node_certificate(&nodes, 1));
    // HELLO, with 8,192 streams.
    let hello = [1, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0x20, 0];
    assert_eq!(first_frame(&nodes, 0, LINK, of_node()), hello);
    let agent = node_peer::agent_certificate(&nodes);
    let of_uri = |uri: &str| Some(certificate(&nodes, &format!("gw://{uri}")));
    let session = format!("{:032x}", Nodes::session(1));
    let no_slot = format!("eu1.gw.localhost/node/1024/{session}");
    let other_region = format!("eu2.gw.localhost/node/1/{session}");
    let ended = |node| Some(node_peer::ended_certificate(&nodes, node));
    let cases = [
        ("of an agent", LINK, Some(agent)),
        ("none", LINK, None),
        ("for a tunnel", b"gw-tunnel/2", of_node()),
        ("of a slot that no node has", LINK, of_uri(&no_slot)),
        (
            "with a short session",
            LINK,
            of_uri("eu1.gw.localhost/node/1/1"),
        ),
        ("of another region", LINK, of_uri(&other_region)),
        ("of an earlier process", LINK, ended(1)),
        ("of an unknown process", LINK, ended(2)),
    ];
    for (count, (name, alpn, identity)) in (1..).zip(cases) {
        let frame = first_frame(&nodes, 0, alpn, identity);
        assert_eq!(frame, b"", "certificate {name}");
        eventually("the refusal is counted", || {
            (nodes.turned_away(0, "node_unverified") == count).then_some(())
        });
    }
}

#[test]
fn a_node_has_no_tunnel() {
    let nodes = Nodes::start(2);
    let (owner, _) = nodes.owner_and_other();
    let identity = Some(node_peer::node_certificate(&nodes, 1));
    let mut peer = connect_to(&nodes.about(owner), HOST, &[b"gw-tunnel/2"], identity);
    let refused = peer.ask(gw_shared::tunnel::handshake::request(HOST, None));
    assert_eq!(refused.code(), "GW_AGENT_CERTIFICATE_REQUIRED");
}

/// Sends `requests` requests at once, 100 on each connection. Returns the responses.
async fn fetch_at_once(about: &About, requests: usize) -> Vec<http2_caller::Response> {
    let mut connections = Vec::new();
    for _ in 0..requests / 100 {
        connections.push(http2_caller::connect_to(about, &h2::client::Builder::new()).await);
    }
    let mut responses = Vec::new();
    for connection in &connections {
        for _ in 0..100 {
            let request = connection.request(&Method::GET, "/");
            let (response, _) = connection.begin(request, true).await;
            responses.push(response);
        }
    }
    let mut statuses = Vec::new();
    for response in responses {
        statuses.push(http2_caller::whole(response).await);
    }
    statuses
}

#[test]
fn requests_that_wait_for_a_tunnel_are_never_more_at_once_than_its_slots() {
    const REQUESTS: usize = 300;
    // Takes its time, so that requests released all at once would exceed the slots of the agent.
    let slow = backend::start(|mut peer| {
        while peer.request().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
            peer.send("HTTP/1.1 204 No Content\r\n\r\n");
        }
    });
    let nodes = &Nodes::start(2);
    let (owner, _) = nodes.owner_and_other();
    let (done, answered) = mpsc::channel::<()>();
    let statuses = std::thread::scope(|scope| {
        scope.spawn(move || {
            eventually("all requests wait", || {
                let waiting = nodes.metrics(owner).count("gw_crossing_requests");
                (waiting == REQUESTS as u64).then_some(())
            });
            let _agent = nodes.run_agent(owner, &slow);
            // Fails when the test has failed.
            let _ = answered.recv();
        });
        let statuses = on_a_reactor(fetch_at_once(&nodes.about(owner), REQUESTS));
        drop(done);
        statuses
    });
    // On a busy machine, the agent can take longer than the requests wait.
    let is_expected = |it: &http2_caller::Response| [204, 504].contains(&it.status.as_u16());
    let unexpected = statuses.iter().find(|it| !is_expected(it));
    assert!(unexpected.is_none(), "{unexpected:?}");
    assert_eq!(statuses.len(), REQUESTS);
    assert!(statuses.iter().any(|it| it.status == 204));
}

#[test]
fn a_node_with_another_session_opens_links_with_its_certificate() {
    let nodes = Nodes::start(2);
    let (owner, other) = nodes.owner_and_other();
    let _agent = nodes.run_agent(owner, &any_path());
    nodes.wait_for_tunnel(owner);
    let links = || nodes.metrics(other).count("gw_node_links");
    let send = || assert_eq!(ask(&nodes, other, "GET /none", "\r\n").status, 204);
    send();
    assert_eq!(links(), 1);
    nodes.renew(other, &[0, 1]);
    assert_eq!(
        links(),
        0,
        "the link shows the certificate of the earlier session"
    );
    send();
    assert_eq!(links(), 1);
}
