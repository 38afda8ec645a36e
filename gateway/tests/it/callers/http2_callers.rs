//! HTTP/2 callers: requests, bodies, refusals, resets, floods and drain.

use std::io::Read;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use gw_shared::net::TlsStream;
use gw_shared::runtime;
use http::{HeaderMap, Method, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::peers::caller::HOST;
use crate::support::peers::http2_caller::{Connection, connect, data, on_a_reactor, tls, whole};
use crate::support::peers::http2_frames::{
    END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, PRIORITY, RST_STREAM, SETTINGS, UNKNOWN, frame,
};
use crate::support::peers::{backend, http2_frames};
use crate::support::scene::Scene;
use crate::support::{SOON, turn};

#[test]
fn a_request_reaches_the_backend_unchanged() {
    let scene = Scene::service().agent().start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let request = caller.request(&Method::from_bytes(b"PURGE").unwrap(), "/a%2F//b?x=1&y");
        let seen = caller
            .fetch(
                request
                    .header("x-one", "1")
                    .header("x-one", "2")
                    .header("host", HOST),
            )
            .await;
        assert!(!seen.header("date").is_empty() && !seen.header("x-gw-request-id").is_empty());
        let seen = seen.json();
        assert_eq!(
            (&seen["method"], &seen["target"]),
            (&"PURGE".into(), &"/a%2F//b?x=1&y".into())
        );
        let fields: Vec<(String, String)> =
            serde_json::from_value(seen["headers"].clone()).unwrap();
        let fields: Vec<(&str, &str)> = fields
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(
            fields[..3],
            [("host", HOST), ("x-one", "1"), ("x-one", "2")]
        );
        assert!(
            fields.contains(&("via", "2 gw")) && fields.contains(&("x-forwarded-proto", "https"))
        );
        assert!(fields.iter().all(|(name, _)| *name != "x-gw-service-key"));
    });
}

#[test]
fn bodies_and_trailers_pass_in_both_directions_at_the_same_time() {
    // The backend echoes each piece after it has arrived: buffering anywhere would stall both
    // directions.
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            let head = peer.request_head().unwrap();
            assert_eq!(head.headers["te"], "trailers");
            peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n");
            for _ in 0..20 {
                let chunk = peer.bytes(6).unwrap();
                peer.send(chunk);
            }
            assert_eq!(peer.bytes(18).unwrap(), b"0\r\nx-check: up\r\n\r\n");
            peer.send("0\r\nX-Sum: down\r\n\r\n");
        }))
        .start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let request = caller.request(&Method::POST, "/").header("te", "trailers");
        let (response, mut upload) = caller.begin(request, false).await;
        let (parts, mut body) = response.await.unwrap().into_parts();
        assert_eq!(
            (
                parts.status.as_u16(),
                parts.headers["trailer"].to_str().unwrap()
            ),
            (200, "x-sum")
        );
        for n in 0..20 {
            upload
                .send_data(Bytes::from((n % 10).to_string()), false)
                .unwrap();
            assert_eq!(data(&mut body).await.unwrap(), (n % 10).to_string());
        }
        upload
            .send_trailers(HeaderMap::from_iter([(
                "x-check".parse().unwrap(),
                "up".parse().unwrap(),
            )]))
            .unwrap();
        assert!(data(&mut body).await.is_none());
        let trailers = std::future::poll_fn(|cx| body.poll_trailers(cx))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(trailers["x-sum"], "down");
    });
    scene.wait_until_slots_are_free();
}

#[test]
fn large_bodies_pass_on_many_streams_on_and_across_workers() {
    let _turn = turn();
    let mirror = backend::start(|mut peer| {
        while let Ok((_, body, _)) = peer.request() {
            peer.send(format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
                body.len()
            ));
            peer.send(body);
        }
    });
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
                        let body: Vec<u8> = (0..number * 40_000)
                            .map(|at| (at * 7 + number) as u8)
                            .collect();
                        let request = caller
                            .request(&Method::PUT, "/")
                            .header("content-length", body.len());
                        let (response, mut upload) = caller.begin(request, false).await;
                        let send =
                            gw_shared::http2::stream::send(&mut upload, body.clone().into(), true);
                        let (response, sent) = futures_util::join!(whole(response), send);
                        sent.unwrap();
                        assert!(response.status == 200 && response.body == body, "{number}");
                    }
                });
                futures_util::future::join_all(exchanges).await;
            }
        });
        scene.wait_until_slots_are_free();
        scene.stop();
    }
}

