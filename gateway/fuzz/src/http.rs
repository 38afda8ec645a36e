//! The HTTP/1.1 codec in both roles.

use bytes::{Bytes, BytesMut};
use gw_base::limits;
use gw_shared::http::body::{CHUNK_END, chunk_start, write_last_chunk};
use gw_shared::http::head::{
    self, ConnectionField, Framing, HeadScanner, RequestHead, ResponseHead,
};
use gw_shared::http::{BodyDecoder, Fields, InvalidBody, InvalidHead, Part};
use http::{Method, StatusCode};

/// The head at the front of `data`, received in pieces of `step` bytes.
fn find_head(data: &[u8], step: usize) -> Result<Option<Bytes>, InvalidHead> {
    let mut scanner = HeadScanner::default();
    let mut buffer = BytesMut::new();
    for piece in data.chunks(step) {
        buffer.extend_from_slice(piece);
        if let Some(end) = scanner.find_end(&mut buffer, limits::REQUEST_HEAD)? {
            return Ok(Some(buffer.split_to(end).freeze()));
        }
    }
    Ok(None)
}

/// Asserts that `head` has no byte that two parsers could split differently.
fn assert_lines(head: &[u8]) {
    let alone = |at: usize| match head[at] {
        b'\r' => head.get(at + 1) != Some(&b'\n'),
        b'\n' => at == 0 || head[at - 1] != b'\r',
        0 => true,
        _ => false,
    };
    assert!(!(0..head.len()).any(alone), "a bare CR or LF, or NUL");
}

/// Values of `Content-Length` and `Transfer-Encoding`, in order, found by splitting at line ends
/// only.
fn announced(head: &[u8]) -> (Vec<&[u8]>, Vec<&[u8]>) {
    let values = |name: &str| -> Vec<&[u8]> {
        let lines = head.split(|byte| *byte == b'\n').skip(1);
        let fields = lines.filter_map(|line| {
            let colon = line.iter().position(|byte| *byte == b':')?;
            line[..colon]
                .trim_ascii()
                .eq_ignore_ascii_case(name.as_bytes())
                .then(|| line[colon + 1..].trim_ascii())
        });
        fields.collect()
    };
    (values("content-length"), values("transfer-encoding"))
}

fn assert_framing(head: &[u8], framing: Framing) {
    match (announced(head), framing) {
        ((lengths, codings), Framing::Length(length) | Framing::Described(length)) => {
            assert!(codings.is_empty() && is_length(&lengths, length));
        }
        ((lengths, codings), Framing::Chunked) => {
            assert!(
                lengths.is_empty()
                    && codings.len() == 1
                    && codings[0].eq_ignore_ascii_case(b"chunked")
            );
        }
        ((lengths, codings), Framing::None | Framing::UntilClose) => {
            assert!(lengths.is_empty() && codings.is_empty());
        }
    }
}

/// Whether there is one length, of digits only, with leading zeros allowed (RFC 9110 §8.6).
fn is_length(lengths: &[&[u8]], length: u64) -> bool {
    let text = |value: &[u8]| String::from_utf8_lossy(value).parse::<u64>();
    matches!(lengths, [value] if value.iter().all(u8::is_ascii_digit) && text(value) == Ok(length))
}

/// A request head. The result does not depend on how it is split, its framing is unambiguous, and
/// written again it parses to the same request.
pub fn request_head(data: &[u8]) {
    // An invalid head may be refused before its end has arrived.
    let accepted = |step| {
        let text = find_head(data, step).ok().flatten()?;
        head::parse_request(&text, limits::REQUEST_HEAD)
            .ok()
            .map(|request| (text, request))
    };
    let whole = accepted(data.len().max(1));
    for step in [1, 3, 7] {
        let texts =
            [accepted(step), accepted(data.len().max(1))].map(|it| it.map(|(text, _)| text));
        assert_eq!(texts[0], texts[1], "in pieces of {step}");
    }
    let Some((text, request)) = whole else { return };
    assert_lines(&text);
    assert_framing(&text, request.framing);
    let RequestHead {
        method,
        target,
        authority,
        headers,
        framing,
        ..
    } = request;
    let mut out = Vec::new();
    // With all fields: `write_request` skips those for framing.
    let host = authority.as_str().as_bytes();
    head::write_request(
        &mut out,
        &method,
        &target,
        host,
        &headers,
        framing,
        ConnectionField::Persists,
    );
    let again = head::parse_request(&out.into(), limits::REQUEST_HEAD);
    // The fields that the writer adds can exceed the limit.
    let Ok(again) = again.map_err(|error| assert!(error.is_too_large(), "{error}")) else {
        return;
    };
    assert_eq!(
        (again.method, again.target, again.framing),
        (method, target, framing)
    );
    assert_eq!(again.authority, authority);
}

/// A response head. The first byte selects the method of the request.
pub fn response_head(data: &[u8]) {
    let Some((first, data)) = data.split_first() else {
        return;
    };
    let method = [Method::GET, Method::HEAD, Method::POST][usize::from(first % 3)].clone();
    let Ok(Some(text)) = find_head(data, data.len().max(1)) else {
        return;
    };
    let Ok(response) = head::parse_response(&text, &method, limits::REQUEST_HEAD) else {
        return;
    };
    assert_lines(&text);
    let ResponseHead {
        status,
        headers,
        framing,
        ..
    } = response;
    let bodiless = method == Method::HEAD
        || status.is_informational()
        || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if bodiless {
        assert!(matches!(framing, Framing::None | Framing::Described(_)));
    } else {
        assert_framing(&text, framing);
    }
    let mut out = Vec::new();
    head::write_response(
        &mut out,
        status,
        &headers,
        framing,
        ConnectionField::Persists,
    );
    let again = head::parse_response(&out.into(), &method, limits::REQUEST_HEAD);
    let Ok(again) = again.map_err(|error| assert!(error.is_too_large(), "{error}")) else {
        return;
    };
    assert_eq!((again.status, again.framing), (status, framing));
}

/// Decodes `data` in pieces of `step` bytes: data, trailers, and number of bytes left.
fn decode(
    framing: Framing,
    data: &[u8],
    step: usize,
) -> Result<(Vec<u8>, Option<Fields>, usize), InvalidBody> {
    let mut decoder = BodyDecoder::new(framing);
    let mut buffer = BytesMut::new();
    let mut body = Vec::new();
    let mut trailers = None;
    let mut pieces = data.chunks(step);
    let mut given = 0;
    loop {
        match decoder.decode(&mut buffer)? {
            Some(Part::Data(piece)) => {
                assert!(
                    !piece.is_empty(),
                    "an empty piece would be encoded as the last chunk"
                );
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

/// A body. The first byte selects the framing. The result does not depend on how it is split, is
/// not longer than the input, and a chunked body encoded again decodes to the same.
pub fn body(data: &[u8]) {
    let Some((first, data)) = data.split_first() else {
        return;
    };
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
    let Ok((decoded, trailers, left)) = whole else {
        return;
    };
    assert!(decoded.len() + left <= data.len());
    match framing {
        Framing::None | Framing::Described(_) => assert_eq!((decoded.len(), left), (0, data.len())),
        Framing::Length(length) => assert_eq!(
            (decoded.len() as u64, decoded.len() + left),
            (length, data.len())
        ),
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
