//! HTTP/2 callers: requests, bodies, refusals, resets, floods and drain.

use std::io::Read;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use gw_shared::runtime;
use http::{HeaderMap, Method, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{FrameCaller, goaway, mirror, pattern};
use crate::support::peers::caller::HOST;
use crate::support::peers::http2_caller::{Connection, connect, data, on_a_reactor, whole};
use crate::support::peers::http2_frames::{
    END_STREAM, Frame, HEADERS, PING, PRIORITY, RST_STREAM, SETTINGS, UNKNOWN, frame, preface,
};
use crate::support::peers::{backend, http2_frames};
use crate::support::scene::Scene;
use crate::support::{SOON, turn};

#[test]
fn a_request_reaches_the_backend_unchanged() {
    let scene = Scene::service().agent().start();
    let purge = Method::from_bytes(b"PURGE").unwrap();
    let response = on_a_reactor(async {
        let caller = connect(&scene).await;
        let request = caller.request(&purge, "/a%2F//b?x=1&y");
        let request = request.header("x-one", "1").header("x-one", "2");
        caller.fetch(request.header("host", HOST)).await
    });
    assert!(!response.header("date").is_empty() && !response.header("x-gw-request-id").is_empty());
    let seen = response.json();
    assert_eq!(seen["method"], "PURGE");
    assert_eq!(seen["target"], "/a%2F//b?x=1&y");
    let fields: Vec<(String, String)> = serde_json::from_value(seen["headers"].clone()).unwrap();
    let fields: Vec<(&str, &str)> = fields
        .iter()
        .map(|(name, value)| (&**name, &**value))
        .collect();
    let first = [("host", HOST), ("x-one", "1"), ("x-one", "2")];
    assert_eq!(fields[..3], first);
    for added in [("via", "2 gw"), ("x-forwarded-proto", "https")] {
        assert!(fields.contains(&added), "{added:?}: {fields:?}");
    }
    assert!(fields.iter().all(|(name, _)| *name != "x-gw-service-key"));
}

#[test]
fn bodies_and_trailers_pass_in_both_directions_at_the_same_time() {
    // The backend echoes each piece after it has arrived: buffering anywhere would stall both
    // directions.
    let backend = backend::start(|mut peer| {
        let head = peer.request_head().unwrap();
        assert_eq!(head.headers["te"], "trailers");
        peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n");
        for _ in 0..20 {
            let chunk = peer.bytes(6).unwrap();
            peer.send(chunk);
        }
        assert_eq!(peer.bytes(18).unwrap(), b"0\r\nx-check: up\r\n\r\n");
        peer.send("0\r\nX-Sum: down\r\n\r\n");
    });
    let scene = Scene::service().agent_to(backend).start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let request = caller.request(&Method::POST, "/").header("te", "trailers");
        let (response, mut upload) = caller.begin(request, false).await;
        let (parts, mut body) = response.await.unwrap().into_parts();
        assert_eq!(parts.status, 200);
        assert_eq!(parts.headers["trailer"], "x-sum");
        for n in 0..20 {
            let digit = (n % 10).to_string();
            upload.send_data(digit.clone().into(), false).unwrap();
            assert_eq!(data(&mut body).await.unwrap(), digit);
        }
        let check = ("x-check".parse().unwrap(), "up".parse().unwrap());
        let trailers = HeaderMap::from_iter([check]);
        upload.send_trailers(trailers).unwrap();
        assert!(data(&mut body).await.is_none());
        let trailers = std::future::poll_fn(|cx| body.poll_trailers(cx)).await;
        assert_eq!(trailers.unwrap().unwrap()["x-sum"], "down");
    });
    scene.wait_until_slots_are_free();
}

