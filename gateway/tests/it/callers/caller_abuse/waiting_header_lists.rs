//! Memory of the gateway process for header lists that wait: heads for their end or that of their
//! body, trailers for a reader.

use std::io::{Read, Write};
use std::net::Ipv4Addr;

use http::Method;

use crate::callers::with_one_worker;
use crate::support::eventually;
use crate::support::peers::caller::{HOST, Tls, session, socket};
use crate::support::peers::http2_frames::{
    CONTINUATION, END_HEADERS, END_STREAM, Frame, HEADERS, LAST, NO_WINDOW, PING, RST_STREAM,
    block, frame, headers, indexed, preface,
};
use crate::support::peers::proxy_protocol::socket_from;
use crate::support::peers::{backend, is_open};
use crate::support::processes::prepared::Prepared;
use crate::support::scene::About;

/// Connections, enough to tell what they hold from what the process holds anyway.
const CONNECTIONS: usize = 10;
/// Concurrent requests of one connection.
const STREAMS: u32 = 100;
/// Most bytes of one connection: 100 heads of 32 KiB, with the memory of 100 fields each, and the
/// same for the largest trailers.
const CONNECTION: usize = 8 * 1024 * 1024;
/// Fields in a list that is just below the limit of 128 KiB, each of 33 bytes (RFC 7541 §4.1).
const MANY: usize = 3800;

/// Fields of a POST, with the key of the service if there is one.
fn post<'a>(key: Option<&'a str>, others: &[(&'a str, &'a str)]) -> Vec<u8> {
    let request = [
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", HOST),
        (":path", "/"),
    ];
    let key = key.map(|key| ("x-gw-service-key", key));
    block(&[&request[..], others, key.as_slice()].concat())
}

/// A header block in HEADERS and CONTINUATION frames.
fn head(stream: u32, flags: u8, block: &[u8]) -> Vec<u8> {
    let chunks = block.chunks(16 * 1024);
    let last = chunks.len() - 1;
    let frames = chunks.enumerate().flat_map(|(at, chunk)| {
        let end = if at == last { END_HEADERS } else { 0 };
        let (kind, flags) = if at == 0 {
            (HEADERS, flags)
        } else {
            (CONTINUATION, 0)
        };
        frame(kind, flags | end, stream, chunk)
    });
    frames.collect()
}

/// A request of two field blocks, the second of which ends it.
fn with_trailers(stream: u32, fields: &[u8], trailers: &[u8]) -> Vec<u8> {
    [head(stream, 0, fields), head(stream, END_STREAM, trailers)].concat()
}

/// The frames of one connection: `request` makes those of a stream.
fn connection(request: impl Fn(u32) -> Vec<u8>) -> Vec<u8> {
    let requests = (0..STREAMS).flat_map(|number| request(2 * number + 1));
    let mut frames = preface(NO_WINDOW);
    frames.extend(requests);
    frames.extend(frame(PING, 0, 0, b"the last"));
    frames
}

/// Opens a connection, sends the frames, and receives up to the answer to their PING, by when the
/// gateway has read them all.
fn send(about: &About, frames: &[u8]) -> Tls {
    let mut stream = Tls::new(session(about, HOST, &[b"h2"], None), socket(about));
    stream.write_all(frames).unwrap();
    stream.flush().unwrap();
    until(&mut stream, PING);
    stream
}

/// Receives frames up to one of this kind. Returns the stream of that.
fn until(stream: &mut Tls, kind: u8) -> u32 {
    loop {
        let frame = Frame::read(stream).unwrap();
        if frame.kind == kind {
            return frame.stream;
        }
    }
}

