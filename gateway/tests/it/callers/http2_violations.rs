//! HTTP/2 callers that break RFC 9113, and that use what an endpoint has to ignore.

use std::sync::mpsc;

use super::{FrameCaller, error_code};
use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::http2_caller::on_a_reactor;
use crate::support::peers::http2_frames::{
    self, ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PING, PREFACE,
    PRIORITY, RST_STREAM, SETTINGS, UNKNOWN, WINDOW_UPDATE, frame, preface,
};
use crate::support::scene::Scene;

const PUSH_PROMISE: u8 = 5;
/// Flag of DATA and HEADERS.
const PADDED: u8 = 8;

const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const FRAME_SIZE_ERROR: u32 = 6;
const REFUSED_STREAM: u32 = 7;

/// Sends `sent` on a new connection. Returns the frames up to the one for which `is_last` is true,
/// or to the end of the connection.
fn exchange(scene: &Scene, sent: &[u8], is_last: impl Fn(&Frame) -> bool) -> Vec<Frame> {
    on_a_reactor(async {
        let mut caller = FrameCaller::connect(scene).await;
        caller.send(sent).await;
        let mut frames = Vec::new();
        while let Some(frame) = caller.next().await {
            let ends = is_last(&frame);
            frames.push(frame);
            if ends {
                // Fails if the gateway has closed the connection.
                let _ = caller.stream.close().await;
                break;
            }
        }
        frames
    })
}

/// The beginning of a connection, and `frames`.
fn connection(frames: &[Vec<u8>]) -> Vec<u8> {
    [preface(&[]), frames.concat()].concat()
}

fn setting(id: u16, value: u32) -> Vec<u8> {
    let payload = [&id.to_be_bytes()[..], &value.to_be_bytes()].concat();
    frame(SETTINGS, 0, 0, &payload)
}

/// The fields of a POST with the key of the demo.
fn post(scene: &Scene) -> Vec<(&str, &str)> {
    vec![
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", HOST),
        (":path", "/"),
        ("x-gw-service-key", &scene.about.service_key),
    ]
}

fn headers(stream: u32, flags: u8, fields: &[(&str, &str)]) -> Vec<u8> {
    http2_frames::headers(stream, flags, &http2_frames::block(fields))
}

/// Beginnings of a request on stream 1.
struct Beginnings {
    /// The body has not ended.
    open: Vec<u8>,
    /// The body has ended.
    done: Vec<u8>,
    /// The field block has not ended.
    begun: Vec<u8>,
}

fn after(first: &[u8], next: Vec<u8>) -> Vec<Vec<u8>> {
    vec![first.to_vec(), next]
}

