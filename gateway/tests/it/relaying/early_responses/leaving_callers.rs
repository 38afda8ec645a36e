//! Callers that leave after a whole response, or an upgraded connection: what they sent before
//! reaches the backend.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use bytes::Bytes;
use gw_shared::http2::stream;
use http::Method;

use super::{ACCEPTED, FIRST, pattern};
use crate::relaying::{SWITCHING, crossings, send_frames};
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::http2_frames::{self as frames, Frame, frame};
use crate::support::peers::{backend, http2_caller};
use crate::support::processes::nodes::Nodes;
use crate::support::request_log::record;
use crate::support::scene::Scene;
use crate::support::{eventually, turn};

/// More than the kernels of agent and backend hold.
const BODY: usize = 8 * 1024 * 1024;

/// Longer than the gateway takes to notice the end of a connection that it does not read from.
const NOTICED: Duration = Duration::from_millis(400);

/// The rest of a request head before a body of [`BODY`] bytes.
const ANNOUNCED: &str = "Content-Length: 8388608\r\n\r\n";

/// What a backend got of a request: the bytes of a whole body, or those after a switch of
/// protocols, and then the error.
type Uploaded = io::Result<Vec<u8>>;

/// A backend that answers 202, or switches protocols, before it reads the body, and then reads more
/// slowly than the caller sends. It pauses once the end of the caller's connection is in the kernel
/// of the gateway. After a switch, the query of the request is the number of bytes; for `/talks` it
/// sends all the time.
struct SlowBackend {
    url: String,
    bodies: Receiver<Uploaded>,
    /// Port of the caller's end of its connection.
    caller: Arc<AtomicU16>,
}

impl SlowBackend {
    fn start() -> Self {
        let (received, bodies) = mpsc::channel();
        let caller = Arc::new(AtomicU16::new(0));
        let port = Arc::clone(&caller);
        let url = backend::start(move |peer| {
            let mut peer = Peer::new(SlowStream {
                stream: peer.stream,
                caller: Arc::clone(&port),
                has_paused: false,
            });
            while let Ok(head) = peer.request_head() {
                peer.stream.has_paused = false;
                if head.upgrade.is_some() {
                    let length = head.target.query().unwrap().parse().unwrap();
                    return switched(peer, length, head.target.path() == "/talks", &received);
                }
                peer.send(ACCEPTED);
                let body = peer.body(head.framing).map(|(body, _)| body);
                // Without a whole body, the connection has ended.
                let has_ended = body.is_err();
                received.send(body).unwrap();
                if has_ended {
                    return;
                }
            }
        });
        Self {
            url,
            bodies,
            caller,
        }
    }

    fn expect(&self, caller: &TcpStream) {
        let port = caller.local_addr().unwrap().port();
        self.caller.store(port, Ordering::SeqCst);
    }

    fn body(&self) -> Uploaded {
        self.bodies.recv().unwrap()
    }

    /// Asserts that the backend has got these bytes.
    #[track_caller]
    fn assert_got(&self, bytes: &[u8]) {
        let is_same = self.body().unwrap() == bytes;
        assert!(is_same, "other bytes arrived");
    }
}

fn switched(mut peer: Peer<SlowStream>, length: usize, talks: bool, received: &Sender<Uploaded>) {
    peer.send(SWITCHING);
    if talks {
        let mut stream = peer.stream.stream.try_clone().unwrap();
        std::thread::spawn(move || while stream.write_all(&[b'.'; 1024]).is_ok() {});
    }
    received.send(peer.bytes(length)).unwrap();
    received.send(peer.bytes(1)).unwrap();
}

struct SlowStream {
    stream: TcpStream,
    caller: Arc<AtomicU16>,
    has_paused: bool,
}

impl Read for SlowStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let caller = self.caller.load(Ordering::SeqCst);
        if !self.has_paused && caller != 0 {
            self.has_paused = has_ended(caller);
            let pause = if self.has_paused {
                NOTICED
            } else {
                Duration::from_millis(1)
            };
            std::thread::sleep(pause);
        }
        let most = buffer.len().min(32 * 1024);
        self.stream.read(&mut buffer[..most])
    }
}

impl Write for SlowStream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Whether the other end of the connection from this port has received its end.
fn has_ended(port: u16) -> bool {
    const FIN_WAIT2: &str = "05";
    let local = format!("0100007F:{port:04X}");
    let sockets = fs::read_to_string("/proc/net/tcp").unwrap();
    sockets.lines().any(|line| {
        let mut columns = line.split_whitespace().skip(1);
        columns.next() == Some(&local) && columns.nth(1) == Some(FIN_WAIT2)
    })
}

