//! Responses of a modified agent. The gateway checks every part of a response before it reaches a caller.

use std::io::Write;

use gw_gateway::config::HandOver;
use gw_gateway::demo::{Demo, Options};
use gw_shared::tunnel::response;
use http::{Method, StatusCode};

use crate::support::demo;
use crate::support::http1_peer::Response;
use crate::support::http2_frames::{
    self, DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE, frame,
};
use crate::support::modified_agent::{Enrolled, Tunnel, enroll, head, last_data, last_head};

/// The caller's response to a request that the agent answers with `answer`, called with the request's stream id.
fn answered(
    enrolled: &Enrolled,
    tunnel: &mut Tunnel,
    demo: &Demo,
    request: &str,
    method: &Method,
    answer: &dyn Fn(u32) -> Vec<u8>,
) -> std::io::Result<Response> {
    let mut caller = enrolled.caller(demo);
    caller.send(request);
    let stream = tunnel.request();
    tunnel.0.send(answer(stream));
    loop {
        let head = caller.response_head(method)?;
        if !head.status.is_informational() || head.status == StatusCode::SWITCHING_PROTOCOLS {
            let (body, trailers) = caller.body(head.framing)?;
            let framing = head.framing;
            return Ok(Response { status: head.status, headers: head.headers, body, trailers, framing });
        }
    }
}

#[test]
fn too_many_interim_responses_end_the_request_and_then_the_tunnel() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    for settings in [&[][..], &[0, 4, 0, 0, 0, 0]] {
        let mut tunnel = enrolled.tunnel(&demo);
        // Neither the HTTP/1.1 caller nor the HTTP/2 caller, which opens no window, reads.
        let mut caller = enrolled.caller(&demo);
        let mut http2 = enrolled.http2_caller(&demo);
        if settings.is_empty() {
            caller.send(enrolled.get());
        } else {
            http2.write_all(http2_frames::PREFACE).unwrap();
            http2.write_all(&frame(SETTINGS, 0, 0, settings)).unwrap();
            let mut block = http2_frames::block(&[
                (":method", "GET"),
                (":scheme", "https"),
                (":path", "/"),
                (":authority", crate::support::modified_agent::HOST),
            ]);
            block.extend(http2_frames::block(&[("x-gw-service-key", enrolled.key())]));
            http2.write_all(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &block)).unwrap();
            http2.flush().unwrap();
        }
        let stream = tunnel.request();
        let interim = head(stream, &[(":status", "103"), ("link", &"x".repeat(200))]);
        // One more than the limit of a request.
        tunnel.0.send(interim.repeat(response::INTERIM_MAX as usize + 1));
        let reset = tunnel.next_of(RST_STREAM).unwrap();
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
            assert_eq!((last.status.as_u16(), last.headers["x-gw-status"].to_str().unwrap()), (502, "AgentError"));
        }
        // Further interim responses on the ended stream end the tunnel.
        let sent = tunnel.sent_until_cut(&interim, 100_000);
        assert!(sent < 50_000, "{sent}");
    }
}

#[test]
fn small_interim_responses_are_bounded() {
    // Requests accepted by the other worker cross workers.
    let demo = Demo::start(&Options { hand_over: HandOver::Never, ..crate::support::options(None) }).unwrap();
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let crossings =
        || -> u64 { demo.gateway().control().reports().iter().map(|report| report.totals["requests_crossing"]).sum() };
    let mut requests = 0;
    while crossings() == 0 || crossings() == requests {
        let mut caller = enrolled.caller(&demo);
        caller.send(enrolled.get());
        requests += 1;
        assert!(requests < 100, "all connections reach the same worker");
        let stream = tunnel.request();
        tunnel.0.send(head(stream, &[(":status", "102")]).repeat(response::INTERIM_MAX as usize));
        for _ in 0..response::INTERIM_MAX {
            assert_eq!(caller.response_head(&Method::GET).unwrap().status, 102);
        }
        tunnel.0.send(head(stream, &[(":status", "102")]));
        assert_eq!(caller.response().code(), "GW_BACKEND_INVALID_RESPONSE");
    }
}

#[test]
fn framing_fields_of_interim_responses_are_ignored() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let (mut caller, stream) = enrolled.send_get(&demo, &mut tunnel);
    tunnel.0.send(head(stream, &[(":status", "103"), ("content-length", "2"), ("link", "</a>"), ("x-gw-status", "x")]));
    let interim = caller.response_head(&Method::GET).unwrap();
    let names: Vec<&str> = interim.headers.keys().map(http::HeaderName::as_str).collect();
    assert_eq!((interim.status.as_u16(), names), (103, vec!["link"]));
    tunnel.0.send([head(stream, &[(":status", "200")]), last_data(stream, b"ok")].concat());
    assert_eq!(caller.response().body, b"ok");
}