fn of(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<Vec<u8>> {
    vec![frame(kind, flags, stream, payload)]
}

fn window(increment: u32) -> [u8; 4] {
    increment.to_be_bytes()
}

type Violation = fn(&Beginnings) -> Vec<Vec<u8>>;

/// Frames that end a connection, with the code of its GOAWAY.
const VIOLATIONS: &[(&str, u32, Violation)] = &[
    ("DATA above the maximum", FRAME_SIZE_ERROR, |at| {
        after(&at.open, frame(DATA, 0, 1, &[0; 16_385]))
    }),
    ("HEADERS above the maximum", FRAME_SIZE_ERROR, |_| {
        of(HEADERS, END_HEADERS, 1, &[0; 16_385])
    }),
    ("PING in a field block", PROTOCOL_ERROR, |at| {
        after(&at.begun, frame(PING, 0, 0, &[0; 8]))
    }),
    ("unknown frame in a field block", PROTOCOL_ERROR, |at| {
        after(&at.begun, frame(UNKNOWN, 0, 0, &[]))
    }),
    ("HEADERS in a field block", PROTOCOL_ERROR, |at| {
        after(&at.begun, frame(HEADERS, END_HEADERS, 3, &[0x82]))
    }),
    ("CONTINUATION of another stream", PROTOCOL_ERROR, |at| {
        after(&at.begun, frame(CONTINUATION, END_HEADERS, 3, &[]))
    }),
    ("unknown index", PROTOCOL_ERROR, |_| {
        of(HEADERS, END_HEADERS | END_STREAM, 1, &[0xfe])
    }),
    ("endless integer", PROTOCOL_ERROR, |_| {
        of(HEADERS, END_HEADERS | END_STREAM, 1, &[0xff; 6])
    }),
    ("stream of the server", PROTOCOL_ERROR, |_| {
        of(HEADERS, END_HEADERS, 2, &[0x82])
    }),
    ("stream behind a later one", PROTOCOL_ERROR, |_| {
        [
            of(HEADERS, 0, 5, &[]),
            of(CONTINUATION, END_HEADERS, 5, &[0x82]),
            of(HEADERS, END_HEADERS, 3, &[0x82]),
        ]
        .concat()
    }),
    ("DATA of stream 0", PROTOCOL_ERROR, |_| of(DATA, 0, 0, b"x")),
    ("DATA of an idle stream", PROTOCOL_ERROR, |_| {
        of(DATA, 0, 1, b"x")
    }),
    ("DATA behind END_STREAM", PROTOCOL_ERROR, |at| {
        after(&at.done, frame(DATA, 0, 1, b"x"))
    }),
    ("HEADERS behind END_STREAM", PROTOCOL_ERROR, |at| {
        after(&at.done, frame(HEADERS, END_HEADERS | END_STREAM, 1, &[]))
    }),
    ("padding of DATA", PROTOCOL_ERROR, |at| {
        after(&at.open, frame(DATA, PADDED, 1, &[3, 0, 0]))
    }),
    ("padding of HEADERS", PROTOCOL_ERROR, |_| {
        of(HEADERS, END_HEADERS | PADDED, 1, &[9, 0, 0])
    }),
    ("HEADERS of stream 0", PROTOCOL_ERROR, |_| {
        of(HEADERS, END_HEADERS, 0, &[0x82])
    }),
    ("PRIORITY of stream 0", PROTOCOL_ERROR, |_| {
        of(PRIORITY, 0, 0, &[0; 5])
    }),
    ("PRIORITY of four octets", PROTOCOL_ERROR, |at| {
        after(&at.open, frame(PRIORITY, 0, 1, &[0; 4]))
    }),
    ("RST_STREAM of stream 0", PROTOCOL_ERROR, |_| {
        of(RST_STREAM, 0, 0, &[0; 4])
    }),
    ("RST_STREAM of an idle stream", PROTOCOL_ERROR, |_| {
        of(RST_STREAM, 0, 1, &[0; 4])
    }),
    ("RST_STREAM of three octets", PROTOCOL_ERROR, |at| {
        after(&at.open, frame(RST_STREAM, 0, 1, &[0; 3]))
    }),
    ("SETTINGS with ACK and a payload", PROTOCOL_ERROR, |_| {
        of(SETTINGS, ACK, 0, &[0; 6])
    }),
    ("SETTINGS of a stream", PROTOCOL_ERROR, |_| {
        of(SETTINGS, 0, 1, &[])
    }),
    ("SETTINGS of five octets", PROTOCOL_ERROR, |_| {
        of(SETTINGS, 0, 0, &[0; 5])
    }),
    ("ENABLE_PUSH 2", PROTOCOL_ERROR, |_| vec![setting(2, 2)]),
    ("INITIAL_WINDOW_SIZE of 2^31", PROTOCOL_ERROR, |_| {
        vec![setting(4, 1 << 31)]
    }),
    ("MAX_FRAME_SIZE 1", PROTOCOL_ERROR, |_| vec![setting(5, 1)]),
    ("ENABLE_CONNECT_PROTOCOL 2", PROTOCOL_ERROR, |_| {
        vec![setting(8, 2)]
    }),
    ("window of a stream by SETTINGS", FLOW_CONTROL_ERROR, |at| {
        [
            after(&at.open, frame(WINDOW_UPDATE, 0, 1, &window(0x7fff_0000))),
            vec![setting(4, 0x7fff_ffff)],
        ]
        .concat()
    }),
    ("PUSH_PROMISE", PROTOCOL_ERROR, |at| {
        after(
            &at.open,
            frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2, 0x82]),
        )
    }),
    ("PING of a stream", PROTOCOL_ERROR, |_| {
        of(PING, 0, 1, &[0; 8])
    }),
    ("PING of seven octets", PROTOCOL_ERROR, |_| {
        of(PING, 0, 0, &[0; 7])
    }),
    ("GOAWAY of a stream", PROTOCOL_ERROR, |_| {
        of(GOAWAY, 0, 1, &[0; 8])
    }),
    ("WINDOW_UPDATE of 0", PROTOCOL_ERROR, |_| {
        of(WINDOW_UPDATE, 0, 0, &window(0))
    }),
    ("WINDOW_UPDATE of 0 for a stream", PROTOCOL_ERROR, |at| {
        after(&at.open, frame(WINDOW_UPDATE, 0, 1, &window(0)))
    }),
    ("WINDOW_UPDATE of an idle stream", PROTOCOL_ERROR, |_| {
        of(WINDOW_UPDATE, 0, 1, &window(1))
    }),
    ("WINDOW_UPDATE of three octets", PROTOCOL_ERROR, |_| {
        of(WINDOW_UPDATE, 0, 0, &[0; 3])
    }),
    ("window of the connection", FLOW_CONTROL_ERROR, |_| {
        of(WINDOW_UPDATE, 0, 0, &window(0x7fff_ffff))
    }),
    ("CONTINUATION of stream 0", PROTOCOL_ERROR, |_| {
        of(CONTINUATION, END_HEADERS, 0, &[])
    }),
    ("CONTINUATION without HEADERS", PROTOCOL_ERROR, |at| {
        after(&at.open, frame(CONTINUATION, END_HEADERS, 1, &[]))
    }),
];

