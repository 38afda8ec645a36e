//! Backends that break RFC 9113.

use super::*;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PROTOCOL_ERROR: u32 = 1;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// A field block of literals (RFC 7541 §6.2.2).
fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            block.push(text.len() as u8);
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

/// HEADERS of stream 1, the first request of each connection.
fn head(flags: u8, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | flags, 1, &block(fields))
}

/// A response without a body.
fn last_head(stream: u32, status: &str) -> Vec<u8> {
    let fields = block(&[(":status", status)]);
    frame(HEADERS, END_HEADERS | END_STREAM, stream, &fields)
}

/// GOAWAY without an error, in which `stream` is the last that is processed.
fn goaway(stream: u8) -> Vec<u8> {
    frame(GOAWAY, 0, 0, &[0, 0, 0, stream, 0, 0, 0, 0])
}

/// A received RST_STREAM or GOAWAY.
#[derive(Debug, PartialEq, Eq)]
struct End {
    kind: u8,
    stream: u32,
    code: u32,
}

/// Starts a backend that answers each request with `answer`, and reports the RST_STREAM and GOAWAY
/// frames that it receives.
fn raw_backend(
    answer: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static,
) -> (Vec<String>, mpsc::Receiver<End>) {
    let (sender, ends) = mpsc::channel();
    let address = listen(move |mut backend, _| {
        backend.read_exact(&mut [0; 24]).unwrap();
        // ENABLE_CONNECT_PROTOCOL (RFC 8441 §3).
        write(&mut backend, frame(SETTINGS, 0, 0, &[0, 8, 0, 0, 0, 1]));
        let mut head = [0; 9];
        while read_whole(&mut backend, &mut head) {
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            assert!(read_whole(&mut backend, &mut payload));
            let stream = u32::from_be_bytes(head[5..].try_into().unwrap());
            let answer = match (head[3], head[4] & ACK) {
                (SETTINGS, 0) => frame(SETTINGS, ACK, 0, &[]),
                (PING, 0) => frame(PING, ACK, 0, &payload),
                (HEADERS, _) => answer(stream),
                (kind @ (RST_STREAM | GOAWAY), _) => {
                    let at = if kind == GOAWAY { 4 } else { 0 };
                    let code = u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
                    // The test may have ended.
                    let _ = sender.send(End { kind, stream, code });
                    continue;
                }
                _ => continue,
            };
            // Fails if the agent has closed the connection.
            let _ = backend.write_all(&answer);
        }
    });
    (vec![format!("h2c://{address}")], ends)
}

/// Whether all of `target` arrives before the end of the stream.
fn read_whole(stream: &mut TcpStream, target: &mut [u8]) -> bool {
    let mut filled = 0;
    while filled < target.len() {
        match read(stream, &mut target[filled..]) {
            0 => return false,
            length => filled += length,
        }
    }
    true
}

#[test]
fn malformed_responses_are_errors() {
    let ok = [(":status", "200")];
    let with = |name, value| head(END_STREAM, &[ok[0], (name, value)]);
    for (name, answer) in [
        ("no :status", head(END_STREAM, &[("x", "1")])),
        ("two of :status", with(":status", "200")),
        (
            ":status of letters",
            head(END_STREAM, &[(":status", "abc")]),
        ),
        (
            ":status behind a field",
            head(END_STREAM, &[("x", "1"), ok[0]]),
        ),
        ("unknown pseudo-header field", with(":x", "1")),
        ("connection", with("connection", "x")),
        ("transfer-encoding", with("transfer-encoding", "chunked")),
        ("upgrade", with("upgrade", "x")),
        ("upper case", with("X", "1")),
        ("LF", with("x", "a\nb")),
        ("NUL", with("x", "a\0b")),
        (
            "interim with END_STREAM",
            head(END_STREAM, &[(":status", "103")]),
        ),
        ("Content-Length without DATA", with("content-length", "3")),
        ("DATA first", frame(DATA, END_STREAM, 1, b"x")),
        (
            "HEADERS of a stream of the backend",
            frame(HEADERS, END_HEADERS, 2, &block(&ok)),
        ),
        (
            "HEADERS of an idle stream",
            frame(HEADERS, END_HEADERS, 3, &block(&ok)),
        ),
    ] {
        let (urls, _) = raw_backend(move |_| answer.clone());
        with_tunnel(&urls, |gateway| async move {
            let code = gateway.send(get("/")).error().await.0;
            assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE", "{name}");
        });
    }
}

