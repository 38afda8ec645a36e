//! Frames of the tunnel: an 8-byte header and a payload. `docs/tunnel.md` specifies the format.

use super::{control, response};
use crate::http::HeadLimits;

/// Length of a frame header, in bytes.
pub const HEADER: usize = 8;

/// Largest payload of DATA, in bytes. With its header, a full frame is one full TLS record (RFC
/// 8446 §5.1).
pub const DATA_MAX: usize = 16 * 1024 - HEADER;

/// Bounds on the head of a REQUEST: the largest head that callers may send, and the fields that the
/// gateway adds.
pub const REQUEST_HEAD: HeadLimits = HeadLimits {
    head: 68 * 1024,
    fields: 128,
    target: 64 * 1024,
};

/// Bounds on the head of a RESPONSE or INTERIM, with the lines that the tunnel adds.
pub const RESPONSE_HEAD: HeadLimits = HeadLimits {
    head: response::HEAD.head + 1024,
    fields: response::HEAD.fields + 8,
    target: 0,
};

/// Most fields of TRAILERS, which have at most as many bytes as the head of a RESPONSE.
pub const TRAILER_FIELDS: usize = 128;

/// Longest code of RESET and REFUSED, in bytes.
pub const CODE_MAX: usize = 64;

/// Longest message of REFUSED, in bytes.
pub const MESSAGE_TEXT_MAX: usize = 1024;

/// Bytes before the head of a REQUEST: the credit for its response.
pub const REQUEST_PREFIX: usize = 4;

/// Bytes before the head of a RESPONSE and the code of REFUSED: two durations.
pub const RESPONSE_PREFIX: usize = 8;

/// Bit of the type that marks the last frame of a direction of a stream.
const END: u8 = 0x80;

/// Frame type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// First frame of the agent: the number of streams that it serves at once (u32).
    Hello = 0x01,
    /// Opens a stream: credit for the response (u32), then the request head.
    Request = 0x02,
    /// Final response: durations of two stages (2 × u32), then the response head.
    Response = 0x03,
    /// Interim response (1xx): the response head.
    Interim = 0x04,
    /// Error of the agent in place of a response: durations (2 × u32), a flag (1 bit) and the
    /// length of the code (7 bits), code, message.
    Refused = 0x05,
    /// Bytes of a body.
    Data = 0x06,
    /// Field lines after a body; ends the direction.
    Trailers = 0x07,
    /// Ends both directions of a stream: the code of an agent's error, or nothing.
    Reset = 0x08,
    /// Bytes of body that the peer may send in addition (u32).
    Credit = 0x09,
    /// Bytes of a request body that the agent may let the gateway send ahead on each stream (u32).
    Window = 0x0a,
    /// Asks for a PONG with the same 8 bytes.
    Ping = 0x0b,
    Pong = 0x0c,
    /// A control message (JSON).
    Message = 0x0d,
    /// The agent needs no more of the request body: the bytes of it that the backend's connection
    /// took (u64).
    Uploaded = 0x0e,
}

impl Kind {
    const ALL: [Self; 14] = [
        Self::Hello,
        Self::Request,
        Self::Response,
        Self::Interim,
        Self::Refused,
        Self::Data,
        Self::Trailers,
        Self::Reset,
        Self::Credit,
        Self::Window,
        Self::Ping,
        Self::Pong,
        Self::Message,
        Self::Uploaded,
    ];

    fn parse(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte).checked_sub(1)?).copied()
    }

    /// Whether the frame belongs to the tunnel and not to a stream.
    fn is_of_tunnel(self) -> bool {
        matches!(
            self,
            Self::Hello | Self::Window | Self::Ping | Self::Pong | Self::Message
        )
    }

    /// Whether a frame of this type with this END flag is valid.
    fn allows_end(self, end: bool) -> bool {
        match self {
            Self::Request | Self::Response | Self::Data => true,
            Self::Refused | Self::Trailers => end,
            _ => !end,
        }
    }

    /// Largest payload, in bytes.
    pub(super) fn payload_max(self) -> usize {
        self.payload().1
    }

    /// Least and largest payload, in bytes.
    fn payload(self) -> (usize, usize) {
        match self {
            Self::Hello | Self::Credit | Self::Window => (4, 4),
            Self::Ping | Self::Pong | Self::Uploaded => (8, 8),
            Self::Request => (REQUEST_PREFIX, REQUEST_PREFIX + REQUEST_HEAD.head),
            Self::Response => (RESPONSE_PREFIX, RESPONSE_PREFIX + RESPONSE_HEAD.head),
            Self::Interim | Self::Trailers => (0, RESPONSE_HEAD.head),
            Self::Refused => (
                RESPONSE_PREFIX + 1,
                RESPONSE_PREFIX + 1 + CODE_MAX + MESSAGE_TEXT_MAX,
            ),
            Self::Data => (0, DATA_MAX),
            Self::Reset => (0, CODE_MAX),
            Self::Message => (1, control::MESSAGE_MAX),
        }
    }
}

