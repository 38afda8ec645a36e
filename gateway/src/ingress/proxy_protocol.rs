//! Version 2 of the PROXY protocol: a TCP proxy announces the client of a connection.
//!
//! Source: haproxy's proxy-protocol.txt §2.2. Version 1, a text format, is not accepted.

use std::io;
use std::net::SocketAddr;

use bytes::{Buf, BytesMut};
use gw_shared::net::Socket;
use ppp::v2::{Addresses, Header, PROTOCOL_PREFIX, ParseError, Protocol};

use crate::limits;

/// The beginning of a connection from a proxy.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    /// The client of the proxy; `None` if the proxy announces none or connects for itself.
    pub(crate) source: Option<SocketAddr>,
    /// Received bytes behind the header.
    pub(crate) rest: BytesMut,
}

/// Invalid header of a proxy.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum InvalidHeader {
    #[error("PROXY header: {0}")]
    Malformed(#[from] ParseError),
    #[error("PROXY header: {0} bytes after the first 16; at most {max} are taken", max = limits::PROXY_HEADER)]
    TooLong(usize),
    #[error("PROXY header: the connection ended within it")]
    CutOff,
}

impl From<InvalidHeader> for io::Error {
    fn from(error: InvalidHeader) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// Reads the optional header at the beginning of `socket`.
pub(crate) async fn read(socket: &Socket) -> io::Result<Announcement> {
    let mut received = BytesMut::new();
    loop {
        if std::future::poll_fn(|cx| socket.poll_recv_buf(cx, &mut received)).await? == 0 {
            return Err(if received.is_empty() {
                io::ErrorKind::UnexpectedEof.into()
            } else {
                InvalidHeader::CutOff.into()
            });
        }
        if let Some(Preface { source, length }) = parse(&received)? {
            received.advance(length);
            return Ok(Announcement { source, rest: received });
        }
    }
}

/// The bytes before the connection proper.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Preface {
    pub(crate) source: Option<SocketAddr>,
    /// In bytes; 0 if there is no header.
    pub(crate) length: usize,
}

