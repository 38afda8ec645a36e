//! Interim responses of a modified agent.

use std::io::Write;

use gw_shared::tunnel::frame::Kind;
use gw_shared::tunnel::response;
use http::Method;

use crate::support::agents::modified_agent::{self, enroll, scene_with_tunnel};
use crate::support::agents::tunnel_frames::{interim, ok};
use crate::support::peers::http2_frames::{self, END_HEADERS, END_STREAM, HEADERS, SETTINGS};
use crate::support::scene::Scene;

#[test]
fn too_many_interim_responses_end_the_request_and_then_the_tunnel() {
    let scene = Scene::service().agent().start();
    let enrolled = enroll(&scene);
    for settings in [&[][..], &[0, 4, 0, 0, 0, 0]] {
        let mut tunnel = enrolled.tunnel(&scene);
        // Neither the HTTP/1.1 caller nor the HTTP/2 caller, which opens no window, reads.
        let mut caller = enrolled.caller(&scene);
        let mut http2 = enrolled.http2_caller(&scene);
        if settings.is_empty() {
            caller.send(enrolled.get());
        } else {
            http2.write_all(http2_frames::PREFACE).unwrap();
            http2
                .write_all(&http2_frames::frame(SETTINGS, 0, 0, settings))
                .unwrap();
            let mut block = http2_frames::block(&[
                (":method", "GET"),
                (":scheme", "https"),
                (":path", "/"),
                (":authority", modified_agent::HOST),
            ]);
            block.extend(http2_frames::block(&[("x-gw-service-key", enrolled.key())]));
            http2
                .write_all(&http2_frames::frame(
                    HEADERS,
                    END_HEADERS | END_STREAM,
                    1,
                    &block,
                ))
                .unwrap();
            http2.flush().unwrap();
        }
        let stream = tunnel.request();
        let hint = interim(stream, "103", &[("link", &"x".repeat(200))]);
        // More bytes than a request may have, and less than a tunnel accepts on one stream.
        tunnel.0.send(hint.repeat(response::INTERIM_BYTES / 200));
        let reset = tunnel.next_of(Kind::Reset).unwrap();
        assert_eq!(reset.stream, stream);
        if settings.is_empty() {
            let mut interims = 0;
            let last = loop {
                let head = caller.response_head(&Method::GET).unwrap();
                if !head.status.is_informational() {
                    break head;
                }
                interims += 1;
            };
            assert!(interims * 200 <= response::INTERIM_BYTES, "{interims}");
            let response = caller.rest(last).unwrap();
            assert_eq!(
                (response.header("x-gw-status"), &*response.code()),
                ("AgentError", "GW_BACKEND_INVALID_RESPONSE")
            );
        }
        // Further interim responses, before the agent has answered the RESET, end the tunnel.
        let sent = tunnel.sent_until_cut(&hint, 100_000);
        assert!(sent < 50_000, "{sent}");
    }
}

#[test]
fn small_interim_responses_are_bounded() {
    // Requests accepted by the other worker cross workers.
    let scene = Scene::service().agent().hand_over("never").start();
    let enrolled = enroll(&scene);
    let mut tunnel = enrolled.tunnel(&scene);
    let crossings = || scene.metrics().count("gw_requests_crossing_total");
    let mut requests = 0;
    while crossings() == 0 || crossings() == requests {
        let mut caller = enrolled.caller(&scene);
        caller.send(enrolled.get());
        requests += 1;
        assert!(requests < 100, "all connections reach the same worker");
        let stream = tunnel.request();
        tunnel
            .0
            .send(interim(stream, "102", &[]).repeat(response::INTERIM_MAX as usize));
        for _ in 0..response::INTERIM_MAX {
            assert_eq!(caller.response_head(&Method::GET).unwrap().status, 102);
        }
        tunnel.0.send(interim(stream, "102", &[]));
        assert_eq!(caller.response().code(), "GW_BACKEND_INVALID_RESPONSE");
    }
}

#[test]
fn framing_fields_of_interim_responses_are_ignored() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let (mut caller, stream) = enrolled.send_get(&scene, &mut tunnel);
    let fields = [
        ("content-length", "2"),
        ("connection", "close"),
        ("link", "</a>"),
        ("x-gw-status", "x"),
    ];
    tunnel.0.send(interim(stream, "103", &fields));
    let interim = caller.response_head(&Method::GET).unwrap();
    let names: Vec<&str> = interim
        .headers
        .names()
        .map(http::HeaderName::as_str)
        .collect();
    assert_eq!((interim.status.as_u16(), names), (103, vec!["link"]));
    tunnel.0.send(ok(stream, b"ok"));
    assert_eq!(caller.response().body, b"ok");
}