#[test]
fn violations_of_the_framing_end_the_connection() {
    let scene = Scene::service().agent().start();
    let fields = post(&scene);
    let open = headers(1, 0, &fields);
    let slow = [&fields[..3], &[(":path", "/slow?ms=60000"), fields[4]]].concat();
    let done = headers(1, END_STREAM, &slow);
    let begun = frame(HEADERS, 0, 1, &http2_frames::block(&fields));
    let at = Beginnings { open, done, begun };
    for (name, code, violation) in VIOLATIONS {
        let received = exchange(&scene, &connection(&violation(&at)), |_| false);
        let goaway = received.iter().rfind(|frame| frame.kind == GOAWAY);
        let goaway = goaway.map(|frame| (frame.stream, error_code(frame)));
        assert_eq!(goaway, Some((0, *code)), "{name}: {received:?}");
    }
    scene.wait_until_slots_are_free();
}

/// Not HTTP/2, so that GOAWAY may be left out (RFC 9113 §3.4).
#[test]
fn another_preface_ends_the_connection() {
    let scene = Scene::service().start();
    let other = [&PREFACE[..16], b"XX\r\n\r\n"].concat();
    let received = exchange(&scene, &other, |_| false);
    let is_settings = |frame: &Frame| frame.kind == SETTINGS;
    assert!(received.iter().all(is_settings), "{received:?}");
}

/// The requests that arrive at a backend.
fn counting() -> (String, mpsc::Receiver<()>) {
    let (sender, receiver) = mpsc::channel();
    let url = backend::start(move |mut peer| {
        while peer.request().is_ok() {
            sender.send(()).unwrap();
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    });
    (url, receiver)
}

/// Fields that are not valid in HTTP/2: what is wrong, name and value.
const INVALID_FIELDS: [(&str, &str, &str); 14] = [
    ("upper case", "X", "1"),
    ("space in a name", "x y", "1"),
    ("colon in a name", "x:y", "1"),
    ("no name", "", "1"),
    ("name beyond ASCII", "ü", "1"),
    ("NUL", "x", "a\0b"),
    ("LF", "x", "a\nb"),
    ("CR", "x", "a\rb"),
    ("connection", "connection", "x"),
    ("transfer-encoding", "transfer-encoding", "chunked"),
    ("upgrade", "upgrade", "x"),
    ("keep-alive", "keep-alive", "1"),
    ("proxy-connection", "proxy-connection", "x"),
    ("other value of te", "te", "gzip"),
];

/// Requests with pseudo-header fields that are not valid, made from one that is.
fn with_invalid_pseudo_header_fields<'a>(
    whole: &[(&'a str, &'a str)],
) -> [(&'static str, Vec<(&'a str, &'a str)>); 14] {
    let without = |name: &str| {
        let others = whole.iter().copied().filter(|field| field.0 != name);
        others.collect::<Vec<_>>()
    };
    let replaced = |name, value| [&[(name, value)], &without(name)[..]].concat();
    let websocket = |path: &'static [(&str, &str)]| {
        let first = [
            (":method", "CONNECT"),
            (":protocol", "websocket"),
            (":authority", HOST),
        ];
        [&first[..], path, &whole[4..]].concat()
    };
    let rest = [(":scheme", "https"), (":path", "/")];
    [
        (
            "unknown pseudo-header field",
            [&[(":x", "1")], whole].concat(),
        ),
        (":status", [&[(":status", "200")], whole].concat()),
        (
            ":path behind a field",
            [&without(":path")[..], &[(":path", "/")]].concat(),
        ),
        ("two of :path", [&[(":path", "/")], whole].concat()),
        ("no :method", without(":method")),
        ("no :scheme", without(":scheme")),
        ("no :path", without(":path")),
        ("empty :path", replaced(":path", "")),
        ("empty :authority", replaced(":authority", "")),
        ("CONNECT with :path", replaced(":method", "CONNECT")),
        (":protocol of POST", [&[(":protocol", "x")], whole].concat()),
        (
            "extended CONNECT without :path",
            websocket(&[(":scheme", "https")]),
        ),
        (
            "extended CONNECT without :scheme",
            websocket(&[(":path", "/")]),
        ),
        (
            "extended CONNECT with upgrade",
            [
                &websocket(&[])[..3],
                &rest,
                &whole[4..],
                &[("upgrade", "websocket")],
            ]
            .concat(),
        ),
    ]
}

