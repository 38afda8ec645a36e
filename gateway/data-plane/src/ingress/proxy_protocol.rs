//! The PROXY protocol: a TCP proxy announces the client of a connection.
//!
//! Source: haproxy's proxy-protocol.txt, §2.1 for version 1 and §2.2 for version 2.

use std::io;
use std::net::SocketAddr;

use crate::limits;
use bytes::{Buf, BytesMut};
use gw_shared::net::Socket;
use ppp::{v1, v2};

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
    #[error("PROXY header: missing")]
    Missing,
    #[error("PROXY header: {0}")]
    Version1(#[from] v1::BinaryParseError),
    #[error("PROXY header: {0}")]
    Version2(#[from] v2::ParseError),
    #[error("PROXY header: no end of the line in {max} bytes", max = limits::PROXY_LINE)]
    LongLine,
    #[error(
        "PROXY header: {0} bytes after the first 16; at most {max} are taken",
        max = limits::PROXY_HEADER
    )]
    TooLong(usize),
    #[error("PROXY header: the connection ended within it")]
    CutOff,
}

/// Why a connection has no announcement.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unannounced {
    #[error(transparent)]
    Header(#[from] InvalidHeader),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Parser of the bytes received so far; `None` asks for more. [`parse`] if a header is required,
/// [`parse_optional`] if not.
pub(crate) type Parse = fn(&[u8]) -> Result<Option<Preface>, InvalidHeader>;

/// Reads the header at the beginning of `socket`.
pub(crate) async fn read(socket: &Socket, parse: Parse) -> Result<Announcement, Unannounced> {
    let mut received = BytesMut::new();
    loop {
        if std::future::poll_fn(|cx| socket.poll_recv_buf(cx, &mut received)).await? == 0 {
            return Err(if received.is_empty() {
                io::Error::from(io::ErrorKind::UnexpectedEof).into()
            } else {
                InvalidHeader::CutOff.into()
            });
        }
        if let Some(Preface { source, length }) = parse(&received)? {
            received.advance(length);
            return Ok(Announcement {
                source,
                rest: received,
            });
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

/// Parses a header of either version; `None` if more bytes are needed.
pub(crate) fn parse(received: &[u8]) -> Result<Option<Preface>, InvalidHeader> {
    if begins(received, v2::PROTOCOL_PREFIX) {
        version_2(received)
    } else if begins(received, b"PROXY ") {
        version_1(received)
    } else {
        Err(InvalidHeader::Missing)
    }
}

/// Parses a header of version 2 if there is one; `None` if more bytes are needed.
pub(crate) fn parse_optional(received: &[u8]) -> Result<Option<Preface>, InvalidHeader> {
    if begins(received, v2::PROTOCOL_PREFIX) {
        version_2(received)
    } else {
        Ok(Some(Preface {
            source: None,
            length: 0,
        }))
    }
}

/// Whether `received`, which may be incomplete, begins with `signature`.
fn begins(received: &[u8], signature: &[u8]) -> bool {
    let length = received.len().min(signature.len());
    received[..length] == signature[..length]
}

fn version_1(received: &[u8]) -> Result<Option<Preface>, InvalidHeader> {
    const END: &[u8] = b"\r\n";
    let line = &received[..received.len().min(limits::PROXY_LINE)];
    let Some(end) = memchr::memmem::find(line, END) else {
        return if line.len() < limits::PROXY_LINE {
            Ok(None)
        } else {
            Err(InvalidHeader::LongLine)
        };
    };
    let length = end + END.len();
    // The rest of an UNKNOWN line is skipped unparsed.
    if let Some(rest) = line[..end].strip_prefix(b"PROXY UNKNOWN")
        && matches!(rest.first(), None | Some(b' '))
    {
        return Ok(Some(Preface {
            source: None,
            length,
        }));
    }
    let source = match v1::Header::try_from(&line[..length])?.addresses {
        v1::Addresses::Tcp4(addresses) => {
            Some((addresses.source_address, addresses.source_port).into())
        }
        v1::Addresses::Tcp6(addresses) => {
            Some((addresses.source_address, addresses.source_port).into())
        }
        v1::Addresses::Unknown => None,
    };
    Ok(Some(Preface { source, length }))
}

fn version_2(received: &[u8]) -> Result<Option<Preface>, InvalidHeader> {
    /// Byte 13 of a LOCAL header: the proxy connects for itself.
    const LOCAL: u8 = 0x20;

    let signature = received.len().min(v2::PROTOCOL_PREFIX.len());
    let Some(&[command, _family, high, low]) = received[signature..].first_chunk() else {
        return Ok(None);
    };
    let announced = usize::from(u16::from_be_bytes([high, low]));
    if announced > limits::PROXY_HEADER {
        return Err(InvalidHeader::TooLong(announced));
    }
    let length = v2::PROTOCOL_PREFIX.len() + 4 + announced;
    // The rest of a LOCAL header is skipped unparsed.
    if command == LOCAL {
        return Ok((received.len() >= length).then_some(Preface {
            source: None,
            length,
        }));
    }
    match v2::Header::try_from(received) {
        Ok(header) => Ok(Some(Preface {
            source: source(&header),
            length,
        })),
        Err(v2::ParseError::Incomplete(_) | v2::ParseError::Partial(..)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Families and transports other than TCP over IP are valid and announce no client.
fn source(header: &v2::Header<'_>) -> Option<SocketAddr> {
    if header.protocol != v2::Protocol::Stream {
        return None;
    }
    match header.addresses {
        v2::Addresses::IPv4(addresses) => {
            Some((addresses.source_address, addresses.source_port).into())
        }
        v2::Addresses::IPv6(addresses) => {
            Some((addresses.source_address, addresses.source_port).into())
        }
        v2::Addresses::Unspecified | v2::Addresses::Unix(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use ppp::v2::PROTOCOL_PREFIX;
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
        [
            &[198, 51, 100, 7, 192, 0, 2, 1, 0x12, 0x34, 0x01, 0xbb],
            rest,
        ]
        .concat()
    }

    /// The announced source, or `-`. Asserts that the header is complete exactly with its last
    /// byte.
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
        assert_eq!(
            announced(&header(PROXY, TCP4, &tcp4(b""))),
            "198.51.100.7:4660"
        );
        let addresses = [
            &b"\x20\x01\x0d\xb8"[..],
            &[0; 11],
            &[7],
            &[0; 16],
            &[0x12, 0x34, 0x01, 0xbb],
        ]
        .concat();
        assert_eq!(
            announced(&header(PROXY, TCP6, &addresses)),
            "[2001:db8::7]:4660"
        );
    }

    #[test]
    fn extensions_are_skipped() {
        assert_eq!(
            announced(&header(PROXY, TCP4, &tcp4(b"\x04\x00\x03abc"))),
            "198.51.100.7:4660"
        );
        let longest = header(PROXY, TCP4, &tcp4(&[0xee; 4096 - 12]));
        assert_eq!(announced(&longest), "198.51.100.7:4660");
    }

    #[test]
    fn a_header_can_announce_no_client() {
        const LOCAL: u8 = 0x20;
        assert_eq!(announced(&header(LOCAL, 0x00, b"")), "-");
        // The rest of the header has no effect.
        for (family, payload) in [
            (TCP4, tcp4(b"")),
            (TCP4, Vec::new()),
            (0xff, b"anything".to_vec()),
        ] {
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
        for beginning in [
            &b"\x16"[..],
            b"\x16\x03\x01\x02",
            b"GET / HTTP/1.1\r\n",
            b"\r\n\r\nx",
            b"PROXX",
            b"PROXYZ",
        ] {
            assert_eq!(parse(beginning), Err(InvalidHeader::Missing));
            assert_eq!(
                parse_optional(beginning),
                Ok(Some(Preface {
                    source: None,
                    length: 0
                }))
            );
        }
        // Version 1 is not looked for where the header is optional.
        let line = b"PROXY TCP4 198.51.100.7 192.0.2.1 4660 443\r\n";
        assert_eq!(
            parse_optional(line),
            Ok(Some(Preface {
                source: None,
                length: 0
            }))
        );
    }

    #[test]
    fn a_line_of_version_1_announces_the_source() {
        for (line, source) in [
            (
                "PROXY TCP4 198.51.100.7 192.0.2.1 4660 443\r\n",
                "198.51.100.7:4660",
            ),
            (
                "PROXY TCP6 2001:db8::7 2001:db8::1 4660 443\r\n",
                "[2001:db8::7]:4660",
            ),
            ("PROXY UNKNOWN\r\n", "-"),
            (
                "PROXY UNKNOWN and anything, up to the end of the line\r\n",
                "-",
            ),
        ] {
            assert_eq!(announced(line.as_bytes()), source, "{line}");
        }
        // The longest line (proxy-protocol.txt §2.1), and one more byte.
        let longest = |more: &str| {
            format!(
                "PROXY UNKNOWN {}{more}\r\n",
                "f".repeat(limits::PROXY_LINE - 16)
            )
        };
        assert_eq!(
            (
                longest("").len(),
                announced(longest("").as_bytes()).as_str()
            ),
            (107, "-")
        );
        assert_eq!(parse(longest("f").as_bytes()), Err(InvalidHeader::LongLine));
        // It is refused without its end.
        assert_eq!(parse(&longest("").as_bytes()[..105]), Ok(None));
        assert_eq!(
            parse(&longest("fff").as_bytes()[..107]),
            Err(InvalidHeader::LongLine)
        );
    }

    #[test]
    fn a_malformed_line_of_version_1_is_refused() {
        for line in [
            "PROXY \r\n",
            "PROXY TCP4\r\n",
            "PROXY tcp4 198.51.100.7 192.0.2.1 4660 443\r\n",
            "PROXY TCP4 2001:db8::7 2001:db8::1 4660 443\r\n",
            "PROXY TCP6 198.51.100.7 192.0.2.1 4660 443\r\n",
            "PROXY TCP4 198.51.100.7 192.0.2.1 4660\r\n",
            "PROXY TCP4 198.51.100.7 192.0.2.1 4660 65536\r\n",
            "PROXY TCP4 198.51.100.7 192.0.2.1 4660 443 x\r\n",
            "PROXY TCP4  198.51.100.7 192.0.2.1 4660 443\r\n",
            "PROXY TCP4 198.51.100.7\r 192.0.2.1 4660 443\r\n",
            "PROXY UNKNOWNS\r\n",
            "PROXY TCP4 \u{fe} 192.0.2.1 4660 443\r\n",
        ] {
            let error = parse(line.as_bytes()).unwrap_err();
            assert!(
                matches!(error, InvalidHeader::Version1(_))
                    && error.to_string().starts_with("PROXY header: ")
            );
        }
    }

    #[test]
    fn errors_of_malformed_headers_name_the_mistake() {
        for (command, family, payload, expected) in [
            (0x11, TCP4, tcp4(b""), "version 10"),
            (0x22, TCP4, tcp4(b""), "command 2"),
            (PROXY, 0x41, tcp4(b""), "Address Family 40"),
            (PROXY, 0x13, tcp4(b""), "protocol 3"),
            (
                PROXY,
                TCP4,
                vec![0; 11],
                "11 bytes cannot store the 12 bytes",
            ),
            (PROXY, TCP6, tcp4(b""), "12 bytes cannot store the 36 bytes"),
            (
                PROXY,
                TCP4,
                vec![0; limits::PROXY_HEADER + 1],
                "4097 bytes after the first 16",
            ),
        ] {
            let error = parse(&header(command, family, &payload))
                .unwrap_err()
                .to_string();
            assert!(
                error.starts_with("PROXY header: ") && error.contains(expected),
                "{error}"
            );
        }
        // A header that is too long is rejected before it is received.
        let long = header(PROXY, TCP4, &[0; limits::PROXY_HEADER + 1]);
        assert_eq!(
            parse(&long[..16]),
            Err(InvalidHeader::TooLong(limits::PROXY_HEADER + 1))
        );
    }

    proptest! {
        #[test]
        fn nothing_panics_or_claims_more_than_came(
            after_signature in prop::collection::vec(any::<u8>(), 0..4300),
            version in prop::sample::select(vec![0x20u8, 0x21]),
        ) {
            let received = [PROTOCOL_PREFIX, &[version], &after_signature].concat();
            if let Ok(Some(Preface { length, .. })) = parse(&received) {
                prop_assert!(
                    (16..=16 + limits::PROXY_HEADER).contains(&length) && length <= received.len()
                );
            }
            let line = [b"PROXY ", &after_signature[..]].concat();
            if let Ok(Some(Preface { length, .. })) = parse(&line) {
                prop_assert!(length <= limits::PROXY_LINE && line[..length].ends_with(b"\r\n"));
            }
        }
    }
}
