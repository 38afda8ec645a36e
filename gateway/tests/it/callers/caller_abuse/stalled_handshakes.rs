//! Handshakes that go no further: each client address has a share of the places of a worker.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use crate::support::eventually;
use crate::support::peers::is_open;
use crate::support::peers::proxy_protocol::{socket_from, tcp4_of, trusted};
use crate::support::processes::prepared::Prepared;
use crate::support::processes::process::Served;

/// Handshakes of one client address on one worker.
const PER_ADDRESS: usize = 1024;
/// Less than the time of a handshake, after which the gateway ends it whatever the others do.
const IN_TIME: Duration = Duration::from_secs(4);

/// A gateway with one worker.
fn start(settings: &str) -> Served {
    let prepared = Prepared::new();
    let config = prepared.config().replace("workers = 2", "workers = 1");
    prepared.serve_with(&format!("{config}{settings}"))
}

fn gave_way(served: &Served) -> usize {
    let metrics = served.metrics();
    metrics.count_with("gw_connections_ended_early_total", "\"handshake\"") as usize
}

/// Opens one connection more than the share of an address by `stall`, after two by `other`. The
/// gateway has to end the oldest one of the address alone.
fn ends_the_oldest(served: &Served, stall: impl Fn() -> TcpStream, other: impl Fn() -> TcpStream) {
    // On a busy machine the time of the handshakes may end meanwhile.
    let is_shown = (0..5).any(|_| {
        eventually("no connection of an earlier attempt is left", || {
            (served.metrics().count("gw_connections") == 0).then_some(())
        });
        let before = gave_way(served);
        let began = Instant::now();
        let others = [other(), other()];
        let mut stalled: Vec<TcpStream> = (0..=PER_ADDRESS).map(|_| stall()).collect();
        let end = stalled[0].read(&mut [0]);
        let count = gave_way(served) - before;
        let are_open = stalled[1..].iter().chain(&others).all(is_open);
        let is_in_time = began.elapsed() < IN_TIME;
        if is_in_time {
            let end = end.unwrap_or_else(|error| panic!("the oldest one goes on: {error}"));
            assert_eq!((end, count, are_open), (0, 1, true));
        }
        is_in_time
    });
    assert!(is_shown, "too slow");
}

#[test]
fn an_address_with_its_share_of_stalled_handshakes_loses_its_own_oldest_one() {
    let served = start("");
    let from = |last| socket_from(Ipv4Addr::new(127, 0, 0, last), served.address);
    ends_the_oldest(&served, || from(1), || from(2));
}

#[test]
fn a_client_that_a_proxy_announces_has_the_share_of_an_address_and_the_proxy_none() {
    let served = start(&trusted(&[("127.0.0.1", "required")]));
    let announce = |client| {
        let mut stream = socket_from(Ipv4Addr::LOCALHOST, served.address);
        stream.write_all(&tcp4_of([198, 51, 100, client])).unwrap();
        stream
    };
    ends_the_oldest(&served, || announce(1), || announce(2));
}

#[test]
fn stalled_handshakes_hold_little_memory() {
    /// Most memory of a handshake: a ClientHello that has not ended, twice, and its connection.
    const HANDSHAKE: usize = 48 * 1024;
    /// Memory of the process that does not depend on the number of handshakes.
    const PROCESS: usize = 8 * 1024 * 1024;
    let served = start("");
    // The header of a record with a ClientHello of 16,000 bytes (RFC 8446 §5.1 and §4), and all but
    // its end.
    let mut hello = vec![0x16, 3, 1, 0x3e, 0x84, 1, 0, 0x3e, 0x80, 3, 3];
    hello.resize(15_000, 0);
    let stall = || {
        let mut stream = socket_from(Ipv4Addr::LOCALHOST, served.address);
        stream.write_all(&hello).unwrap();
        stream
    };
    drop(stall());
    let before = served.resident();
    let stalled: Vec<TcpStream> = (0..2 * PER_ADDRESS).map(|_| stall()).collect();
    eventually("the oldest handshakes have given way", || {
        (gave_way(&served) >= PER_ADDRESS).then_some(())
    });
    let growth = served.resident().saturating_sub(before);
    eprintln!("{} KiB for {} handshakes", growth / 1024, stalled.len());
    assert!(growth <= PER_ADDRESS * HANDSHAKE + PROCESS, "{growth}");
}
