//! HTTP/2 header lists over the limits (RFC 9113 §10.5.1) get an error with a request id, or end the connection.

use std::io::{Read, Write};

use http::Method;

use crate::support::caller::{self, HOST, Tls};
use crate::support::http2_caller::{connect, on_a_reactor};
use crate::support::http2_frames::{
    self, CONTINUATION, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, SETTINGS, frame,
};
use crate::support::{demo, eventually, reports};

const KIB: usize = 1024;
const ENHANCE_YOUR_CALM: u8 = 11;

#[test]
fn a_list_of_up_to_128_kib_gets_an_error_with_a_request_id() {
    let demo = demo(None);
    on_a_reactor(async {
        let caller = connect(&demo).await;
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

/// A header block of a request that decodes to some hundred bytes plus 4,032 bytes per repetition: it adds a field to
/// the dynamic table and then refers to it (RFC 7541 §2.3.3).
fn amplified(repetitions: usize) -> Vec<u8> {
    let mut block = http2_frames::get("/", None);
    block.extend([0x40, 1, b'x', 127, 0xa0, 0x1e]);
    block.extend([b'y'; 3999]);
    block.extend(std::iter::repeat_n(0x80 | 62, repetitions));
    block
}

/// A header block of at least `size` bytes, in HEADERS and CONTINUATION frames.
fn literal(size: usize) -> Vec<u8> {
    let mut block = http2_frames::get("/", None);
    while block.len() < size {
        // A never-indexed literal with a new name and a value of 1,000 bytes.
        block.extend([0x10, 1, b'x', 127, 0xe9, 0x06]);
        block.extend([b'y'; 1000]);
    }
    let chunks: Vec<&[u8]> = block.chunks(16 * KIB).collect();
    let last = chunks.len() - 1;
    let frames = chunks.iter().enumerate().map(|(at, chunk)| {
        let end = if at == last { END_HEADERS } else { 0 };
        if at == 0 {
            frame(HEADERS, END_STREAM | end, 1, chunk)
        } else {
            frame(CONTINUATION, end, 1, chunk)
        }
    });
    frames.collect::<Vec<_>>().concat()
}

/// Sends `head` on a new connection and reads to the end. Returns the types of all frames and the error code of GOAWAY.
fn answer(demo: &gw_gateway::demo::Demo, head: &[u8]) -> (Vec<u8>, Option<u8>) {
    let mut stream = Tls::new(
        caller::session(&demo.about, HOST, &[b"h2"], None),
        caller::socket(&demo.about),
    );
    stream.write_all(PREFACE).unwrap();
    stream.write_all(&frame(SETTINGS, 0, 0, &[])).unwrap();
    // The gateway may close the connection before it has read everything.
    drop(stream.write_all(head).and_then(|()| stream.flush()));
    let mut received = Vec::new();
    let mut chunk = vec![0; 64 * KIB];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => received.extend_from_slice(&chunk[..read]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // The gateway sends no close_notify after GOAWAY.
            Err(error) => {
                assert!(
                    error.kind() != std::io::ErrorKind::WouldBlock,
                    "the connection does not end"
                );
                break;
            }
        }
    }
    let mut kinds = Vec::new();
    let mut code = None;
    let mut rest = &received[..];
    while let [a, b, c, kind, behind @ ..] = rest {
        let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
        kinds.push(*kind);
        if *kind == GOAWAY {
            // Flags, stream id, last stream id, then the error code (RFC 9113 §6.8).
            code = behind.get(12).copied();
        }
        rest = behind.get(5 + length..).unwrap_or_default();
    }
    (kinds, code)
}

#[test]
fn a_larger_list_ends_the_connection_without_a_response() {
    let demo = demo(None);
    let whole = |block: &[u8]| frame(HEADERS, END_HEADERS | END_STREAM, 1, block);
    let heads = [
        // Decoded sizes slightly over the limit, just below four times the limit, and beyond it, where h2 itself stops.
        ("33 repetitions", whole(&amplified(33)), (1, 0)),
        ("127 repetitions", whole(&amplified(127)), (2, 0)),
        ("1,000 repetitions", whole(&amplified(1000)), (2, 1)),
        ("129 KiB", literal(129 * KIB), (3, 1)),
        ("600 KiB", literal(600 * KIB), (4, 1)),
    ];
    for (what, head, counts) in heads {
        let (kinds, code) = answer(&demo, &head);
        assert_eq!(code, Some(ENHANCE_YOUR_CALM), "{what}: {kinds:?}");
        assert!(!kinds.contains(&HEADERS), "{what}: {kinds:?}");
        let ended = |reason: &str| -> u64 {
            reports(&demo)
                .iter()
                .filter_map(|report| report.by_reason.ended_early.get(reason))
                .sum()
        };
        eventually(what, || {
            ((ended("headers"), ended("http2")) == counts).then_some(())
        });
    }
}
