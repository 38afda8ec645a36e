//! HTTP/2 callers that break RFC 9113, and that use what an endpoint has to ignore.

use std::sync::mpsc;

use gw_shared::net::TlsStream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::peers::backend;
use crate::support::peers::caller::HOST;
use crate::support::peers::http2_caller::{on_a_reactor, tls};
use crate::support::peers::http2_frames::{
    self, ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, PREFACE,
    PRIORITY, RST_STREAM, SETTINGS, UNKNOWN, WINDOW_UPDATE, frame,
};
use crate::support::scene::Scene;

const PUSH_PROMISE: u8 = 5;
/// Flag of DATA and HEADERS.
const PADDED: u8 = 8;

const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const FRAME_SIZE_ERROR: u32 = 6;
const REFUSED_STREAM: u32 = 7;

/// A received frame.
#[derive(Debug, PartialEq, Eq)]
struct Received {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

impl Received {
    /// The error code of RST_STREAM or GOAWAY.
    fn code(&self) -> u32 {
        let at = if self.kind == GOAWAY { 4 } else { 0 };
        u32::from_be_bytes(self.payload[at..at + 4].try_into().unwrap())
    }
}

/// Sends `sent` on a new connection. Returns the frames up to the one for which `is_last` is true,
/// or to the end of the connection.
fn exchange(scene: &Scene, sent: &[u8], is_last: impl Fn(&Received) -> bool) -> Vec<Received> {
    on_a_reactor(async {
        let mut stream = tls(&scene.about).await;
        AsyncWriteExt::write_all(&mut stream, sent).await.unwrap();
        AsyncWriteExt::flush(&mut stream).await.unwrap();
        let mut frames = Vec::new();
        while let Some(frame) = receive(&mut stream).await {
            let ends = is_last(&frame);
            frames.push(frame);
            if ends {
                // Fails if the gateway has closed the connection.
                let _ = stream.close().await;
                break;
            }
        }
        frames
    })
}

/// The next frame; `None` at the end of the connection.
async fn receive(stream: &mut TlsStream) -> Option<Received> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.ok()?;
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    stream.read_exact(&mut payload).await.unwrap();
    Some(Received {
        kind: head[3],
        flags: head[4],
        stream: u32::from_be_bytes(head[5..].try_into().unwrap()),
        payload,
    })
}

/// The beginning of a connection, and `frames`.
fn connection(frames: &[Vec<u8>]) -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, &[]), &frames.concat()].concat()
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
    let block = http2_frames::block(fields);
    frame(HEADERS, END_HEADERS | flags, stream, &block)
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
    let done = headers(
        1,
        END_STREAM,
        &[&fields[..3], &[(":path", "/slow?ms=60000"), fields[4]]].concat(),
    );
    let begun = frame(HEADERS, 0, 1, &http2_frames::block(&fields));
    let at = Beginnings { open, done, begun };
    for (name, code, violation) in VIOLATIONS {
        let received = exchange(&scene, &connection(&violation(&at)), |_| false);
        let goaway = received.iter().rfind(|frame| frame.kind == GOAWAY);
        assert_eq!(
            goaway.map(|frame| (frame.stream, frame.code())),
            Some((0, *code)),
            "{name}: {received:?}"
        );
    }
    // Not HTTP/2, so that GOAWAY may be left out (RFC 9113 §3.4).
    let preface = [&PREFACE[..16], b"XX\r\n\r\n"].concat();
    let received = exchange(&scene, &preface, |_| false);
    assert!(
        received.iter().all(|frame| frame.kind == SETTINGS),
        "{received:?}"
    );
    scene.wait_until_slots_are_free();
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

    // The h2 crate drops pseudo-header fields of trailers.
    let trailers = [
        headers(1, 0, &whole),
        headers(1, END_STREAM, &[(":path", "/other")]),
    ];
    let is_answer = |frame: &Received| frame.kind == HEADERS;
    let received = exchange(&scene, &connection(&trailers), is_answer);
    assert_eq!(received.last().map(|frame| frame.payload[0]), Some(OK));
    assert_eq!(seen.try_iter().count(), 1);
}