#[test]
fn malformed_responses_break_off() {
    for (name, rest) in [
        ("two heads", head(0, &[(":status", "200")])),
        ("less DATA", frame(DATA, END_STREAM, 1, b"x")),
        ("more DATA", frame(DATA, 0, 1, b"12345")),
    ] {
        let begin = head(0, &[(":status", "200"), ("content-length", "4")]);
        let (urls, _) = raw_backend(move |_| [&begin[..], &rest].concat());
        with_tunnel(&urls, |gateway| async move {
            let exchange = gateway.send(get("/"));
            // The head may have been relayed before the violation arrived.
            loop {
                match exchange.down.receive().await {
                    Ok(ReceivedPart::Head(Kind::Response, _)) => {}
                    Ok(ReceivedPart::Data(data)) => exchange.down.release(data.len()),
                    Ok(ReceivedPart::Head(Kind::Refused, _)) | Err(Closed::Reset(_)) => break,
                    other => panic!("{name}: {other:?}"),
                }
            }
        });
    }
}

#[test]
fn trailers_of_a_switched_stream_are_an_error() {
    let (urls, _) = raw_backend(|_| {
        let begin = head(0, &[(":status", "200")]);
        let data = frame(DATA, 0, 1, b"hi");
        [begin, data, head(END_STREAM, &[("x", "1")])].concat()
    });
    with_tunnel(&urls, |gateway| async move {
        let exchange = gateway.send(upgrade("foo"));
        assert_eq!(exchange.response().await.head.status, 101);
        assert_eq!(exchange.bytes(2).await, b"hi");
        exchange.assert_reset("GW_BACKEND_INVALID_RESPONSE").await;
    });
}

#[test]
fn a_push_ends_the_connection() {
    let promise = block(&[
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", HOST),
        (":path", "/"),
    ]);
    let promised = [&[0, 0, 0, 2][..], &promise].concat();
    for stream in [0, 1, 3] {
        let push = frame(PUSH_PROMISE, END_HEADERS, stream, &promised);
        let (urls, ends) = raw_backend(move |_| push.clone());
        with_tunnel(&urls, |gateway| async move {
            let code = gateway.send(get("/")).error().await.0;
            assert_eq!(code, "GW_BACKEND_INVALID_RESPONSE", "{stream}");
            let end = received(&ends).await;
            assert_eq!((end.kind, end.code), (GOAWAY, PROTOCOL_ERROR));
        });
    }
}

#[test]
fn no_stream_follows_a_goaway() {
    // Goes on to answer on the same connection.
    let (urls, _) = raw_backend(|stream| {
        let status = if stream == 1 { "200" } else { "500" };
        [goaway(1), last_head(stream, status)].concat()
    });
    with_tunnel(&urls, |gateway| async move {
        for _ in 0..3 {
            assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
        }
    });
}

#[test]
fn a_request_is_sent_on_a_limited_number_of_connections_that_end_without_it() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    // Processes no request.
    let (urls, _) = raw_backend(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        goaway(0)
    });
    with_tunnel(&urls, |gateway| async move {
        assert!(gateway.send(post(Framing::None)).refusal().await.unsent);
        assert_eq!(requests.load(Ordering::Relaxed), 31);
    });
}

#[test]
fn streams_before_a_goaway_go_on_after_an_invalid_second_one() {
    let connections = AtomicUsize::new(0);
    let (urls, _) = raw_backend(move |stream| {
        match stream {
            // Waits for the second request.
            1 if connections.fetch_add(1, Ordering::Relaxed) == 0 => Vec::new(),
            1 => last_head(1, "200"),
            // The second one increases the last stream (RFC 9113 §6.8).
            _ => [goaway(1), goaway(5), last_head(1, "200")].concat(),
        }
    });
    with_tunnel(&urls, |gateway| async move {
        let first = gateway.send(post(Framing::None));
        let second = gateway.send(post(Framing::None));
        assert_eq!(first.response().await.head.status, 200);
        assert_eq!(second.response().await.head.status, 200);
    });
}

#[test]
fn frames_after_a_reset_are_processed() {
    let (urls, ends) = raw_backend(|stream| {
        if stream == 1 {
            // Malformed, and followed by frames that were under way.
            return [
                head(0, &[(":status", "200"), ("connection", "x")]),
                frame(DATA, 0, 1, b"late"),
                frame(DATA, END_STREAM, 1, b"later"),
            ]
            .concat();
        }
        last_head(stream, "200")
    });
    with_tunnel(&urls, |gateway| async move {
        gateway.send(get("/")).error().await;
        for _ in 0..3 {
            assert_eq!(gateway.send(get("/")).response().await.head.status, 200);
        }
    });
    let resets = ends.try_iter().filter(|end| end.kind == RST_STREAM);
    assert!(resets.map(|end| end.stream).eq([1]));
}