async fn refusal(caller: &Connection, request: http::request::Builder) -> String {
    let response = caller.fetch(request).await;
    let body = response.json();
    assert_eq!(
        response.header("content-type"),
        "application/vnd.gw.error+json"
    );
    assert_eq!(
        body["error"]["request_id"],
        response.header("x-gw-request-id")
    );
    let status = response.header("x-gw-status");
    let code = body["error"]["code"].as_str().unwrap();
    format!("{} {status} {code}", response.status.as_u16())
}

#[test]
fn refusals_match_http1_and_keep_the_connection() {
    let scene = Scene::service().agent().start();
    let other = "demo--other.eu1.gw.localhost";
    scene.api().create_service("demo", "other");
    let (_, other_key) = scene.api().create_service_key("demo", &["other"]);
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let key = &scene.about.service_key;
        let get = |uri: String| Request::get(uri);
        let to =
            |host: &str| Request::get(format!("https://{host}/")).header("x-gw-service-key", key);
        let long = "a".repeat(8 * 1024);
        for (request, expected) in [
            (
                get(format!("https://{HOST}/")),
                "502 AuthDenied GW_AUTH_REQUIRED",
            ),
            (
                to(HOST).header("x-gw-service-key", key),
                "502 AuthDenied GW_AUTH_AMBIGUOUS",
            ),
            (
                to("demo--nothing.eu1.gw.localhost"),
                "502 PolicyDenied GW_SERVICE_NOT_FOUND",
            ),
            (to("eu2.gw.localhost"), "421 Misdirected GW_MISDIRECTED"),
            (to("eu1.gw.localhost"), "404 NotFound GW_NOT_FOUND"),
            (to(other), "502 AuthDenied GW_SERVICE_KEY_NOT_ALLOWED"),
            // Another tenant host name of the same certificate, on the same connection.
            (
                Request::get(format!("https://{other}/")).header("x-gw-service-key", other_key),
                "504 AgentUnavailable AGENT_UNAVAILABLE",
            ),
            (
                get(format!("https://{HOST}/{long}")),
                "502 HeadersTooLarge GW_HEADERS_TOO_LARGE",
            ),
            (
                to(HOST).header("x", "y".repeat(33 * 1024)),
                "502 HeadersTooLarge GW_HEADERS_TOO_LARGE",
            ),
            (
                (0..101).fold(to(HOST), |request, _| request.header("a", "b")),
                "502 HeadersTooLarge GW_HEADERS_TOO_LARGE",
            ),
            (
                to(HOST).header("host", "elsewhere"),
                "400 BadRequest GW_BAD_REQUEST",
            ),
            (
                Request::connect(format!("{HOST}:443")),
                "400 BadRequest GW_BAD_REQUEST",
            ),
        ] {
            assert_eq!(refusal(&caller, request).await, expected);
        }
        assert_eq!(caller.get("/after").await.json()["target"], "/after");
    });
}

#[test]
fn a_stream_reset_cancels_only_its_request() {
    let (closed, closes) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
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
        }))
        .start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        for target in ["/wait", "/stream"] {
            let (response, mut stream) = caller
                .begin(caller.request(&Method::GET, target), true)
                .await;
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
    on_a_reactor(async {
        let mut stream = tls(&scene.about).await;
        let begin = [PREFACE, &settings(), &get(&scene, 1, "/slow?ms=60000")].concat();
        AsyncWriteExt::write_all(&mut stream, &begin).await.unwrap();
        for slow in (1..40).step_by(4) {
            let next = slow + 2;
            let reset_and_next = [cancel(slow), get(&scene, next, "/")].concat();
            AsyncWriteExt::write_all(&mut stream, &reset_and_next)
                .await
                .unwrap();
            AsyncWriteExt::flush(&mut stream).await.unwrap();
            let status = loop {
                let (kind, id, payload) = read_frame(&mut stream).await;
                if (kind, id) == (HEADERS, next) {
                    break payload[0];
                }
            };
            // `:status: 200` in HPACK's static table (RFC 7541 appendix A).
            assert_eq!(status, 0x88, "{slow}");
            AsyncWriteExt::write_all(&mut stream, &get(&scene, slow + 4, "/slow?ms=60000"))
                .await
                .unwrap();
        }
    });
}

#[test]
fn requests_that_are_reset_at_once_do_not_reach_the_backend() {
    let (heard, targets) = mpsc::channel();
    let scene = Scene::service()
        .agent_to(backend::start(move |mut peer| {
            while let Ok((head, ..)) = peer.request() {
                heard.send(head.target.as_str().to_owned()).unwrap();
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
            }
        }))
        .start();
    let asked = || scene.metrics().count("gw_requests_total");
    let before = asked();
    on_a_reactor(async {
        let mut stream = tls(&scene.about).await;
        let mut sent = [PREFACE, &settings()].concat();
        for id in (1..40).step_by(2) {
            sent.extend(get(&scene, id, "/taken-back"));
            sent.extend(cancel(id));
        }
        sent.extend(get(&scene, 41, "/wanted"));
        AsyncWriteExt::write_all(&mut stream, &sent).await.unwrap();
        AsyncWriteExt::flush(&mut stream).await.unwrap();
        while !matches!(read_frame(&mut stream).await, (HEADERS, 41, _)) {}
    });
    assert_eq!(targets.try_iter().collect::<Vec<_>>(), ["/wanted"]);
    assert_eq!(asked() - before, 21, "all resets are counted");
}

