//! Connections that break during a request, on the caller's or the backend's side.

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use gw_shared::http::Framing;
use http::Method;
use tokio::io::AsyncWriteExt;

use crate::support::peers::caller::{Caller, HOST, connect_to};
use crate::support::peers::http1_peer::{Peer, Response};
use crate::support::peers::http2_frames::{
    END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame,
};
use crate::support::peers::{backend, http2_caller, http2_frames};
use crate::support::scene::Scene;
use crate::support::{SOON, eventually};

#[test]
fn an_incomplete_response_is_never_relayed_as_complete() {
    for head in [
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "Content-Length: 100\r\n\r\nhello",
    ] {
        let (release, held) = mpsc::channel::<()>();
        let held = Mutex::new(held);
        let scene = Scene::service()
            .agent_to(backend::start(move |mut peer| {
                drop(peer.request());
                peer.send(format!("HTTP/1.1 200 OK\r\n{head}"));
                // Waits until the caller has read the head; before that, the gateway could still
                // send an error response.
                let _ = held.lock().unwrap().recv_timeout(SOON);
            }))
            .start();
        let mut caller = scene.connect();
        caller.send(scene.get("/"));
        let begun = caller.response_head(&Method::GET).unwrap();
        assert_eq!(begun.status, 200);
        release.send(()).unwrap();
        assert_eq!(
            caller.body(begun.framing).unwrap_err().kind(),
            ErrorKind::ConnectionReset,
            "{head}"
        );
        scene.wait_until_slots_are_free();
    }
}

#[test]
fn an_incomplete_response_to_http_1_0_ends_with_a_reset() {
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            drop(peer.request());
            peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n");
            let _ = held.lock().unwrap().recv_timeout(SOON);
        }))
        .start();
    let mut caller = connect_to(&scene.about, HOST, &[b"http/1.0"], None);
    caller.send(scene.get("/").replace("HTTP/1.1", "HTTP/1.0"));
    assert_eq!(caller.stream.conn.alpn_protocol(), Some(&b"http/1.0"[..]));
    let begun = caller.response_head(&Method::GET).unwrap();
    // The body is delimited by the end of the connection.
    assert_eq!(
        (begun.status.as_u16(), begun.framing),
        (200, Framing::UntilClose)
    );
    assert_eq!(caller.bytes(5).unwrap(), b"hello");
    release.send(()).unwrap();
    assert_eq!(
        caller.bytes(1).unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
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

#[test]
fn a_disconnected_caller_ends_the_backend_request_at_once() {
    let (backend, backend_saw) = observing_backend();
    let scene = Scene::service().agent_to(backend).start();
    // The caller leaves while it waits for a response, and during an upload.
    for rest in [
        "\r\n".to_owned(),
        "Content-Length: 10\r\n\r\nabc".to_owned(),
    ] {
        let mut caller = scene.connect();
        caller.send(scene.request("POST /", &rest));
        assert_eq!(backend_saw.recv_timeout(SOON), Ok("head"));
        drop(caller);
        assert_eq!(backend_saw.recv_timeout(SOON), Ok("end"));
        scene.wait_until_slots_are_free();
    }
}

/// Ends the caller's sending direction only: by close_notify (RFC 8446 §6.1), by FIN, or by both.
fn end_sending(caller: &mut Caller, close_notify: bool, fin: bool) {
    if close_notify {
        caller.stream.conn.send_close_notify();
        caller.stream.flush().unwrap();
    }
    if fin {
        // Fails if the gateway has reset the connection because of the alert.
        let _ = caller.stream.sock.shutdown(Shutdown::Write);
    }
}

const HALF_CLOSES: [(bool, bool); 3] = [(true, false), (false, true), (true, true)];

#[test]
fn a_half_closed_connection_cancels_its_request_like_a_closed_one() {
    let (backend, backend_saw) = observing_backend();
    let scene = Scene::service().agent_to(backend).start();
    for (close_notify, fin) in HALF_CLOSES {
        // Behind a whole request, and in an upload.
        for rest in ["\r\n", "Content-Length: 10\r\n\r\nabc"] {
            let mut caller = scene.connect();
            caller.send(scene.request("POST /", rest));
            assert_eq!(backend_saw.recv_timeout(SOON), Ok("head"));
            end_sending(&mut caller, close_notify, fin);
            assert_eq!(
                backend_saw.recv_timeout(SOON),
                Ok("end"),
                "{close_notify} {fin} {rest:?}"
            );
            let gone = caller.bytes(1).unwrap_err().kind();
            assert_eq!(
                gone,
                ErrorKind::ConnectionReset,
                "{close_notify} {fin} {rest:?}"
            );
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
        let head = frame(
            HEADERS,
            END_HEADERS | END_STREAM,
            1,
            &http2_frames::block(&head),
        );
        let sent = [PREFACE, &frame(SETTINGS, 0, 0, &[]), &head].concat();
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
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, ..)) = peer.request() {
                if head.target == "/whole" {
                    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
                    continue;
                }
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello");
                sender.send(peer.is_closed()).unwrap();
            }
        }))
        .start();
    for (close_notify, fin) in HALF_CLOSES {
        let mut caller = scene.connect();
        caller.send(scene.get("/cut"));
        assert_eq!(caller.response_head(&Method::GET).unwrap().status, 200);
        assert_eq!(caller.bytes(5).unwrap(), b"hello");
        end_sending(&mut caller, close_notify, fin);
        assert_eq!(ended.recv_timeout(SOON), Ok(true), "{close_notify} {fin}");
        assert_eq!(
            caller.bytes(1).unwrap_err().kind(),
            ErrorKind::ConnectionReset,
            "{close_notify} {fin}"
        );
        // Behind the whole response, the end is orderly.
        let mut caller = scene.connect();
        caller.send(scene.get("/whole"));
        assert_eq!(caller.response().body, b"hello");
        end_sending(&mut caller, close_notify, fin);
        assert_eq!(
            caller.bytes(1).unwrap_err().kind(),
            ErrorKind::UnexpectedEof,
            "{close_notify} {fin}"
        );
    }
    scene.wait_until_slots_are_free();
}

