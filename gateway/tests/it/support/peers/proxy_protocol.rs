//! PROXY protocol headers, and callers that send them.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use super::caller::{self, Caller, HOST, Tls};
use super::http1_peer::Peer;
use crate::support::SOON;
use crate::support::scene::Scene;

/// Signature of a version 2 header (proxy-protocol.txt §2.2).
pub(crate) const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// A header that announces a connection from `source`, port 4660, to 192.0.2.1:443.
pub(crate) fn tcp4_of(source: [u8; 4]) -> Vec<u8> {
    [
        SIGNATURE,
        b"\x21\x11\x00\x0c",
        &source,
        &[192, 0, 2, 1, 0x12, 0x34, 0x01, 0xbb],
    ]
    .concat()
}

/// The line of a configuration with these proxies: addresses, and what they send.
pub(crate) fn trusted(proxies: &[(&str, &str)]) -> String {
    let proxy = |(address, setting): &(&str, &str)| {
        format!("{{ address = \"{address}\", proxy_protocol = \"{setting}\" }}")
    };
    let proxies: Vec<String> = proxies.iter().map(proxy).collect();
    format!("trusted_proxies = [{}]\n", proxies.join(", "))
}

/// A TCP connection from `source`, an address on loopback, to `to`.
pub(crate) fn socket_from(source: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket.into()
}

/// A caller that sends `header` in one segment with its ClientHello.
pub(crate) fn connect_through(scene: &Scene, header: &[u8]) -> Caller {
    begin_with(scene, header, caller::socket(&scene.about))
}

/// As [`connect_through`], on a TCP connection that exists.
pub(crate) fn begin_with(scene: &Scene, header: &[u8], mut socket: TcpStream) -> Caller {
    let mut session = caller::session(&scene.about, HOST, &[b"http/1.1"], None);
    let mut beginning = header.to_vec();
    session.write_tls(&mut beginning).unwrap();
    socket.write_all(&beginning).unwrap();
    Peer::new(Tls::new(session, socket))
}