#[test]
fn large_bodies_pass_on_many_streams_on_and_across_workers() {
    let _turn = turn();
    let mirror = mirror();
    for hand_over in ["always", "never"] {
        let scene = Scene::service()
            .agent_to(mirror.clone())
            .workers(4)
            .hand_over(hand_over)
            .start();
        on_a_reactor(async {
            for _ in 0..4 {
                let caller = connect(&scene).await;
                let exchanges = (1..20usize).map(|number| {
                    let caller = &caller;
                    async move {
                        let body = pattern(number * 40_000, number);
                        let request = caller.request(&Method::PUT, "/");
                        let request = request.header("content-length", body.len());
                        let (response, mut upload) = caller.begin(request, false).await;
                        let send =
                            gw_shared::http2::stream::send(&mut upload, body.clone().into(), true);
                        let (response, sent) = futures_util::join!(whole(response), send);
                        sent.unwrap();
                        assert_eq!(response.status, 200, "{number}");
                        assert!(response.body == body, "{number}");
                    }
                });
                futures_util::future::join_all(exchanges).await;
            }
        });
        scene.wait_until_slots_are_free();
        scene.stop();
    }
}

/// Status, `X-Gw-Status` and code of the error response to `request`.
async fn refusal(caller: &Connection, request: http::request::Builder) -> String {
    let response = caller.fetch(request).await;
    let content_type = response.header("content-type");
    assert_eq!(content_type, "application/vnd.gw.error+json");
    let error = &response.json()["error"];
    assert_eq!(error["request_id"], response.header("x-gw-request-id"));
    let status = response.status.as_u16();
    let gw_status = response.header("x-gw-status");
    format!("{status} {gw_status} {}", error["code"].as_str().unwrap())
}

#[test]
fn refusals_match_http1_and_keep_the_connection() {
    const TOO_LARGE: &str = "502 HeadersTooLarge GW_HEADERS_TOO_LARGE";
    const BAD_REQUEST: &str = "400 BadRequest GW_BAD_REQUEST";
    let scene = Scene::service().agent().start();
    let other = "demo--other.eu1.gw.localhost";
    scene.api().create_service("demo", "other");
    let (_, other_key) = scene.api().create_service_key("demo", &["other"]);
    let key = &scene.about.service_key;
    let get = |host: &str, path: &str| Request::get(format!("https://{host}/{path}"));
    let to = |host: &str| get(host, "").header("x-gw-service-key", key);
    let unknown = "demo--nothing.eu1.gw.localhost";
    let cases = [
        (get(HOST, ""), "502 AuthDenied GW_AUTH_REQUIRED"),
        (
            to(HOST).header("x-gw-service-key", key),
            "502 AuthDenied GW_AUTH_AMBIGUOUS",
        ),
        (to(unknown), "502 PolicyDenied GW_SERVICE_NOT_FOUND"),
        (to("eu2.gw.localhost"), "421 Misdirected GW_MISDIRECTED"),
        (to("eu1.gw.localhost"), "404 NotFound GW_NOT_FOUND"),
        (to(other), "502 AuthDenied GW_SERVICE_KEY_NOT_ALLOWED"),
        // Another tenant host name of the same certificate, on the same connection.
        (
            get(other, "").header("x-gw-service-key", other_key),
            "504 AgentUnavailable AGENT_UNAVAILABLE",
        ),
        (get(HOST, &"a".repeat(8 * 1024)), TOO_LARGE),
        (to(HOST).header("x", "y".repeat(33 * 1024)), TOO_LARGE),
        (
            (0..101).fold(to(HOST), |request, _| request.header("a", "b")),
            TOO_LARGE,
        ),
        (to(HOST).header("host", "elsewhere"), BAD_REQUEST),
        (Request::connect(format!("{HOST}:443")), BAD_REQUEST),
    ];
    on_a_reactor(async {
        let caller = connect(&scene).await;
        for (number, (request, expected)) in cases.into_iter().enumerate() {
            assert_eq!(refusal(&caller, request).await, expected, "case {number}");
        }
        assert_eq!(caller.get("/after").await.json()["target"], "/after");
    });
}