/// What waits in each case, and the frames of a connection.
fn cases(key: &str) -> [(&'static str, Vec<u8>); 7] {
    let repeated = [indexed("x", ""), vec![LAST; MANY]].concat();
    let cookies = [indexed("cookie", ""), vec![LAST; 3000]].concat();
    let distinct: Vec<String> = (0..1800).map(|number| format!("x{number}")).collect();
    let distinct: Vec<(&str, &str)> = distinct.iter().map(|name| (name.as_str(), "")).collect();
    let distinct = block(&distinct);
    let large = block(&[("x", &"v".repeat(30 * 1024))]);
    let upgrade = block(&[
        (":method", "CONNECT"),
        (":protocol", "websocket"),
        (":scheme", "https"),
        (":authority", HOST),
        (":path", "/"),
        ("x-gw-service-key", key),
    ]);
    let no_data = post(None, &[("content-length", "0")]);
    [
        (
            "trailers behind a refusal without a window",
            connection(|stream| with_trailers(stream, &post(None, &[]), &repeated)),
        ),
        (
            "trailers with distinct names",
            connection(|stream| with_trailers(stream, &post(None, &[]), &distinct)),
        ),
        (
            "trailers behind an extended CONNECT",
            connection(|stream| with_trailers(stream, &upgrade, &repeated)),
        ),
        (
            "trailers of requests that wait for a response",
            connection(|stream| with_trailers(stream, &post(Some(key), &[]), &repeated)),
        ),
        (
            "heads over the limits that announce no data",
            connection(|stream| head(stream, 0, &[&no_data[..], &repeated].concat())),
        ),
        (
            "heads within the limits that announce no data",
            connection(|stream| head(stream, 0, &[&no_data[..], &large].concat())),
        ),
        (
            "heads of cookies that announce no data",
            connection(|stream| head(stream, 0, &[&no_data[..], &cookies].concat())),
        ),
    ]
}

#[test]
fn header_lists_that_wait_are_bounded() {
    let prepared = Prepared::new();
    // Answers nothing but GET, so that all other requests wait.
    let backend = backend::start(|mut peer| {
        while let Ok(head) = peer.request_head() {
            if head.method == Method::GET && head.upgrade.is_none() {
                peer.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
            }
        }
    });
    let gateway = with_one_worker(&prepared);
    let _agent = prepared.run_agent(gateway.address.port(), &backend);
    prepared.wait_for_tunnel(gateway.address);
    let about = prepared.about(gateway.address);

    for (what, frames) in &cases(prepared.service_key()) {
        // The first connection allocates what the process keeps.
        drop(send(&about, frames));
        let before = gateway.resident();
        let open: Vec<Tls> = (0..CONNECTIONS).map(|_| send(&about, frames)).collect();
        let growth = gateway.resident().saturating_sub(before);
        eprintln!("{what}: {} KiB a connection", growth / CONNECTIONS / 1024);
        assert!(
            growth <= CONNECTIONS * CONNECTION,
            "{what}: {growth} bytes of {} connections",
            open.len()
        );
    }
}

/// A head of HTTP/1.1 without its end, of nearly the largest size.
fn unfinished_head() -> String {
    format!(
        "GET / HTTP/1.1\r\nHost: {HOST}\r\nX: {}",
        "v".repeat(30 * 1024)
    )
}

/// Number of connections that the gateway has not ended.
fn open(streams: &[Tls]) -> usize {
    streams
        .iter()
        .filter(|stream| is_open(&stream.sock))
        .count()
}

#[test]
fn incomplete_heads_of_an_address_are_bounded() {
    /// As docs/limits.md says.
    const PER_ADDRESS: usize = 256;
    const BLOCKS_PER_ADDRESS: usize = 40;
    /// Most memory of one such connection: a head with one more receive, in a buffer that has
    /// grown, and the connection.
    const HEAD: usize = 144 * 1024;
    const BLOCK: usize = 800 * 1024;
    let prepared = Prepared::new();
    let gateway = with_one_worker(&prepared);
    let about = prepared.about(gateway.address);
    let begin = |last: u8, alpn: &str, bytes: &[u8]| {
        let socket = socket_from(Ipv4Addr::new(127, 0, 0, last), gateway.address);
        let alpn = [alpn.as_bytes()];
        let mut stream = Tls::new(session(&about, HOST, &alpn, None), socket);
        stream.write_all(bytes).unwrap();
        stream.flush().unwrap();
        stream
    };
    // Fields of 34 bytes each, which take three times that in memory.
    let fields: Vec<String> = (0..1500).map(|number| format!("x{number}")).collect();
    let fields: Vec<(&str, &str)> = fields.iter().map(|name| (name.as_str(), "")).collect();
    let block = frame(HEADERS, 0, 1, &[post(None, &[]), block(&fields)].concat());
    let block = [preface(&[]), block].concat();
    let head = unfinished_head().into_bytes();
    let cases: [(&str, &[u8], usize, usize); 2] = [
        ("http/1.1", &head, PER_ADDRESS, HEAD),
        ("h2", &block, BLOCKS_PER_ADDRESS, BLOCK),
    ];
    for (alpn, bytes, most, memory) in cases {
        drop(begin(3, alpn, bytes));
        let before = gateway.resident();
        let mut flood: Vec<Tls> = (0..most).map(|_| begin(3, alpn, bytes)).collect();
        let mut bystander = begin(2, "http/1.1", &head);
        flood.extend((0..32).map(|_| begin(3, alpn, bytes)));
        eventually("the oldest heads have given way", || {
            (open(&flood) <= most).then_some(())
        });
        let growth = gateway.resident().saturating_sub(before);
        eprintln!("{} KiB for {most} heads of {alpn}", growth / 1024);
        let limit = most * memory + 4 * 1024 * 1024;
        assert!(growth <= limit, "{alpn}: {growth}");
        // The request of another address goes on.
        bystander.write_all(b"\r\n\r\n").unwrap();
        let mut status = [0; 12];
        bystander.read_exact(&mut status).unwrap();
        assert_eq!(&status, b"HTTP/1.1 502", "{alpn}");
    }
}

#[test]
fn requests_without_data_that_do_not_end_are_bounded() {
    let prepared = Prepared::new();
    let gateway = with_one_worker(&prepared);
    let about = prepared.about(gateway.address);
    let frames = connection(|stream| {
        let head = post(None, &[("content-length", "0")]);
        headers(stream, 0, &head)
    });
    let mut all: Vec<Tls> = (0..3).map(|_| send(&about, &frames)).collect();
    // 300 requests wait, of which an address may have 256: the oldest is reset, and its connection
    // goes on.
    assert_eq!(until(&mut all[0], RST_STREAM), 1);
    all[0].write_all(&frame(PING, 0, 0, b"the next")).unwrap();
    until(&mut all[0], PING);
}
