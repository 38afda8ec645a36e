//! Responses of a modified agent. The gateway checks every part of a response before it reaches a
//! caller.

mod interim;
mod slots;

use std::io;

use gw_shared::tunnel::frame::{Kind, StreamId};
use gw_shared::tunnel::response;
use http::{Method, StatusCode};

use crate::support::agents::modified_agent::{Enrolled, Tunnel, scene_with_tunnel};
use crate::support::agents::tunnel_frames::{
    CHUNKED, begun, data, frame, head, interim, last_data, last_head, ok, refused, reset,
    response as framed, trailers,
};
use crate::support::peers::http1_peer::{self, Response};
use crate::support::scene::Scene;

/// An agent that answers requests with frames of the test.
struct Answering {
    tunnel: Tunnel,
    enrolled: Enrolled,
    scene: Scene,
}

impl Answering {
    fn start() -> Self {
        let (scene, enrolled, tunnel) = scene_with_tunnel();
        Self {
            tunnel,
            enrolled,
            scene,
        }
    }

    /// The caller's response to a GET that the agent answers with `answer`, called with the
    /// request's stream id.
    fn get(&mut self, answer: impl Fn(StreamId) -> Vec<u8>) -> io::Result<Response> {
        let get = self.enrolled.get();
        self.ask(&Method::GET, &get, answer)
    }

    /// As [`Self::get`], for any request.
    fn ask(
        &mut self,
        method: &Method,
        request: &str,
        answer: impl Fn(StreamId) -> Vec<u8>,
    ) -> io::Result<Response> {
        let mut caller = self.enrolled.caller(&self.scene);
        caller.send(request);
        let stream = self.tunnel.request();
        self.tunnel.0.send(answer(stream));
        loop {
            let head = caller.response_head(method)?;
            if !head.status.is_informational() || head.status == StatusCode::SWITCHING_PROTOCOLS {
                return caller.rest(head);
            }
        }
    }

    fn assert_tunnel_is_open(&self) {
        assert!(self.enrolled.report(&self.scene).is_some());
    }
}

const SMUGGLED: &str = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged";
const SWITCHING: [(&str, &str); 2] = [("connection", "upgrade"), ("upgrade", "websocket")];

/// Frames of an agent for a request.
type Answer = fn(StreamId) -> Vec<u8>;

/// Invalid answers to a GET.
const INVALID_ANSWERS: &[(&str, Answer)] = &[
    ("101 in between", |id| {
        [interim(id, "101", &SWITCHING), ok(id, SMUGGLED.as_bytes())].concat()
    }),
    ("200 in between", |id| {
        [interim(id, "200", &[]), ok(id, SMUGGLED.as_bytes())].concat()
    }),
    ("an interim one at the end", |id| last_head(id, "103", &[])),
    ("status 100 at the end", |id| head(id, "100", &[CHUNKED])),
    ("status 600", |id| {
        last_head(id, "600", &[("content-length", "0")])
    }),
    ("status 999", |id| head(id, "999", &[CHUNKED])),
    ("unasked upgrade", |id| {
        [head(id, "101", &SWITCHING), data(id, SMUGGLED.as_bytes())].concat()
    }),
    ("unasked upgrade at the end", |id| {
        last_head(id, "101", &SWITCHING)
    }),
    ("too many fields", many_fields),
    ("far too many fields", |id| {
        head(id, "200", &[&[("x", "1"); 2000][..], &[CHUNKED]].concat())
    }),
    ("too large a head", |id| {
        head(
            id,
            "200",
            &[("x-large", &"x".repeat(response::HEAD.head)), CHUNKED],
        )
    }),
    ("no number", |id| {
        head(id, "200", &[("content-length", "+5")])
    }),
    ("length and coding", |id| {
        head(id, "200", &[("content-length", "5"), CHUNKED])
    }),
    ("another coding", |id| {
        head(id, "200", &[("transfer-encoding", "gzip, chunked")])
    }),
    ("END before a body", |id| {
        last_head(id, "200", &[("content-length", "5")])
    }),
    ("a broken interim head", |id| {
        [
            frame(Kind::Interim, false, id, b"HTTP/1.1 103\r\nx\r\n\r\n"),
            ok(id, b"ok"),
        ]
        .concat()
    }),
    ("an empty interim head", |id| {
        [frame(Kind::Interim, false, id, b""), ok(id, b"ok")].concat()
    }),
];

