//! HTTP/2 header lists over the limits (RFC 9113 §10.5.1) get an error, or end the connection.

use std::io::{Read, Write};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use crate::support::eventually;
use crate::support::peers::caller::{HOST, Tls};
use crate::support::peers::http2_backend;
use crate::support::peers::http2_caller::{connect, on_a_reactor, whole};
use crate::support::peers::http2_frames::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, SETTINGS, frame,
};
use crate::support::peers::{backend, caller, http2_frames};
use crate::support::scene::Scene;

const KIB: usize = 1024;
const ENHANCE_YOUR_CALM: u8 = 11;

#[test]
fn a_list_of_up_to_128_kib_gets_an_error_with_a_request_id() {
    let scene = Scene::service().agent().start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        for (fields, size) in [(1, 33 * KIB), (5, 16 * KIB), (7, 16 * KIB), (3000, 1)] {
            let value = "x".repeat(size);
            let get = caller.request(&Method::GET, "/");
            let response = caller
                .fetch((0..fields).fold(get, |request, _| request.header("x", &value)))
                .await;
            assert_eq!(response.status, 502);
            assert_eq!(response.json()["error"]["code"], "GW_HEADERS_TOO_LARGE");
            assert_eq!(
                response.json()["error"]["request_id"],
                response.header("x-gw-request-id")
            );
        }
        assert_eq!(caller.get("/after").await.status, 200);
    });
}

/// From backends of both versions, to callers of both, on all workers.
#[test]
fn a_response_has_up_to_a_thousand_fields() {
    let over_http1 = backend::start(|mut peer| {
        while let Ok(request) = peer.request() {
            let fields: String = fields_of(request.0.target.as_str())
                .map(|name| format!("{name}: v\r\n"))
                .collect();
            peer.send(format!("HTTP/1.1 204 No Content\r\n{fields}\r\n"));
        }
    });
    let over_http2 = http2_backend::start(async |request, mut respond| {
        let mut response = http::Response::new(());
        *response.status_mut() = http::StatusCode::NO_CONTENT;
        for name in fields_of(request.uri().path()) {
            response
                .headers_mut()
                .append(name, HeaderValue::from_static("v"));
        }
        respond.send_response(response, true).unwrap();
    });
    for backend in [over_http1, over_http2] {
        let scene = Scene::service().agent_to(backend).start();
        for _ in 0..4 {
            let mut caller = scene.connect();
            caller.send(scene.get("/1000"));
            let response = caller.response();
            let passed = fields_of("/1000").filter(|name| response.headers.contains(name));
            assert_eq!((response.status.as_u16(), passed.count()), (204, 1000));
            caller.send(scene.get("/1001"));
            let error = caller.response().json()["error"].clone();
            assert_eq!(error["code"], "GW_BACKEND_INVALID_RESPONSE");
            let message = error["message"].as_str().unwrap();
            assert!(
                message.contains("more than 1000 header fields"),
                "{message}"
            );
            assert!(!message.contains("not valid HTTP"), "{message}");
        }
        on_a_reactor(async {
            let caller = connect(&scene).await;
            let response = caller.get("/1000").await;
            let passed = fields_of("/1000").filter(|name| response.headers.contains_key(name));
            assert_eq!((response.status.as_u16(), passed.count()), (204, 1000));
            assert_eq!(caller.get("/1001").await.status, 502);
        });
    }
}

/// Names of as many fields as the target says.
fn fields_of(target: &str) -> impl Iterator<Item = HeaderName> {
    let number: u32 = target.trim_start_matches('/').parse().unwrap();
    (0..number).map(|at| HeaderName::try_from(format!("x-{at}")).unwrap())
}

#[test]
fn settings_announce_the_limit_of_a_request_head() {
    const MAX_HEADER_LIST_SIZE: [u8; 2] = [0, 6];
    let scene = Scene::service().agent().start();
    let mut caller = RawCaller::connect(&scene);
    caller.receive_until(SETTINGS);
    let announced = caller.payloads(SETTINGS)[0]
        .chunks(6)
        .find(|setting| setting.starts_with(&MAX_HEADER_LIST_SIZE));
    assert_eq!(announced.unwrap()[2..], (32 * KIB as u32).to_be_bytes());
}

