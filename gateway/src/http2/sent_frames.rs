//! Meter of the frames that one HTTP/2 connection sends. Finds responses that the h2 crate generates itself.
//!
//! h2 answers 431 without other fields if a header list exceeds `max_header_list_size` by less than a factor of four.
//! Its API does not report this. Every response of the gateway has a request id, so the frame of such a 431 is the only
//! HEADERS frame that ends its stream, is shorter than a request id, and is not a trailer section.

use std::io::IoSlice;

use crate::limits;

const HEADER: usize = 9;
/// Longest header block of h2's own response: two table size updates (RFC 7541 §6.3) and a status. An encoded request
/// id alone is longer.
const BARE_RESPONSE: u32 = 24;

/// Position in the sequence of frames (RFC 9113 §4.1).
#[derive(Debug, Clone, Copy, Default)]
struct Position {
    /// Header of the current frame (its sent part); between frames, of the previous frame.
    header: [u8; HEADER],
    filled: usize,
    /// Bytes of the payload still to be sent.
    payload: u32,
}

struct FrameHeader {
    length: u32,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl FrameHeader {
    const HEADERS: u8 = 1;
    const DATA: u8 = 0;
    const RST_STREAM: u8 = 3;
    const GOAWAY: u8 = 7;
    const END_STREAM: u8 = 1;

    fn ends_stream(&self) -> bool {
        match self.kind {
            Self::DATA | Self::HEADERS => self.flags & Self::END_STREAM != 0,
            kind => kind == Self::RST_STREAM,
        }
    }

    /// Trailers, or a response without a body.
    fn ends_stream_with_fields(&self) -> bool {
        self.kind == Self::HEADERS && self.flags & Self::END_STREAM != 0
    }
}

impl Position {
    fn is_between_frames(&self) -> bool {
        self.filled == 0 && self.payload == 0
    }

    /// Advances to the end of the header or payload, or of `bytes`. Returns the number of bytes, and a header that is
    /// now complete.
    fn advance(&mut self, bytes: &[u8]) -> (usize, Option<FrameHeader>) {
        if self.payload > 0 {
            let skipped = bytes.len().min(self.payload as usize);
            self.payload -= skipped as u32;
            return (skipped, None);
        }
        let taken = bytes.len().min(HEADER - self.filled);
        self.header[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
        self.filled += taken;
        if self.filled < HEADER {
            return (taken, None);
        }
        let [a, b, c, kind, flags, stream @ ..] = self.header;
        let length = u32::from_be_bytes([0, a, b, c]);
        (self.filled, self.payload) = (0, length);
        (
            taken,
            Some(FrameHeader {
                length,
                kind,
                flags,
                stream: u32::from_be_bytes(stream),
            }),
        )
    }
}

/// What to do with the next bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Send(usize),
    Discard(usize),
}

#[derive(Default)]
pub(crate) struct SentFrames {
    position: Position,
    /// Streams with trailers that h2 has not sent yet. Entries of streams that are reset remain.
    trailers: Vec<u32>,
    /// Streams whose tasks wait until the last frame of the response has been sent.
    ending: Vec<u32>,
    bare_response: bool,
}

impl SentFrames {
    /// Records that h2 was given the trailers of `stream`.
    pub(crate) fn trailers_follow(&mut self, stream: u32) {
        if self.trailers.len() < limits::HTTP2_TRAILERS_WAITING {
            self.trailers.push(stream);
        }
    }

    /// Begins to look for the last frame of `stream`, which h2 was given.
    pub(crate) fn end_follows(&mut self, stream: u32) {
        self.ending.push(stream);
    }

    /// Whether the end of `stream` has yet to be sent.
    pub(crate) fn awaits_end_of(&self, stream: u32) -> bool {
        self.ending.contains(&stream)
    }

    /// Stops looking for the last frame of `stream`. Returns whether it was looked for.
    pub(crate) fn end_passed(&mut self, stream: u32) -> bool {
        let at = self.ending.iter().position(|ending| *ending == stream);
        at.map(|at| self.ending.swap_remove(at)).is_some()
    }

    /// Whether a response without a request id was found. From then on only GOAWAY is sent: later header blocks depend
    /// on the compression state of the discarded one.
    pub(crate) fn has_bare_response(&self) -> bool {
        self.bare_response
    }

