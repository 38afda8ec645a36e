//! Responses that are complete before their requests: the rest of the request body goes on to the
//! backend.

mod leaving_callers;

use std::io::ErrorKind;
use std::sync::mpsc::{self, Receiver};

use bytes::Bytes;
use gw_shared::http2::stream;
use http::Method;
use serde_json::json;

use super::crossings;
use crate::support::peers::caller::Caller;
use crate::support::peers::http2_caller::{on_a_reactor, whole};
use crate::support::peers::{backend, http2_caller};
use crate::support::processes::nodes::Nodes;
use crate::support::request_log::{self, assert_fields};
use crate::support::scene::Scene;
use crate::support::turn;

/// More than all windows and socket buffers between caller and backend hold together.
const BODY: usize = 24 * 1024 * 1024;
/// Sent before the response is read.
const FIRST: usize = 300_000;

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

/// The response before the body.
const ACCEPTED: &str = "HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok";

/// A backend that answers 202 before it reads the body, and reports each body.
fn accepting() -> (String, Receiver<Vec<u8>>) {
    let (received, bodies) = mpsc::channel();
    let url = backend::start(move |mut peer| {
        while let Ok(head) = peer.request_head() {
            peer.send(ACCEPTED);
            let Ok((body, _)) = peer.body(head.framing) else {
                return;
            };
            received.send(body).unwrap();
        }
    });
    (url, bodies)
}

/// Asserts that the backend has got this body.
#[track_caller]
fn assert_arrived(bodies: &Receiver<Vec<u8>>, body: &[u8]) {
    let is_same = bodies.recv().unwrap() == body;
    assert!(is_same, "the backend got another body");
}

/// Sends a request whose response arrives before the rest of its body. Returns the id of the
/// request.
fn upload_through(
    caller: &mut Caller,
    head: &str,
    is_chunked: bool,
    bodies: &Receiver<Vec<u8>>,
) -> String {
    let body = pattern(BODY);
    let send = |caller: &mut Caller, data: &[u8]| {
        if is_chunked {
            caller.send(format!("{:x}\r\n", data.len()));
        }
        caller.send(data);
        if is_chunked {
            caller.send("\r\n");
        }
    };
    caller.send(head);
    send(caller, &body[..FIRST]);
    let response = caller.response();
    assert_eq!(response.status, 202);
    assert_eq!(response.body, b"ok");
    assert_eq!(response.header("connection"), "");
    for piece in body[FIRST..].chunks(1 << 20) {
        send(caller, piece);
    }
    if is_chunked {
        caller.send("0\r\n\r\n");
    }
    assert_arrived(bodies, &body);
    response.header("x-gw-request-id").to_owned()
}

fn framing(is_chunked: bool) -> String {
    if is_chunked {
        "Transfer-Encoding: chunked\r\n\r\n".to_owned()
    } else {
        format!("Content-Length: {BODY}\r\n\r\n")
    }
}

/// A connection whose requests cross workers, or do not. The kernel may give any number of
/// connections to the same worker.
fn caller_that(scene: &Scene, crosses: bool, bodies: &Receiver<Vec<u8>>) -> Caller {
    for _ in 0..100 {
        let before = crossings(scene);
        let mut caller = scene.connect();
        assert_eq!(caller.ask(scene.get("/")).status, 202);
        assert_arrived(bodies, b"");
        if (crossings(scene) > before) == crosses {
            return caller;
        }
    }
    panic!("all connections reach the same worker");
}