/// Each of these would be refused by an agent that gets it, which would count against the agent.
#[test]
fn pseudo_header_fields_count_as_parts_of_the_head() {
    let scene = Scene::service().agent().start();
    let key = scene.about.service_key.clone();
    let long_port = format!("{HOST}:{}443", "0".repeat(40 * KIB));
    let long_protocol = "p".repeat(40 * KIB);
    for (authority, protocol) in [(&*long_port, "p"), (HOST, &*long_protocol)] {
        let block = http2_frames::block(&[
            (":method", "CONNECT"),
            (":protocol", protocol),
            (":scheme", "https"),
            (":authority", authority),
            (":path", "/"),
            ("x-gw-service-key", &key),
        ]);
        let mut caller = RawCaller::connect(&scene);
        caller.send(&in_frames(1, &block));
        caller.receive_until(DATA);
        let body: serde_json::Value = serde_json::from_slice(caller.payloads(DATA)[0]).unwrap();
        assert_eq!(body["error"]["code"], "GW_HEADERS_TOO_LARGE");
    }
}

#[test]
fn trailers_over_the_limits_are_malformed() {
    let scene = Scene::service().agent_to(http2_backend::http2()).start();
    on_a_reactor(async {
        let caller = connect(&scene).await;
        let trailers = |fields: usize, size: usize| -> HeaderMap {
            let value = HeaderValue::try_from("v".repeat(size)).unwrap();
            let name = |at: usize| HeaderName::try_from(format!("x-{at:02}")).unwrap();
            (0..fields).map(|at| (name(at), value.clone())).collect()
        };
        let most = 16 * KIB - "x-00: \r\n".len();
        for (what, trailers, expected) in [
            ("64 fields", trailers(64, 1), 200),
            ("65 fields", trailers(65, 1), 400),
            ("16 KiB", trailers(1, most), 200),
            ("a byte more", trailers(1, most + 1), 400),
            ("130 KiB", trailers(10, 13 * KIB), 400),
        ] {
            let post = caller.request(&Method::POST, "/");
            let (response, mut body) = caller.begin(post, false).await;
            body.send_data(Bytes::from_static(b"data"), false).unwrap();
            body.send_trailers(trailers).unwrap();
            let response = whole(response).await;
            assert_eq!(response.status, expected, "{what}");
            if expected == 400 {
                assert_eq!(response.json()["error"]["code"], "GW_BAD_REQUEST", "{what}");
            }
        }
        assert_eq!(caller.get("/after").await.status, 200);
    });
}

/// A header block of a request that decodes to some hundred bytes plus 4,032 bytes per repetition:
/// it adds a field to the dynamic table and then refers to it (RFC 7541 §2.3.3).
fn amplified(repetitions: usize) -> Vec<u8> {
    let mut block = http2_frames::get("/", None);
    block.extend([0x40, 1, b'x', 127, 0xa0, 0x1e]);
    block.extend([b'y'; 3999]);
    block.extend(std::iter::repeat_n(0x80 | 62, repetitions));
    block
}

/// A header block of at least `size` bytes, in HEADERS and CONTINUATION frames.
fn literal(stream: u32, size: usize) -> Vec<u8> {
    let mut block = http2_frames::get("/", None);
    while block.len() < size {
        // A never-indexed literal with a new name and a value of 1,000 bytes.
        block.extend([0x10, 1, b'x', 127, 0xe9, 0x06]);
        block.extend([b'y'; 1000]);
    }
    in_frames(stream, &block)
}

/// The frames of a header block that ends its stream.
fn in_frames(stream: u32, block: &[u8]) -> Vec<u8> {
    let chunks: Vec<&[u8]> = block.chunks(16 * KIB).collect();
    let last = chunks.len() - 1;
    let frames = chunks.iter().enumerate().map(|(at, chunk)| {
        let end = if at == last { END_HEADERS } else { 0 };
        if at == 0 {
            frame(HEADERS, END_STREAM | end, stream, chunk)
        } else {
            frame(CONTINUATION, end, stream, chunk)
        }
    });
    frames.collect::<Vec<_>>().concat()
}

