//! Heads of HTTP/1.1 messages (RFC 9112).

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};

use super::{
    BARE_LINE_FEED, CONNECT, Framing, HeadLimits, HttpVersion, InvalidHead, RequestHead,
    ResponseHead, USERINFO, expects_continue,
};
use crate::http::Fields;
use crate::http::fields::{field_name, has_too_many_connection_options};
use crate::http::framing::announced;
use crate::http::upgrade::{UPGRADE_CONTENT_MAX, UpgradeProtocol};

/// Most header fields that [`parse_request`] can parse. [`parse_response`] parses as many without
/// an allocation.
const FIELDS_MAX: usize = 128;

/// Parses a request head. `head` ends with the empty line.
pub fn parse_request(head: &Bytes, limits: HeadLimits) -> Result<RequestHead, InvalidHead> {
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut parsed = httparse::Request::new(&mut []);
    match parsed.parse_with_uninit_headers(head, &mut fields) {
        Ok(httparse::Status::Complete(length)) if length == head.len() => {}
        Ok(_) => {
            return Err(InvalidHead::Syntax(
                "the head does not end with its empty line",
            ));
        }
        Err(httparse::Error::Version) => {
            let at = memchr::memchr(b'\r', head).and_then(|end| end.checked_sub(VERSION_LENGTH));
            return match at.and_then(|at| as_http11(head, at)) {
                Some(head) => parse_request(&head, limits),
                None => Err(syntax(head, httparse::Error::Version, limits)),
            };
        }
        Err(error) => return Err(syntax(head, error, limits)),
    }
    check_line_feeds(head)?;
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version)
    else {
        return Err(InvalidHead::Syntax("request line"));
    };
    if target.len() > limits.target {
        return Err(InvalidHead::TargetTooLong(limits.target));
    }
    check_field_count(parsed.headers, limits)?;
    let method =
        Method::from_bytes(method.as_bytes()).map_err(|_| InvalidHead::Syntax("method"))?;
    let version = version_of(version);
    let (target, target_authority) = parse_target(head, target, &method)?;
    let (mut hosts, others) = split_off_host(parsed.headers);
    let headers = collect_fields(head, others)?;
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => Some(head.slice_ref(host.value)),
        (None, _) if version == HttpVersion::Http10 && target_authority.is_some() => None,
        (None, _) => return Err(InvalidHead::Syntax("no Host field")),
        (Some(_), Some(_)) => return Err(InvalidHead::Syntax("more than one Host field")),
    };
    let authority = authority_of(target_authority, host)?;

    let framing = announced(&headers, version)?.unwrap_or(Framing::None);
    // In HTTP/1.0, bytes behind a request without a length may be meant as its body (RFC 1945
    // §7.2.2).
    let is_unframed =
        version == HttpVersion::Http10 && framing == Framing::None && !method.is_safe();
    let keep_alive = keeps_alive(&headers, version) && !is_unframed;
    let expects_continue = version == HttpVersion::Http11 && expects_continue(&headers, framing);
    let upgrade = match framing {
        Framing::None | Framing::Length(0..=UPGRADE_CONTENT_MAX)
            if version == HttpVersion::Http11 =>
        {
            upgrade(&headers)
        }
        _ => None,
    };
    Ok(RequestHead {
        method,
        target,
        authority,
        version,
        headers,
        framing,
        keep_alive,
        expects_continue,
        upgrade,
    })
}

/// The authority that a request is for.
fn authority_of(
    of_target: Option<Authority>,
    host: Option<Bytes>,
) -> Result<Authority, InvalidHead> {
    // A bad Host is an error even if the target overrides it (RFC 9112 §3.2).
    let host = host.map(Authority::from_maybe_shared).transpose();
    let host = host.map_err(|_| InvalidHead::Syntax("Host field"))?;
    let authority = of_target
        .or(host)
        .ok_or(InvalidHead::Syntax("no Host field"))?;
    if authority.as_str().contains('@') {
        return Err(USERINFO);
    }
    Ok(authority)
}

/// Parses the head of a response to a request with `method`. `head` ends with the empty line.
pub fn parse_response(
    head: &Bytes,
    method: &Method,
    limits: HeadLimits,
) -> Result<ResponseHead, InvalidHead> {
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    match parse_response_with(head, method, limits, &mut fields) {
        Err(InvalidHead::TooManyFields(most)) if most > FIELDS_MAX => {
            let mut fields = vec![MaybeUninit::uninit(); most];
            parse_response_with(head, method, limits, &mut fields)
        }
        parsed => parsed,
    }
}