#[test]
fn a_stream_reset_cancels_only_its_request() {
    let (closed, closes) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        while let Ok(head) = peer.request_head() {
            match head.target.as_str() {
                "/wait" => {}
                "/stream" => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbegun"),
                _ => {
                    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
                    continue;
                }
            }
            let target = head.target.as_str().to_owned();
            assert!(peer.is_closed());
            return closed.send(target).unwrap();
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        for target in ["/wait", "/stream"] {
            let request = caller.request(&Method::GET, target);
            let (response, mut stream) = caller.begin(request, true).await;
            let body = if target == "/stream" {
                Some(response.await.unwrap().into_body())
            } else {
                None
            };
            assert_eq!(caller.get("/other").await.status, 200);
            stream.send_reset(h2::Reason::CANCEL);
            drop(body);
            runtime::yield_now().await;
            assert_eq!(caller.get("/other").await.status, 200);
        }
    });
    // Each connection of the backend has its own thread.
    let mut ended = [(); 2].map(|()| closes.recv_timeout(SOON).unwrap());
    ended.sort();
    assert_eq!(ended, ["/stream", "/wait"]);
    scene.wait_until_slots_are_free();
}

#[test]
fn the_slot_of_a_reset_stream_is_free_at_once() {
    let scene = Scene::service().agent().slots(1).start();
    let slow = |id| get(&scene, id, "/slow?ms=60000");
    on_a_reactor(async {
        let mut caller = FrameCaller::connect(&scene).await;
        caller.send(&[preface(&[]), slow(1)].concat()).await;
        for id in (1..40).step_by(4) {
            let next = id + 2;
            let reset_and_next = [cancel(id), get(&scene, next, "/")].concat();
            caller.send(&reset_and_next).await;
            let head = caller.until(|frame| (frame.kind, frame.stream) == (HEADERS, next));
            // `:status: 200` in HPACK's static table (RFC 7541 appendix A).
            assert_eq!(head.await.payload[0], 0x88, "{id}");
            caller.send(&slow(id + 4)).await;
        }
    });
}

#[test]
fn requests_that_are_reset_at_once_do_not_reach_the_backend() {
    let (heard, targets) = mpsc::channel();
    let backend = backend::start(move |mut peer| {
        while let Ok((head, ..)) = peer.request() {
            heard.send(head.target.as_str().to_owned()).unwrap();
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let scene = Scene::service().agent_to(backend).start();
    let asked = || scene.metrics().count("gw_requests_total");
    let before = asked();
    on_a_reactor(async {
        let mut caller = FrameCaller::connect(&scene).await;
        let mut sent = preface(&[]);
        for id in (1..40).step_by(2) {
            sent.extend(get(&scene, id, "/taken-back"));
            sent.extend(cancel(id));
        }
        sent.extend(get(&scene, 41, "/wanted"));
        caller.send(&sent).await;
        let is_answer = |frame: &Frame| (frame.kind, frame.stream) == (HEADERS, 41);
        caller.until(is_answer).await;
    });
    assert_eq!(targets.try_iter().collect::<Vec<_>>(), ["/wanted"]);
    assert_eq!(asked() - before, 21, "all resets are counted");
}

/// A complete request with the scene's key.
fn get(scene: &Scene, stream: u32, target: &str) -> Vec<u8> {
    let block = http2_frames::get(target, Some(&scene.about.service_key));
    http2_frames::headers(stream, END_STREAM, &block)
}

fn cancel(stream: u32) -> Vec<u8> {
    let code = u32::from(h2::Reason::CANCEL).to_be_bytes();
    frame(RST_STREAM, 0, stream, &code)
}

#[test]
fn an_incomplete_response_resets_its_stream() {
    let backend = backend::start(|mut peer| {
        peer.request().unwrap();
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
    });
    let scene = Scene::service().agent_to(backend).start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let (response, _) = caller.begin(caller.request(&Method::GET, "/"), true).await;
        let mut body = response.await.unwrap().into_body();
        assert_eq!(data(&mut body).await.unwrap(), "half");
        let end = std::future::poll_fn(|cx| body.poll_data(cx)).await;
        let reason = end.unwrap().unwrap_err().reason();
        assert_eq!(reason, Some(h2::Reason::INTERNAL_ERROR));
    });
}

#[test]
fn a_response_may_end_before_its_request() {
    const EARLY: &str = "HTTP/1.1 413 Content Too Large\r\nContent-Length: 6\r\n\
                         Connection: close\r\n\r\nenough";
    let backend = backend::start(|mut peer| {
        peer.request_head().unwrap();
        peer.send(EARLY);
        // Reads the rest of the request: a TCP reset would discard the response.
        drop(peer.stream.shutdown(std::net::Shutdown::Write));
        drop(peer.stream.read_to_end(&mut Vec::new()));
    });
    let scene = Scene::service().agent_to(backend).start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let request = caller.request(&Method::POST, "/");
        let (response, mut upload) = caller.begin(request, false).await;
        let part = Bytes::from_static(&[0; 1000]);
        upload.send_data(part, false).unwrap();
        let response = whole(response).await;
        assert_eq!(response.status, 413);
        assert_eq!(response.body, b"enough");
        drop(upload);
    });
    scene.wait_until_slots_are_free();
}