#[test]
fn invalid_responses_are_refused() {
    const SMUGGLED: &str = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged";
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let many: Vec<(String, &str)> = (0..=response::HEAD.fields).map(|number| (format!("x-{number}"), "1")).collect();
    let mut many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    many.insert(0, (":status", "200"));
    let large = "x".repeat(response::HEAD.head);
    let upgrade = enrolled.request(
        "GET /",
        "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    );
    let get = enrolled.get();
    type Answer<'a> = Box<dyn Fn(u32) -> Vec<u8> + 'a>;
    let cases: Vec<(&str, &str, Answer<'_>)> = vec![
        (
            "101 in between",
            &get,
            Box::new(|id| {
                let data = frame(DATA, 0, id, SMUGGLED.as_bytes());
                [head(id, &[(":status", "101"), ("x-a", "b")]), head(id, &[(":status", "200")]), data].concat()
            }),
        ),
        ("101 in between, of an upgrade", &upgrade, Box::new(|id| head(id, &[(":status", "101")]))),
        ("101 at the end", &get, Box::new(|id| last_head(id, &[(":status", "101")]))),
        ("an interim one at the end", &get, Box::new(|id| last_head(id, &[(":status", "103")]))),
        ("status 600", &get, Box::new(|id| last_head(id, &[(":status", "600")]))),
        ("status 999", &get, Box::new(|id| head(id, &[(":status", "999")]))),
        (
            "unasked upgrade",
            &get,
            Box::new(|id| {
                let data = frame(DATA, 0, id, SMUGGLED.as_bytes());
                [head(id, &[(":status", "200"), ("x-gw-upgrade", "websocket")]), data].concat()
            }),
        ),
        ("another upgrade", &upgrade, Box::new(|id| head(id, &[(":status", "200"), ("x-gw-upgrade", "h2c")]))),
        (
            "two upgrades",
            &upgrade,
            Box::new(|id| {
                head(id, &[(":status", "200"), ("x-gw-upgrade", "websocket"), ("x-gw-upgrade", "websocket")])
            }),
        ),
        (
            "upgrade with another status",
            &upgrade,
            Box::new(|id| head(id, &[(":status", "404"), ("x-gw-upgrade", "websocket")])),
        ),
        ("too many fields", &get, Box::new(|id| last_head(id, &many))),
        (
            "too large a head",
            &get,
            Box::new(|id| {
                let block = http2_frames::block(&[(":status", "200"), ("x-large", &large)]);
                let (first, rest) = block.split_at(30_000);
                let (second, rest) = rest.split_at(30_000);
                [
                    frame(HEADERS, END_STREAM, id, first),
                    frame(http2_frames::CONTINUATION, 0, id, second),
                    frame(http2_frames::CONTINUATION, END_HEADERS, id, rest),
                ]
                .concat()
            }),
        ),
        (
            "two lengths",
            &get,
            Box::new(|id| head(id, &[(":status", "200"), ("content-length", "5"), ("content-length", "6")])),
        ),
        ("no number", &get, Box::new(|id| head(id, &[(":status", "200"), ("content-length", "+5")]))),
        ("a padded value", &get, Box::new(|id| head(id, &[(":status", "200"), ("x-padded", " x")]))),
        (
            "a padded value in between",
            &get,
            Box::new(|id| {
                [head(id, &[(":status", "103"), ("link", "</a>\t")]), last_head(id, &[(":status", "200")])].concat()
            }),
        ),
        ("connection fields", &get, Box::new(|id| head(id, &[(":status", "200"), ("connection", "close")]))),
        ("transfer codings", &get, Box::new(|id| head(id, &[(":status", "200"), ("transfer-encoding", "chunked")]))),
    ];
    for (what, request, answer) in cases {
        let response = answered(&enrolled, &mut tunnel, &demo, request, &Method::GET, &answer)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((response.status.as_u16(), &*response.code()), (502, "GW_BACKEND_INVALID_RESPONSE"), "{what}");
    }
}

#[test]
fn content_lengths_of_responses_are_enforced_and_normalized() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let five = [(":status", "200"), ("content-length", "5")];
    for (what, data) in [("less", &b"1234"[..]), ("more", b"123456")] {
        let answer = |id| [head(id, &five), last_data(id, data)].concat();
        // The fault was found before any part was sent: the caller gets an error instead.
        if let Ok(response) = answered(&enrolled, &mut tunnel, &demo, &enrolled.get(), &Method::GET, &answer) {
            assert_eq!((response.status.as_u16(), &*response.code()), (502, "GW_BACKEND_RESET"), "{what}");
        }
    }
    let twice = |id| {
        let fields = [(":status", "200"), ("content-length", "5"), ("content-length", "5")];
        [head(id, &fields), last_data(id, b"12345")].concat()
    };
    let response = answered(&enrolled, &mut tunnel, &demo, &enrolled.get(), &Method::GET, &twice).unwrap();
    assert_eq!((response.status.as_u16(), &*response.code()), (502, "GW_BACKEND_INVALID_RESPONSE"));
    let with_zeros = |id| [head(id, &[(":status", "200"), ("content-length", "05")]), last_data(id, b"12345")].concat();
    let response = answered(&enrolled, &mut tunnel, &demo, &enrolled.get(), &Method::GET, &with_zeros).unwrap();
    let lengths: Vec<&[u8]> = response.headers.get_all("content-length").iter().map(|it| it.as_bytes()).collect();
    assert_eq!((lengths, response.body), (vec![&b"5"[..]], b"12345".to_vec()));
}

