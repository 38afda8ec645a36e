//! PROXY protocol headers, and callers that send them.

use std::io::Write;

use gw_gateway::demo::Demo;

use super::caller::{self, Caller, HOST, Tls};
use super::http1_peer::Peer;

/// Signature of a version 2 header (proxy-protocol.txt §2.2).
pub(crate) const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// A header that announces a connection from `source`, port 4660, to 192.0.2.1:443.
pub(crate) fn tcp4_of(source: [u8; 4]) -> Vec<u8> {
    [SIGNATURE, b"\x21\x11\x00\x0c", &source, &[192, 0, 2, 1, 0x12, 0x34, 0x01, 0xbb]].concat()
}

/// A caller that sends `header` in one segment with its ClientHello.
pub(crate) fn connect_through(demo: &Demo, header: &[u8]) -> Caller {
    let mut session = caller::session(&demo.about, HOST, &[b"http/1.1"], None);
    let mut beginning = header.to_vec();
    session.write_tls(&mut beginning).unwrap();
    let mut socket = caller::socket(&demo.about);
    socket.write_all(&beginning).unwrap();
    Peer::new(Tls::new(session, socket))
}