/// Identifier of a stream: the slot in the low 16 bits, and in the high bits a generation above 0
/// that tells successive streams of a slot apart. 0 is the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamId(pub u32);

impl StreamId {
    pub const TUNNEL: Self = Self(0);

    pub const fn new(slot: u16, generation: u16) -> Self {
        Self((generation as u32) << 16 | slot as u32)
    }

    pub const fn slot(self) -> usize {
        (self.0 & 0xffff) as usize
    }

    pub const fn generation(self) -> u16 {
        (self.0 >> 16) as u16
    }
}

/// Frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    pub kind: Kind,
    /// Last frame of this direction of the stream.
    pub end: bool,
    /// Length of the payload, in bytes.
    pub length: usize,
    pub stream: StreamId,
}

/// Header that no peer may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFrameHeader {
    #[error("unknown frame type {0:#04x}")]
    Type(u8),
    #[error("{0:?} with a payload of {1} bytes")]
    Length(Kind, usize),
    #[error("{0:?} on stream {1:#010x}")]
    Stream(Kind, u32),
    #[error("{0:?} has the wrong END flag")]
    End(Kind),
}

impl FrameHeader {
    pub fn encode(self) -> [u8; HEADER] {
        let [_, high, middle, low] = (self.length as u32).to_be_bytes();
        let [a, b, c, d] = self.stream.0.to_be_bytes();
        let end = if self.end { END } else { 0 };
        [self.kind as u8 | end, high, middle, low, a, b, c, d]
    }

    /// Parses a header and checks everything that does not depend on the stream's state.
    pub fn decode(bytes: [u8; HEADER]) -> Result<Self, InvalidFrameHeader> {
        let [kind, high, middle, low, a, b, c, d] = bytes;
        let end = kind & END != 0;
        let kind = Kind::parse(kind & !END).ok_or(InvalidFrameHeader::Type(kind))?;
        let length = u32::from_be_bytes([0, high, middle, low]) as usize;
        let (least, most) = kind.payload();
        if !(least..=most).contains(&length) {
            return Err(InvalidFrameHeader::Length(kind, length));
        }
        if !kind.allows_end(end) {
            return Err(InvalidFrameHeader::End(kind));
        }
        let stream = StreamId(u32::from_be_bytes([a, b, c, d]));
        let is_valid = if kind.is_of_tunnel() {
            stream == StreamId::TUNNEL
        } else {
            stream.generation() > 0
        };
        if !is_valid {
            return Err(InvalidFrameHeader::Stream(kind, stream.0));
        }
        // An empty frame carries nothing.
        if kind == Kind::Data && length == 0 && !end {
            return Err(InvalidFrameHeader::Length(kind, 0));
        }
        Ok(Self {
            kind,
            end,
            length,
            stream,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stream_ids_have_a_slot_and_a_generation() {
        let id = StreamId::new(0xfffe, 0x0102);
        assert_eq!(id.0, 0x0102_fffe);
        assert_eq!((id.slot(), id.generation()), (0xfffe, 0x0102));
    }

    #[test]
    fn headers_that_no_peer_may_send_are_refused() {
        let header = |kind: Kind, end, length, stream| {
            let stream = StreamId(stream);
            let header = FrameHeader {
                kind,
                end,
                length,
                stream,
            };
            header.encode()
        };
        let refused = |bytes| FrameHeader::decode(bytes).unwrap_err();
        for kind in [0, 0x0f] {
            let error = refused([kind, 0, 0, 0, 0, 1, 0, 0]);
            assert_eq!(error, InvalidFrameHeader::Type(kind));
        }
        let stream = 0x0001_0000;
        for (kind, end) in [
            (Kind::Refused, false),
            (Kind::Trailers, false),
            (Kind::Reset, true),
            (Kind::Interim, true),
        ] {
            let error = refused(header(kind, end, 9, stream));
            assert_eq!(error, InvalidFrameHeader::End(kind));
        }
        for (kind, length) in [
            (Kind::Data, 0),
            (Kind::Data, DATA_MAX + 1),
            (Kind::Credit, 3),
            (Kind::Request, 3),
            (Kind::Reset, CODE_MAX + 1),
        ] {
            let error = refused(header(kind, false, length, stream));
            assert_eq!(error, InvalidFrameHeader::Length(kind, length));
        }
        for (kind, length, stream) in [(Kind::Data, 1, 5), (Kind::Ping, 8, stream)] {
            let error = refused(header(kind, false, length, stream));
            assert_eq!(error, InvalidFrameHeader::Stream(kind, stream));
        }
        assert!(FrameHeader::decode(header(Kind::Data, true, 0, stream)).is_ok());
    }

    proptest! {
        #[test]
        fn valid_headers_encode_back(bytes: [u8; HEADER]) {
            if let Ok(header) = FrameHeader::decode(bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
