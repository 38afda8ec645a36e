//! Message bodies: decoding from a buffer that fills as bytes arrive, and chunked encoding (RFC
//! 9112 §6, §7.1).

use bytes::{Buf, Bytes, BytesMut};
use http::header::{HeaderName, HeaderValue};

use super::chunk_extensions;
use super::fields::has_too_many_connection_options;
use super::framing::Framing;
use super::write::write_trailers;
use crate::http::Fields;

/// Longest chunk-size line, extensions included, in bytes.
const SIZE_LINE_MAX: usize = 4096;
/// Largest trailer section of a request, and of a response of a backend, in bytes.
pub const TRAILERS_MAX: usize = 16 * 1024;
/// Most fields in such a section.
pub const TRAILER_FIELDS_MAX: usize = 64;

/// A piece of a body.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    Data(Bytes),
    /// Trailer fields of a chunked body; precede `End`, only if there are any.
    Trailers(Fields),
    /// End of the body. Bytes that remain in the buffer do not belong to it.
    End,
}

/// Body that does not match its framing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBody {
    #[error("malformed chunk: {0}")]
    Chunk(&'static str),
    #[error("malformed or oversized trailer section")]
    Trailers,
    #[error("the connection ended before the body did")]
    CutShort,
}

/// Decodes one body.
#[derive(Debug)]
pub struct BodyDecoder {
    state: DecoderState,
    /// Whether the size of a chunk may be followed by SP and HTAB, which some servers pad it with.
    is_padded: bool,
}

#[derive(Debug)]
enum DecoderState {
    Length(u64),
    UntilClose,
    ChunkSize,
    ChunkData(u64),
    ChunkDataEnd,
    Trailers,
    Done,
}

impl BodyDecoder {
    pub fn new(framing: Framing) -> Self {
        let state = match framing {
            Framing::None | Framing::Described(_) | Framing::Length(0) => DecoderState::Done,
            Framing::Length(length) => DecoderState::Length(length),
            Framing::Chunked => DecoderState::ChunkSize,
            Framing::UntilClose => DecoderState::UntilClose,
        };
        Self {
            state,
            is_padded: false,
        }
    }

    /// A decoder of a backend's response: the size of a chunk may be followed by SP and HTAB. Never
    /// for requests: what two servers read differently can hide a request in another.
    pub fn of_response(framing: Framing) -> Self {
        Self {
            is_padded: true,
            ..Self::new(framing)
        }
    }

    pub fn is_done(&self) -> bool {
        matches!(self.state, DecoderState::Done)
    }

    /// Takes the next part off the front of `buffer`; `None` if it needs more bytes.
    pub fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<Part>, InvalidBody> {
        loop {
            match self.state {
                DecoderState::Done => return Ok(Some(Part::End)),
                _ if buffer.is_empty() => return Ok(None),
                DecoderState::UntilClose => return Ok(Some(Part::Data(buffer.split().freeze()))),
                DecoderState::Length(remaining) => {
                    let data = take(buffer, remaining);
                    let remaining = remaining - data.len() as u64;
                    self.state = if remaining == 0 {
                        DecoderState::Done
                    } else {
                        DecoderState::Length(remaining)
                    };
                    return Ok(Some(Part::Data(data)));
                }
                DecoderState::ChunkSize => {
                    let Some(mut line) =
                        take_line(buffer, SIZE_LINE_MAX, InvalidBody::Chunk("size line"))?
                    else {
                        return Ok(None);
                    };
                    while self.is_padded && matches!(line.last(), Some(b' ' | b'\t')) {
                        line.truncate(line.len() - 1);
                    }
                    let size = parse_chunk_size(&line)?;
                    self.state = if size == 0 {
                        DecoderState::Trailers
                    } else {
                        DecoderState::ChunkData(size)
                    };
                }
                DecoderState::ChunkData(remaining) => {
                    let data = take(buffer, remaining);
                    let remaining = remaining - data.len() as u64;
                    self.state = if remaining == 0 {
                        DecoderState::ChunkDataEnd
                    } else {
                        DecoderState::ChunkData(remaining)
                    };
                    return Ok(Some(Part::Data(data)));
                }
                DecoderState::ChunkDataEnd => {
                    if buffer.len() < 2 {
                        return if buffer[0] == b'\r' {
                            Ok(None)
                        } else {
                            Err(BAD_CHUNK_END)
                        };
                    }
                    if !buffer.starts_with(b"\r\n") {
                        return Err(BAD_CHUNK_END);
                    }
                    buffer.advance(2);
                    self.state = DecoderState::ChunkSize;
                }
                DecoderState::Trailers => return self.decode_trailers(buffer),
            }
        }
    }