#[test]
fn malformed_requests_are_not_forwarded() {
    let (url, seen) = counting();
    let scene = Scene::service().agent_to(url).start();
    let whole = post(&scene);
    for (name, field, value) in INVALID_FIELDS {
        let fields = [&whole[..], &[(field, value)]].concat();
        is_malformed(&scene, name, &[headers(1, END_STREAM, &fields)]);
    }
    for (name, fields) in &with_invalid_pseudo_header_fields(&whole) {
        is_malformed(&scene, name, &[headers(1, END_STREAM, fields)]);
    }
    let trailers = [headers(1, 0, &whole), headers(1, 0, &[("x", "1")])];
    is_malformed(&scene, "trailers without END_STREAM", &trailers);
    scene.wait_until_slots_are_free();
    assert_eq!(seen.try_iter().count(), 0);
}

/// The h2 crate drops them.
#[test]
fn pseudo_header_fields_of_trailers_are_ignored() {
    let (url, seen) = counting();
    let scene = Scene::service().agent_to(url).start();
    let trailers = headers(1, END_STREAM, &[(":path", "/other")]);
    let sent = connection(&[headers(1, 0, &post(&scene)), trailers]);
    let received = exchange(&scene, &sent, |frame| frame.kind == HEADERS);
    assert_eq!(received.last().map(|frame| frame.payload[0]), Some(OK));
    assert_eq!(seen.try_iter().count(), 1);
}

#[test]
fn trailers_of_a_switched_stream_reset_it() {
    let backend = backend::start(|mut peer| {
        peer.request_head().unwrap();
        peer.send("HTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nhello");
        assert!(peer.is_closed());
    });
    let scene = Scene::service().agent_to(backend).start();
    let connect = [
        (":method", "CONNECT"),
        (":protocol", "x"),
        (":scheme", "https"),
        (":authority", HOST),
        (":path", "/"),
        ("x-gw-service-key", &scene.about.service_key),
    ];
    on_a_reactor(async {
        let mut caller = FrameCaller::connect(&scene).await;
        caller.send(&connection(&[headers(1, 0, &connect)])).await;
        caller.until(|frame| frame.kind == DATA).await;
        caller.send(&headers(1, END_STREAM, &[("y", "1")])).await;
        let reset = caller.until(|frame| frame.kind == RST_STREAM).await;
        assert_eq!((reset.stream, error_code(&reset)), (1, PROTOCOL_ERROR));
    });
    scene.wait_until_slots_are_free();
}

/// Asserts that the frames end their stream, or the connection, with `PROTOCOL_ERROR`.
fn is_malformed(scene: &Scene, name: &str, frames: &[Vec<u8>]) {
    let is_end = |frame: &Frame| [RST_STREAM, GOAWAY, HEADERS].contains(&frame.kind);
    let received = exchange(scene, &connection(frames), is_end);
    let end = received.last().unwrap();
    let is_refused = end.kind != HEADERS && error_code(end) == PROTOCOL_ERROR;
    assert!(is_refused, "{name}: {received:?}");
}

/// `:status: 200` in HPACK's static table (RFC 7541 appendix A).
const OK: u8 = 0x88;

