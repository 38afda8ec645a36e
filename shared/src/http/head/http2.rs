//! Heads of HTTP/2 requests (RFC 9113 §8.3).

use h2::ext::Protocol;
use http::Method;
use http::header;
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Uri};

use super::{
    CONNECT, Framing, HeadLimits, HttpVersion, InvalidHead, RequestHead, USERINFO, expects_continue,
};
use crate::http::Fields;
use crate::http::fields::join_cookies;
use crate::http::framing::check_values_of_http2;
use crate::http::upgrade::UpgradeProtocol;

const PROTOCOL: InvalidHead =
    InvalidHead::Syntax(":protocol is not the name of one protocol, other than HTTP and TLS");

/// Converts the head of an HTTP/2 request that the h2 crate has accepted (RFC 9113 §8.3). `Host`
/// stays among the fields and names the authority, in any case and with or without the default
/// port. `has_body` tells whether data or trailers may follow. Returns a refused head with the
/// error.
pub fn request_of_http2(
    mut parts: Parts,
    has_body: bool,
    limits: HeadLimits,
) -> Result<RequestHead, Box<(InvalidHead, Parts)>> {
    if let Err(too_large) = check_size(&parts, limits) {
        return Err(Box::new((too_large, parts)));
    }
    let mut headers = Fields::from(std::mem::take(&mut parts.headers));
    if headers.len() > limits.fields {
        // Cookies alone may be that many. A list of them takes a multiple of their bytes.
        join_cookies(&mut headers);
    }
    let checked = match check_http2(&parts, &headers, has_body) {
        Ok(checked) => checked,
        Err(invalid) => {
            parts.headers = headers.into();
            return Err(Box::new((invalid, parts)));
        }
    };
    let (target, authority, framing, upgrade) = checked;
    let method = parts.method;
    let expects_continue = expects_continue(&headers, framing);
    Ok(RequestHead {
        method: if upgrade.is_some() {
            Method::GET
        } else {
            method
        },
        target,
        authority,
        version: HttpVersion::Http2,
        headers,
        framing,
        keep_alive: true,
        expects_continue,
        upgrade,
    })
}

/// Checks the size of a request head as if it were written as HTTP/1.1.
fn check_size(parts: &Parts, limits: HeadLimits) -> Result<(), InvalidHead> {
    let Parts {
        method,
        uri,
        headers,
        extensions,
        ..
    } = parts;
    let target = uri.path_and_query().map_or("", PathAndQuery::as_str);
    let authority = uri.authority().map_or("", Authority::as_str);
    let protocol = extensions.get::<Protocol>().map_or("", Protocol::as_str);
    let others = method.as_str().len() + authority.len() + protocol.len();
    limits.check(target, others, headers.iter())
}

type CheckedHttp2 = (PathAndQuery, Authority, Framing, Option<UpgradeProtocol>);

fn check_http2(
    parts: &Parts,
    headers: &Fields,
    has_body: bool,
) -> Result<CheckedHttp2, InvalidHead> {
    let Parts {
        method,
        uri,
        extensions,
        ..
    } = parts;
    check_values_of_http2(headers)?;
    if uri.scheme_str() == Some("") {
        return Err(InvalidHead::Malformed(":scheme is empty"));
    }
    let target = uri.path_and_query().map_or("", PathAndQuery::as_str);
    let upgrade = match extensions.get::<Protocol>() {
        Some(protocol) => Some(UpgradeProtocol::parse_str(protocol.as_str()).ok_or(PROTOCOL)?),
        None if *method == Method::CONNECT => return Err(CONNECT),
        None => None,
    };
    let is_options = upgrade.is_none() && *method == Method::OPTIONS;
    if !(target.starts_with('/') || target == "*" && is_options) {
        return Err(InvalidHead::Syntax(
            ":path does not begin with `/`, and only OPTIONS may have `*`",
        ));
    }
    let target = uri
        .path_and_query()
        .cloned()
        .ok_or(InvalidHead::Syntax("no :path"))?;
    let authority = authority_of_http2(uri, headers)?;
    let framing = Framing::of_stream(headers, has_body)?;
    Ok((target, authority, framing, upgrade))
}

pub(in crate::http) fn authority_of_http2(
    uri: &Uri,
    headers: &Fields,
) -> Result<Authority, InvalidHead> {
    let mut hosts = headers.get_all(header::HOST);
    let authority = match (uri.authority(), hosts.next(), hosts.next()) {
        (_, _, Some(_)) => return Err(InvalidHead::Syntax("more than one Host field")),
        (Some(authority), None, None) => authority.clone(),
        (Some(authority), Some(host), None)
            if without_default_port(authority.as_str().as_bytes(), uri)
                .eq_ignore_ascii_case(without_default_port(host.as_bytes(), uri)) =>
        {
            authority.clone()
        }
        (Some(_), Some(_), None) => return Err(InvalidHead::Syntax(":authority and Host differ")),
        (None, Some(host), None) => {
            Authority::try_from(host.as_bytes()).map_err(|_| InvalidHead::Syntax("Host field"))?
        }
        (None, None, None) => return Err(InvalidHead::Syntax("neither :authority nor Host")),
    };
    if authority.as_str().contains('@') {
        Err(USERINFO)
    } else {
        Ok(authority)
    }
}

