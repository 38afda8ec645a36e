//! Connections that break during a request, on the caller's or the backend's side.

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use gw_shared::http::Framing;
use http::Method;
use tokio::io::AsyncWriteExt;

use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::http1_peer::Peer;
use crate::support::peers::http2_frames::{self, END_STREAM};
use crate::support::peers::{backend, http2_caller};
use crate::support::scene::Scene;
use crate::support::{SOON, eventually};

const INCOMPLETE_CHUNKED: &str = "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
const INCOMPLETE_LENGTH: &str = "Content-Length: 100\r\n\r\nhello";

/// A scene with a backend that sends the beginning of a response. It closes the connection once
/// the caller has read the head: before that, the gateway could still send an error response.
fn with_incomplete(response: &'static str) -> (Scene, Sender<()>) {
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let backend = backend::start(move |mut peer| {
        drop(peer.request());
        peer.send(format!("HTTP/1.1 200 OK\r\n{response}"));
        let _ = held.lock().unwrap().recv_timeout(SOON);
    });
    (Scene::service().agent_to(backend).start(), release)
}

/// How the connection ends before another byte.
fn end_of(caller: &mut Caller) -> ErrorKind {
    caller.bytes(1).unwrap_err().kind()
}

#[test]
fn an_incomplete_response_is_never_relayed_as_complete() {
    for response in [INCOMPLETE_CHUNKED, INCOMPLETE_LENGTH] {
        let (scene, release) = with_incomplete(response);
        let mut caller = scene.connect();
        caller.send(scene.get("/"));
        let begun = caller.response_head(&Method::GET).unwrap();
        assert_eq!(begun.status, 200);
        release.send(()).unwrap();
        let cut = caller.body(begun.framing).unwrap_err().kind();
        assert_eq!(cut, ErrorKind::ConnectionReset, "{response}");
        scene.wait_until_slots_are_free();
    }
}

#[test]
fn an_incomplete_response_to_http_1_0_ends_with_a_reset() {
    let (scene, release) = with_incomplete(INCOMPLETE_CHUNKED);
    let mut caller = connect_to(&scene.about, HOST, &[b"http/1.0"], None);
    caller.send(scene.get("/").replace("HTTP/1.1", "HTTP/1.0"));
    assert_eq!(caller.stream.conn.alpn_protocol(), Some(&b"http/1.0"[..]));
    let begun = caller.response_head(&Method::GET).unwrap();
    assert_eq!(begun.status, 200);
    // The body is delimited by the end of the connection.
    assert_eq!(begun.framing, Framing::UntilClose);
    assert_eq!(caller.bytes(5).unwrap(), b"hello");
    release.send(()).unwrap();
    assert_eq!(end_of(&mut caller), ErrorKind::ConnectionReset);
}

/// A backend that reports the head of a request and the end of its connection, and never answers.
fn observing_backend() -> (String, Receiver<&'static str>) {
    let (sender, receiver) = mpsc::channel();
    let url = backend::start(move |mut peer| {
        peer.request_head().unwrap();
        sender.send("head").unwrap();
        while peer.bytes(1).is_ok() {}
        sender.send("end").unwrap();
    });
    (url, receiver)
}

/// When a caller leaves, and what it has sent behind the first fields of a POST.
const UNANSWERED: [(&str, &str); 2] = [
    ("behind a whole request", "\r\n"),
    ("in an upload", "Content-Length: 10\r\n\r\nabc"),
];

#[test]
fn a_disconnected_caller_ends_the_backend_request_at_once() {
    let (backend, backend_saw) = observing_backend();
    let scene = Scene::service().agent_to(backend).start();
    for (when, rest) in UNANSWERED {
        let mut caller = scene.connect();
        caller.send(scene.request("POST /", rest));
        assert_eq!(backend_saw.recv_timeout(SOON), Ok("head"), "{when}");
        drop(caller);
        assert_eq!(backend_saw.recv_timeout(SOON), Ok("end"), "{when}");
        scene.wait_until_slots_are_free();
    }
}

const CLOSE_NOTIFY: &str = "close_notify";
const FIN: &str = "FIN";