/// `None` if more bytes are needed.
pub(crate) fn parse(received: &[u8]) -> Result<Option<Preface>, InvalidHeader> {
    /// Byte 13 of a LOCAL header of version 2: the proxy connects for itself.
    const LOCAL: u8 = 0x20;

    let signature = received.len().min(PROTOCOL_PREFIX.len());
    if received[..signature] != PROTOCOL_PREFIX[..signature] {
        return Ok(Some(Preface { source: None, length: 0 }));
    }
    let Some(&[command, _family, high, low]) = received[signature..].first_chunk() else { return Ok(None) };
    let announced = usize::from(u16::from_be_bytes([high, low]));
    if announced > limits::PROXY_HEADER {
        return Err(InvalidHeader::TooLong(announced));
    }
    let length = PROTOCOL_PREFIX.len() + 4 + announced;
    // The rest of a LOCAL header is skipped unparsed.
    if command == LOCAL {
        return Ok((received.len() >= length).then_some(Preface { source: None, length }));
    }
    match Header::try_from(received) {
        Ok(header) => Ok(Some(Preface { source: source(&header), length })),
        Err(ParseError::Incomplete(_) | ParseError::Partial(..)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Families and transports other than TCP over IP are valid and announce no client.
fn source(header: &Header<'_>) -> Option<SocketAddr> {
    if header.protocol != Protocol::Stream {
        return None;
    }
    match header.addresses {
        Addresses::IPv4(addresses) => Some((addresses.source_address, addresses.source_port).into()),
        Addresses::IPv6(addresses) => Some((addresses.source_address, addresses.source_port).into()),
        Addresses::Unspecified | Addresses::Unix(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TCP4: u8 = 0x11;
    const TCP6: u8 = 0x21;
    const PROXY: u8 = 0x21;

    fn header(command: u8, family: u8, payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
        [PROTOCOL_PREFIX, &[command, family], &length, payload].concat()
    }

    /// A header that announces 198.51.100.7:4660 → 192.0.2.1:443, followed by `rest`.
    fn tcp4(rest: &[u8]) -> Vec<u8> {
        [&[198, 51, 100, 7, 192, 0, 2, 1, 0x12, 0x34, 0x01, 0xbb], rest].concat()
    }

    /// The announced source, or `-`. Asserts that the header is complete exactly with its last byte.
    fn announced(header: &[u8]) -> String {
        for end in 0..header.len() {
            assert_eq!(parse(&header[..end]), Ok(None), "{end} bytes");
        }
        let with_more = [header, b"\x16\x03\x01"].concat();
        let Preface { source, length } = parse(&with_more).unwrap().unwrap();
        assert_eq!(length, header.len());
        source.map_or("-".to_owned(), |source| source.to_string())
    }

    #[test]
    fn the_source_is_announced() {
        assert_eq!(announced(&header(PROXY, TCP4, &tcp4(b""))), "198.51.100.7:4660");
        let addresses = [&b"\x20\x01\x0d\xb8"[..], &[0; 11], &[7], &[0; 16], &[0x12, 0x34, 0x01, 0xbb]].concat();
        assert_eq!(announced(&header(PROXY, TCP6, &addresses)), "[2001:db8::7]:4660");
    }

    #[test]
    fn extensions_are_skipped() {
        assert_eq!(announced(&header(PROXY, TCP4, &tcp4(b"\x04\x00\x03abc"))), "198.51.100.7:4660");
        let longest = header(PROXY, TCP4, &tcp4(&[0; limits::PROXY_HEADER - 12]));
        assert_eq!(announced(&longest), "198.51.100.7:4660");
    }

    #[test]
    fn a_header_can_announce_no_client() {
        const LOCAL: u8 = 0x20;
        assert_eq!(announced(&header(LOCAL, 0x00, b"")), "-");
        // The rest of the header has no effect.
        for (family, payload) in [(TCP4, tcp4(b"")), (TCP4, Vec::new()), (0xff, b"anything".to_vec())] {
            assert_eq!(announced(&header(LOCAL, family, &payload)), "-");
        }
        const UNSPECIFIED: u8 = 0x00;
        const UDP4: u8 = 0x12;
        const UNIX: u8 = 0x31;
        for (family, payload) in [
            (UNSPECIFIED, Vec::new()),
            (UNSPECIFIED, b"to be skipped".to_vec()),
            (UDP4, tcp4(b"")),
            (UNIX, vec![b'/'; 216]),
        ] {
            assert_eq!(announced(&header(PROXY, family, &payload)), "-");
        }
    }

    #[test]
    fn other_bytes_are_not_a_header() {
        for beginning in [&b"\x16"[..], b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\n", b"PROXY TCP4 ", b"\r\n\r\nx"] {
            assert_eq!(parse(beginning), Ok(Some(Preface { source: None, length: 0 })));
        }
    }

    #[test]
    fn errors_of_malformed_headers_name_the_mistake() {
        for (command, family, payload, expected) in [
            (0x11, TCP4, tcp4(b""), "version 10"),
            (0x22, TCP4, tcp4(b""), "command 2"),
            (PROXY, 0x41, tcp4(b""), "Address Family 40"),
            (PROXY, 0x13, tcp4(b""), "protocol 3"),
            (PROXY, TCP4, vec![0; 11], "11 bytes cannot store the 12 bytes"),
            (PROXY, TCP6, tcp4(b""), "12 bytes cannot store the 36 bytes"),
            (PROXY, TCP4, vec![0; limits::PROXY_HEADER + 1], "537 bytes after the first 16"),
        ] {
            let error = parse(&header(command, family, &payload)).unwrap_err().to_string();
            assert!(error.starts_with("PROXY header: ") && error.contains(expected), "{error}");
        }
        // A header that is too long is rejected before it is received.
        let long = header(PROXY, TCP4, &[0; limits::PROXY_HEADER + 1]);
        assert_eq!(parse(&long[..16]), Err(InvalidHeader::TooLong(limits::PROXY_HEADER + 1)));
    }

    proptest! {
        #[test]
        fn nothing_panics_or_claims_more_than_came(
            after_signature in prop::collection::vec(any::<u8>(), 0..700),
            version in prop::sample::select(vec![0x20u8, 0x21]),
        ) {
            let received = [PROTOCOL_PREFIX, &[version], &after_signature].concat();
            if let Ok(Some(Preface { length, .. })) = parse(&received) {
                prop_assert!((16..=16 + limits::PROXY_HEADER).contains(&length) && length <= received.len());
            }
        }
    }
}
