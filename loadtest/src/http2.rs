//! Raw HTTP/2 frames (RFC 9113 §4.1) and header blocks (RFC 7541).

use std::io::{Read, Write};

use crate::client::Stream;
use crate::failure::Failure;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const UNKNOWN: u8 = 0xfa;

pub(crate) const END_STREAM: u8 = 1;
/// Flag of SETTINGS and PING.
pub(crate) const ACK: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// Payload of SETTINGS with SETTINGS_INITIAL_WINDOW_SIZE 0.
pub(crate) const NO_WINDOW: &[u8] = &[0, 4, 0, 0, 0, 0];

/// Sends the connection preface and SETTINGS on a new connection.
pub(crate) fn begin(mut stream: Stream, settings: &[u8]) -> Result<Stream, Failure> {
    stream.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, settings)].concat())?;
    stream.flush()?;
    Ok(stream)
}

/// A HEADERS frame with the complete header block.
pub(crate) fn headers(stream: u32, flags: u8, block: &[u8]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | flags, stream, block)
}

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len())
        .unwrap_or_default()
        .to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Fields of a received frame.
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
}

/// Reads one frame and discards its payload.
pub(crate) fn read(stream: &mut impl Read) -> Result<Frame, Failure> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let [a, b, c, kind, flags, id @ ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    stream.read_exact(&mut payload)?;
    // The highest bit is reserved.
    Ok(Frame {
        kind,
        flags,
        stream: u32::from_be_bytes(id) & 0x7fff_ffff,
    })
}

/// Header block of a request, with or without a service key. No field is added to the dynamic
/// table.
pub(crate) fn request(method: &str, host: &str, path: &str, key: Option<&str>) -> Vec<u8> {
    const SCHEME_HTTPS: u8 = 0x87;
    let mut block = vec![SCHEME_HTTPS];
    // Literals with names from the static table: `:authority` is 1, `:method` 2, `:path` 4.
    for (name, value) in [(1, host), (2, method), (4, path)] {
        block.push(name);
        text(&mut block, value);
    }
    if let Some(key) = key {
        block.push(0);
        text(&mut block, "x-gw-service-key");
        text(&mut block, key);
    }
    block
}

/// A literal field that is added to the dynamic table, where its index is 62.
pub(crate) fn remembered(name: &str, value: &str) -> Vec<u8> {
    let mut field = vec![0x40];
    text(&mut field, name);
    text(&mut field, value);
    field
}

/// Index of the newest field of the dynamic table.
pub(crate) const LAST: u8 = 0x80 | 62;

fn text(block: &mut Vec<u8>, text: &str) {
    const PREFIX: usize = 127;
    let mut length = text.len();
    if length < PREFIX {
        block.push(length as u8);
    } else {
        block.push(PREFIX as u8);
        length -= PREFIX;
        while length >= 128 {
            block.push((length % 128) as u8 | 0x80);
            length /= 128;
        }
        block.push(length as u8);
    }
    block.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_frames_are_read_again() {
        let bytes = [
            frame(DATA, END_STREAM, 3, b"payload"),
            frame(SETTINGS, ACK, 0, &[]),
        ]
        .concat();
        let mut rest = &bytes[..];
        let data = read(&mut rest).unwrap();
        assert_eq!((data.kind, data.flags, data.stream), (DATA, END_STREAM, 3));
        let settings = read(&mut rest).unwrap();
        assert_eq!(
            (settings.kind, settings.flags, settings.stream),
            (SETTINGS, ACK, 0)
        );
        assert!(read(&mut rest).is_err());
    }
}