/// Invalid answers to a request to switch to WebSocket.
const INVALID_SWITCHES: &[(&str, Answer)] = &[
    ("101 in between, of an upgrade", |id| {
        interim(id, "101", &SWITCHING)
    }),
    ("another upgrade", |id| {
        head(id, "101", &[("connection", "upgrade"), ("upgrade", "h2c")])
    }),
    ("two upgrades", |id| {
        head(id, "101", &[SWITCHING, SWITCHING].concat())
    }),
    ("upgrade to nothing", |id| head(id, "101", &[])),
];

/// Invalid heads of a response to a GET.
const INVALID_HEADS: &[(&str, &[u8])] = &[
    ("status 99", b"HTTP/1.1 099 \r\n\r\n"),
    (
        "two lengths",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    ),
    (
        "length twice",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\n",
    ),
    ("no head", b""),
    ("no status line", b"\r\n"),
    ("no end", b"HTTP/1.1 200 OK\r\nx: 1\r\n"),
    (
        "bytes behind the end",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx",
    ),
    (
        "HTTP/2.0",
        b"HTTP/2.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    ),
    (
        "line feeds",
        b"HTTP/1.1 200 OK\ntransfer-encoding: chunked\n\n",
    ),
    (
        "a folded line",
        b"HTTP/1.1 200 OK\r\nx: 1\r\n 2\r\ntransfer-encoding: chunked\r\n\r\n",
    ),
    (
        "a space before the colon",
        b"HTTP/1.1 200 OK\r\nx : 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ),
    (
        "NUL",
        b"HTTP/1.1 200 OK\r\nx: a\0b\r\ntransfer-encoding: chunked\r\n\r\n",
    ),
    (
        "a carriage return",
        b"HTTP/1.1 200 OK\r\nx: a\rb\r\ntransfer-encoding: chunked\r\n\r\n",
    ),
    ("no text", &[0xff; 100]),
];

/// A response with one field more than the limit, and another one.
fn many_fields(id: StreamId) -> Vec<u8> {
    let many: Vec<String> = (0..=response::HEAD.fields)
        .map(|number| format!("x-{number}"))
        .collect();
    let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "1")).collect();
    head(id, "200", &[&many[..], &[CHUNKED]].concat())
}

#[test]
fn invalid_responses_are_refused() {
    let mut agent = Answering::start();
    let get = agent.enrolled.get();
    // A request to switch to WebSocket.
    let fields = "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                  Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    let websocket = agent.enrolled.request("GET /", fields);
    let mut assert_refused = |what: &str, request: &str, answer: &dyn Fn(StreamId) -> Vec<u8>| {
        let response = agent
            .ask(&Method::GET, request, answer)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(
            (response.status.as_u16(), &*response.code()),
            (502, "GW_BACKEND_INVALID_RESPONSE"),
            "{what}"
        );
    };
    for (what, answer) in INVALID_ANSWERS {
        assert_refused(what, &get, answer);
    }
    for (what, answer) in INVALID_SWITCHES {
        assert_refused(what, &websocket, answer);
    }
    for (what, head) in INVALID_HEADS {
        assert_refused(what, &get, &|id| framed(id, false, head));
    }
    agent.assert_tunnel_is_open();
}

#[test]
fn fields_of_a_connection_and_own_fields_are_not_relayed() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let mut caller = enrolled.caller(&scene);
    for _ in 0..2 {
        caller.send(enrolled.get());
        let stream = tunnel.request();
        let fields = [
            ("connection", "close, x-of-hop"),
            ("keep-alive", "timeout=1"),
            ("upgrade", "h2c"),
            ("x-of-hop", "1"),
            ("x-gw-request-id", "forged"),
            ("x-gw-status", "forged"),
            ("x-padded", " \ta\t "),
            CHUNKED,
        ];
        tunnel
            .0
            .send([head(stream, "200", &fields), last_data(stream, b"ok")].concat());
        let response = caller.response();
        assert_eq!(response.body, b"ok");
        assert_ne!(response.header("x-gw-request-id"), "forged");
        assert_eq!(response.header("x-padded"), "a");
        for name in [
            "connection",
            "keep-alive",
            "upgrade",
            "x-of-hop",
            "x-gw-status",
        ] {
            assert!(!response.headers.contains(name), "{name}");
        }
    }
}