/// How a caller ends its sending direction: by close_notify (RFC 8446 §6.1), by FIN, or by both.
const HALF_CLOSES: [&[&str]; 3] = [&[CLOSE_NOTIFY], &[FIN], &[CLOSE_NOTIFY, FIN]];

/// Ends the caller's sending direction only.
fn end_sending(caller: &mut Caller, by: &[&str]) {
    if by.contains(&CLOSE_NOTIFY) {
        caller.stream.conn.send_close_notify();
        caller.stream.flush().unwrap();
    }
    if by.contains(&FIN) {
        // Fails if the gateway has reset the connection because of the alert.
        let _ = caller.stream.sock.shutdown(Shutdown::Write);
    }
}

#[test]
fn a_half_closed_connection_cancels_its_request_like_a_closed_one() {
    let (backend, backend_saw) = observing_backend();
    let scene = Scene::service().agent_to(backend).start();
    for by in HALF_CLOSES {
        for (when, rest) in UNANSWERED {
            let mut caller = scene.connect();
            caller.send(scene.request("POST /", rest));
            assert_eq!(backend_saw.recv_timeout(SOON), Ok("head"));
            end_sending(&mut caller, by);
            let seen = backend_saw.recv_timeout(SOON);
            assert_eq!(seen, Ok("end"), "{by:?} {when}");
            let end = end_of(&mut caller);
            assert_eq!(end, ErrorKind::ConnectionReset, "{by:?} {when}");
            scene.wait_until_slots_are_free();
        }
    }
}

#[test]
fn the_end_of_an_http2_connection_cancels_its_requests() {
    let (backend, backend_saw) = observing_backend();
    let scene = Scene::service().agent_to(backend).start();
    http2_caller::on_a_reactor(async {
        let mut stream = http2_caller::tls(&scene.about).await;
        let key = scene.about.service_key.as_str();
        let head = [
            (":method", "GET"),
            (":scheme", "https"),
            (":authority", HOST),
            (":path", "/"),
            ("x-gw-service-key", key),
        ];
        let head = http2_frames::headers(1, END_STREAM, &http2_frames::block(&head));
        let sent = [http2_frames::preface(&[]), head].concat();
        AsyncWriteExt::write_all(&mut stream, &sent).await.unwrap();
        AsyncWriteExt::flush(&mut stream).await.unwrap();
        assert_eq!(backend_saw.recv_timeout(SOON), Ok("head"));
        // Ends this direction only.
        stream.close().await.unwrap();
        assert_eq!(backend_saw.recv_timeout(SOON), Ok("end"));
    });
    scene.wait_until_slots_are_free();
}

