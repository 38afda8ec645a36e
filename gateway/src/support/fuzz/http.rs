//! The HTTP/1.1 codec, both roles, and the rules for fields.

use bytes::{Bytes, BytesMut};
use gw_shared::http::body::{CHUNK_END, chunk_start, write_last_chunk};
use gw_shared::http::head::{self, Connection, Framing, HeadScanner, RequestHead, ResponseHead};
use gw_shared::http::{BodyDecoder, InvalidBody, InvalidHead, Part, fields};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};

use crate::limits;

/// Where the head at the front of `data` ends, fed in pieces of `step` bytes; and what of `data` it is.
fn find_head(data: &[u8], step: usize) -> Result<Option<Bytes>, InvalidHead> {
    let (mut scanner, mut buffer) = (HeadScanner::default(), BytesMut::new());
    for piece in data.chunks(step) {
        buffer.extend_from_slice(piece);
        if let Some(end) = scanner.find_end(&mut buffer, limits::REQUEST_HEAD)? {
            return Ok(Some(buffer.split_to(end).freeze()));
        }
    }
    Ok(None)
}

/// What two readers could take for different lines.
fn assert_lines(head: &[u8]) {
    let alone = |at: usize| match head[at] {
        b'\r' => head.get(at + 1) != Some(&b'\n'),
        b'\n' => at == 0 || head[at - 1] != b'\r',
        0 => true,
        _ => false,
    };
    assert!(!(0..head.len()).any(alone), "a bare CR or LF, or NUL");
}

/// The framing that a reader sees who knows nothing but lines: the values of both fields, in their order.
fn announced(head: &[u8]) -> (Vec<&[u8]>, Vec<&[u8]>) {
    let values = |name: &str| -> Vec<&[u8]> {
        let lines = head.split(|byte| *byte == b'\n').skip(1);
        let fields = lines.filter_map(|line| {
            let colon = line.iter().position(|byte| *byte == b':')?;
            line[..colon].trim_ascii().eq_ignore_ascii_case(name.as_bytes()).then(|| line[colon + 1..].trim_ascii())
        });
        fields.collect()
    };
    (values("content-length"), values("transfer-encoding"))
}

fn assert_framing(head: &[u8], framing: Framing) {
    match (announced(head), framing) {
        ((lengths, codings), Framing::Length(length) | Framing::Described(length)) => {
            assert!(codings.is_empty() && leading_zeros(&lengths, length));
        }
        ((lengths, codings), Framing::Chunked) => {
            assert!(lengths.is_empty() && codings.len() == 1 && codings[0].eq_ignore_ascii_case(b"chunked"));
        }
        ((lengths, codings), Framing::None | Framing::UntilClose) => assert!(lengths.is_empty() && codings.is_empty()),
    }
}

/// `Content-Length = 1*DIGIT` allows them.
fn leading_zeros(lengths: &[&[u8]], length: u64) -> bool {
    let text = |value: &[u8]| String::from_utf8_lossy(value).parse::<u64>();
    matches!(lengths, [value] if value.iter().all(u8::is_ascii_digit) && text(value) == Ok(length))
}

/// A request head: accepted or not however it arrives, unambiguous, and the same again when it is written.
pub fn request_head(data: &[u8]) {
    // What is refused may be so before its end has come.
    let accepted = |step| {
        let text = find_head(data, step).ok().flatten()?;
        head::parse_request(&text, limits::REQUEST_HEAD).ok().map(|request| (text, request))
    };
    let whole = accepted(data.len().max(1));
    for step in [1, 3, 7] {
        let texts = [accepted(step), accepted(data.len().max(1))].map(|it| it.map(|(text, _)| text));
        assert_eq!(texts[0], texts[1], "in pieces of {step}");
    }
    let Some((text, request)) = whole else { return };
    assert_lines(&text);
    assert_framing(&text, request.framing);
    let RequestHead { method, target, authority, headers, framing, .. } = request;
    let mut out = Vec::new();
    // All fields, so that what frames among them is passed over.
    let host = authority.as_str().as_bytes();
    head::write_request(&mut out, &method, &target, host, &headers, framing, Connection::Persists);
    let again = head::parse_request(&out.into(), limits::REQUEST_HEAD);
    // What is added can be what is too much.
    let Ok(again) = again.map_err(|error| assert!(error.is_too_large(), "{error}")) else { return };
    assert_eq!((again.method, again.target, again.framing), (method, target, framing));
    assert_eq!(again.authority, authority);
}