/// A connection without a library of HTTP/2.
struct RawCaller {
    stream: Tls,
    received: Vec<u8>,
}

impl RawCaller {
    fn connect(scene: &Scene) -> Self {
        let session = caller::session(&scene.about, HOST, &[b"h2"], None);
        let mut stream = Tls::new(session, caller::socket(&scene.about));
        stream.write_all(PREFACE).unwrap();
        stream.write_all(&frame(SETTINGS, 0, 0, &[])).unwrap();
        Self {
            stream,
            received: Vec::new(),
        }
    }

    fn send(&mut self, head: &[u8]) {
        // The gateway may close the connection before it has read everything.
        drop(
            self.stream
                .write_all(head)
                .and_then(|()| self.stream.flush()),
        );
    }

    /// Receives to the end of the connection, or until a frame of this type is there.
    fn receive_until(&mut self, kind: u8) {
        let mut chunk = vec![0; 64 * KIB];
        while self.payloads(kind).is_empty() {
            match self.stream.read(&mut chunk) {
                Ok(0) => return,
                Ok(read) => self.received.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // The gateway sends no close_notify after GOAWAY.
                Err(error) => {
                    assert!(
                        error.kind() != std::io::ErrorKind::WouldBlock,
                        "the connection does not end"
                    );
                    return;
                }
            }
        }
    }

    /// Payloads of the received frames of a type.
    fn payloads(&self, wanted: u8) -> Vec<&[u8]> {
        let mut payloads = Vec::new();
        let mut rest = &self.received[..];
        while let [a, b, c, kind, _, _, _, _, _, behind @ ..] = rest {
            let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
            let Some((payload, next)) = behind.split_at_checked(length) else {
                break;
            };
            payloads.extend((*kind == wanted).then_some(payload));
            rest = next;
        }
        payloads
    }

    /// Receives the end of the connection. Asserts that it is GOAWAY with this error code (RFC 9113
    /// §6.8).
    fn assert_ended_for(&mut self, code: u8) {
        self.receive_until(GOAWAY);
        let goaway = self.payloads(GOAWAY);
        assert_eq!(goaway.first().map(|payload| payload[7]), Some(code));
    }
}

#[test]
fn a_longer_block_ends_the_connection_without_a_response() {
    let scene = Scene::service().agent().start();
    let whole = |block: &[u8]| frame(HEADERS, END_HEADERS | END_STREAM, 1, block);
    let heads = [
        // From four times the limit on, decoded, h2 itself ends the connection.
        ("1,000 repetitions", whole(&amplified(1000)), (0, 1)),
        ("129 KiB", literal(1, 129 * KIB), (1, 1)),
        ("600 KiB", literal(1, 600 * KIB), (2, 1)),
    ];
    for (what, head, counts) in heads {
        let mut caller = RawCaller::connect(&scene);
        caller.send(&head);
        caller.assert_ended_for(ENHANCE_YOUR_CALM);
        assert!(caller.payloads(HEADERS).is_empty(), "{what}");
        let ended = |reason: &str| {
            let name = "gw_connections_ended_early_total";
            scene.metrics().count_with(name, &format!("\"{reason}\""))
        };
        eventually(what, || {
            ((ended("headers"), ended("http2")) == counts).then_some(())
        });
    }
}

/// h2 answers a list that is over the limit only when it is decoded: with RFC 6585's 431 and
/// nothing else.
#[test]
fn a_list_that_decodes_to_more_gets_a_plain_431() {
    // `:status`, as Huffman code (RFC 7541 appendix B).
    const STATUS_431: [u8; 4] = [0x83, 0x69, 0x90, 0xff];
    let scene = Scene::service().agent().start();
    for repetitions in [33, 127] {
        let mut caller = RawCaller::connect(&scene);
        let head = amplified(repetitions);
        caller.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &head));
        caller.receive_until(HEADERS);
        // The connection goes on until it is ended for another reason.
        caller.send(&literal(3, 129 * KIB));
        caller.assert_ended_for(ENHANCE_YOUR_CALM);
        let heads = caller.payloads(HEADERS);
        assert!(
            heads.len() == 1 && heads[0].len() < 10 && heads[0].ends_with(&STATUS_431),
            "{heads:?}"
        );
    }
}
