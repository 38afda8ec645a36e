//! A DNS server that has no names.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

/// Starts a server that answers each question with NXDOMAIN, until the test ends. Returns its
/// address.
pub(crate) fn start() -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut message = [0; 1500];
        while let Ok((length, peer)) = socket.recv_from(&mut message) {
            // QR, RD and RA; then the response code (RFC 1035 §4.1.1).
            (message[2], message[3]) = (0x81, 0x83);
            drop(socket.send_to(&message[..length], peer));
        }
    });
    address
}