#[test]
fn the_rest_of_a_body_reaches_the_backend_on_and_across_workers() {
    /// Framings of the uploads on one connection.
    const ARE_CHUNKED: [bool; 4] = [false, false, true, true];
    let _turn = turn();
    for (workers, crosses) in [(1, false), (2, false), (2, true)] {
        let (url, bodies) = accepting();
        let scene = Scene::service()
            .agent_to(url)
            .workers(workers)
            .hand_over("never")
            .start();
        let mut caller = caller_that(&scene, crosses, &bodies);
        let before = crossings(&scene);
        for is_chunked in ARE_CHUNKED {
            let head = scene.request("POST /", &framing(is_chunked));
            upload_through(&mut caller, &head, is_chunked, &bodies);
        }
        let crossed = if crosses { ARE_CHUNKED.len() } else { 0 };
        assert_eq!(crossings(&scene) - before, crossed as u64);
        scene.wait_until_slots_are_free();
    }
}

#[test]
fn the_rest_of_a_body_reaches_the_backend_across_nodes() {
    let _turn = turn();
    let (url, bodies) = accepting();
    let nodes = Nodes::start(2);
    let (owner, other) = nodes.owner_and_other();
    let _agent = nodes.run_agent(other, &url);
    nodes.wait_for_tunnel(owner);
    let mut caller = nodes.connect(other);
    for is_chunked in [false, true] {
        let head = nodes.request("POST /", &framing(is_chunked));
        upload_through(&mut caller, &head, is_chunked, &bodies);
    }
    assert_eq!(nodes.total(other, "requests_crossing_nodes"), 2);
}

#[test]
fn the_rest_of_a_body_reaches_the_backend_from_an_http2_caller() {
    let _turn = turn();
    let (url, bodies) = accepting();
    let scene = Scene::service().agent_to(url).start();
    on_a_reactor(async {
        let connection = http2_caller::connect(&scene).await;
        let post = connection.request(&Method::POST, "/");
        let (response, mut upload) = connection.begin(post, false).await;
        let body = Bytes::from(pattern(BODY));
        let sent = stream::send(&mut upload, body.slice(..FIRST), false).await;
        sent.unwrap();
        let response = whole(response).await;
        assert_eq!(response.status, 202);
        assert_eq!(response.body, b"ok");
        let sent = stream::send(&mut upload, body.slice(FIRST..), true).await;
        sent.unwrap();
        // The receiver of the backend's thread blocks this one, so the frames have to be sent
        // first.
        while scene.tunnels()[0].in_flight > 0 {
            gw_shared::runtime::yield_now().await;
        }
        assert_arrived(&bodies, &body);
    });
}

#[test]
fn the_request_log_shows_what_the_backend_took() {
    let (url, bodies) = accepting();
    let scene = Scene::service().agent_to(url).start();
    let mut caller = scene.connect();
    let head = scene.request("POST /", &framing(false));
    let id = upload_through(&mut caller, &head, false, &bodies);
    let record = request_log::record(&scene.api(), &id);
    let expected = json!({ "bytes_in": BODY, "bytes_taken": BODY, "ended": "complete" });
    assert_fields(&record, &expected);
}

#[test]
fn a_tunnel_that_is_lost_during_the_rest_of_a_body_resets_the_caller() {
    let (url, bodies) = accepting();
    let scene = Scene::service().agent_to(url).start();
    let mut caller = scene.connect();
    let response = caller.ask(scene.request("POST /", &framing(false)));
    assert_eq!(response.status, 202);
    let agent = &scene.tunnels()[0].agent_id;
    scene.api().revoke_agent("demo", agent);
    let end = caller.bytes(1).unwrap_err().kind();
    assert_eq!(end, ErrorKind::ConnectionReset);
    let part = bodies.try_recv();
    assert!(part.is_err(), "a part of a body looked complete");
}

#[test]
fn a_caller_that_leaves_after_the_response_cancels_the_request() {
    let (ended, at_backend) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        let head = peer.request_head().unwrap();
        peer.send(ACCEPTED);
        ended.send(peer.body(head.framing)).unwrap();
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", &framing(false)));
    caller.send(pattern(FIRST));
    assert_eq!(caller.response().status, 202);
    drop(caller);
    let end = at_backend.recv().unwrap().unwrap_err().kind();
    assert_eq!(end, ErrorKind::ConnectionReset);
    scene.wait_until_slots_are_free();
}