/// How a caller ends its connection.
#[derive(Debug, Clone, Copy)]
enum End {
    /// With `close_notify`, then FIN.
    InOrder,
    /// It closes the socket.
    Closes,
}

/// Sends the head, reads the response, then sends the body and leaves. Returns the id of the
/// request.
fn upload_and_leave(
    mut caller: Caller,
    backend: &SlowBackend,
    head: &str,
    body: &[u8],
    end: End,
) -> String {
    backend.expect(&caller.stream.sock);
    let (first, rest) = body.split_at(FIRST.min(body.len()));
    caller.send(head);
    let response = caller.ask(first);
    assert_eq!(response.status, 202);
    caller.send(rest);
    if let End::InOrder = end {
        caller.stream.conn.send_close_notify();
        caller.stream.flush().unwrap();
        caller.stream.sock.shutdown(Shutdown::Write).unwrap();
        // The connection ends once the backend has the body.
        assert!(caller.is_closed());
    }
    response.header("x-gw-request-id").to_owned()
}

#[test]
fn a_whole_body_reaches_the_backend_on_and_across_workers() {
    let _turn = turn();
    let body = pattern(BODY);
    for workers in [1, 2] {
        let backend = SlowBackend::start();
        let scene = Scene::service()
            .agent_to(backend.url.clone())
            .workers(workers)
            .hand_over("never")
            .start();
        // The kernel may give any number of connections to the same worker.
        for _ in 0..32 {
            for end in [End::InOrder, End::Closes] {
                let head = scene.request("PUT /", ANNOUNCED);
                let id = upload_and_leave(scene.connect(), &backend, &head, &body, end);
                backend.assert_got(&body);
                let record = record(&scene.api(), &id);
                assert_eq!(record["bytes_taken"], BODY);
                assert_eq!(record["ended"], "complete");
            }
            if workers == 1 || crossings(&scene) > 0 {
                break;
            }
        }
        assert_eq!(workers > 1, crossings(&scene) > 0);
        scene.wait_until_slots_are_free();
    }
}

/// Sends bytes of another protocol, and leaves without `close_notify`. They arrive, and the backend
/// learns that more may be missing.
fn break_off(mut caller: Caller, backend: &SlowBackend, head: &str, body: &[u8]) {
    backend.expect(&caller.stream.sock);
    caller.send(head);
    assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
    caller.send(body);
    caller.stream.sock.shutdown(Shutdown::Write).unwrap();
    // With bytes that it has not read, the end of its socket is a reset.
    let port = caller.stream.sock.local_addr().unwrap().port();
    eventually("the end is at the gateway", || {
        has_ended(port).then_some(())
    });
    drop(caller);
    backend.assert_got(body);
    let ended = backend.body().unwrap_err().kind();
    // One that talks may have learned it by a write.
    assert!(ended == io::ErrorKind::ConnectionReset || head.contains("/talks"));
}

const UPGRADE: &str = "Connection: upgrade\r\nUpgrade: x\r\n\r\n";

#[test]
fn the_bytes_of_an_upgraded_connection_arrive_before_its_end() {
    let _turn = turn();
    let body = pattern(BODY);
    for hand_over in ["always", "never"] {
        let backend = SlowBackend::start();
        let scene = Scene::service()
            .agent_to(backend.url.clone())
            .hand_over(hand_over)
            .start();
        for target in ["/", "/talks", "/", "/talks"] {
            let head = scene.request(&format!("GET {target}?{BODY}"), UPGRADE);
            break_off(scene.connect(), &backend, &head, &body);
        }
        scene.wait_until_slots_are_free();
    }
}

#[test]
fn what_a_leaving_caller_sent_reaches_the_backend_across_nodes() {
    let _turn = turn();
    let backend = SlowBackend::start();
    let nodes = Nodes::start(2);
    let (owner, other) = nodes.owner_and_other();
    let _agent = nodes.run_agent(other, &backend.url);
    nodes.wait_for_tunnel(owner);
    let body = pattern(BODY);
    for end in [End::InOrder, End::Closes] {
        let head = nodes.request("PUT /", ANNOUNCED);
        upload_and_leave(nodes.connect(other), &backend, &head, &body, end);
        backend.assert_got(&body);
    }
    let head = nodes.request(&format!("GET /?{BODY}"), UPGRADE);
    break_off(nodes.connect(other), &backend, &head, &body);
    assert_eq!(nodes.total(other, "requests_crossing_nodes"), 3);
}