/// A response head, to a request of the method that the first byte says.
pub fn response_head(data: &[u8]) {
    let Some((first, data)) = data.split_first() else { return };
    let method = [Method::GET, Method::HEAD, Method::POST][usize::from(first % 3)].clone();
    let Ok(Some(text)) = find_head(data, data.len().max(1)) else { return };
    let Ok(response) = head::parse_response(&text, &method, limits::REQUEST_HEAD) else { return };
    assert_lines(&text);
    let ResponseHead { status, headers, framing, .. } = response;
    let bodiless = method == Method::HEAD
        || status.is_informational()
        || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if bodiless {
        assert!(matches!(framing, Framing::None | Framing::Described(_)));
    } else {
        assert_framing(&text, framing);
    }
    let mut out = Vec::new();
    head::write_response(&mut out, status, &headers, framing, Connection::Persists);
    let again = head::parse_response(&out.into(), &method, limits::REQUEST_HEAD);
    let Ok(again) = again.map_err(|error| assert!(error.is_too_large(), "{error}")) else { return };
    assert_eq!((again.status, again.framing), (status, framing));
}

/// What a body decoder makes of `data` in pieces of `step`: data, trailers, and how much was left.
fn decode(framing: Framing, data: &[u8], step: usize) -> Result<(Vec<u8>, Option<HeaderMap>, usize), InvalidBody> {
    let (mut decoder, mut buffer, mut body, mut trailers) =
        (BodyDecoder::new(framing), BytesMut::new(), Vec::new(), None);
    let (mut pieces, mut given) = (data.chunks(step), 0);
    loop {
        match decoder.decode(&mut buffer)? {
            Some(Part::Data(piece)) => {
                assert!(!piece.is_empty(), "an empty piece would be the last chunk");
                body.extend_from_slice(&piece);
            }
            Some(Part::Trailers(fields)) => trailers = Some(fields),
            Some(Part::End) => return Ok((body, trailers, data.len() - given + buffer.len())),
            None => match pieces.next() {
                Some(piece) => {
                    given += piece.len();
                    buffer.extend_from_slice(piece);
                }
                None => decoder.finish()?,
            },
        }
    }
}

/// A body of the framing that the first byte says: the same however it arrives, never longer than what came, and what
/// was chunked is so again.
pub fn body(data: &[u8]) {
    let Some((first, data)) = data.split_first() else { return };
    let framing = match first % 4 {
        0 => Framing::None,
        1 => Framing::Length(u64::from(first / 4)),
        2 => Framing::UntilClose,
        _ => Framing::Chunked,
    };
    let whole = decode(framing, data, data.len().max(1));
    for step in [1, 2, 5] {
        assert_eq!(decode(framing, data, step), whole, "in pieces of {step}");
    }
    let Ok((decoded, trailers, left)) = whole else { return };
    assert!(decoded.len() + left <= data.len());
    match framing {
        Framing::None | Framing::Described(_) => assert_eq!((decoded.len(), left), (0, data.len())),
        Framing::Length(length) => assert_eq!((decoded.len() as u64, decoded.len() + left), (length, data.len())),
        Framing::UntilClose => assert_eq!((decoded.len(), left), (data.len(), 0)),
        Framing::Chunked => {
            let mut out = Vec::new();
            for piece in decoded.chunks(3) {
                out.extend_from_slice(chunk_start(piece.len(), &mut [0; 18]));
                out.extend_from_slice(piece);
                out.extend_from_slice(CHUNK_END);
            }
            write_last_chunk(&mut out, trailers.as_ref());
            assert_eq!(decode(framing, &out, out.len()), Ok((decoded, trailers, 0)));
        }
    }
}

/// Fields, one `name: value` a line: what goes on to the next hop, of a head and of a trailer section.
pub fn header_rules(data: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in data.split(|byte| *byte == b'\n').take(60) {
        let colon = line.iter().position(|byte| *byte == b':').unwrap_or(line.len());
        let (name, value) = (HeaderName::from_bytes(&line[..colon]), line.get(colon + 1..).unwrap_or_default());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value.trim_ascii())) {
            headers.append(name, value);
        }
    }
    let named = |name: &HeaderName| {
        let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
        let mut names = values.flat_map(|value| value.split(','));
        names.any(|it| it.trim().eq_ignore_ascii_case(name.as_str()))
    };
    let kept = fields::end_to_end(headers.clone(), fields::is_own, 0);
    for (name, value) in &kept {
        assert!(!fields::is_own(name));
        match name.as_str() {
            "te" => assert_eq!(value, "trailers"),
            "connection" | "transfer-encoding" | "upgrade" | "keep-alive" | "proxy-connection" => panic!("{name}"),
            "content_length" | "transfer_encoding" | "http2-settings" => panic!("{name}"),
            "host" | "content-length" => {}
            _ => assert!(!named(name), "{name} was for this hop"),
        }
    }
    // What is left keeps its order.
    let mut all = headers.iter();
    for field in kept.iter().filter(|(name, _)| **name != header::TE) {
        assert!(all.any(|it| it == field), "{field:?} is not where it was");
    }
    assert_eq!(fields::end_to_end(kept.clone(), fields::is_own, 0), kept, "once is enough");
    for name in fields::end_to_end_trailers(headers).keys() {
        assert!(!fields::is_own(name));
        let framing = [header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::HOST, header::TE, header::TRAILER];
        assert!(!framing.contains(name), "{name} in trailers");
    }
}
