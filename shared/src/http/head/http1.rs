//! Heads of HTTP/1.1 messages (RFC 9112).

use std::mem::MaybeUninit;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Method, StatusCode};

use super::{
    BARE_LINE_FEED, CONNECT, Framing, HeadLimits, HttpVersion, InvalidHead, RequestHead,
    ResponseHead, USERINFO, expects_continue,
};
use crate::http::Fields;
use crate::http::fields::has_too_many_connection_options;
use crate::http::framing::announced;
use crate::http::upgrade::UpgradeProtocol;

/// Most header fields that [`parse_request`] and [`parse_response`] can parse.
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
    // A bad Host is an error even if the target overrides it (RFC 9112 §3.2).
    let host = host.map(Authority::from_maybe_shared).transpose();
    let host = host.map_err(|_| InvalidHead::Syntax("Host field"))?;
    let authority = target_authority
        .or(host)
        .ok_or(InvalidHead::Syntax("no Host field"))?;
    if authority.as_str().contains('@') {
        return Err(USERINFO);
    }

    let framing = announced(&headers, version)?.unwrap_or(Framing::None);
    // In HTTP/1.0, bytes behind a request without a length may be meant as its body (RFC 1945 §7.2.2).
    let is_unframed =
        version == HttpVersion::Http10 && framing == Framing::None && !method.is_safe();
    let keep_alive = keeps_alive(&headers, version) && !is_unframed;
    let expects_continue = version == HttpVersion::Http11 && expects_continue(&headers, framing);
    let upgrade = if version == HttpVersion::Http11 && !framing.has_body() {
        upgrade(&headers)
    } else {
        None
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

/// Parses the head of a response to a request with `method`. `head` ends with the empty line.
pub fn parse_response(
    head: &Bytes,
    method: &Method,
    limits: HeadLimits,
) -> Result<ResponseHead, InvalidHead> {
    let mut fields = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    match httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut parsed,
        head,
        &mut fields,
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

/// Rewrites the head of a later minor version of HTTP/1 as HTTP/1.1; the version begins at `at`. A recipient processes
/// such a message as the highest minor version that it supports (RFC 9110 §2.5).
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

/// Room for the fields that an intermediary adds.
const ROOM: usize = 8;

fn collect_fields<'a, 'b: 'a>(
    head: &Bytes,
    fields: impl Iterator<Item = &'a httparse::Header<'b>>,
) -> Result<Fields, InvalidHead> {
    let mut headers = Fields::with_capacity(fields.size_hint().1.unwrap_or_default() + ROOM);
    for field in fields {
        let name = HeaderName::from_bytes(field.name.as_bytes())
            .map_err(|_| InvalidHead::Syntax("field name"))?;
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

/// Returns the requested protocol if it can be relayed. A list of protocols is ignored (RFC 9110 §7.8).
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
mod tests {
    use super::*;
    use crate::http::write::{ConnectionField, write_request, write_response};

    const LIMITS: HeadLimits = HeadLimits {
        head: 1024,
        fields: 10,
        target: 100,
    };

    fn request(text: &str) -> Result<RequestHead, InvalidHead> {
        parse_request(&Bytes::copy_from_slice(text.as_bytes()), LIMITS)
    }

    fn response(text: &str, method: &Method) -> Result<ResponseHead, InvalidHead> {
        parse_response(&Bytes::copy_from_slice(text.as_bytes()), method, LIMITS)
    }

    #[test]
    fn method_target_authority_and_fields_keep_every_byte() {
        let head = request(
            "PoST /a%2F//b?x=1&y=%00 HTTP/1.1\r\nHost: A.b:80\r\nX-One: 1\r\nx-one:  2 \r\n\r\n",
        )
        .unwrap();
        assert_eq!(head.method.as_str(), "PoST");
        assert_eq!(head.target.as_str(), "/a%2F//b?x=1&y=%00");
        assert_eq!(head.authority.as_str(), "A.b:80");
        let values: Vec<_> = head.headers.get_all("x-one").collect();
        assert_eq!(values, ["1", "2"]);
        assert!(head.keep_alive && !head.expects_continue && head.framing == Framing::None);
    }

    #[test]
    fn all_target_forms_are_parsed() {
        let absolute =
            request("GET http://other.example:81/p?q HTTP/1.1\r\nHost: ignored\r\n\r\n").unwrap();
        assert_eq!(
            (absolute.authority.as_str(), absolute.target.as_str()),
            ("other.example:81", "/p?q")
        );
        let bare = request("GET https://h HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        assert_eq!(bare.target.as_str(), "/");
        assert_eq!(
            request("OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n")
                .unwrap()
                .target
                .as_str(),
            "*"
        );
        assert_eq!(
            request("OPTIONS http://h HTTP/1.1\r\nHost: h\r\n\r\n")
                .unwrap()
                .target
                .as_str(),
            "*"
        );
        let query = request("GET http://h?q=1 HTTP/1.1\r\nHost: h\r\n\r\n").unwrap();
        assert_eq!(query.target.as_str(), "/?q=1");
        for bad in [
            "GET * ",
            "CONNECT h:1 ",
            "GET foo ",
            "GET ftp://h/ ",
            "GET /a#b ",
            "GET http:///x ",
        ] {
            assert!(
                request(&format!("{bad}HTTP/1.1\r\nHost: h\r\n\r\n")).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn an_upgrade_names_one_protocol_other_than_http() {
        let upgrade = |fields: &str| {
            request(&format!("GET / HTTP/1.1\r\nHost: h\r\n{fields}\r\n"))
                .unwrap()
                .upgrade
        };
        let offered = upgrade("Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n");
        assert_eq!(offered.unwrap().as_str(), "websocket");
        assert_eq!(
            upgrade("Connection: upgrade\r\nUpgrade: SPDY/3.1\r\n")
                .unwrap()
                .as_str(),
            "SPDY/3.1"
        );
        assert!(upgrade("Connection: upgrade\r\nUpgrade: a\r\nContent-Length: 0\r\n").is_some());
        for none in [
            "Upgrade: websocket\r\n",
            "Connection: upgrade\r\n",
            "Connection: upgrade\r\nUpgrade: h2c\r\n",
            "Connection: upgrade\r\nUpgrade: HTTP/2.0\r\n",
            "Connection: upgrade\r\nUpgrade: websocket, h2c\r\n",
            "Connection: upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n",
            "Connection: upgrade\r\nUpgrade: a b\r\n",
            "Connection: upgrade\r\nUpgrade:\r\n",
            "Connection: upgrade\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n",
            "Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 1\r\n",
        ] {
            assert_eq!(upgrade(none), None, "{none:?}");
        }
    }

    #[test]
    fn framing_and_persistence_follow_the_fields() {
        let framing =
            |fields: &str| request(&format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}\r\n")).unwrap();
        assert_eq!(framing("Content-Length: 5\r\n").framing, Framing::Length(5));
        assert_eq!(framing("Content-Length: 0\r\n").framing, Framing::Length(0));
        assert_eq!(
            framing("Content-Length: 005\r\n").framing,
            Framing::Length(5)
        );
        assert_eq!(
            framing("Content_Length: 5\r\nTransfer_Encoding: chunked\r\n").framing,
            Framing::None
        );
        assert_eq!(
            framing("Transfer-Encoding: Chunked\r\n").framing,
            Framing::Chunked
        );
        assert!(framing("Content-Length: 5\r\nExpect: 100-Continue\r\n").expects_continue);
        assert!(!framing("Connection: x, Close\r\n").keep_alive);
        assert!(
            !request("GET / HTTP/1.0\r\nHost: h\r\n\r\n")
                .unwrap()
                .keep_alive
        );
        let persists = |line: &str, fields: &str| {
            let text =
                format!("{line} HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n{fields}\r\n");
            request(&text).unwrap().keep_alive
        };
        assert!(
            persists("GET /", "")
                && persists("HEAD /", "")
                && persists("POST /", "Content-Length: 0\r\n")
        );
        assert!(!persists("POST /", "") && !persists("PUT /", "") && !persists("X /", ""));
    }

    #[test]
    fn ambiguous_requests_are_refused() {
        for fields in [
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "Content-Length: 5\r\nContent-Length: 5\r\n",
            "Content-Length: 5, 5\r\n",
            "Content-Length: +5\r\n",
            "Content-Length: 0x5\r\n",
            "Content-Length: 5 5\r\n",
            "Content-Length:\r\n",
            "Content-Length: 18446744073709551616\r\n",
            "Content-Length: 00000000000000000005\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: chunked, identity\r\n",
            "Transfer-Encoding: xchunked\r\n",
            "Transfer-Encoding:\x0bchunked\r\n",
            "Transfer-Encoding : chunked\r\n",
            "X: a\r\n b\r\n",
            " X: a\r\n",
            "X: a\nY: b\r\n",
            "X: a\rY: b\r\n",
            "X: a\0b\r\n",
            "X\r\n",
            ": x\r\n",
            "X Y: z\r\n",
            "Host: other\r\n",
        ] {
            let result = request(&format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
            assert!(
                matches!(result, Err(InvalidHead::Syntax(_))),
                "{fields:?}: {result:?}"
            );
        }
        for text in [
            "GET / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: user@h\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: h/p\r\n\r\n",
            "GET /  HTTP/1.1\r\nHost: h\r\n\r\n",
            "GET / HTTP/2.0\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.10\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.x\r\nHost: h\r\n\r\n",
            "GET / http/1.2\r\nHost: h\r\n\r\n",
            "GET /HTTP/1.2\r\nHost: h\r\n\r\n",
            "GET / HTTP/1.1 \r\nHost: h\r\n\r\n",
            "G(T / HTTP/1.1\r\nHost: h\r\n\r\n",
            "POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
        ] {
            assert!(
                matches!(request(text), Err(InvalidHead::Syntax(_))),
                "{text:?}"
            );
        }
    }

    #[test]
    fn errors_name_the_exceeded_limit() {
        let long_target = format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "a".repeat(100));
        assert_eq!(
            request(&long_target).unwrap_err(),
            InvalidHead::TargetTooLong(100)
        );
        let many = format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "a: b\r\n".repeat(10));
        assert_eq!(request(&many).unwrap_err(), InvalidHead::TooManyFields(10));
        let very_many = format!(
            "GET / HTTP/1.1\r\nHost: h\r\n{}\r\n",
            "a: b\r\n".repeat(FIELDS_MAX)
        );
        assert_eq!(
            request(&very_many).unwrap_err(),
            InvalidHead::TooManyFields(10)
        );
    }

    #[test]
    fn response_framing_follows_method_and_status() {
        let head = |fields: &str, method| {
            response(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n"), method).unwrap()
        };
        assert_eq!(
            head("Content-Length: 7\r\n", &Method::GET).framing,
            Framing::Length(7)
        );
        assert_eq!(
            head("Content-Length: 0\r\n", &Method::GET).framing,
            Framing::Length(0)
        );
        assert_eq!(
            head("Content-Length: 7\r\n", &Method::HEAD).framing,
            Framing::Described(7)
        );
        assert_eq!(head("", &Method::HEAD).framing, Framing::None);
        assert_eq!(
            head("Transfer-Encoding: chunked\r\n", &Method::HEAD).framing,
            Framing::None
        );
        assert_eq!(
            head("Transfer-Encoding: chunked\r\n", &Method::GET).framing,
            Framing::Chunked
        );
        let until_close = head("", &Method::GET);
        assert_eq!(
            (until_close.framing, until_close.keep_alive),
            (Framing::UntilClose, false)
        );
        let not_modified = response("HTTP/1.1 304 x\r\n\r\n", &Method::GET).unwrap();
        assert_eq!(
            (not_modified.framing, not_modified.keep_alive),
            (Framing::None, true)
        );
        let not_modified =
            response("HTTP/1.1 304 x\r\nContent-Length: 5\r\n\r\n", &Method::GET).unwrap();
        assert_eq!(not_modified.framing, Framing::Described(5));
        let no_content =
            response("HTTP/1.1 204 x\r\nContent-Length: 5\r\n\r\n", &Method::HEAD).unwrap();
        assert_eq!(no_content.framing, Framing::None);
        assert_eq!(
            response("HTTP/1.1 100 \r\n\r\n", &Method::GET)
                .unwrap()
                .framing,
            Framing::None
        );
        assert!(
            !response("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", &Method::GET)
                .unwrap()
                .keep_alive
        );
        for bad in [
            "HTTP/1.1 20 OK\r\n\r\n",
            "HTTP/2.0 200 OK\r\n\r\n",
            "HTTP/1.10 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        ] {
            assert!(response(bad, &Method::GET).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn options_in_connection_are_bounded() {
        let with = |first: usize, second: usize| {
            let first = vec!["x"; first].join(",");
            let second = vec!["y"; second].join(", ");
            let fields = format!("Connection: {first}\r\nConnection: {second}\r\n\r\n");
            let request = request(&format!("GET / HTTP/1.1\r\nHost: h\r\n{fields}")).map(drop);
            let response =
                response(&format!("HTTP/1.1 200 OK\r\n{fields}"), &Method::GET).map(drop);
            (request, response)
        };
        assert_eq!(with(1, 63), (Ok(()), Ok(())));
        let refused = Err(InvalidHead::Syntax("too many options in Connection"));
        assert_eq!(with(32, 33), (refused.clone(), refused));
    }

    #[test]
    fn later_minor_versions_are_parsed_as_http_1_1() {
        for version in ["1.2", "1.9"] {
            let text = format!("POST /a?b HTTP/{version}\r\nHost: h\r\nContent-Length: 3\r\n\r\n");
            let head = request(&text).unwrap();
            assert_eq!(
                (head.version, head.target.as_str()),
                (HttpVersion::Http11, "/a?b")
            );
            assert_eq!((head.framing, head.keep_alive), (Framing::Length(3), true));
            let text = format!("HTTP/{version} 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            let head = response(&text, &Method::GET).unwrap();
            assert_eq!(
                (head.version, head.framing, head.keep_alive),
                (HttpVersion::Http11, Framing::Chunked, true)
            );
        }
    }

    #[test]
    fn written_heads_parse_back() {
        let mut headers = Fields::new();
        headers.append(HeaderName::from_static("x"), HeaderValue::from_static("1"));
        headers.append(HeaderName::from_static("x"), HeaderValue::from_static("2"));
        let mut out = Vec::new();
        let target = PathAndQuery::from_static("/a?b");
        write_request(
            &mut out,
            &Method::PUT,
            &target,
            b"h",
            &headers,
            Framing::Chunked,
            ConnectionField::Persists,
        );
        let head = parse_request(&Bytes::from(out), LIMITS).unwrap();
        assert_eq!(
            (head.framing, head.headers.get_all("x").count()),
            (Framing::Chunked, 2)
        );
        let mut out = Vec::new();
        write_response(
            &mut out,
            StatusCode::OK,
            &headers,
            Framing::Length(3),
            ConnectionField::Close,
        );
        let head = parse_response(&Bytes::from(out), &Method::GET, LIMITS).unwrap();
        assert_eq!((head.framing, head.keep_alive), (Framing::Length(3), false));
    }
}