/// `authority` without the port that its scheme has by default (RFC 3986 §6.2.3).
fn without_default_port<'a>(authority: &'a [u8], uri: &Uri) -> &'a [u8] {
    let port: &[u8] = match uri.scheme_str() {
        Some("https") => b":443",
        Some("http") => b":80",
        _ => b"",
    };
    authority.strip_suffix(port).unwrap_or(authority)
}

#[cfg(test)]
mod tests {
    use super::super::tests::LIMITS;
    use super::*;

    fn request_2(request: http::request::Builder) -> Result<RequestHead, InvalidHead> {
        let parts = request.body(()).unwrap().into_parts().0;
        request_of_http2(parts, false, LIMITS).map_err(|refused| refused.0)
    }

    fn upgrade(protocol: &'static str) -> http::request::Builder {
        let protocol = Protocol::from_static(protocol);
        http::Request::connect("https://h/chat").extension(protocol)
    }

    #[test]
    fn http2_requests_are_checked_like_http1_requests() {
        let get = || http::Request::get("https://A.b:80/p?q").version(http::Version::HTTP_2);
        let head = request_2(get().header("x", "1").header("host", "a.B:80")).unwrap();
        assert_eq!(head.authority.as_str(), "A.b:80");
        assert_eq!(head.target.as_str(), "/p?q");
        assert_eq!(head.framing, Framing::None);
        assert_eq!((head.version, head.upgrade), (HttpVersion::Http2, None));
        let with_host = request_2(http::Request::get("/p").header("host", "h")).unwrap();
        assert_eq!(with_host.authority.as_str(), "h");
        let websocket = request_2(upgrade("websocket")).unwrap();
        assert_eq!(websocket.method, Method::GET);
        assert_eq!(websocket.upgrade.unwrap().as_str(), "websocket");
        let cookies = (0..50).fold(get(), |request, _| request.header("cookie", "a=b"));
        assert!(request_2(cookies).is_ok());
        let bare = || http::Request::get("/p");
        let long = format!("https://h/{}", "a".repeat(100));
        let length = |value| get().header("content-length", value);
        let asterisk = bare().uri("*").header("host", "h");
        let many = (0..11).fold(get(), |request, _| request.header("a", "b"));
        let two_hosts = get().header("host", "A.b:80").header("host", "A.b:80");
        for (bad, request) in [
            ("differ", get().header("host", "other")),
            ("more than one Host", two_hosts),
            ("neither", bare()),
            ("userinfo", http::Request::get("https://u@h/")),
            ("Host", bare().header("host", "a b")),
            ("CONNECT", http::Request::connect("h:1")),
            (":path", asterisk),
            ("Content-Length", length("1").header("content-length", "1")),
            ("Content-Length", length("+1")),
            ("target is longer", http::Request::get(long)),
            ("fields", many),
            ("larger than", get().header("a", "b".repeat(1024))),
            (":protocol", upgrade("h2c")),
            (":protocol", upgrade("a, b")),
            (":protocol", upgrade("")),
        ] {
            let error = request_2(request).unwrap_err().to_string();
            assert!(error.contains(bad), "{bad}: {error}");
        }
    }

    #[test]
    fn host_and_authority_may_differ_in_the_default_port() {
        for (uri, host, is_same) in [
            ("https://h/", "h:443", true),
            ("https://h:443/", "H", true),
            ("http://h/", "h:80", true),
            ("https://h/", "h:80", false),
            ("https://h/", "h:", false),
            ("https://h:8443/", "h", false),
            ("https://h:443/", "h:80", false),
        ] {
            let head = request_2(http::Request::get(uri).header("host", host));
            assert_eq!(head.is_ok(), is_same, "{uri} {host}");
            if let Ok(head) = head {
                let authority = uri.split('/').nth(2);
                assert_eq!(Some(head.authority.as_str()), authority);
            }
        }
    }

    #[test]
    fn http2_messages_with_padded_values_are_malformed() {
        let get = || http::Request::get("https://h/");
        for (name, request) in [
            ("leading space", get().header("x", " a")),
            ("trailing space", get().header("x", "a ")),
            ("trailing tab", get().header("x", "a\t")),
        ] {
            let error = request_2(request).unwrap_err();
            let is_malformed = matches!(error, InvalidHead::Malformed(_));
            assert!(is_malformed && !error.is_too_large(), "{name}: {error}");
        }
        assert!(request_2(get().header("x", "").header("y", "a b")).is_ok());
    }
}