fn settings() -> Vec<u8> {
    frame(SETTINGS, 0, 0, &[])
}

/// A complete request with the scene's key.
fn get(scene: &Scene, stream: u32, target: &str) -> Vec<u8> {
    frame(
        HEADERS,
        END_HEADERS | END_STREAM,
        stream,
        &http2_frames::get(target, Some(&scene.about.service_key)),
    )
}

fn cancel(stream: u32) -> Vec<u8> {
    frame(
        RST_STREAM,
        0,
        stream,
        &u32::from(h2::Reason::CANCEL).to_be_bytes(),
    )
}

/// Type, stream id and payload of the next frame.
async fn read_frame(stream: &mut TlsStream) -> (u8, u32, Vec<u8>) {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.unwrap();
    let number = |bytes: &[u8]| {
        bytes
            .iter()
            .fold(0, |number, &byte| number << 8 | u32::from(byte))
    };
    let mut payload = vec![0; number(&head[..3]) as usize];
    stream.read_exact(&mut payload).await.unwrap();
    (head[3], number(&head[5..]), payload)
}

#[test]
fn an_incomplete_response_resets_its_stream() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            peer.request().unwrap();
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
        }))
        .start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let (response, _) = caller.begin(caller.request(&Method::GET, "/"), true).await;
        let mut body = response.await.unwrap().into_body();
        assert_eq!(data(&mut body).await.unwrap(), "half");
        let error = std::future::poll_fn(|cx| body.poll_data(cx))
            .await
            .unwrap()
            .unwrap_err();
        assert_eq!(error.reason(), Some(h2::Reason::INTERNAL_ERROR));
    });
}

#[test]
fn a_response_may_end_before_its_request() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            peer.request_head().unwrap();
            peer.send(
                "HTTP/1.1 413 Content Too Large\r\nContent-Length: 6\r\nConnection: close\r\n\r\n\
             enough",
            );
            // Reads the rest of the request: a TCP reset would discard the response.
            drop(peer.stream.shutdown(std::net::Shutdown::Write));
            drop(peer.stream.read_to_end(&mut Vec::new()));
        }))
        .start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let (response, mut upload) = caller
            .begin(caller.request(&Method::POST, "/"), false)
            .await;
        upload
            .send_data(Bytes::from_static(&[0; 1000]), false)
            .unwrap();
        let response = whole(response).await;
        assert_eq!(
            (response.status.as_u16(), response.body.as_slice()),
            (413, b"enough".as_slice())
        );
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
        assert_eq!(
            answer.status,
            200,
            "{}",
            String::from_utf8_lossy(&answer.body)
        );
    });
}

#[test]
fn floods_of_empty_frames_end_the_connection() {
    let scene = Scene::service().agent().start();
    let ping = frame(PING, 0, 0, &[7; 8]);
    let priority = frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 16]);
    for flood in [ping, settings(), priority, frame(UNKNOWN, 0, 0, &[])] {
        on_a_reactor(async {
            let mut stream = tls(&scene.about).await;
            AsyncWriteExt::write_all(&mut stream, &[PREFACE, &settings()].concat())
                .await
                .unwrap();
            let mut received = Vec::new();
            // The gateway stops reading during this flood.
            let flooding = async {
                let (mut reader, mut writer) = tokio::io::split(&mut stream);
                let write = async {
                    for _ in 0..20_000 {
                        if writer.write_all(&flood).await.is_err() || writer.flush().await.is_err()
                        {
                            break;
                        }
                    }
                    std::future::pending::<()>().await;
                };
                let read = async { drop(reader.read_to_end(&mut received).await) };
                futures_util::future::select(std::pin::pin!(write), std::pin::pin!(read)).await;
            };
            flooding.await;
            // GOAWAY with ENHANCE_YOUR_CALM (RFC 9113 §7).
            let goaway = received
                .windows(17)
                .any(|bytes| bytes[3] == 7 && bytes[13..17] == [0, 0, 0, 11]);
            assert!(
                goaway,
                "{} bytes: {:?}",
                received.len(),
                &received[received.len().saturating_sub(40)..]
            );
        });
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
