//! Frames of HTTP/2 (RFC 9113 §4.1 and §6) and header blocks (RFC 7541), written and read as bytes:
//! callers can send what no library sends.

mod judge;

use std::io::{self, Read};

use bytes::{Buf, Bytes, BytesMut};

pub use self::judge::{Granted, Received};

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;
pub const UNKNOWN: u8 = 0xfa;

/// Flag of DATA and HEADERS.
pub const END_STREAM: u8 = 1;
/// Flag of SETTINGS and PING.
pub const ACK: u8 = 1;
/// Flag of HEADERS and CONTINUATION.
pub const END_HEADERS: u8 = 4;

/// Connection preface of a client (RFC 9113 §3.4), without its SETTINGS frame.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Payload of SETTINGS with SETTINGS_INITIAL_WINDOW_SIZE 0.
pub const NO_WINDOW: &[u8] = &[0, 4, 0, 0, 0, 0];

/// Bit of a literal field that the decoder adds to its table (RFC 7541 §6.2.1).
pub const WITH_INDEXING: u8 = 0x40;
/// Index of the newest field of the decoder's table, as a whole field.
pub const LAST: u8 = 0x80 | 62;

/// Bytes of a frame header.
const FRAME_HEADER: usize = 9;

/// Returns the bytes of a frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// Returns a HEADERS frame with the complete header block.
pub fn headers(stream: u32, flags: u8, block: &[u8]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS | flags, stream, block)
}

/// Returns the first bytes of a connection: the preface and SETTINGS.
pub fn preface(settings: &[u8]) -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, settings)].concat()
}

/// A frame that has arrived whole.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Bytes,
}

impl Frame {
    /// Reads a frame from a blocking stream.
    pub fn read(stream: &mut impl Read) -> io::Result<Self> {
        let mut header = [0; FRAME_HEADER];
        stream.read_exact(&mut header)?;
        let (frame, length) = Self::of_header(header);
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload)?;
        Ok(Self {
            payload: payload.into(),
            ..frame
        })
    }

    /// A frame without its payload, and the length of that.
    fn of_header([a, b, c, kind, flags, stream @ ..]: [u8; FRAME_HEADER]) -> (Self, usize) {
        let frame = Self {
            kind,
            flags,
            // The highest bit is reserved.
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
            payload: Bytes::new(),
        };
        (frame, u32::from_be_bytes([0, a, b, c]) as usize)
    }

    /// Whether the frame ends its stream.
    pub fn ends_stream(&self) -> bool {
        matches!(self.kind, HEADERS | DATA) && self.flags & END_STREAM != 0
    }
}

/// Splits bytes into frames.
#[derive(Debug, Default)]
pub struct Splitter {
    /// Received bytes that are not taken.
    pub buffer: BytesMut,
}

impl Splitter {
    /// Takes the next frame, once it is whole.
    pub fn take(&mut self) -> Option<Frame> {
        let (frame, length) = Frame::of_header(*self.buffer.first_chunk()?);
        if self.buffer.len() < FRAME_HEADER + length {
            return None;
        }
        self.buffer.advance(FRAME_HEADER);
        let payload = self.buffer.split_to(length).freeze();
        Some(Frame { payload, ..frame })
    }
}

/// Appends a string of a header block, without a Huffman code (RFC 7541 §5.2).
pub fn write_text(block: &mut Vec<u8>, text: &[u8]) {
    // An integer with a prefix of seven bits (RFC 7541 §5.1). The highest bit would announce a
    // Huffman code.
    match text.len() {
        length @ ..127 => block.push(length as u8),
        length => {
            block.push(127);
            let mut rest = length - 127;
            while rest >= 128 {
                block.push(0x80 | (rest % 128) as u8);
                rest /= 128;
            }
            block.push(rest as u8);
        }
    }
    block.extend_from_slice(text);
}

/// Appends a literal field that the decoder does not add to its table (RFC 7541 §6.2.2). The name
/// may be a pseudo-header field, and neither name nor value need be valid.
pub fn write_field(block: &mut Vec<u8>, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
    block.push(0);
    write_text(block, name.as_ref());
    write_text(block, value.as_ref());
}

/// Returns a header block with these fields in this order.
pub fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        write_field(&mut block, name, value);
    }
    block
}

/// Returns a literal field that the decoder adds to its table.
pub fn indexed(name: &str, value: &str) -> Vec<u8> {
    let mut block = block(&[(name, value)]);
    block[0] |= WITH_INDEXING;
    block
}

/// Returns the header block of a request, with or without a service key. The decoder adds no field
/// to its table.
pub fn request(method: &str, host: &str, path: &str, key: Option<&str>) -> Vec<u8> {
    const SCHEME_HTTPS: u8 = 0x87;
    let mut block = vec![SCHEME_HTTPS];
    // Names from the static table: `:authority` is 1, `:method` 2, `:path` 4.
    for (name, value) in [(1, host), (2, method), (4, path)] {
        block.push(name);
        write_text(&mut block, value.as_bytes());
    }
    if let Some(key) = key {
        write_field(&mut block, "x-gw-service-key", key);
    }
    block
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
        let mut splitter = Splitter {
            buffer: BytesMut::from(&bytes[..]),
        };
        for (kind, flags, stream, payload) in
            [(DATA, END_STREAM, 3, "payload"), (SETTINGS, ACK, 0, "")]
        {
            let frame = Frame {
                kind,
                flags,
                stream,
                payload: payload.into(),
            };
            assert_eq!(splitter.take().as_ref(), Some(&frame));
            assert_eq!(Frame::read(&mut rest).unwrap(), frame);
        }
        assert_eq!(splitter.take(), None);
        assert!(Frame::read(&mut rest).is_err());
    }
}
