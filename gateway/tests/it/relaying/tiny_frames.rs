//! Bodies in one-byte pieces for a receiver that does not read: memory use, and other requests on
//! the same connection.

use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use gw_shared::tunnel::window::LEAST;
use http::Method;

use super::{OK, assert_answered, crossings};
use crate::support::agents::modified_agent::{self, enroll};
use crate::support::agents::tunnel_frames::{begun, data, trailers};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::Caller;
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::http2_frames::{
    ACK, DATA, END_STREAM, SETTINGS, frame, headers, preface, request,
};
use crate::support::scene::{Plan, Scene};

const HELD_BY_SOCKETS: &str = "the caller's socket buffers hold the whole response";
/// Size of a large piece.
const BLOCK: usize = 16 * 1024;

fn byte(number: usize) -> u8 {
    (number % 251) as u8
}

/// `/tiny` answers with a block for each message of `blocks`, then with `tiny` chunks of one byte.
/// Other requests are answered at once.
fn serve(mut peer: Peer<TcpStream>, blocks: &Mutex<Receiver<()>>, tiny: usize) {
    while let Ok(head) = peer.request_head() {
        if head.target.as_str() != "/tiny" {
            peer.send(OK);
            continue;
        }
        peer.stream.set_write_timeout(None).unwrap();
        peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        let blocks = blocks.lock().unwrap();
        while blocks.recv().is_ok() {
            peer.send([format!("{BLOCK:x}\r\n").as_bytes(), &[0; BLOCK], b"\r\n"].concat());
        }
        let piece = |number| [b'1', b'\r', b'\n', byte(number), b'\r', b'\n'];
        let mut pieces: Vec<u8> = (0..tiny).flat_map(piece).collect();
        pieces.extend(b"0\r\n\r\n");
        if peer.try_send(&pieces).is_err() {
            return;
        }
    }
}

/// Starts a scene whose backend [serves](serve) `tiny` pieces.
fn start(plan: impl FnOnce(Plan) -> Plan, tiny: usize) -> (Scene, Sender<()>) {
    let (more, blocks) = channel();
    let blocks = Mutex::new(blocks);
    let backend = backend::start(move |peer| serve(peer, &blocks, tiny));
    (plan(Scene::service().agent_to(backend)).start(), more)
}

/// Gives a caller a small socket receive buffer.
fn slow(caller: Caller) -> Caller {
    socket2::SockRef::from(&caller.stream.sock)
        .set_recv_buffer_size(4096)
        .unwrap();
    caller
}

/// Asserts that a stalled caller gets its complete response once it reads, and that its tunnel
/// serves other requests until then.
fn stalls_alone(scene: &Scene, more: Sender<()>, mut slow: Caller, tiny: usize) {
    let tunnel = || scene.tunnels().swap_remove(0);
    let generation = tunnel().generation;
    slow.send(scene.get("/tiny"));
    assert_eq!(slow.response_head(&Method::GET).unwrap().status, 200);
    // Blocks stay at the gateway once the socket buffers of the caller are full.
    let mut blocks = 0;
    let mut unchanged = 0;
    while unchanged < 20 {
        if tunnel().held_bytes >= BLOCK {
            unchanged += 1;
            std::thread::sleep(Duration::from_millis(5));
        } else {
            (blocks, unchanged) = (blocks + 1, 0);
            assert!(blocks < 10_000, "{HELD_BY_SOCKETS}");
            more.send(()).unwrap();
        }
    }
    drop(more);
    eventually("pieces wait at the gateway", || {
        let tunnel = tunnel();
        assert_eq!(tunnel.generation, generation);
        (tunnel.held_bytes >= tiny / 4 * 3).then_some(())
    });
    assert_answered(scene);
    let (body, _) = slow.body(gw_shared::http::Framing::Chunked).unwrap();
    assert_eq!(body.len(), blocks * BLOCK + tiny);
    let mut pieces = body[blocks * BLOCK..].iter().enumerate();
    let wrong = pieces.find(|(number, got)| **got != byte(*number));
    assert_eq!(wrong, None);
    assert_eq!(tunnel().generation, generation);
}

#[test]
fn a_stalled_caller_does_not_end_the_tunnel() {
    // Three quarters of it take far more memory than their bytes, unless pieces are merged.
    const TINY: usize = 400_000;
    let (scene, more) = start(|plan| plan.workers(1), TINY);
    stalls_alone(&scene, more, slow(scene.connect()), TINY);
}

#[test]
fn a_stalled_caller_of_another_worker_does_not_end_the_tunnel() {
    const TINY: usize = 120_000;
    let (scene, more) = start(|plan| plan.hand_over("never"), TINY);
    for _ in 0..100 {
        let before = crossings(&scene);
        let mut caller = slow(scene.connect());
        assert_eq!(caller.ask(scene.get("/")).body, b"ok");
        if crossings(&scene) > before {
            return stalls_alone(&scene, more, caller, TINY);
        }
    }
    panic!("all connections reach the same worker");
}

#[test]
fn pieces_and_trailers_keep_their_order() {
    let scene = Scene::service().agent().workers(1).start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.tunnel(&scene);
    let mut slow = slow(enrolled.caller(&scene));
    slow.send(enrolled.get());
    let stream = tunnel.request();
    tunnel.0.send(begun(stream));
    assert_eq!(slow.response_head(&Method::GET).unwrap().status, 200);
    // Alternates small and large pieces until the socket buffers of the caller are full. The window
    // still has room.
    let mut sent = Vec::new();
    let waits = || enrolled.report(&scene).unwrap().held_bytes >= 100_000;
    while !waits() {
        assert!(sent.len() < 100_000_000, "{HELD_BY_SOCKETS}");
        let piece: Vec<u8> = (sent.len()..sent.len() + 10_000).map(byte).collect();
        let (small, large) = piece.split_at(100);
        let frames = [data(stream, small), data(stream, large)];
        tunnel.0.send(frames.concat());
        sent.extend(piece);
        tunnel.until_handled();
    }
    tunnel.0.send(trailers(stream, &[("grpc-status", "0")]));
    let (read, trailers) = slow.body(gw_shared::http::Framing::Chunked).unwrap();
    assert!(read == sent, "{} of {} bytes", read.len(), sent.len());
    assert_eq!(trailers["grpc-status"], "0");
}

#[test]
fn an_unread_request_body_does_not_end_the_callers_connection() {
    // More frames than h2's default limit beyond the window of a caller's connection.
    const TINY: usize = 20_000;
    // Uses up the credit that an agent grants to each request.
    const FIRST: usize = 16 * 1024;
    const FRAMES: usize = LEAST as usize / FIRST;
    let scene = Scene::service().agent().workers(1).start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.tunnel(&scene);
    let mut caller = Peer::new(enrolled.http2_caller(&scene));
    let request = |stream, flags, method| {
        let block = request(method, modified_agent::HOST, "/", Some(enrolled.key()));
        headers(stream, flags, &block)
    };
    caller.send([preface(&[]), request(1, 0, "POST")].concat());
    let first = tunnel.request();
    // The gateway's window is in force from the acknowledgement of its SETTINGS on.
    caller.send(frame(SETTINGS, ACK, 0, &[]));
    caller.send(frame(DATA, 0, 1, &[0; FIRST]).repeat(FRAMES));
    caller.send(frame(DATA, 0, 1, b"x").repeat(TINY));
    caller.send(request(3, END_STREAM, "GET"));
    assert_ne!(tunnel.request(), first);
}