    fn decode_trailers(&mut self, buffer: &mut BytesMut) -> Result<Option<Part>, InvalidBody> {
        if buffer.starts_with(b"\r\n") {
            buffer.advance(2);
            self.state = DecoderState::Done;
            return Ok(Some(Part::End));
        }
        let Some(end) = memchr::memmem::find(buffer, b"\r\n\r\n") else {
            return if buffer.len() > TRAILERS_MAX {
                Err(InvalidBody::Trailers)
            } else {
                Ok(None)
            };
        };
        if end > TRAILERS_MAX {
            return Err(InvalidBody::Trailers);
        }
        let section = buffer.split_to(end + 4).freeze();
        let trailers = parse_trailers::<TRAILER_FIELDS_MAX>(&section)?;
        self.state = DecoderState::Done;
        Ok(Some(Part::Trailers(trailers)))
    }

    /// Handles the end of the connection; an error if the body is incomplete.
    pub fn finish(&mut self) -> Result<(), InvalidBody> {
        match self.state {
            DecoderState::UntilClose | DecoderState::Done => {
                self.state = DecoderState::Done;
                Ok(())
            }
            _ => Err(InvalidBody::CutShort),
        }
    }
}

const BAD_CHUNK_END: InvalidBody = InvalidBody::Chunk("no CRLF after its data");

fn take(buffer: &mut BytesMut, most: u64) -> Bytes {
    let length = usize::try_from(most)
        .unwrap_or(usize::MAX)
        .min(buffer.len());
    buffer.split_to(length).freeze()
}

/// Takes a line that ends in CRLF and returns it without CRLF.
fn take_line(
    buffer: &mut BytesMut,
    most: usize,
    error: InvalidBody,
) -> Result<Option<BytesMut>, InvalidBody> {
    match memchr::memchr(b'\n', &buffer[..buffer.len().min(most)]) {
        Some(0) => Err(error),
        Some(end) if buffer[end - 1] == b'\r' => {
            let mut line = buffer.split_to(end + 1);
            line.truncate(end - 1);
            Ok(Some(line))
        }
        Some(_) => Err(error),
        None if buffer.len() >= most => Err(error),
        None => Ok(None),
    }
}

/// Parses `chunk-size [ chunk-ext ]`. Checks extensions and ignores them, as RFC 9112 §7.1.1
/// requires of an intermediary.
fn parse_chunk_size(line: &[u8]) -> Result<u64, InvalidBody> {
    let digits = line
        .iter()
        .take_while(|byte| byte.is_ascii_hexdigit())
        .count();
    if digits == 0 || digits > 16 {
        return Err(InvalidBody::Chunk("size is not 1 to 16 hexadecimal digits"));
    }
    let (size, extensions) = line.split_at(digits);
    if !chunk_extensions::are_valid(extensions) {
        return Err(InvalidBody::Chunk(
            "size is followed by something other than `;name` and `;name=value`",
        ));
    }
    Ok(size.iter().fold(0, |value, digit| {
        (value << 4) | u64::from(char::from(*digit).to_digit(16).unwrap_or(0))
    }))
}