#[test]
fn a_half_closed_connection_cuts_its_response() {
    let (sender, ended) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        peer.request().unwrap();
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello");
        sender.send(peer.is_closed()).unwrap();
    });
    let scene = Scene::service().agent_to(backend).start();
    for by in HALF_CLOSES {
        let mut caller = scene.connect();
        caller.send(scene.get("/"));
        assert_eq!(caller.response_head(&Method::GET).unwrap().status, 200);
        assert_eq!(caller.bytes(5).unwrap(), b"hello");
        end_sending(&mut caller, by);
        assert_eq!(ended.recv_timeout(SOON), Ok(true), "{by:?}");
        let end = end_of(&mut caller);
        assert_eq!(end, ErrorKind::ConnectionReset, "{by:?}");
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn a_half_closed_connection_ends_orderly_behind_its_whole_response() {
    let hello = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
    let backend = backend::answering(hello);
    let scene = Scene::service().agent_to(backend).start();
    for by in HALF_CLOSES {
        let mut caller = scene.connect();
        assert_eq!(caller.ask(scene.get("/")).body, b"hello");
        end_sending(&mut caller, by);
        let end = end_of(&mut caller);
        assert_eq!(end, ErrorKind::UnexpectedEof, "{by:?}");
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn an_upload_that_nothing_reads_holds_its_slot_until_the_caller_leaves() {
    const LENGTH: usize = 100_000_000;
    let kept = Mutex::new(Vec::new());
    let backend = backend::start(move |mut peer| {
        peer.request_head().unwrap();
        peer.send("HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno!");
        // Keeps the connection open without reading, so the upload stalls.
        kept.lock().unwrap().push(peer);
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    let length = format!("Content-Length: {LENGTH}\r\n\r\n");
    let response = caller.ask(scene.request("POST /", &length));
    assert_eq!(response.status, 413);
    assert_eq!(response.body, b"no!");
    let sent = fill(&mut caller);
    assert!(sent < LENGTH, "the buffers hold less than the upload");
    eventually("a slot in use", || {
        (scene.tunnels()[0].slots_in_use == Some(1)).then_some(())
    });
    // A reset: the end of a direction would wait behind the bytes that nothing reads.
    socket2::SockRef::from(&caller.stream.sock)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(caller);
    scene.wait_until_slots_are_free();
}

/// Fills all windows and buffers up to the backend, and returns the number of bytes. They are full
/// when nothing more can be written for a while.
fn fill(caller: &mut Caller) -> usize {
    caller.stream.sock.set_nonblocking(true).unwrap();
    let piece = vec![b'x'; 1 << 16];
    let mut sent = 0;
    let mut blocked = 0;
    while blocked < 50 {
        match caller.stream.write(&piece) {
            Ok(written) => {
                sent += written;
                blocked = 0;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                blocked += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    sent
}

#[test]
fn a_request_on_a_closed_pooled_connection_is_retried_if_safe() {
    // Answers one request per connection and closes without `Connection: close`.
    let backend = backend::start(|mut peer| {
        drop(peer.request());
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    });
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    for _ in 0..200 {
        assert_eq!(caller.ask(scene.get("/")).status, 200);
    }
}

/// A scene with a backend that answers the first request of each connection, reads the second and
/// closes, and the targets of its requests.
fn answering_once() -> (Scene, Receiver<String>) {
    let (seen, requests) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        let mut first = true;
        while let Ok((head, _, _)) = peer.request() {
            seen.send(head.target.to_string()).unwrap();
            if !std::mem::take(&mut first) {
                return;
            }
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    (Scene::service().agent_to(backend).start(), requests)
}

#[test]
fn a_request_that_a_backend_received_is_not_repeated_unless_it_is_safe() {
    let (scene, requests) = answering_once();
    let mut caller = scene.connect();
    let mut sent = Vec::new();
    // On a busy machine the agent opens a new connection, as the other one has been idle for over a
    // second.
    let broken = (0..20).find(|number| {
        let target = format!("/{number}");
        let response = caller.ask(scene.request(&format!("DELETE {target}"), "\r\n"));
        sent.push(target);
        response.status != 200 && response.code() == "GW_BACKEND_RESET"
    });
    assert!(broken.is_some());
    scene.wait_until_slots_are_free();
    assert_eq!(requests.try_iter().collect::<Vec<_>>(), sent);
}

#[test]
fn a_request_that_a_backend_received_is_repeated_once_if_safe() {
    let (scene, requests) = answering_once();
    let mut caller = scene.connect();
    for _ in 0..2 {
        assert_eq!(caller.ask(scene.get("/safe")).status, 200);
    }
    scene.wait_until_slots_are_free();
    // Three with the repetition. Two if the machine was so busy that the connection was idle for
    // over four seconds.
    let seen = requests.try_iter().count();
    assert!((2..=3).contains(&seen), "{seen}");
}

#[test]
fn a_disconnect_is_noticed_behind_pipelined_requests() {
    let (backend, backend_saw) = observing_backend();
    let scene = Scene::service().agent_to(backend).start();
    let mut caller = scene.connect();
    // More than the gateway reads ahead, less than its socket buffer holds.
    caller.send(scene.get("/").repeat(600));
    assert_eq!(backend_saw.recv_timeout(SOON), Ok("head"));
    drop(caller);
    assert_eq!(backend_saw.recv_timeout(SOON), Ok("end"));
    scene.wait_until_slots_are_free();
}

/// Responses that break after their head.
const BREAKS: [&str; 4] = ["/bad-chunk", "/bad-chunk-later", "/short", "/reset"];

/// A scene with a backend that serves [`BREAKS`]. Connections are not handed over, so some requests
/// cross workers and others do not.
fn breaking() -> Scene {
    let backend = backend::start(|mut peer| {
        let Ok((head, _, _)) = peer.request() else {
            return;
        };
        const OK: &str = "HTTP/1.1 200 OK\r\n";
        match head.target.path() {
            "/bad-chunk" => peer.send(format!("{OK}Transfer-Encoding: chunked\r\n\r\nzz\r\n")),
            "/bad-chunk-later" => {
                peer.send(format!("{OK}Transfer-Encoding: chunked\r\n\r\n"));
                peer.send("zz\r\n");
            }
            "/short" => peer.send(format!("{OK}Content-Length: 100\r\n\r\nhello")),
            _ => {
                peer.send(format!("{OK}Content-Length: 100\r\n\r\n"));
                reset(&peer);
            }
        }
    });
    Scene::service()
        .agent_to(backend)
        .hand_over("never")
        .start()
}

/// Makes the connection end with a TCP reset when it is dropped.
fn reset(peer: &Peer<TcpStream>) {
    rustix::net::sockopt::set_socket_linger(&peer.stream, Some(Duration::ZERO)).unwrap();
}

/// Checks the error response for a response that broke before any part was relayed.
fn is_refusal_of(path: &str, code: &str) {
    let expected = if path.starts_with("/bad-chunk") {
        "GW_BACKEND_INVALID_RESPONSE"
    } else {
        "GW_BACKEND_RESET"
    };
    // If the break comes after a part of the body, that part was relayed.
    assert!(path != "/short" && code == expected, "{path}: {code}");
}

#[test]
fn over_http1_a_response_that_breaks_after_its_head_is_an_error_or_is_cut() {
    let scene = breaking();
    for _ in 0..100 {
        for path in BREAKS {
            let mut caller = scene.connect();
            caller.send(scene.get(path));
            let head = caller
                .response_head(&Method::GET)
                .unwrap_or_else(|error| panic!("{path}: no head: {error}"));
            assert!(head.headers.contains("x-gw-request-id"));
            if head.status == 502 {
                is_refusal_of(path, &caller.rest(head).unwrap().code());
                continue;
            }
            let status = head.status;
            assert!(status == 200 && path != "/bad-chunk", "{path}: {status}");
            if path == "/short" {
                assert_eq!(caller.bytes(5).unwrap(), b"hello");
            }
            let end = end_of(&mut caller);
            assert_eq!(end, ErrorKind::ConnectionReset, "{path}");
        }
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn over_http2_a_response_that_breaks_after_its_head_is_an_error_or_is_cut() {
    let scene = breaking();
    for _ in 0..10 {
        http2_caller::on_a_reactor(async {
            let connection = http2_caller::connect(&scene).await;
            for path in BREAKS.repeat(10) {
                let (response, _) = connection
                    .begin(connection.request(&Method::GET, path), true)
                    .await;
                let response = response
                    .await
                    .unwrap_or_else(|error| panic!("{path}: no head: {error}"));
                assert!(response.headers().contains_key("x-gw-request-id"));
                let (head, mut stream) = response.into_parts();
                let mut body = Vec::new();
                let end = loop {
                    match std::future::poll_fn(|cx| stream.poll_data(cx)).await {
                        Some(Ok(data)) => body.extend_from_slice(&data),
                        Some(Err(error)) => break Some(error),
                        None => break None,
                    }
                };
                if head.status == 502 {
                    assert!(end.is_none(), "{path}: {end:?}");
                    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
                    is_refusal_of(path, body["error"]["code"].as_str().unwrap());
                    continue;
                }
                let status = head.status;
                assert!(status == 200 && path != "/bad-chunk", "{path}: {status}");
                let expected: &[u8] = if path == "/short" { b"hello" } else { b"" };
                assert_eq!(body, expected, "{path}");
                let reason = end.and_then(|error| error.reason());
                assert_eq!(reason, Some(h2::Reason::INTERNAL_ERROR), "{path}");
            }
        });
    }
    scene.wait_until_slots_are_free();
}