/// Parses a head with at most as many fields as `fields` has entries.
fn parse_response_with<'a>(
    head: &'a Bytes,
    method: &Method,
    limits: HeadLimits,
    fields: &mut [MaybeUninit<httparse::Header<'a>>],
) -> Result<ResponseHead, InvalidHead> {
    let mut parsed = httparse::Response::new(&mut []);
    match httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut parsed,
        head,
        fields,
    ) {
        Ok(httparse::Status::Complete(length)) if length == head.len() => {}
        Ok(_) => {
            return Err(InvalidHead::Syntax(
                "the head does not end with its empty line",
            ));
        }
        Err(httparse::Error::Version) => {
            return match as_http11(head, 0) {
                Some(head) => parse_response(&head, method, limits),
                None => Err(syntax(head, httparse::Error::Version, limits)),
            };
        }
        Err(error) => return Err(syntax(head, error, limits)),
    }
    check_line_feeds(head)?;
    let (Some(status), Some(version)) = (parsed.code, parsed.version) else {
        return Err(InvalidHead::Syntax("status line"));
    };
    check_field_count(parsed.headers, limits)?;
    let status = StatusCode::from_u16(status).map_err(|_| InvalidHead::Syntax("status code"))?;
    let version = version_of(version);
    let headers = collect_fields(head, parsed.headers.iter())?;
    let framing = announced(&headers, version)?
        .unwrap_or(Framing::UntilClose)
        .of_response(status, method);
    let keep_alive = keeps_alive(&headers, version) && framing != Framing::UntilClose;
    Ok(ResponseHead {
        status,
        version,
        headers,
        framing,
        keep_alive,
    })
}

/// Refuses bare LF, which some parsers read as a line end. Bare CR and NUL are errors of httparse.
fn check_line_feeds(head: &[u8]) -> Result<(), InvalidHead> {
    for at in memchr::memchr_iter(b'\n', head) {
        if at == 0 || head[at - 1] != b'\r' {
            return Err(BARE_LINE_FEED);
        }
    }
    Ok(())
}

/// The bytes of `head` that are an error wherever they are.
fn forbidden_bytes(head: &[u8]) -> Option<InvalidHead> {
    let is_bare_return = |at: usize| head.get(at + 1) != Some(&b'\n');
    if memchr::memchr(0, head).is_some() {
        Some(InvalidHead::Syntax("NUL"))
    } else if memchr::memchr_iter(b'\r', head).any(is_bare_return) {
        Some(InvalidHead::Syntax("carriage return without line feed"))
    } else {
        check_line_feeds(head).err()
    }
}

fn syntax(head: &[u8], error: httparse::Error, limits: HeadLimits) -> InvalidHead {
    if let Some(forbidden) = forbidden_bytes(head) {
        return forbidden;
    }
    match error {
        httparse::Error::TooManyHeaders => InvalidHead::TooManyFields(limits.fields),
        httparse::Error::HeaderName => InvalidHead::Syntax(
            "field name (a space before the colon and folded lines are refused too)",
        ),
        httparse::Error::HeaderValue => InvalidHead::Syntax("field value"),
        httparse::Error::NewLine => InvalidHead::Syntax("line end"),
        httparse::Error::Status => InvalidHead::Syntax("status line"),
        httparse::Error::Token => InvalidHead::Syntax("request line"),
        httparse::Error::Version => InvalidHead::Syntax("version is not HTTP/1.x"),
    }
}

const VERSION_LENGTH: usize = "HTTP/1.1".len();

/// Rewrites the head of a later minor version of HTTP/1 as HTTP/1.1; the version begins at `at`. A
/// recipient processes such a message as the highest minor version that it supports (RFC 9110
/// §2.5).
fn as_http11(head: &[u8], at: usize) -> Option<Bytes> {
    let end = at + VERSION_LENGTH;
    if !matches!(
        head.get(at..end)?,
        [b'H', b'T', b'T', b'P', b'/', b'1', b'.', b'2'..=b'9']
    ) {
        return None;
    }
    let mut head = head.to_vec();
    *head.get_mut(end - 1)? = b'1';
    Some(head.into())
}

fn version_of(minor: u8) -> HttpVersion {
    if minor == 0 {
        HttpVersion::Http10
    } else {
        HttpVersion::Http11
    }
}

