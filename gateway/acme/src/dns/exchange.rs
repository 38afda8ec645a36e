//! One question to a DNS server: over UDP, and over TCP if the answer is cut or does not come.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use crate::limits::{DNS_ANSWER_WITHIN, DNS_ATTEMPTS, DNS_TCP_WITHIN};

/// Length of the header of a message (RFC 1035 §4.1.1).
const HEADER_BYTES: usize = 12;

/// Parts of the question that an answer must have, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Match {
    /// The id alone. The rest of the message is not a question, or its answer is signed.
    Id,
    /// The id and the question section (RFC 5452 §4), unless the answer is an error.
    Question,
}

/// Sends `question` until `deadline` and returns the answer, of at most 64 KiB. Blocks.
pub(crate) fn exchange(
    server: SocketAddr,
    question: &[u8],
    must_match: Match,
    deadline: Instant,
) -> io::Result<Vec<u8>> {
    let is_answer = |message: &[u8]| answers(message, question, must_match);
    match over_udp(server, question, is_answer, deadline) {
        Ok(answer) if !is_cut(&answer) => Ok(answer),
        Ok(_) => over_tcp(server, question, is_answer, deadline),
        // The cause of a failure over TCP says more than a time limit.
        Err(_) => over_tcp(server, question, is_answer, deadline),
    }
}

fn over_udp(
    server: SocketAddr,
    question: &[u8],
    is_answer: impl Fn(&[u8]) -> bool,
    deadline: Instant,
) -> io::Result<Vec<u8>> {
    let local: SocketAddr = match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    // A port of its own and a connected socket: an answer comes from the server, or is a guess of
    // both port and id.
    let socket = UdpSocket::bind(local)?;
    socket.connect(server)?;
    let mut buffer = vec![0; usize::from(u16::MAX)];
    let mut failure = io::Error::from(io::ErrorKind::TimedOut);
    for _ in 0..DNS_ATTEMPTS {
        socket.set_read_timeout(Some(remaining(deadline, DNS_ANSWER_WITHIN)?))?;
        socket.send(question)?;
        match socket.recv(&mut buffer) {
            Ok(length) if is_answer(&buffer[..length]) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            Ok(_) => {}
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn over_tcp(
    server: SocketAddr,
    question: &[u8],
    is_answer: impl Fn(&[u8]) -> bool,
    deadline: Instant,
) -> io::Result<Vec<u8>> {
    let deadline = deadline.min(Instant::now() + DNS_TCP_WITHIN);
    let mut stream = TcpStream::connect_timeout(&server, remaining(deadline, DNS_TCP_WITHIN)?)?;
    stream.set_write_timeout(Some(remaining(deadline, DNS_TCP_WITHIN)?))?;
    let length = u16::try_from(question.len())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the question is too long"))?;
    stream.write_all(&[&length.to_be_bytes()[..], question].concat())?;
    let mut length = [0; 2];
    read_exact(&mut stream, &mut length, deadline)?;
    let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
    read_exact(&mut stream, &mut answer, deadline)?;
    match is_answer(&answer) {
        true => Ok(answer),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the answer is for another question",
        )),
    }
}

/// Fills `buffer`. A time limit for each read alone would let a server that sends byte by byte hold
/// the caller.
fn read_exact(stream: &mut TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        stream.set_read_timeout(Some(remaining(deadline, DNS_TCP_WITHIN)?))?;
        match stream.read(&mut buffer[filled..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => filled += read,
        }
    }
    Ok(())
}

/// Time until `deadline`, and `longest` if that is less.
fn remaining(deadline: Instant, longest: Duration) -> io::Result<Duration> {
    let time = deadline.saturating_duration_since(Instant::now());
    match time.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(time.min(longest)),
    }
}

/// Whether `answer` is a response to `question`.
fn answers(answer: &[u8], question: &[u8], must_match: Match) -> bool {
    let is_response =
        answer.len() >= HEADER_BYTES && answer[..2] == question[..2] && answer[2] & 0x80 != 0;
    if !is_response || must_match == Match::Id {
        return is_response;
    }
    // A server that cannot read the question repeats none. Its error proves nothing.
    let is_error = !matches!(answer[3] & 0x0f, 0 | 3);
    let repeats = answer[4..6] == question[4..6]
        && answer
            .get(HEADER_BYTES..question.len())
            .is_some_and(|section| section.eq_ignore_ascii_case(&question[HEADER_BYTES..]));
    is_error || repeats
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

    fn within() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

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
        let answer = exchange(address, &QUESTION, Match::Question, within()).unwrap();
        assert_eq!(&answer[HEADER_BYTES..], b"all");
        server.join().unwrap();
    }

    #[test]
    fn an_answer_with_another_id_or_without_the_response_bit_is_none() {
        let mut answer = QUESTION;
        assert!(
            !answers(&answer, &QUESTION, Match::Id),
            "a question is no answer"
        );
        answer[2] |= 0x80;
        assert!(answers(&answer, &QUESTION, Match::Id));
        answer[0] = 8;
        assert!(!answers(&answer, &QUESTION, Match::Id));
        assert!(!answers(&answer[..4], &QUESTION, Match::Id));
    }

    #[test]
    fn an_answer_repeats_the_question_or_is_an_error() {
        let question = [&QUESTION[..], b"\x01a\x00\x00\x10\x00\x01"].concat();
        let mut answer = question.clone();
        answer[2] |= 0x80;
        let is_answer = |answer: &[u8]| answers(answer, &question, Match::Question);
        assert!(is_answer(&answer));
        answer[HEADER_BYTES + 1] = b'A';
        assert!(is_answer(&answer), "names have no case");
        answer[HEADER_BYTES + 1] = b'b';
        assert!(!is_answer(&answer));
        assert!(answers(&answer, &question, Match::Id));
        assert!(!is_answer(&answer[..HEADER_BYTES]));
        answer[3] = 3;
        assert!(!is_answer(&answer), "NXDOMAIN says something about a name");
        answer[3] = 1;
        assert!(is_answer(&answer[..HEADER_BYTES]), "FORMERR");
    }

    #[test]
    fn a_server_that_sends_byte_by_byte_meets_the_deadline() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[255, 255]).unwrap();
            // Ends when the other side has closed.
            while stream.write_all(&[0]).is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let deadline = Instant::now() + Duration::from_millis(300);
        let error = exchange(address, &QUESTION, Match::Question, deadline).unwrap_err();
        let kinds = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
        assert!(kinds.contains(&error.kind()), "{error}");
        server.join().unwrap();
    }
}