#[test]
fn repeated_stream_resets_end_the_connection() {
    let scene = Scene::service().agent().start();
    on_a_reactor(async {
        let mut caller = connect(&scene).await;
        let ended = loop {
            let request = caller
                .request(&Method::GET, "/slow?ms=60000")
                .body(())
                .unwrap();
            match caller.requests.clone().ready().await {
                Ok(mut requests) => match requests.send_request(request, true) {
                    Ok((_, mut stream)) => stream.send_reset(h2::Reason::CANCEL),
                    Err(error) => break error,
                },
                Err(error) => break error,
            }
            runtime::yield_now().await;
        };
        // A TCP reset may discard the GOAWAY; then only the counter shows the reason.
        assert!(
            ended.is_io() || ended.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM),
            "{ended:?}"
        );
        assert!((&mut caller.ended).await.unwrap().is_err());
    });
    assert_eq!(scene.metrics().count("gw_connections_abusive_total"), 1);
    scene.wait_until_slots_are_free();
    on_a_reactor(async {
        let answer = connect(&scene).await.get("/").await;
        let body = String::from_utf8_lossy(&answer.body);
        assert_eq!(answer.status, 200, "{body}");
    });
}

#[test]
fn floods_of_empty_frames_end_the_connection() {
    const ENHANCE_YOUR_CALM: Option<u32> = Some(11);
    let scene = Scene::service().agent().start();
    for (what, flood) in [
        ("PING", frame(PING, 0, 0, &[7; 8])),
        ("SETTINGS", frame(SETTINGS, 0, 0, &[])),
        ("PRIORITY", frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 16])),
        ("unknown frame", frame(UNKNOWN, 0, 0, &[])),
    ] {
        let received = on_a_reactor(async {
            let mut caller = FrameCaller::connect(&scene).await;
            caller.send(&preface(&[])).await;
            let (mut reader, mut writer) = tokio::io::split(caller.stream);
            // The gateway stops reading during this flood.
            let write = async {
                for _ in 0..20_000 {
                    if writer.write_all(&flood).await.is_err() || writer.flush().await.is_err() {
                        break;
                    }
                }
                std::future::pending::<()>().await;
            };
            let mut received = Vec::new();
            let read = async { drop(reader.read_to_end(&mut received).await) };
            futures_util::future::select(std::pin::pin!(write), std::pin::pin!(read)).await;
            received
        });
        let end = &received[received.len().saturating_sub(40)..];
        assert_eq!(goaway(&received), ENHANCE_YOUR_CALM, "{what}: {end:?}");
    }
}

#[test]
fn a_drain_sends_goaway_and_finishes_requests() {
    let (release, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            peer.request().unwrap();
            held.lock().unwrap().recv_timeout(SOON).unwrap();
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }))
        .start();
    on_a_reactor(async move {
        let mut caller = connect(&scene).await;
        let (response, _) = caller.begin(caller.request(&Method::GET, "/"), true).await;
        while scene.tunnels()[0].in_flight == 0 {
            runtime::sleep(Duration::from_millis(5)).await;
        }
        let ready = format!("{}/readyz", scene.about.admin_url);
        let stopping = thread::spawn(move || scene.stop());
        while ureq::get(&ready).call().is_ok() {
            runtime::sleep(Duration::from_millis(5)).await;
        }
        // The drain has begun.
        release.send(()).unwrap();
        assert_eq!(whole(response).await.status, 200);
        // GOAWAY with NO_ERROR: the connection ended cleanly.
        (&mut caller.ended).await.unwrap().unwrap();
        stopping.join().unwrap();
    });
}