#[test]
fn content_lengths_of_responses_are_enforced() {
    let mut agent = Answering::start();
    let five = |id| head(id, "200", &[("content-length", "5")]);
    let bodies: [(&str, Answer); 8] = [
        ("less", |id| last_data(id, b"1234")),
        ("less, in two frames", |id| {
            [data(id, b"1234"), last_data(id, b"")].concat()
        }),
        ("nothing", |id| last_data(id, b"")),
        ("less, with trailers", |id| {
            [data(id, b"1234"), trailers(id, &[("a", "b")])].concat()
        }),
        ("only trailers", |id| trailers(id, &[("a", "b")])),
        ("more", |id| last_data(id, b"123456")),
        ("more, in two frames", |id| {
            [data(id, b"12345"), last_data(id, b"6")].concat()
        }),
        ("a reset behind less", |id| {
            [data(id, b"1234"), reset(id, b"")].concat()
        }),
    ];
    for (what, body) in bodies {
        let answer = |id| [five(id), body(id)].concat();
        // If the fault was found before any part was sent, the caller gets an error instead.
        if let Ok(response) = agent.get(answer) {
            assert_eq!(response.status, 502, "{what}");
            assert!(
                ["GW_BACKEND_RESET", "GW_BACKEND_INVALID_RESPONSE"].contains(&&*response.code()),
                "{what}"
            );
        }
        // Once the caller has the head, the connection is cut.
        let (mut caller, stream) = agent.enrolled.send_get(&agent.scene, &mut agent.tunnel);
        agent.tunnel.0.send(five(stream));
        let begun = caller.response_head(&Method::GET).unwrap();
        assert_eq!(begun.status, 200, "{what}");
        agent.tunnel.0.send(body(stream));
        match caller.body(begun.framing) {
            Err(_) => {}
            // The announced bytes have arrived, and those behind them have not.
            Ok((body, trailers)) => {
                assert!(what.starts_with("more") && trailers.is_empty(), "{what}");
                assert_eq!(body, b"12345", "{what}");
                assert!(caller.is_closed(), "{what}");
            }
        }
    }
    agent.assert_tunnel_is_open();
}

#[test]
fn zeros_of_a_content_length_are_removed() {
    let with_zeros = |id| {
        let head = head(id, "200", &[("content-length", "05")]);
        [head, last_data(id, b"12345")].concat()
    };
    let response = Answering::start().get(with_zeros).unwrap();
    let lengths: Vec<&[u8]> = response
        .headers
        .get_all("content-length")
        .map(|it| it.as_bytes())
        .collect();
    assert_eq!(
        (lengths, response.body),
        (vec![&b"5"[..]], b"12345".to_vec())
    );
}

#[test]
fn an_empty_body_may_end_with_the_head_or_behind_it() {
    let mut agent = Answering::start();
    for fields in [&[][..], &[CHUNKED], &[("content-length", "0")]] {
        let with_head = |id| last_head(id, "200", fields);
        let behind = |id| [head(id, "200", fields), last_data(id, b"")].concat();
        let with_trailers = |id| [head(id, "200", fields), trailers(id, &[])].concat();
        type Answer<'a> = &'a dyn Fn(StreamId) -> Vec<u8>;
        for answer in [&with_head as Answer<'_>, &behind, &with_trailers] {
            let response = agent.get(answer).unwrap();
            assert_eq!(
                (response.status.as_u16(), response.body),
                (200, Vec::new()),
                "{fields:?}"
            );
        }
    }
}

#[test]
fn bodies_of_bodiless_responses_are_dropped() {
    let (scene, enrolled, mut tunnel) = scene_with_tunnel();
    let get = enrolled.get();
    let head_request = enrolled.request("HEAD /", "\r\n");
    for (status, request, method) in [
        ("204", &get, Method::GET),
        ("304", &get, Method::GET),
        ("200", &head_request, Method::HEAD),
    ] {
        let mut caller = enrolled.caller(&scene);
        caller.send(request);
        let stream = tunnel.request();
        // The gateway does not wait for the end of the stream or of the data.
        tunnel
            .0
            .send(head(stream, status, &[("content-length", "6")]));
        let response = caller.response_head(&method).unwrap();
        assert_eq!(response.status.as_str(), status);
        assert_eq!(
            response.headers.contains("content-length"),
            status != "204",
            "{status}"
        );
        tunnel.0.send(data(stream, b"forged"));
        tunnel.answer_reset(stream);
        // The connection stays open, and none of the data is taken for the next response.
        caller.send(&get);
        let stream = tunnel.request();
        tunnel.0.send(ok(stream, b"next"));
        assert_eq!(caller.response().body, b"next", "{status}");
    }
}

/// A response with these lines in place of its trailers.
fn with_trailers(agent: &mut Answering, lines: &[u8]) -> io::Result<Response> {
    agent.get(|id| {
        [
            begun(id),
            data(id, b"ok"),
            frame(Kind::Trailers, true, id, lines),
        ]
        .concat()
    })
}