    /// Decides on the frames in `pieces`.
    pub(crate) fn look(&mut self, pieces: &[IoSlice<'_>]) -> Next {
        if !self.bare_response {
            let sound = self.sound(pieces);
            if sound > 0 {
                return Next::Send(sound);
            }
            self.bare_response = pieces.iter().any(|piece| !piece.is_empty());
        }
        self.frame(pieces)
    }

    /// Number of bytes of `pieces` before a response without a request id.
    fn sound(&self, pieces: &[IoSlice<'_>]) -> usize {
        let mut position = self.position;
        let mut seen = 0;
        let mut sound = 0;
        for piece in pieces {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                if position.is_between_frames() {
                    sound = seen;
                }
                let (taken, header) = position.advance(rest);
                (rest, seen) = (&rest[taken..], seen + taken);
                if header.is_some_and(|header| self.is_bare_response(&header)) {
                    return sound;
                }
            }
        }
        seen
    }

    fn is_bare_response(&self, header: &FrameHeader) -> bool {
        let is_known = self.trailers.contains(&header.stream)
            || self.trailers.len() == limits::HTTP2_TRAILERS_WAITING;
        header.ends_stream_with_fields() && header.length <= BARE_RESPONSE && !is_known
    }

    /// Decides on the rest of one frame: only GOAWAY is sent. h2 writes whole frames, so a frame that begins has its
    /// header.
    fn frame(&self, pieces: &[IoSlice<'_>]) -> Next {
        let mut position = self.position;
        let was_begun = !position.is_between_frames();
        let mut length = 0;
        let mut is_goaway = was_begun && position.header[3] == FrameHeader::GOAWAY;
        for piece in pieces {
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let (taken, header) = position.advance(rest);
                (rest, length) = (&rest[taken..], length + taken);
                if let Some(header) = header {
                    is_goaway = header.kind == FrameHeader::GOAWAY;
                }
                if position.is_between_frames() {
                    return if is_goaway {
                        Next::Send(length)
                    } else {
                        Next::Discard(length)
                    };
                }
            }
        }
        if is_goaway {
            Next::Send(length)
        } else {
            Next::Discard(length)
        }
    }

    /// Records that the first `count` bytes of `pieces` were sent or discarded. Returns whether the end of a response that
    /// waits for it was among them.
    pub(crate) fn passed(&mut self, pieces: &[IoSlice<'_>], count: usize) -> bool {
        let mut count = count;
        let mut has_end = false;
        for piece in pieces {
            let mut rest = &piece[..piece.len().min(count)];
            count -= rest.len();
            while !rest.is_empty() {
                let (taken, header) = self.position.advance(rest);
                rest = &rest[taken..];
                let Some(header) = header else { continue };
                has_end |= !self.ending.is_empty()
                    && header.ends_stream()
                    && self.end_passed(header.stream);
                if header.ends_stream_with_fields()
                    && let Some(at) = self
                        .trailers
                        .iter()
                        .position(|stream| *stream == header.stream)
                {
                    self.trailers.swap_remove(at);
                }
            }
        }
        has_end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: u8 = 0;

    fn frame(kind: u8, flags: u8, stream: u8, length: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, length, kind, flags, 0, 0, 0, stream];
        frame.resize(HEADER + usize::from(length), 0xff);
        frame
    }

    fn headers(flags: u8, stream: u8, length: u8) -> Vec<u8> {
        frame(FrameHeader::HEADERS, flags, stream, length)
    }

    /// Bytes that are sent on a socket that accepts `step` bytes at a time.
    fn sent(frames: &mut SentFrames, bytes: &[u8], step: usize) -> Vec<u8> {
        let mut rest = bytes;
        let mut sent = Vec::new();
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(rest.len().min(7));
            let pieces = [head, tail].map(IoSlice::new);
            let count = match frames.look(&pieces) {
                Next::Send(count) => {
                    let count = count.min(step);
                    sent.extend_from_slice(&rest[..count]);
                    count
                }
                Next::Discard(count) => count,
            };
            frames.passed(&pieces, count);
            rest = &rest[count..];
        }
        sent
    }

    #[test]
    fn the_end_of_a_stream_that_is_waited_for_is_found_when_it_is_sent() {
        let end = FrameHeader::END_STREAM;
        let headers_of_5 = headers(0, 5, 30);
        for last in [
            frame(DATA, end, 5, 10),
            headers(end, 5, 30),
            frame(FrameHeader::RST_STREAM, 0, 5, 4),
        ] {
            let mut frames = SentFrames::default();
            frames.end_follows(5);
            frames.end_follows(7);
            for bytes in [&headers_of_5, &frame(DATA, 0, 5, 10), &headers(end, 9, 30)] {
                assert!(!frames.passed(&[IoSlice::new(bytes)], bytes.len()));
            }
            assert!(frames.awaits_end_of(5));
            let (begin, rest) = last.split_at(HEADER - 1);
            assert!(!frames.passed(&[IoSlice::new(begin)], begin.len()));
            assert!(frames.passed(&[IoSlice::new(rest)], rest.len()));
            assert!(!frames.awaits_end_of(5) && frames.awaits_end_of(7));
        }
    }

    #[test]
    fn responses_and_trailers_of_the_gateway_are_sent() {
        let end = FrameHeader::END_STREAM;
        let own = [
            headers(0, 1, 80),
            frame(DATA, 0, 1, 200),
            headers(end, 1, 2),
            headers(end, 3, 60),
        ]
        .concat();
        for step in [1, 5, 9, 1000] {
            let mut frames = SentFrames::default();
            frames.trailers_follow(1);
            assert_eq!(sent(&mut frames, &own, step), own);
            assert!(!frames.has_bare_response() && frames.trailers.is_empty());
        }
    }

    #[test]
    fn only_goaway_follows_a_bare_response() {
        let end = FrameHeader::END_STREAM;
        let before = [frame(DATA, 0, 1, 200), headers(end, 3, 60)].concat();
        let goaway = frame(FrameHeader::GOAWAY, 0, 0, 20);
        let after = [
            headers(end, 5, 5),
            headers(0, 7, 80),
            frame(DATA, end, 7, 3),
            goaway.clone(),
        ]
        .concat();
        for step in [1, 5, 9, 1000] {
            let mut frames = SentFrames::default();
            frames.trailers_follow(9);
            assert_eq!(sent(&mut frames, &before, step), before);
            assert!(!frames.has_bare_response());
            assert_eq!(sent(&mut frames, &after, step), goaway);
            assert!(frames.has_bare_response());
            assert_eq!(
                sent(&mut frames, &[before.clone(), after.clone()].concat(), step),
                goaway
            );
        }
    }

    #[test]
    fn streams_with_trailers_are_bounded() {
        let mut frames = SentFrames::default();
        (0..10_000).for_each(|stream| frames.trailers_follow(stream));
        assert_eq!(frames.trailers.len(), limits::HTTP2_TRAILERS_WAITING);
    }
}