/// Parses a trailer section of at most `FIELDS_MAX` fields: field lines and an empty line (RFC 9112
/// §7.1.2).
pub(crate) fn parse_trailers<const FIELDS_MAX: usize>(
    section: &Bytes,
) -> Result<Fields, InvalidBody> {
    // As strict as for heads: some parsers read a bare CR or LF as a line end.
    let line_ends = section
        .windows(2)
        .all(|pair| (pair[0] == b'\r') == (pair[1] == b'\n'));
    if !line_ends || section.first() == Some(&b'\n') || section.contains(&0) {
        return Err(InvalidBody::Trailers);
    }
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let Ok(httparse::Status::Complete((length, fields))) =
        httparse::parse_headers(section, &mut fields)
    else {
        return Err(InvalidBody::Trailers);
    };
    if length != section.len() {
        return Err(InvalidBody::Trailers);
    }
    let mut trailers = Fields::with_capacity(fields.len());
    for field in fields {
        let name =
            HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| InvalidBody::Trailers)?;
        let value = HeaderValue::from_maybe_shared(section.slice_ref(field.value))
            .map_err(|_| InvalidBody::Trailers)?;
        trailers.append(name, value);
    }
    if has_too_many_connection_options(&trailers) {
        return Err(InvalidBody::Trailers);
    }
    Ok(trailers)
}

/// Writes the line that starts a chunk of `length` bytes into `buffer`. The chunk's data and
/// [`CHUNK_END`] follow it.
pub fn chunk_start(length: usize, buffer: &mut [u8; 18]) -> &[u8] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let digits = ((usize::BITS - length.leading_zeros()).div_ceil(4)).max(1) as usize;
    for (at, digit) in buffer[..digits].iter_mut().enumerate() {
        *digit = HEX[(length >> (4 * (digits - 1 - at))) & 0xf];
    }
    buffer[digits..digits + 2].copy_from_slice(b"\r\n");
    &buffer[..digits + 2]
}

/// Bytes after the data of every chunk.
pub const CHUNK_END: &[u8] = b"\r\n";

/// Bytes after the data of the last chunk with data, in a body without trailers: its end, and the
/// empty chunk.
pub const LAST_CHUNK_END: &[u8] = b"\r\n0\r\n\r\n";