/// Parses a request target in one of the four forms of RFC 9112 §3.2.
fn parse_target(
    head: &Bytes,
    target: &str,
    method: &Method,
) -> Result<(PathAndQuery, Option<Authority>), InvalidHead> {
    if *method == Method::CONNECT {
        return Err(CONNECT);
    }
    let invalid = InvalidHead::Syntax(
        "request target (no white space, control characters or fragment; UTF-8)",
    );
    // `http::uri` silently drops a fragment.
    if target.bytes().any(|byte| byte == b'#') {
        return Err(invalid);
    }
    let path = |path: &str| PathAndQuery::from_maybe_shared(head.slice_ref(path.as_bytes()));
    if target.starts_with('/') {
        return Ok((path(target).map_err(|_| invalid)?, None));
    }
    if target == "*" {
        return if *method == Method::OPTIONS {
            Ok((PathAndQuery::from_static("*"), None))
        } else {
            Err(InvalidHead::Syntax("`*` is a target of OPTIONS only"))
        };
    }
    let scheme_end = target.find("://").ok_or(invalid.clone())?;
    if !["http", "https"]
        .iter()
        .any(|scheme| target[..scheme_end].eq_ignore_ascii_case(scheme))
    {
        return Err(invalid);
    }
    let after_scheme = &target[scheme_end + 3..];
    let authority_end = after_scheme.find(['/', '?']).unwrap_or(after_scheme.len());
    let (authority, rest) = after_scheme.split_at(authority_end);
    let authority = Authority::from_maybe_shared(head.slice_ref(authority.as_bytes()));
    let authority = authority.map_err(|_| invalid.clone())?;
    let target = match rest {
        "" if *method == Method::OPTIONS => PathAndQuery::from_static("*"),
        "" => PathAndQuery::from_static("/"),
        // An empty path becomes `/` (RFC 9112 §3.2.1).
        query if query.starts_with('?') => {
            PathAndQuery::from_maybe_shared(Bytes::from(format!("/{query}")))
                .map_err(|_| invalid)?
        }
        _ => path(rest).map_err(|_| invalid)?,
    };
    Ok((target, Some(authority)))
}

fn check_field_count(
    fields: &[httparse::Header<'_>],
    limits: HeadLimits,
) -> Result<(), InvalidHead> {
    if fields.len() > limits.fields {
        Err(InvalidHead::TooManyFields(limits.fields))
    } else {
        Ok(())
    }
}

/// Separates `Host` fields, whose value becomes the authority, from all others.
fn split_off_host<'a, 'b>(
    fields: &'a [httparse::Header<'b>],
) -> (
    impl Iterator<Item = &'a httparse::Header<'b>>,
    impl Iterator<Item = &'a httparse::Header<'b>>,
) {
    fn is_host(field: &&httparse::Header<'_>) -> bool {
        field.name.eq_ignore_ascii_case("host")
    }
    (
        fields.iter().filter(is_host),
        fields.iter().filter(|field| !is_host(field)),
    )
}

fn collect_fields<'a, 'b: 'a>(
    head: &Bytes,
    fields: impl Iterator<Item = &'a httparse::Header<'b>>,
) -> Result<Fields, InvalidHead> {
    let mut headers = Fields::with_room_for(fields.size_hint().1.unwrap_or_default());
    for field in fields {
        let name =
            field_name(field.name.as_bytes()).map_err(|_| InvalidHead::Syntax("field name"))?;
        let value = HeaderValue::from_maybe_shared(head.slice_ref(field.value))
            .map_err(|_| InvalidHead::Syntax("field value"))?;
        headers.append(name, value);
    }
    if has_too_many_connection_options(&headers) {
        return Err(InvalidHead::Syntax("too many options in Connection"));
    }
    Ok(headers)
}

fn keeps_alive(headers: &Fields, version: HttpVersion) -> bool {
    match version {
        HttpVersion::Http11 | HttpVersion::Http2 => !has_connection_option(headers, "close"),
        HttpVersion::Http10 => {
            has_connection_option(headers, "keep-alive") && !has_connection_option(headers, "close")
        }
    }
}

fn has_connection_option(headers: &Fields, name: &str) -> bool {
    headers
        .get_all(header::CONNECTION)
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|option| option.trim().eq_ignore_ascii_case(name))
}

/// Returns the requested protocol if it can be relayed. A list of protocols is ignored (RFC 9110
/// §7.8).
fn upgrade(headers: &Fields) -> Option<UpgradeProtocol> {
    let mut offered = headers.get_all(header::UPGRADE);
    let (Some(protocol), None) = (offered.next(), offered.next()) else {
        return None;
    };
    if has_connection_option(headers, "upgrade") {
        UpgradeProtocol::parse(protocol)
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
