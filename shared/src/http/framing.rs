//! Framing of message bodies, and the fields that determine it (RFC 9112 §6).
//!
//! Fields that frame a message are not relayed as fields. A reader converts them into a
//! [`Framing`]; the HTTP/1.1 writer ([`super::write`]) generates them from it. Over HTTP/2 the
//! stream frames the body, and [`set_content_length`] makes `Content-Length` agree with it.

use http::header::{self, HeaderName, HeaderValue};
use http::{Method, StatusCode};

use super::limits::InvalidHead;
use super::version::HttpVersion;
use crate::http::Fields;

/// Framing of a message body (RFC 9112 §6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// No body.
    None,
    /// No body; `Content-Length` is that of the response to a GET. For responses to HEAD, and for
    /// 304 (RFC 9110 §8.6).
    Described(u64),
    /// `Content-Length`, in bytes.
    Length(u64),
    Chunked,
    /// The body ends with the connection; responses only.
    UntilClose,
}

impl Framing {
    /// Whether a body follows the head, or may follow.
    pub fn has_body(self) -> bool {
        !matches!(self, Self::None | Self::Described(_) | Self::Length(0))
    }

    /// Value of `Content-Length`.
    pub fn content_length(self) -> Option<u64> {
        match self {
            Self::Length(length) | Self::Described(length) => Some(length),
            Self::None | Self::Chunked | Self::UntilClose => None,
        }
    }

    /// Framing of an HTTP/2 request with or without a body.
    pub fn of_stream(headers: &Fields, has_body: bool) -> Result<Self, InvalidHead> {
        Ok(match content_length(headers)? {
            // An empty body may still have trailers.
            Some(0) => Self::Length(0),
            Some(length) if has_body => Self::Length(length),
            Some(_) => return Err(InvalidHead::Malformed("Content-Length without a body")),
            None if has_body => Self::Chunked,
            None => Self::None,
        })
    }

    /// Framing of a response with `status` to a request with `method`; `self` is the framing that
    /// its fields announce. Some responses have no body regardless of their fields (RFC 9112 §6.3),
    /// and 1xx and 204 have no `Content-Length` (RFC 9110 §8.6).
    #[must_use]
    pub fn of_response(self, status: StatusCode, method: &Method) -> Self {
        if status.is_informational() || status == StatusCode::NO_CONTENT {
            Self::None
        } else if status == StatusCode::NOT_MODIFIED || *method == Method::HEAD {
            self.content_length().map_or(Self::None, Self::Described)
        } else {
            self
        }
    }
}

/// Whether a field frames a message or belongs to a connection, so that only the writer of a head
/// generates it: the fields of RFC 9110 §7.6.1, `Content-Length`, and names that servers which read
/// `_` as `-` (CGI, WSGI) confuse with them.
pub fn is_framing(name: &HeaderName) -> bool {
    *name == header::CONTENT_LENGTH || is_of_connection(name)
}

/// As [`is_framing`], without `Content-Length`.
pub(super) fn is_of_connection(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "transfer-encoding"
            | "upgrade"
            | "keep-alive"
            | "proxy-connection"
            | "http2-settings"
            | "content_length"
            | "transfer_encoding"
    )
}

/// Parses `Content-Length` as [`length_of`] does.
pub fn content_length(headers: &Fields) -> Result<Option<u64>, InvalidHead> {
    length_of(headers.get_all(header::CONTENT_LENGTH))
}

/// Parses the values of `Content-Length` fields.
///
/// Refuses equal duplicates, which RFC 9112 §6.3 lets a recipient merge: two hops could disagree
/// about them. Accepts leading zeros, which are not relayed. Refuses more than 19 digits, as the h2
/// crate does.
pub fn length_of<'a>(
    values: impl IntoIterator<Item = &'a HeaderValue>,
) -> Result<Option<u64>, InvalidHead> {
    const DIGITS_MAX: usize = 19;
    let mut lengths = values.into_iter();
    let Some(length) = lengths.next() else {
        return Ok(None);
    };
    if lengths.next().is_some() {
        return Err(InvalidHead::Syntax("more than one Content-Length"));
    }
    let digits = length.as_bytes();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return Err(InvalidHead::Syntax(
            "Content-Length is not a decimal number",
        ));
    }
    if digits.len() > DIGITS_MAX {
        return Err(InvalidHead::Syntax(
            "Content-Length has more than 19 digits",
        ));
    }
    Ok(Some(digits.iter().fold(0, |value, digit| {
        value * 10 + u64::from(digit - b'0')
    })))
}