#[test]
fn an_upload_that_nothing_reads_holds_its_slot_until_the_caller_leaves() {
    let kept = Mutex::new(Vec::new());
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            peer.request_head().unwrap();
            peer.send(
                "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno!",
            );
            // Keeps the connection open without reading, so the upload stalls.
            kept.lock().unwrap().push(peer);
        }))
        .start();
    let mut caller = scene.connect();
    caller.send(scene.request("POST /", "Content-Length: 100000000\r\n\r\n"));
    let response = caller.response();
    // Fills all windows and buffers up to the backend. They are full when nothing more can be
    // written for a while.
    caller.stream.sock.set_nonblocking(true).unwrap();
    let piece = vec![b'x'; 1 << 16];
    let mut sent = 0;
    let mut blocked = 0;
    while blocked < 50 {
        match caller.stream.write(&piece) {
            Ok(written) => (sent, blocked) = (sent + written, 0),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                blocked += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    assert!(sent < 100_000_000, "the buffers hold less than the upload");
    assert_eq!(
        (response.status.as_u16(), response.body.as_slice()),
        (413, b"no!".as_slice())
    );
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

#[test]
fn a_request_on_a_closed_pooled_connection_is_retried_if_safe() {
    // Answers one request per connection and closes without `Connection: close`.
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            drop(peer.request());
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }))
        .start();
    let mut caller = scene.connect();
    for _ in 0..200 {
        caller.send(scene.get("/"));
        assert_eq!(caller.response().status, 200);
    }
}

#[test]
fn a_request_that_a_backend_received_is_repeated_once_if_safe() {
    let (seen, requests) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            // Answers the first request of each connection, reads the second and closes.
            let mut first = true;
            while let Ok((head, _, _)) = peer.request() {
                seen.send(head.target.to_string()).unwrap();
                if !std::mem::take(&mut first) {
                    return;
                }
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
            }
        }))
        .start();
    let mut caller = scene.connect();
    let mut sent = Vec::new();
    // On a busy machine the agent opens a new connection, as the other one has been idle for over a
    // second.
    let broken = (0..20).find(|number| {
        let target = format!("/{number}");
        caller.send(scene.request(&format!("DELETE {target}"), "\r\n"));
        sent.push(target);
        let response = caller.response();
        response.status != 200 && response.code() == "GW_BACKEND_RESET"
    });
    assert!(broken.is_some());
    scene.wait_until_slots_are_free();
    assert_eq!(requests.try_iter().collect::<Vec<_>>(), sent);

    for _ in 0..2 {
        caller.send(scene.get("/safe"));
        assert_eq!(caller.response().status, 200);
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
                let (body, trailers) = caller.body(head.framing).unwrap();
                let status = head.status;
                let headers = head.headers;
                let framing = head.framing;
                is_refusal_of(
                    path,
                    &Response {
                        status,
                        headers,
                        body,
                        trailers,
                        framing,
                    }
                    .code(),
                );
                continue;
            }
            assert!(
                head.status == 200 && path != "/bad-chunk",
                "{path}: {}",
                head.status
            );
            if path == "/short" {
                assert_eq!(caller.bytes(5).unwrap(), b"hello");
            }
            let cut = caller.bytes(1).unwrap_err();
            assert_eq!(cut.kind(), ErrorKind::ConnectionReset, "{path}");
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
                assert!(
                    head.status == 200 && path != "/bad-chunk",
                    "{path}: {}",
                    head.status
                );
                assert_eq!(
                    body,
                    if path == "/short" { &b"hello"[..] } else { b"" },
                    "{path}"
                );
                assert_eq!(
                    end.and_then(|error| error.reason()),
                    Some(h2::Reason::INTERNAL_ERROR),
                    "{path}"
                );
            }
        });
    }
    scene.wait_until_slots_are_free();
}
