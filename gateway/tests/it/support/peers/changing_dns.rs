//! A DNS server that answers with another text at each look.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

/// TXT (RFC 1035 §3.2.2).
const TXT: u8 = 16;

/// Starts a server that answers questions about TXT records with another text each time, and every
/// third one with a failure, until the test ends. Other questions get no record. Returns its
/// address.
pub(crate) fn start() -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut message = [0; 1500];
        let mut asked = 0;
        while let Ok((_, peer)) = socket.recv_from(&mut message) {
            let end = 12 + message[12..].iter().position(|byte| *byte == 0).unwrap() + 5;
            let mut answer = message[..end].to_vec();
            // QR, RD and RA; no records (RFC 1035 §4.1.1).
            (answer[2], answer[3]) = (0x81, 0x80);
            answer[6..12].fill(0);
            if answer[end - 3] == TXT {
                asked += 1;
                let text = format!("text {asked}");
                let length = u8::try_from(text.len()).unwrap();
                match asked % 3 {
                    // The server fails.
                    0 => answer[3] |= 2,
                    _ => {
                        answer[7] = 1;
                        answer.extend([0xC0, 12, 0, TXT, 0, 1, 0, 0, 0, 1, 0, length + 1, length]);
                        answer.extend(text.into_bytes());
                    }
                }
            }
            drop(socket.send_to(&answer, peer));
        }
    });
    address
}