/// Sets `Content-Length` according to `framing`, in the head of an HTTP/2 message.
pub fn set_content_length(headers: &mut Fields, framing: Framing) {
    let Some(length) = framing.content_length() else {
        headers.remove(header::CONTENT_LENGTH);
        return;
    };
    let is_canonical =
        |value: &HeaderValue| value.len() == 1 || !value.as_bytes().starts_with(b"0");
    let is_set = content_length(headers) == Ok(Some(length))
        && headers
            .get(header::CONTENT_LENGTH)
            .is_some_and(is_canonical);
    if !is_set {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
}

/// Returns the framing that the fields of a message announce; refuses fields that contradict each
/// other.
pub(super) fn announced(
    headers: &Fields,
    version: HttpVersion,
) -> Result<Option<Framing>, InvalidHead> {
    let length = content_length(headers)?;
    if !headers.contains(header::TRANSFER_ENCODING) {
        return Ok(length.map(Framing::Length));
    }
    if length.is_some() {
        return Err(InvalidHead::Syntax(
            "both Transfer-Encoding and Content-Length",
        ));
    }
    if version == HttpVersion::Http10 {
        return Err(InvalidHead::Syntax("Transfer-Encoding in HTTP/1.0"));
    }
    check_chunked(headers)?;
    Ok(Some(Framing::Chunked))
}

/// Refuses every transfer coding but a single `chunked`: recipients read others differently.
fn check_chunked(headers: &Fields) -> Result<(), InvalidHead> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING);
    match (codings.next(), codings.next()) {
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err(InvalidHead::Syntax(
            "Transfer-Encoding other than `chunked`",
        )),
    }
}

/// Checks that no field value of an HTTP/2 message begins or ends with white space (RFC 9113
/// §8.2.1), which the h2 crate does not check.
pub fn check_values_of_http2(headers: &Fields) -> Result<(), InvalidHead> {
    let is_space = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    let is_padded = |value: &HeaderValue| {
        is_space(value.as_bytes().first()) || is_space(value.as_bytes().last())
    };
    if headers.values().any(is_padded) {
        return Err(InvalidHead::Malformed(
            "a field value begins or ends with white space",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(values: &[&'static str]) -> Fields {
        values
            .iter()
            .map(|value| (header::CONTENT_LENGTH, HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn content_length_is_one_decimal_number() {
        for (text, length) in [
            ("0", 0),
            ("5", 5),
            ("005", 5),
            ("0000000000000000005", 5),
            ("9999999999999999999", 9_999_999_999_999_999_999),
        ] {
            let found = content_length(&lengths(&[text]));
            assert_eq!(found, Ok(Some(length)), "{text}");
        }
        assert_eq!(content_length(&Fields::new()), Ok(None));
        for bad in [
            &["+5"][..],
            &["-5"],
            &["0x5"],
            &["5 5"],
            &["5, 5"],
            &[""],
            &["5", "5"],
            &["00000000000000000005"],
            &["٥"],
        ] {
            let value = |text: &&str| HeaderValue::from_bytes(text.as_bytes()).unwrap();
            let values = bad.iter().map(value);
            let headers: Fields = values
                .map(|value| (header::CONTENT_LENGTH, value))
                .collect();
            assert!(content_length(&headers).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn content_length_of_an_http2_message_follows_its_framing() {
        for (before, framing, after) in [
            (&["5"][..], Framing::Length(5), Some("5")),
            (&["005"], Framing::Length(5), Some("5")),
            (&["0"], Framing::Length(0), Some("0")),
            (&["00"], Framing::Length(0), Some("0")),
            (&["7"], Framing::Length(5), Some("5")),
            (&["5", "5"], Framing::Length(5), Some("5")),
            (&["x"], Framing::Described(5), Some("5")),
            (&[], Framing::Length(5), Some("5")),
            (&["5"], Framing::None, None),
            (&["5", "6"], Framing::Chunked, None),
            (&["5"], Framing::UntilClose, None),
            (&[], Framing::None, None),
        ] {
            let mut headers = lengths(before);
            set_content_length(&mut headers, framing);
            let found = headers.get_all(header::CONTENT_LENGTH);
            assert!(found.eq(after), "{before:?} {framing:?}: {headers:?}");
        }
    }

    #[test]
    fn framing_of_an_http2_request_follows_its_length_and_body() {
        let of = |values: &[&'static str], has_body| Framing::of_stream(&lengths(values), has_body);
        for (values, has_body, framing) in [
            (&[][..], false, Framing::None),
            (&[], true, Framing::Chunked),
            (&["3"], true, Framing::Length(3)),
            (&["0"], true, Framing::Length(0)),
            (&["0"], false, Framing::Length(0)),
        ] {
            assert_eq!(of(values, has_body), Ok(framing), "{values:?} {has_body}");
        }
        assert!(of(&["3"], false).is_err() && of(&["x"], true).is_err());
    }

    #[test]
    fn a_framing_has_a_body_unless_it_is_empty() {
        for (framing, has_body) in [
            (Framing::Length(0), false),
            (Framing::Described(3), false),
            (Framing::None, false),
            (Framing::Length(1), true),
            (Framing::Chunked, true),
            (Framing::UntilClose, true),
        ] {
            assert_eq!(framing.has_body(), has_body, "{framing:?}");
        }
    }
}