#[test]
fn bodies_of_bodiless_responses_are_dropped() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let (get, head_request) = (enrolled.get(), enrolled.request("HEAD /", "\r\n"));
    for (status, request, method) in
        [("204", &get, Method::GET), ("304", &get, Method::GET), ("200", &head_request, Method::HEAD)]
    {
        let mut caller = enrolled.caller(&demo);
        caller.send(request);
        let stream = tunnel.request();
        // The gateway does not wait for the end of the stream or of the data.
        tunnel.0.send(head(stream, &[(":status", status), ("content-length", "6")]));
        let response = caller.response_head(&method).unwrap();
        assert_eq!(response.status.as_str(), status);
        assert_eq!(response.headers.contains_key("content-length"), status != "204", "{status}");
        tunnel.try_send(&frame(DATA, 0, stream, b"forged")).unwrap();
        assert_eq!(tunnel.next_of(RST_STREAM).unwrap().stream, stream);
        // The connection stays open, and none of the data is taken for the next response.
        caller.send(&get);
        let stream = tunnel.request();
        tunnel.0.send([head(stream, &[(":status", "200")]), last_data(stream, b"next")].concat());
        assert_eq!(caller.response().body, b"next", "{status}");
    }
}

#[test]
fn trailers_lose_framing_fields_and_are_bounded() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let with = |trailers: Vec<(String, &'static str)>| {
        move |id| {
            let trailers: Vec<(&str, &str)> = trailers.iter().map(|(name, value)| (name.as_str(), *value)).collect();
            [head(id, &[(":status", "200")]), frame(DATA, 0, id, b"ok"), last_head(id, &trailers)].concat()
        }
    };
    let some = [(":status", "500"), ("content-length", "9"), ("x-gw-status", "forged"), ("grpc-status", "0")];
    let some = with(some.map(|(name, value)| (name.to_owned(), value)).to_vec());
    let response = answered(&enrolled, &mut tunnel, &demo, &enrolled.get(), &Method::GET, &some).unwrap();
    assert_eq!((response.status.as_u16(), response.body), (200, b"ok".to_vec()));
    assert_eq!(
        crate::support::http1_peer::fields(&response.trailers),
        [("grpc-status".to_owned(), "0".to_owned())].into()
    );
    let padded = with(vec![("grpc-message".to_owned(), " x")]);
    answered(&enrolled, &mut tunnel, &demo, &enrolled.get(), &Method::GET, &padded).expect_err("a padded value");
    let many = with((0..=response::HEAD.fields).map(|number| (format!("x-{number}"), "1")).collect());
    answered(&enrolled, &mut tunnel, &demo, &enrolled.get(), &Method::GET, &many).expect_err("too many");
}