#[test]
fn what_an_endpoint_ignores_leaves_the_connection_usable() {
    let scene = Scene::service().agent().start();
    let fields = post(&scene);
    let reset = |code: u32| frame(RST_STREAM, 0, 1, &code.to_be_bytes());
    let mut undefined = headers(7, END_STREAM | 0xc2, &fields);
    // The reserved bit of the stream identifier.
    undefined[5] |= 0x80;
    let sent = connection(&[
        setting(0xfafa, 1),
        frame(UNKNOWN, 0xff, 0, b"unknown"),
        frame(UNKNOWN, 0xff, 9, b"unknown"),
        frame(PING, 0, 0, b"question"),
        frame(PING, ACK, 0, b"answer!!"),
        // Malformed, so that the gateway resets it; the other frames were under way.
        headers(1, 0, &[&fields[..], &[("te", "gzip")]].concat()),
        frame(DATA, 0, 1, b"x"),
        frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]),
        reset(0xfafa),
        reset(8),
        // A frame of the largest size that each endpoint receives.
        headers(3, 0, &fields),
        frame(DATA, END_STREAM, 3, &[b'x'; 16_384]),
        frame(WINDOW_UPDATE, 0, 3, &[0, 0, 0, 1]),
        undefined,
    ]);
    let answers = std::cell::Cell::new(0);
    let received = exchange(&scene, &sent, |frame| {
        answers.set(answers.get() + u32::from(frame.kind == HEADERS));
        answers.get() == 2
    });
    let of = |kind: u8| received.iter().filter(move |frame| frame.kind == kind);
    let acknowledged = of(SETTINGS).filter(|frame| frame.flags == ACK && frame.payload.is_empty());
    assert_eq!((acknowledged.count(), of(SETTINGS).count()), (2, 3));
    let pings = of(PING).map(|frame| (frame.flags, &frame.payload[..]));
    assert_eq!(pings.collect::<Vec<_>>(), [(ACK, &b"question"[..])]);
    let resets = of(RST_STREAM).map(|frame| (frame.stream, error_code(frame)));
    let resets: Vec<_> = resets.collect();
    let is_as_malformed = resets.is_empty() || resets == [(1, PROTOCOL_ERROR)];
    assert!(is_as_malformed, "{resets:?}");
    let answered = of(HEADERS).map(|frame| (frame.stream, frame.payload[0]));
    let mut answered: Vec<_> = answered.collect();
    answered.sort_unstable();
    assert_eq!(answered, [(3, OK), (7, OK)], "{received:?}");
    assert_eq!(of(GOAWAY).count(), 0);
}

/// The settings in the first frame of the gateway: identifiers and values.
fn settings(received: &[Frame]) -> Vec<(u16, u32)> {
    let first = &received[0];
    assert_eq!((first.kind, first.flags & ACK), (SETTINGS, 0));
    let setting = |bytes: &[u8]| {
        let value = u32::from_be_bytes(bytes[2..].try_into().unwrap());
        (u16::from_be_bytes([bytes[0], bytes[1]]), value)
    };
    first.payload.chunks(6).map(setting).collect()
}

#[test]
fn the_gateway_begins_with_valid_settings() {
    const ENABLE_PUSH: u16 = 2;
    const MAX_FRAME_SIZE: u16 = 5;
    const ENABLE_CONNECT_PROTOCOL: u16 = 8;
    let scene = Scene::service().start();
    let settings = settings(&exchange(&scene, &connection(&[]), |_| true));
    for (id, value) in &settings {
        let is_valid = match *id {
            ENABLE_PUSH => *value == 0,
            MAX_FRAME_SIZE => (16_384..1 << 24).contains(value),
            _ => true,
        };
        assert!(is_valid, "{settings:?}");
    }
    let connect_protocol = (ENABLE_CONNECT_PROTOCOL, 1);
    assert!(settings.contains(&connect_protocol), "{settings:?}");
}

#[test]
fn a_stream_beyond_the_limit_is_refused() {
    const MAX_CONCURRENT_STREAMS: u16 = 3;
    const LIMIT: u32 = 100;
    let scene = Scene::service().agent().start();
    let fields = post(&scene);
    let open = (0..=LIMIT).map(|number| headers(2 * number + 1, 0, &fields));
    let sent = connection(&open.collect::<Vec<_>>());
    let received = exchange(&scene, &sent, |frame| frame.kind == RST_STREAM);
    let mut limits = settings(&received);
    limits.retain(|(id, _)| *id == MAX_CONCURRENT_STREAMS);
    assert_eq!(limits, [(MAX_CONCURRENT_STREAMS, LIMIT)]);
    let refused = received
        .last()
        .map(|frame| (frame.stream, error_code(frame)));
    assert_eq!(refused, Some((2 * LIMIT + 1, REFUSED_STREAM)));
    scene.wait_until_slots_are_free();
}