#[test]
fn trailers_of_a_switched_stream_reset_it() {
    let scene = Scene::service()
        .agent_to(backend::start(|mut peer| {
            peer.request_head().unwrap();
            peer.send("HTTP/1.1 101 Yes\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nhello");
            assert!(peer.is_closed());
        }))
        .start();
    let connect = [
        (":method", "CONNECT"),
        (":protocol", "x"),
        (":scheme", "https"),
        (":authority", HOST),
        (":path", "/"),
        ("x-gw-service-key", &scene.about.service_key),
    ];
    on_a_reactor(async {
        let mut stream = tls(&scene.about).await;
        let send = async |stream: &mut TlsStream, sent: Vec<u8>| {
            AsyncWriteExt::write_all(stream, &sent).await.unwrap();
            AsyncWriteExt::flush(stream).await.unwrap();
        };
        send(&mut stream, connection(&[headers(1, 0, &connect)])).await;
        while receive(&mut stream).await.unwrap().kind != DATA {}
        send(&mut stream, headers(1, END_STREAM, &[("y", "1")])).await;
        let reset = loop {
            let frame = receive(&mut stream).await.unwrap();
            if frame.kind == RST_STREAM {
                break frame;
            }
        };
        assert_eq!((reset.stream, reset.code()), (1, PROTOCOL_ERROR));
    });
    scene.wait_until_slots_are_free();
}

/// Asserts that the frames end their stream, or the connection, with `PROTOCOL_ERROR`.
fn is_malformed(scene: &Scene, name: &str, frames: &[Vec<u8>]) {
    let is_end = |frame: &Received| [RST_STREAM, GOAWAY, HEADERS].contains(&frame.kind);
    let received = exchange(scene, &connection(frames), is_end);
    let end = received.last().unwrap();
    assert!(
        end.kind != HEADERS && end.code() == PROTOCOL_ERROR,
        "{name}: {received:?}"
    );
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
    the_settings_are_valid(&received[0]);
    let acknowledged = of(SETTINGS).filter(|frame| frame.flags == ACK && frame.payload.is_empty());
    assert_eq!((acknowledged.count(), of(SETTINGS).count()), (2, 3));
    let pings: Vec<_> = of(PING)
        .map(|frame| (frame.flags, &frame.payload[..]))
        .collect();
    assert_eq!(pings, [(ACK, &b"question"[..])]);
    let resets: Vec<_> = of(RST_STREAM)
        .map(|frame| (frame.stream, frame.code()))
        .collect();
    assert!(
        resets.is_empty() || resets == [(1, PROTOCOL_ERROR)],
        "{resets:?}"
    );
    let mut answered: Vec<_> = of(HEADERS)
        .map(|frame| (frame.stream, frame.payload[0]))
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, [(3, OK), (7, OK)], "{received:?}");
    assert_eq!(of(GOAWAY).count(), 0);
}

fn the_settings_are_valid(first: &Received) {
    assert_eq!((first.kind, first.flags & ACK), (SETTINGS, 0));
    let settings: Vec<(u8, u32)> = first
        .payload
        .chunks(6)
        .map(|setting| {
            (
                setting[1],
                u32::from_be_bytes(setting[2..].try_into().unwrap()),
            )
        })
        .collect();
    for (id, value) in &settings {
        let is_valid = match id {
            // ENABLE_PUSH, MAX_FRAME_SIZE
            2 => *value == 0,
            5 => (16_384..1 << 24).contains(value),
            _ => true,
        };
        assert!(is_valid, "{settings:?}");
    }
    assert!(
        settings.contains(&(8, 1)),
        "ENABLE_CONNECT_PROTOCOL: {settings:?}"
    );
}

#[test]
fn a_stream_beyond_the_limit_is_refused() {
    let scene = Scene::service().agent().start();
    let fields = post(&scene);
    let open: Vec<_> = (0..=100)
        .map(|number| headers(2 * number + 1, 0, &fields))
        .collect();
    let received = exchange(&scene, &connection(&open), |frame| frame.kind == RST_STREAM);
    let limit = received[0]
        .payload
        .chunks(6)
        .find(|setting| setting[1] == 3);
    assert_eq!(
        limit.map(|setting| &setting[2..]),
        Some(&[0, 0, 0, 100][..])
    );
    let refused = received.last().map(|frame| (frame.stream, frame.code()));
    assert_eq!(refused, Some((201, REFUSED_STREAM)));
    scene.wait_until_slots_are_free();
}
