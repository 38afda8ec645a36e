//! Readable parts of an invalid request head, for logs. They are neither trusted nor relayed.

use std::fmt::Write;

use http::Method;
use http::header::HeaderValue;
use http::request::Parts;
use http::uri::{Authority, PathAndQuery};

use super::fields::X_FORWARDED_FOR;
use super::head;
use super::version::HttpVersion;
use crate::http::Fields;

/// Longest kept target, in received bytes.
const TARGET_MAX: usize = 8 * 1024;

/// Parts of an invalid request head that could be read.
#[derive(Debug)]
pub struct InvalidHeadParts {
    pub version: HttpVersion,
    pub method: Option<Method>,
    /// Target as received; bytes other than visible ASCII are percent-encoded.
    pub target: Box<str>,
    /// Host and optional port, if the head has exactly one.
    pub authority: Option<Authority>,
    /// Fields; in HTTP/1 only `X-Forwarded-For`.
    pub headers: Fields,
}

impl InvalidHeadParts {
    /// Reads the complete lines of `received`.
    pub fn of_http1(received: &[u8]) -> Self {
        let mut lines = received.split_inclusive(|byte| *byte == b'\n');
        let mut words = lines
            .next()
            .unwrap_or_default()
            .trim_ascii_end()
            .splitn(3, |byte| *byte == b' ');
        let method = words
            .next()
            .and_then(|method| Method::from_bytes(method).ok());
        let target = words.next().unwrap_or_default();
        let version = if words.next() == Some(b"HTTP/1.0") {
            HttpVersion::Http10
        } else {
            HttpVersion::Http11
        };
        let mut hosts = HostValue::default();
        let mut headers = Fields::new();
        for line in lines.filter_map(|line| line.strip_suffix(b"\n")) {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            let Some(colon) = memchr::memchr(b':', line) else {
                break;
            };
            let name = &line[..colon];
            let value = line[colon + 1..].trim_ascii();
            if name.eq_ignore_ascii_case(b"host") {
                hosts.add(value);
            } else if name.eq_ignore_ascii_case(X_FORWARDED_FOR.as_str().as_bytes())
                && let Ok(value) = HeaderValue::from_bytes(value)
            {
                headers.append(X_FORWARDED_FOR, value);
            }
        }
        let authority = authority_of_target(target).or(hosts.only);
        Self {
            version,
            method,
            target: visible(target),
            authority,
            headers,
        }
    }

    /// Reads a head that the h2 crate accepted.
    pub fn of_http2(parts: Parts) -> Self {
        let target = parts.uri.path_and_query().map_or("", PathAndQuery::as_str);
        let headers = Fields::from(parts.headers);
        Self {
            version: HttpVersion::Http2,
            target: visible(target.as_bytes()),
            authority: head::authority_of_http2(&parts.uri, &headers).ok(),
            method: Some(parts.method),
            headers,
        }
    }
}

/// Value of `Host`; none if there are several different ones.
#[derive(Default)]
struct HostValue {
    only: Option<Authority>,
    contradict: bool,
}

impl HostValue {
    fn add(&mut self, value: &[u8]) {
        let host = authority(value);
        self.contradict |= host.is_none()
            || self
                .only
                .as_ref()
                .is_some_and(|only| Some(only) != host.as_ref());
        self.only = host.filter(|_| !self.contradict);
    }
}

/// Authority of an absolute-form target, which overrides `Host` (RFC 9112 §3.2.2).
fn authority_of_target(target: &[u8]) -> Option<Authority> {
    let after_scheme = &target[memchr::memmem::find(target, b"://")? + 3..];
    let scheme_is_first = !target.starts_with(b"/");
    let end = after_scheme
        .iter()
        .position(|byte| matches!(byte, b'/' | b'?'))
        .unwrap_or(after_scheme.len());
    authority(&after_scheme[..end]).filter(|_| scheme_is_first)
}

fn authority(text: &[u8]) -> Option<Authority> {
    Authority::try_from(text)
        .ok()
        .filter(|authority| !authority.as_str().contains('@'))
}

fn visible(target: &[u8]) -> Box<str> {
    let target = &target[..target.len().min(TARGET_MAX)];
    let mut text = String::with_capacity(target.len());
    for byte in target {
        if byte.is_ascii_graphic() {
            text.push(char::from(*byte));
        } else {
            // Writing to a String does not fail.
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(head: &str) -> InvalidHeadParts {
        InvalidHeadParts::of_http1(head.as_bytes())
    }

    fn host(head: &str) -> Option<String> {
        read(head).authority.map(|authority| authority.to_string())
    }

    #[test]
    fn complete_lines_are_read() {
        let head = read(
            "PUT /a?b=\u{e4}\"# HTTP/1.0\r\nhOST:  a--b.eu1.example.com:443 \r\nX: \0\r\n\
             X-Forwarded-For: 192.0.2.1\r\nCut: o",
        );
        assert_eq!(head.method, Some(Method::PUT));
        assert_eq!(head.version, HttpVersion::Http10);
        assert_eq!(&*head.target, "/a?b=%C3%A4\"#");
        assert_eq!(head.authority.unwrap(), "a--b.eu1.example.com:443");
        assert_eq!(head.headers[X_FORWARDED_FOR], "192.0.2.1");
        let lines = read("GET / HTTP/1.1\nHost: a.example\n\n");
        assert_eq!(lines.authority.unwrap(), "a.example");
        assert_eq!(lines.version, HttpVersion::Http11);
        let long = read(&format!("GET /{}", "a".repeat(10_000)));
        assert_eq!(long.target.len(), TARGET_MAX);
    }

    #[test]
    fn nonsense_has_no_method_and_no_host() {
        for (head, target) in [("\x16\x03\x01 nonsense\r\n\r\n", "nonsense"), ("", "")] {
            let parts = read(head);
            assert_eq!((parts.method, parts.authority), (None, None));
            assert_eq!(&*parts.target, target);
        }
    }

    #[test]
    fn a_host_counts_if_it_is_complete_and_the_only_one() {
        let line = "GET / HTTP/1.1\r\n";
        let twice = host(&format!("{line}Host: a.b\r\nHost: a.b\r\n\r\n"));
        assert_eq!(twice.as_deref(), Some("a.b"));
        for fields in [
            "Host: a.b\r\nHost: c.d\r\n\r\n",
            "Host: a.b\r\nHost: c.d\r\nHost: a.b\r\n\r\n",
            "Host: a.b\r\nHost: \u{1}\r\n\r\n",
            "Host: user@a.b\r\n\r\n",
            "Host: a.b",
            "Host : a.b\r\n\r\n",
            "\r\nHost: a.b\r\n",
            "\r\n",
        ] {
            assert_eq!(host(&format!("{line}{fields}")), None, "{fields:?}");
        }
        for (target, expected) in [("https://c.d:1/x?y", "c.d:1"), ("/x?u=https://c.d/", "a.b")] {
            let found = host(&format!("GET {target} HTTP/1.1\r\nHost: a.b\r\n\r\n"));
            assert_eq!(found.as_deref(), Some(expected));
        }
    }
}