#[test]
fn tiny_chunks_reach_the_backend_at_their_pace() {
    let backend = SlowBackend::start();
    let scene = Scene::service().agent_to(backend.url.clone()).start();
    // Takes about a second.
    let body = pattern(28_000);
    let mut chunks: Vec<u8> = body
        .chunks(7)
        .flat_map(|chunk| [b"7\r\n", chunk, b"\r\n"].concat())
        .collect();
    chunks.extend(b"0\r\n\r\n");
    let head = scene.request("PUT /", "Transfer-Encoding: chunked\r\n\r\n");
    let id = upload_and_leave(scene.connect(), &backend, &head, &chunks, End::Closes);
    backend.assert_got(&body);
    assert_eq!(record(&scene.api(), &id)["ended"], "complete");
}

#[test]
fn an_incomplete_body_does_not_look_complete() {
    let _turn = turn();
    let backend = SlowBackend::start();
    let scene = Scene::service().agent_to(backend.url.clone()).start();
    let body = pattern(BODY - 1);
    for end in [End::InOrder, End::Closes] {
        let head = scene.request("PUT /", ANNOUNCED);
        let id = upload_and_leave(scene.connect(), &backend, &head, &body, end);
        backend.body().unwrap_err();
        assert_eq!(record(&scene.api(), &id)["ended"], "caller_gone");
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn a_whole_body_of_http2_reaches_the_backend() {
    let backend = SlowBackend::start();
    let scene = Scene::service().agent_to(backend.url.clone()).start();
    let body = Bytes::from(pattern(BODY));
    let sent = body.clone();
    on_a_reactor(async {
        let connection = http2_caller::connect(&scene).await;
        let request = connection.request(&Method::PUT, "/");
        let (response, mut upload) = connection.begin(request, false).await;
        assert_eq!(http2_caller::whole(response).await.status.as_u16(), 202);
        stream::send(&mut upload, sent, true).await.unwrap();
        // The end of the stream is sent before that of the connection.
        drop((connection.requests, upload));
        connection.ended.await.unwrap().unwrap();
    });
    backend.assert_got(&body);
    scene.wait_until_slots_are_free();
}

/// Sends a request of HTTP/2 and reads until the first frame of this kind and flags for its stream.
fn begin_http2(scene: &Scene, request: &[(&str, &str)], kind: u8, flags: u8) -> Caller {
    let key = ("x-gw-service-key", &*scene.about.service_key);
    let target = [(":scheme", "https"), (":authority", HOST), key];
    // Pseudo-header fields go first.
    let block = frames::block(&[request, &target].concat());
    let mut caller = send_frames(scene, &frames::headers(1, 0, &block));
    loop {
        let frame = Frame::read(&mut caller.stream).unwrap();
        if frame.kind == kind && frame.flags & flags == flags && frame.stream == 1 {
            return caller;
        }
    }
}

/// Ends the connection without `close_notify`, and waits until the gateway has closed it.
fn end_http2(mut caller: Caller) {
    caller.stream.sock.shutdown(Shutdown::Write).unwrap();
    while caller.bytes(1).is_ok() {}
}

/// Body that fits into the first window.
const IN_WINDOW: usize = 48_000;

/// DATA frames with a body; the last one has these flags.
fn data(body: &[u8], flags: u8) -> Vec<u8> {
    let (most, last) = body.split_at(body.len() - 16_000);
    let pieces = most.chunks(16_000);
    let mut data: Vec<u8> = pieces
        .flat_map(|piece| frame(frames::DATA, 0, 1, piece))
        .collect();
    data.extend(frame(frames::DATA, flags, 1, last));
    data
}

#[test]
fn data_of_http2_arrives_before_the_end_of_the_connection() {
    let backend = SlowBackend::start();
    let scene = Scene::service().agent_to(backend.url.clone()).start();
    let body = pattern(IN_WINDOW);
    let request = [(":method", "PUT"), (":path", "/")];
    for (flags, is_whole) in [(frames::END_STREAM, true), (0, false)] {
        let mut caller = begin_http2(&scene, &request, frames::DATA, frames::END_STREAM);
        caller.send(data(&body, flags));
        end_http2(caller);
        match backend.body() {
            Ok(received) => assert!(is_whole && received == body),
            Err(_) => assert!(!is_whole),
        }
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn bytes_of_an_http2_upgrade_arrive_before_the_end_of_the_connection() {
    let backend = SlowBackend::start();
    let scene = Scene::service().agent_to(backend.url.clone()).start();
    let body = pattern(IN_WINDOW);
    let target = format!("/?{IN_WINDOW}");
    let request = [
        (":method", "CONNECT"),
        (":protocol", "x"),
        (":path", &target),
    ];
    let mut caller = begin_http2(&scene, &request, frames::HEADERS, 0);
    caller.send(data(&body, 0));
    end_http2(caller);
    backend.assert_got(&body);
    let end = backend.body().unwrap_err().kind();
    assert_eq!(end, io::ErrorKind::ConnectionReset);
    scene.wait_until_slots_are_free();
}