#[test]
fn error_codes_of_an_agent_are_known_and_messages_are_cleaned() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let mut refused = |code: &'static str, data: Vec<u8>| {
        let answer = move |id| [head(id, &[(":status", "200"), ("x-gw-agent-error", code)]), data.clone()].concat();
        let get = enrolled.get();
        let response = answered(&enrolled, &mut tunnel, &demo, &get, &Method::GET, &answer).unwrap();
        (response.status.as_u16(), response.code(), response.json()["error"]["message"].as_str().unwrap().to_owned())
    };
    for unknown in ["GW_AUTH_REQUIRED", "x", ""] {
        let (status, code, message) = refused(unknown, Vec::new());
        assert_eq!((status, &*code), (502, "GW_RELAY_ERROR"), "{unknown}");
        assert!(!message.contains("GW_AUTH"));
    }
    // Stream ids start at 3 and grow by 2 per request. The message is sent on the stream of the next request.
    let stream = 3 + 2 * 3;
    let text = b"down\r\nINFO forged line\x1b[2J\0\xff\xe2\x80\xae";
    let (_, code, message) = refused("GW_BACKEND_RESET", last_data(stream, text));
    assert_eq!((&*code, &*message), ("GW_BACKEND_RESET", "down  INFO forged line [2J \u{fffd} "));
    // The gateway does not wait for the end of a message.
    let (_, code, message) = refused("GW_BACKEND_TLS", frame(DATA, 0, stream + 2, &[b'x'; 30_000]));
    assert_eq!((&*code, message.len()), ("GW_BACKEND_TLS", 1024));
}

#[test]
fn early_answers_resets_and_open_streams_release_their_slot() {
    let demo = demo(None);
    let enrolled = enroll(&demo);
    let mut tunnel = enrolled.tunnel(&demo);
    let post = enrolled.request("POST /", "Content-Length: 1000000\r\n\r\nbegun");
    let is_free = || {
        let in_flight = |agent: &gw_gateway::telemetry::counters::TunnelReport| agent.in_flight;
        crate::support::eventually("no request is left", || {
            crate::support::tunnels(&demo).iter().all(|it| in_flight(it) == 0).then_some(())
        });
    };
    // Answers before the request is complete.
    let early = |id| [head(id, &[(":status", "200")]), last_data(id, b"ok")].concat();
    assert_eq!(answered(&enrolled, &mut tunnel, &demo, &post, &Method::POST, &early).unwrap().body, b"ok");
    is_free();
    // Resets before and after the head.
    let reset = |id: u32| frame(RST_STREAM, 0, id, &[0, 0, 0, 8]);
    let response = answered(&enrolled, &mut tunnel, &demo, &post, &Method::POST, &reset).unwrap();
    assert_eq!((response.status.as_u16(), &*response.code()), (502, "GW_RELAY_ERROR"));
    is_free();
    let cut = |id| [head(id, &[(":status", "200")]), frame(DATA, 0, id, b"begun"), reset(id)].concat();
    answered(&enrolled, &mut tunnel, &demo, &enrolled.get(), &Method::GET, &cut).unwrap_err();
    is_free();
    // Ends the stream and continues to send on it.
    let ended = |id: u32| [early(id), frame(WINDOW_UPDATE, 0, id, &[0, 0, 0, 9]), reset(id)].concat();
    assert_eq!(answered(&enrolled, &mut tunnel, &demo, &enrolled.get(), &Method::GET, &ended).unwrap().body, b"ok");
    is_free();
    // Sends no answer: the caller gives up.
    let (caller, stream) = enrolled.send_get(&demo, &mut tunnel);
    drop(caller);
    assert_eq!(tunnel.next_of(RST_STREAM).unwrap().stream, stream);
    is_free();
}

#[test]
fn an_upgraded_request_is_in_flight_until_both_halves_end() {
    for hand_over in [HandOver::Always, HandOver::Never] {
        let demo = Demo::start(&Options { hand_over, ..crate::support::options(None) }).unwrap();
        let enrolled = enroll(&demo);
        let mut tunnel = enrolled.tunnel(&demo);
        let in_flight = || crate::support::tunnels(&demo).iter().map(|tunnel| tunnel.in_flight).sum::<usize>();
        // Some of these requests arrive on a worker that does not own the tunnel.
        for _ in 0..8 {
            let mut caller = enrolled.caller(&demo);
            caller.send(enrolled.request("GET /", "Connection: upgrade\r\nUpgrade: other\r\n\r\n"));
            let stream = tunnel.request();
            // The agent ends its half with the head.
            tunnel.0.send(last_head(stream, &[(":status", "200"), ("x-gw-upgrade", "other")]));
            assert_eq!(caller.response_head(&Method::GET).unwrap().status, 101);
            assert!(caller.is_closed());
            // The caller's half stays open.
            caller.send("more");
            let data = tunnel.next_of(DATA).unwrap();
            assert_eq!((data.stream, &*data.payload), (stream, &b"more"[..]));
            assert_eq!(in_flight(), 1);
            caller.stream.conn.send_close_notify();
            caller.stream.flush().unwrap();
            caller.stream.sock.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(tunnel.next_of(DATA).unwrap().flags, END_STREAM);
            crate::support::eventually("no request is left", || (in_flight() == 0).then_some(()));
        }
    }
}