/// Appends the empty chunk and the trailer section to `out`. Leaves out fields that frame
/// ([`is_framing`](super::framing::is_framing)).
pub fn write_last_chunk(out: &mut Vec<u8>, trailers: Option<&Fields>) {
    out.extend_from_slice(b"0\r\n");
    if let Some(trailers) = trailers {
        write_trailers(out, trailers);
    }
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Joined data, trailers, and the bytes after the body.
    type Decoded = (Vec<u8>, Option<Fields>, Vec<u8>);

    /// Decodes `input`, given in pieces of `step` bytes.
    fn decode_all(framing: Framing, input: &[u8], step: usize) -> Result<Decoded, InvalidBody> {
        decode_with(BodyDecoder::new(framing), input, step)
    }

    fn decode_with(
        mut decoder: BodyDecoder,
        input: &[u8],
        step: usize,
    ) -> Result<Decoded, InvalidBody> {
        let mut buffer = BytesMut::new();
        let mut data = Vec::new();
        let mut trailers = None;
        let mut pieces = input.chunks(step);
        loop {
            match decoder.decode(&mut buffer)? {
                Some(Part::Data(piece)) => data.extend_from_slice(&piece),
                Some(Part::Trailers(fields)) => trailers = Some(fields),
                Some(Part::End) => {
                    let rest = pieces.flatten().copied();
                    return Ok((data, trailers, buffer.iter().copied().chain(rest).collect()));
                }
                None => match pieces.next() {
                    Some(piece) => buffer.extend_from_slice(piece),
                    None => decoder.finish()?,
                },
            }
        }
    }

    #[test]
    fn chunked_bodies_split_anywhere_are_decoded() {
        let input =
            b"5\r\nhello\r\n1;ext=\"v\\\";\"\r\n!\r\nA \t;x\r\n0123456789\r\n0;last = 1\r\n\
                      X-T: 1\r\n\r\nnext";
        for step in 1..=input.len() {
            let (data, trailers, rest) = decode_all(Framing::Chunked, input, step).unwrap();
            assert_eq!(data, b"hello!0123456789");
            assert_eq!(trailers.unwrap()["x-t"], "1");
            assert_eq!(rest, b"next");
        }
    }

    #[test]
    fn malformed_chunks_are_refused() {
        for input in [
            "g\r\n",
            "\r\n",
            "-1\r\n",
            "0x5\r\nhello\r\n0\r\n\r\n",
            "5\nhello\r\n0\r\n\r\n",
            "5\r\nhelloX\r\n0\r\n\r\n",
            "5\r\nhello\n0\r\n\r\n",
            "11111111111111111\r\n",
            "5 \r\nhello\r\n0\r\n\r\n",
            "5 5\r\nhello\r\n",
            "5\rX\r\nhello",
            " 5\r\nhello",
            "0\r\nbad\r\n\r\n",
            "0\r\nX : 1\r\n\r\n",
            "0\r\nX: 1\nY: 2\r\n\r\n",
            "0\r\n X: 1\r\n\r\n",
            "+5\r\nhello\r\n0\r\n\r\n",
            "5;a\rb\r\nhello\r\n0\r\n\r\n",
            "5;\r\nhello\r\n0\r\n\r\n",
            "5;=x\r\nhello\r\n0\r\n\r\n",
            "5;a\nhello\r\n0\r\n\r\n",
            "5;a=\"\r\nhello\"\r\n0\r\n\r\n",
            "5;a=\"\r\n\"\r\nhello\r\n0\r\n\r\n",
            "5;a=\"\n\"\r\nhello\r\n0\r\n\r\n",
            "5\r\nhello\r\n0;\r\n\r\n",
        ] {
            let result = decode_all(Framing::Chunked, input.as_bytes(), 1);
            assert!(result.is_err(), "{input:?} gave {result:?}");
        }
        for endless in [
            format!("5;{}", "a".repeat(SIZE_LINE_MAX)),
            format!("5;a=\"{}", ";b".repeat(SIZE_LINE_MAX)),
        ] {
            assert!(decode_all(Framing::Chunked, endless.as_bytes(), 100).is_err());
        }
    }

    #[test]
    fn the_size_of_a_chunk_of_a_response_may_be_padded() {
        let decode = |input: &str, step| {
            let decoder = BodyDecoder::of_response(Framing::Chunked);
            decode_with(decoder, input.as_bytes(), step)
        };
        let padded = "5   \r\nhello\r\n6\t \r\n world\r\n0  \r\n\r\n";
        for step in 1..=padded.len() {
            assert_eq!(decode(padded, step).unwrap().0, b"hello world");
        }
        for input in [
            " 5\r\nhello",
            "5 \r\r\nhello",
            "5 5\r\nhello",
            "   \r\n",
            "5\x0b\r\nhello",
        ] {
            assert!(decode(input, 1).is_err(), "{input:?}");
        }
    }

    #[test]
    fn a_cut_off_body_is_never_complete() {
        let whole = b"5\r\nhello\r\n0\r\n\r\n";
        for end in 0..whole.len() {
            let decoded = decode_all(Framing::Chunked, &whole[..end], 3);
            assert!(decoded.is_err(), "cut at {end}");
        }
        let cut = decode_all(Framing::Length(5), b"hell", 9);
        assert_eq!(cut, Err(InvalidBody::CutShort));
    }

    #[test]
    fn bytes_behind_a_body_are_left() {
        for (framing, data, rest) in [
            (Framing::Length(5), &b"hello"[..], &b"!"[..]),
            (Framing::UntilClose, b"hello!", b""),
            (Framing::None, b"", b"hello!"),
        ] {
            let decoded = decode_all(framing, b"hello!", 2).unwrap();
            assert_eq!((&decoded.0[..], &decoded.2[..]), (data, rest));
        }
    }

    proptest! {
        #[test]
        fn encoded_chunks_decode_to_the_same_data(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 0..8),
            step in 1usize..64,
        ) {
            let mut encoded = Vec::new();
            for chunk in &chunks {
                encoded.extend_from_slice(chunk_start(chunk.len(), &mut [0; 18]));
                encoded.extend_from_slice(chunk);
                encoded.extend_from_slice(CHUNK_END);
            }
            write_last_chunk(&mut encoded, None);
            let (data, _, rest) = decode_all(Framing::Chunked, &encoded, step).unwrap();
            prop_assert_eq!(data, chunks.concat());
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(
            input in prop::collection::vec(any::<u8>(), 0..200),
            step in 1usize..9,
        ) {
            let whole = decode_all(Framing::Chunked, &input, input.len().max(1));
            let pieces = decode_all(Framing::Chunked, &input, step);
            prop_assert_eq!(whole, pieces);
        }
    }
}
