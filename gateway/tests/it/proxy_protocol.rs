//! Client addresses that proxies announce with the PROXY protocol.

use std::io::{ErrorKind, Read, Write};

use gw_gateway::config::{Config, HandOver};
use gw_gateway::demo::{Demo, Options};

use crate::support::caller::{self, Caller, HOST, Tls, get};
use crate::support::eventually;
use crate::support::http1_peer::Peer;
use crate::support::proxy_protocol::{SIGNATURE, connect_through, tcp4_of};

/// A header that announces a connection from 198.51.100.7:4660 to 192.0.2.1:443.
fn tcp4() -> Vec<u8> {
    tcp4_of([198, 51, 100, 7])
}

/// A header that announces a connection from [2001:db8::7]:4660, with an extension of 3 bytes.
fn tcp6() -> Vec<u8> {
    let (source, destination) = ([&b"\x20\x01\x0d\xb8"[..], &[0; 11], &[7]].concat(), [0; 16]);
    let ports_and_extension = b"\x12\x34\x01\xbb\x04\x00\x03abc";
    [SIGNATURE, b"\x21\x21\x00\x2a", &source, &destination, ports_and_extension].concat()
}

/// A demo that trusts proxies on loopback and hands over all connections.
fn behind_a_proxy() -> Demo {
    let adjust = |config: &mut Config| {
        config.trusted_proxies = std::iter::once("127.0.0.1/32".parse().unwrap()).collect();
    };
    Demo::start(&Options { adjust, hand_over: HandOver::Always, ..crate::support::options(None) }).unwrap()
}

/// Value of `X-Forwarded-For` at the backend.
fn forwarded_for(demo: &Demo, caller: &mut Caller) -> String {
    caller.send(get(demo, "/"));
    let seen = caller.response().json();
    let fields = seen["headers"].as_array().unwrap();
    let field = fields.iter().find(|field| field[0] == "x-forwarded-for").unwrap();
    field[1].as_str().unwrap().to_owned()
}

/// Bytes that the gateway sends before it ends a connection that begins with `beginning`.
fn refusal(demo: &Demo, beginning: &[u8]) -> Vec<u8> {
    let mut socket = caller::socket(&demo.about);
    socket.write_all(beginning).unwrap();
    let mut said = Vec::new();
    match socket.read_to_end(&mut said) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("still open: {error}"),
        _ => said,
    }
}

fn handshake_failures(demo: &Demo) -> u64 {
    crate::support::reports(demo).iter().map(|report| report.totals["handshake_failures"]).sum()
}

#[test]
fn the_announced_source_is_the_client_address() {
    let demo = behind_a_proxy();
    // Enough connections for each worker to accept some of them.
    for _ in 0..8 {
        assert_eq!(forwarded_for(&demo, &mut connect_through(&demo, &tcp4())), "198.51.100.7");
        assert_eq!(forwarded_for(&demo, &mut connect_through(&demo, &tcp6())), "2001:db8::7");
    }
}

#[test]
fn a_header_may_arrive_byte_by_byte() {
    let demo = behind_a_proxy();
    let mut socket = caller::socket(&demo.about);
    for byte in tcp6() {
        socket.write_all(&[byte]).unwrap();
    }
    let session = caller::session(&demo.about, HOST, &[b"http/1.1"], None);
    assert_eq!(forwarded_for(&demo, &mut Peer::new(Tls::new(session, socket))), "2001:db8::7");
}

#[test]
fn local_headers_and_connections_without_a_header_are_accepted() {
    let demo = behind_a_proxy();
    let local = [SIGNATURE, b"\x20\x00\x00\x00"].concat();
    let unspecified = [SIGNATURE, b"\x21\x00\x00\x03abc"].concat();
    for header in [local, unspecified, Vec::new()] {
        assert_eq!(forwarded_for(&demo, &mut connect_through(&demo, &header)), "127.0.0.1");
    }
    // The agent's tunnel was opened without a header as well.
    assert_eq!(crate::support::tunnels(&demo).len(), 1);
}

#[test]
fn malformed_headers_end_the_connection() {
    let demo = behind_a_proxy();
    let wrong_version = [SIGNATURE, b"\x11\x11\x00\x00"].concat();
    let too_short = [SIGNATURE, b"\x21\x11\x00\x04\x01\x02\x03\x04"].concat();
    let too_long = [SIGNATURE, b"\x21\x11\xff\xff"].concat();
    let malformed = [wrong_version, too_short, too_long];
    for header in &malformed {
        assert_eq!(refusal(&demo, header), b"");
    }
    let failures = malformed.len() as u64;
    eventually("the failures are counted", || (handshake_failures(&demo) == failures).then_some(()));
    // Version 1 headers and other bytes are not accepted as a header.
    assert_eq!(refusal(&demo, b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n")[..9], *b"HTTP/1.1 ");
}

#[test]
fn headers_of_untrusted_peers_are_refused() {
    let demo = crate::support::demo(None);
    // Content type 21: alert (RFC 8446 §5.1).
    assert_eq!(refusal(&demo, &tcp4())[0], 21);
    assert_eq!(forwarded_for(&demo, &mut connect_through(&demo, b"")), "127.0.0.1");
}
