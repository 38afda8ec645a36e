//! HTTP/2 header lists over the limits (RFC 9113 §10.5.1) get an error, or end the connection.

use std::io::{ErrorKind, Read};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};

use super::send_frames;
use crate::support::eventually;
use crate::support::peers::caller::{Caller, HOST};
use crate::support::peers::http2_caller::{connect, on_a_reactor, whole};
use crate::support::peers::http2_frames::{
    self, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, SETTINGS, Splitter,
    frame,
};
use crate::support::peers::{backend, http2_backend};
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
            let get = (0..fields).fold(get, |request, _| request.header("x", &value));
            let response = caller.fetch(get).await;
            assert_eq!(response.status, 502, "{fields}");
            let error = &response.json()["error"];
            assert_eq!(error["code"], "GW_HEADERS_TOO_LARGE", "{fields}");
            let request_id = response.header("x-gw-request-id");
            assert_eq!(error["request_id"], request_id, "{fields}");
        }
        assert_eq!(caller.get("/after").await.status, 200);
    });
}

/// From backends of both versions, to callers of both, on all workers.
#[test]
fn a_response_has_up_to_a_thousand_fields() {
    let over_http1 = backend::start(|mut peer| {
        while let Ok((head, ..)) = peer.request() {
            let names = fields_of(head.target.as_str());
            let fields: String = names.map(|name| format!("{name}: v\r\n")).collect();
            peer.send(format!("HTTP/1.1 204 No Content\r\n{fields}\r\n"));
        }
    });
    let over_http2 = http2_backend::start(async |request, mut respond| {
        let mut response = http::Response::new(());
        *response.status_mut() = http::StatusCode::NO_CONTENT;
        let value = HeaderValue::from_static("v");
        let fields = fields_of(request.uri().path()).map(|name| (name, value.clone()));
        response.headers_mut().extend(fields);
        respond.send_response(response, true).unwrap();
    });
    for backend in [over_http1, over_http2] {
        let scene = Scene::service().agent_to(backend).start();
        for _ in 0..4 {
            let mut caller = scene.connect();
            let response = caller.ask(scene.get("/1000"));
            let passed = fields_of("/1000").filter(|name| response.headers.contains(name));
            assert_eq!((response.status.as_u16(), passed.count()), (204, 1000));
            let error = &caller.ask(scene.get("/1001")).json()["error"];
            assert_eq!(error["code"], "GW_BACKEND_INVALID_RESPONSE");
            let message = error["message"].as_str().unwrap();
            let is_named = message.contains("more than 1000 header fields");
            assert!(is_named && !message.contains("not valid HTTP"), "{message}");
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
    let mut settings = caller.payloads(SETTINGS)[0].chunks(6);
    let announced = settings.find(|setting| setting.starts_with(&MAX_HEADER_LIST_SIZE));
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
                let code = &response.json()["error"]["code"];
                assert_eq!(code, "GW_BAD_REQUEST", "{what}");
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
    caller: Caller,
    splitter: Splitter,
    received: Vec<Frame>,
}

impl RawCaller {
    fn connect(scene: &Scene) -> Self {
        Self {
            caller: send_frames(scene, &[]),
            splitter: Splitter::default(),
            received: Vec::new(),
        }
    }

    fn send(&mut self, head: &[u8]) {
        // The gateway may close the connection before it has read everything.
        drop(self.caller.try_send(head));
    }

    /// Receives to the end of the connection, or until a frame of this type is there.
    fn receive_until(&mut self, kind: u8) {
        let mut chunk = vec![0; 64 * KIB];
        while self.payloads(kind).is_empty() {
            match self.caller.stream.read(&mut chunk) {
                Ok(0) => return,
                Ok(read) => {
                    self.splitter.buffer.extend_from_slice(&chunk[..read]);
                    let frames = std::iter::from_fn(|| self.splitter.take());
                    self.received.extend(frames);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The gateway sends no close_notify after GOAWAY.
                Err(error) => {
                    let is_ended = error.kind() != ErrorKind::WouldBlock;
                    assert!(is_ended, "the connection does not end");
                    return;
                }
            }
        }
    }

    /// Payloads of the received frames of a type.
    fn payloads(&self, kind: u8) -> Vec<&[u8]> {
        let frames = self.received.iter().filter(|frame| frame.kind == kind);
        frames.map(|frame| &frame.payload[..]).collect()
    }

    /// Receives the end of the connection. Asserts that it is GOAWAY with this error code (RFC 9113
    /// §6.8).
    #[track_caller]
    fn assert_ended_for(&mut self, code: u8) {
        self.receive_until(GOAWAY);
        let goaway = self.payloads(GOAWAY);
        assert_eq!(goaway.first().map(|payload| payload[7]), Some(code));
    }
}

#[test]
fn a_longer_block_ends_the_connection_without_a_response() {
    let scene = Scene::service().agent().start();
    let repeated = http2_frames::headers(1, END_STREAM, &amplified(1000));
    for (what, head, counts) in [
        // From four times the limit on, decoded, h2 itself ends the connection.
        ("1,000 repetitions", repeated, (0, 1)),
        ("129 KiB", literal(1, 129 * KIB), (1, 1)),
        ("600 KiB", literal(1, 600 * KIB), (2, 1)),
    ] {
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
        caller.send(&http2_frames::headers(1, END_STREAM, &head));
        caller.receive_until(HEADERS);
        // The connection goes on until it is ended for another reason.
        caller.send(&literal(3, 129 * KIB));
        caller.assert_ended_for(ENHANCE_YOUR_CALM);
        let heads = caller.payloads(HEADERS);
        let is_plain = |head: &[u8]| head.len() < 10 && head.ends_with(&STATUS_431);
        assert!(heads.len() == 1 && is_plain(heads[0]), "{heads:?}");
    }
}
