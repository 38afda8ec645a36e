//! Kernel memory of the connections of callers and strangers that read nothing, as the kernel
//! counts it.

use std::io::Write;
use std::process::Command;

use http::Method;

use super::{small_socket, with_one_worker};
use crate::support::eventually;
use crate::support::peers::backend;
use crate::support::peers::caller::{Caller, HOST, Tls, session};
use crate::support::peers::http1_peer::Peer;
use crate::support::processes::prepared::Prepared;
use crate::support::programs::usable;

const MIB: usize = 1024 * 1024;
const RELAY_MEMORY: usize = 64 * MIB;
/// An account on one worker has half of what callers have, which is half of [`RELAY_MEMORY`]. A
/// socket takes up to twice its limit between two measurements.
const KERNEL_MEMORY: usize = RELAY_MEMORY / 4 + 8 * MIB;
/// Callers: enough to fill five times as much.
const CALLERS: usize = 400;

/// Bytes that wait in the sockets of the connections to this port.
fn held(port: u16) -> usize {
    let of_port = ["state", "established", "sport", "=", &format!(":{port}")];
    let output = Command::new("ss").arg("-tmnOH").args(of_port).output();
    let output = output.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    // `skmem:(r0,rb131072,t0,tb87040,f0,w0,o0,bl0,d0)`: received, sent and reserved bytes are `r`,
    // `w` and `f` (ss(8)). The reserved ones are a signed number of the kernel, which is below 0
    // for a moment while a socket uses more than it has reserved, and which `ss` prints unsigned.
    let of_socket = |fields: &str| -> i64 {
        let number = |field: &str| {
            let digits = field.trim_start_matches(['r', 'w', 'f']);
            let number = (digits.len() + 1 == field.len()).then(|| digits.parse::<u32>().ok())?;
            number.map(|number| i64::from(number.cast_signed()))
        };
        fields.split(',').filter_map(number).sum()
    };
    let sockets = text
        .lines()
        .filter_map(|line| line.split_once("skmem:("))
        .filter_map(|(_, rest)| rest.split_once(')'));
    let sum: i64 = sockets.map(|(fields, _)| of_socket(fields)).sum();
    usize::try_from(sum).unwrap_or(0)
}

#[test]
fn callers_that_read_nothing_hold_little_kernel_memory() {
    if !usable(&["ss"]) {
        return;
    }
    let large = vec![b'x'; 4 * MIB];
    let backend = backend::start(move |mut peer| {
        while let Ok(head) = peer.request_head() {
            let body = match head.target.path() {
                "/large" => &large[..],
                _ => &[],
            };
            let length = body.len();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
            // Fails once the caller has gone.
            let sent = peer.try_send(head).and_then(|()| peer.try_send(body));
            if sent.is_err() {
                return;
            }
        }
    });
    let prepared = Prepared::new();
    let gateway = prepared.serve_with(&with_one_worker(&prepared.config(), RELAY_MEMORY));
    let _agent = prepared.run_agent(gateway.address.port(), &backend);
    prepared.wait_for_tunnel(gateway.address);
    let mut most = 0;
    let mut callers: Vec<Caller> = Vec::new();
    for _ in 0..CALLERS {
        let mut caller = prepared.connect(gateway.address);
        caller.send(prepared.get("/large"));
        // Fails if the connection was reset to make room.
        let _ = caller.response_head(&Method::GET);
        callers.push(caller);
        most = most.max(held(gateway.address.port()));
    }
    eprintln!("{most} bytes for {} connections", callers.len());
    assert!((MIB..=KERNEL_MEMORY).contains(&most), "{most}");
    drop(callers);
    prepared.wait_for_tunnel(gateway.address);
}

#[test]
fn strangers_that_read_nothing_hold_little_kernel_memory() {
    /// Few of them fill their part, a quarter, before the first ones have to give up.
    const RELAY_MEMORY: usize = 16 * MIB;
    const KERNEL_MEMORY: usize = RELAY_MEMORY / 4 + 8 * MIB;
    if !usable(&["ss"]) {
        return;
    }
    let prepared = Prepared::new();
    let gateway = prepared.serve_with(&with_one_worker(&prepared.config(), RELAY_MEMORY));
    let about = prepared.about(gateway.address);
    // Refusals fill what the gateway may send, and then requests what it may receive.
    let requests = format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n").repeat(20);
    let metrics = || gateway.metrics();
    let reset = || metrics().count_with("gw_connections_ended_early_total", "memory");
    let counted = || metrics().count("gw_connections_kernel_bytes");
    let refused = || {
        let session = session(&about, HOST, &[b"http/1.1"], None);
        let mut stranger = Peer::new(Tls::new(session, small_socket(&about)));
        stranger.send(format!("GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n"));
        assert_eq!(stranger.response().code(), "GW_AUTH_REQUIRED");
        stranger.stream.sock.set_nonblocking(true).unwrap();
        stranger.stream
    };
    // All are connected before the first one fills its part, as a stalled response has little time.
    let mut strangers: Vec<Tls> = std::iter::repeat_with(refused).take(CALLERS).collect();
    let mut most = 0;
    let mut filled = 0;
    for some in strangers.chunks_mut(4) {
        let counted_before = counted();
        for stranger in some {
            // Until the kernel of the stranger takes no more, or the connection was reset.
            while stranger.write_all(requests.as_bytes()).is_ok() {}
            filled += 1;
        }
        eventually("the gateway has measured them", || {
            (counted() > counted_before || reset() > 0).then_some(())
        });
        most = most.max(held(gateway.address.port()));
        if reset() > 0 {
            break;
        }
    }
    eprintln!("{most} bytes for {filled} connections");
    assert!(reset() > 0, "no connection was reset");
    assert!((MIB..=KERNEL_MEMORY).contains(&most), "{most}");
}
