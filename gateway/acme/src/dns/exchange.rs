//! One question to a DNS server: over UDP, and over TCP if the answer is cut or does not come.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};

use crate::limits::{DNS_ANSWER_WITHIN, DNS_ATTEMPTS, DNS_TCP_WITHIN};

/// Length of the header of a message (RFC 1035 §4.1.1).
const HEADER_BYTES: usize = 12;

/// Sends `question` and returns the answer. Blocks.
pub(crate) fn exchange(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    match over_udp(server, question) {
        Ok(answer) if !is_cut(&answer) => Ok(answer),
        Ok(_) => over_tcp(server, question),
        // The cause of a failure over TCP says more than a time limit.
        Err(_) => over_tcp(server, question),
    }
}

fn over_udp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let local: SocketAddr = match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    // A port of its own and a connected socket: an answer comes from the server, or is a guess of both port and id.
    let socket = UdpSocket::bind(local)?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(DNS_ANSWER_WITHIN))?;
    let mut buffer = vec![0; usize::from(u16::MAX)];
    let mut failure = io::Error::from(io::ErrorKind::TimedOut);
    for _ in 0..DNS_ATTEMPTS {
        socket.send(question)?;
        match socket.recv(&mut buffer) {
            Ok(length) if answers(&buffer[..length], question) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            Ok(_) => {}
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn over_tcp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&server, DNS_TCP_WITHIN)?;
    stream.set_read_timeout(Some(DNS_TCP_WITHIN))?;
    stream.set_write_timeout(Some(DNS_TCP_WITHIN))?;
    let length = u16::try_from(question.len())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the question is too long"))?;
    stream.write_all(&[&length.to_be_bytes()[..], question].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut answer)?;
    match answers(&answer, question) {
        true => Ok(answer),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the answer is for another question",
        )),
    }
}

/// Whether `answer` is a response with the id of `question`.
fn answers(answer: &[u8], question: &[u8]) -> bool {
    answer.len() >= HEADER_BYTES && answer[..2] == question[..2] && answer[2] & 0x80 != 0
}

/// Whether the answer did not fit into a datagram.
fn is_cut(answer: &[u8]) -> bool {
    answer[2] & 0x02 != 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

    use std::net::TcpListener;
    use std::thread;

    use super::*;

    const QUESTION: [u8; HEADER_BYTES] = [7, 9, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    #[test]
    fn a_cut_answer_is_asked_for_over_tcp() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let udp = UdpSocket::bind(address).unwrap();
        let server = thread::spawn(move || {
            let mut buffer = [0; 64];
            let (length, from) = udp.recv_from(&mut buffer).unwrap();
            let mut answer = buffer[..length].to_vec();
            answer[2] |= 0x82;
            udp.send_to(&answer, from).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = [0; 2 + HEADER_BYTES];
            stream.read_exact(&mut question).unwrap();
            question[4] |= 0x80;
            stream
                .write_all(&[&[0, 15][..], &question[2..], b"all"].concat())
                .unwrap();
        });
        let answer = exchange(address, &QUESTION).unwrap();
        assert_eq!(&answer[HEADER_BYTES..], b"all");
        server.join().unwrap();
    }

    #[test]
    fn an_answer_with_another_id_or_without_the_response_bit_is_none() {
        let mut answer = QUESTION;
        assert!(!answers(&answer, &QUESTION), "a question is no answer");
        answer[2] |= 0x80;
        assert!(answers(&answer, &QUESTION));
        answer[0] = 8;
        assert!(!answers(&answer, &QUESTION));
        assert!(!answers(&answer[..4], &QUESTION));
    }
}