#[test]
fn trailers_lose_framing_fields() {
    let some =
        b"content-length: 9\r\ntransfer-encoding: chunked\r\nconnection: close\r\nhost: h\r\n\
                 x-gw-status: forged\r\ngrpc-status: 0\r\n\r\n";
    let response = with_trailers(&mut Answering::start(), some).unwrap();
    assert_eq!(
        (response.status.as_u16(), response.body),
        (200, b"ok".to_vec())
    );
    assert_eq!(
        http1_peer::fields(&response.trailers),
        [("grpc-status".to_owned(), "0".to_owned())].into()
    );
}

#[test]
fn invalid_trailers_end_their_response_only() {
    let mut agent = Answering::start();
    let many: String = (0..=response::HEAD.fields)
        .map(|number| format!("x-{number}: 1\r\n"))
        .collect();
    let far_too_many = "x: 1\r\n".repeat(1000);
    let large = format!("x: {}\r\n", "x".repeat(response::HEAD.head));
    for (what, lines) in [
        ("many", &*format!("{many}\r\n")),
        ("far too many", &format!("{far_too_many}\r\n")),
        ("large", &format!("{large}\r\n")),
        ("nothing", ""),
        ("no end", "a: b\r\n"),
        ("bytes behind the end", "a: b\r\n\r\nc"),
        ("a status line", "HTTP/1.1 200 OK\r\n\r\n"),
        ("a pseudo-header field", ":status: 500\r\n\r\n"),
        ("line feeds", "a: b\n\n"),
        ("NUL", "a: \0\r\n\r\n"),
        ("a folded line", "a: b\r\n c\r\n\r\n"),
    ] {
        with_trailers(&mut agent, lines.as_bytes()).expect_err(what);
    }
    agent.assert_tunnel_is_open();
}

/// Status, code and message of the error that a caller gets for these frames of an agent.
fn error(agent: &mut Answering, answer: impl Fn(StreamId) -> Vec<u8>) -> (u16, String, String) {
    let response = agent.get(answer).unwrap();
    let message = response.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned();
    (response.status.as_u16(), response.code(), message)
}

#[test]
fn unknown_error_codes_of_an_agent_are_not_relayed() {
    let mut agent = Answering::start();
    for unknown in [
        &b"GW_AUTH_REQUIRED"[..],
        b"AGENT_UNAVAILABLE",
        b"x",
        b"",
        &[0xff, 0, b'\n'],
        &[b'x'; 64],
    ] {
        let text = b"GW_AUTH: enter your key at http://x/";
        let refused = error(&mut agent, |id| refused(id, unknown, text));
        let reset = error(&mut agent, |id| reset(id, unknown));
        for (status, code, message) in [refused, reset] {
            assert_eq!((status, &*code), (502, "GW_RELAY_ERROR"), "{unknown:?}");
            assert!(!message.contains("GW_AUTH"), "{message}");
        }
    }
    // The length of the code is beyond the payload.
    let (status, code, _) = error(&mut agent, |id| {
        let payload = [&[0; 8][..], &[200], b"GW_BACKEND_TLS"].concat();
        frame(Kind::Refused, true, id, &payload)
    });
    assert_eq!((status, &*code), (502, "GW_RELAY_ERROR"));
}

#[test]
fn error_messages_of_an_agent_are_escaped() {
    let mut agent = Answering::start();
    let text = b"down\r\nINFO forged line\x1b[2J\0\xff\xe2\x80\xae";
    let (_, code, message) = error(&mut agent, |id| refused(id, b"GW_BACKEND_RESET", text));
    let escaped = "down\\u{d}\\u{a}INFO forged line\\u{1b}[2J\\u{0}\u{fffd}\\u{202e}";
    assert_eq!((&*code, &*message), ("GW_BACKEND_RESET", escaped));
}

#[test]
fn an_error_message_of_an_agent_may_be_long_or_missing() {
    let mut agent = Answering::start();
    let (_, code, message) = error(&mut agent, |id| {
        refused(id, b"GW_BACKEND_TLS", &[b'x'; 1024])
    });
    assert_eq!((&*code, message.len()), ("GW_BACKEND_TLS", 1024));
    let (_, code, message) = error(&mut agent, |id| refused(id, b"GW_BACKEND_TLS", b""));
    assert_eq!(code, "GW_BACKEND_TLS");
    assert!(!message.is_empty());
}
