//! A DNS server on a thread, which answers over UDP (RFC 1035).

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::thread;

/// Types of records (§3.2.2).
pub const CNAME: u16 = 5;
pub const TXT: u16 = 16;

/// Response codes (§4.1.1).
pub const SERVER_FAILURE: u8 = 2;
pub const NAME_ERROR: u8 = 3;

/// Length of the header of a message (§4.1.1).
const HEADER: usize = 12;

/// The answer to a question: one record of its name, no record, or a response code.
pub enum Answer {
    Record { kind: u16, data: Vec<u8> },
    Nothing,
    Error(u8),
}

/// Starts a server that answers each question as `answer` says, which gets the name and the type.
/// It runs until the process ends. Returns its address.
pub fn serve(mut answer: impl FnMut(&str, u16) -> Answer + Send + 'static) -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut message = [0; 1500];
        while let Ok((length, peer)) = socket.recv_from(&mut message) {
            let response = respond(&message[..length], &mut answer);
            drop(socket.send_to(&response, peer));
        }
    });
    address
}

/// The response to a message with one question.
fn respond(message: &[u8], answer: &mut impl FnMut(&str, u16) -> Answer) -> Vec<u8> {
    let name = &message[HEADER..];
    let end = HEADER + name.iter().position(|byte| *byte == 0).unwrap() + 1;
    let kind = u16::from_be_bytes([message[end], message[end + 1]]);
    let mut response = message[..end + 4].to_vec();
    // QR, RD and RA; no records.
    (response[2], response[3]) = (0x81, 0x80);
    response[6..HEADER].fill(0);
    match answer(&text(&message[HEADER..end]), kind) {
        Answer::Record { kind, data } => {
            response[7] = 1;
            // The name of the question (§4.1.4), the class IN, and a second to live.
            response.extend([0xC0, HEADER as u8]);
            response.extend(kind.to_be_bytes());
            response.extend([0, 1, 0, 0, 0, 1]);
            response.extend(u16::try_from(data.len()).unwrap().to_be_bytes());
            response.extend(data);
        }
        Answer::Nothing => {}
        Answer::Error(code) => response[3] |= code,
    }
    response
}

/// A name in a message as text (§3.1).
fn text(mut labels: &[u8]) -> String {
    let mut name = Vec::new();
    while let Some((length, rest)) = labels.split_first().filter(|(length, _)| **length > 0) {
        let (label, rest) = rest.split_at(usize::from(*length));
        name.push(String::from_utf8_lossy(label).into_owned());
        labels = rest;
    }
    name.join(".")
}

/// A name as a record has it (§3.1).
pub fn name(text: &str) -> Vec<u8> {
    let label = |label: &str| [&[label.len() as u8], label.as_bytes()].concat();
    let labels: Vec<u8> = text.split('.').flat_map(label).collect();
    [labels, vec![0]].concat()
}

/// A text as a record of the type TXT has it (§3.3.14).
pub fn character_string(text: &str) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        assert_eq!(text(&name("api.customer.test")), "api.customer.test");
        assert_eq!(name("ab.c"), b"\x02ab\x01c\0");
    }
}
