//! The host that a backend gets in place of the caller's, in the fields of its responses.

use bytes::Bytes;
use gw_shared::http::Fields;
use http::HeaderName;
use http::header::{CONTENT_LOCATION, HeaderValue, LOCATION, REFRESH, SET_COOKIE};
use http::uri::Authority;

/// The authority that a backend gets, and that of the caller.
pub(super) struct HostMapping<'a> {
    pub(super) sent: &'a Authority,
    /// Port that the scheme of the backend's URL has by default, behind a colon.
    pub(super) default_port: &'static str,
    pub(super) of_caller: &'a Authority,
}

impl HostMapping<'_> {
    /// Maps URLs of the backend in `Location`, `Content-Location` and `Refresh` to those of the
    /// caller, and removes `Domain` of cookies for the backend's host. Relative and foreign URLs
    /// stay as they are.
    pub(super) fn map_back(&self, headers: Fields) -> Fields {
        let map = |(name, value)| {
            let mapped = self.mapped(&name, &value);
            (name, mapped.unwrap_or(value))
        };
        headers.into_iter().map(map).collect()
    }

    /// The value of a field that names the backend's host; `None` for any other.
    fn mapped(&self, name: &HeaderName, value: &HeaderValue) -> Option<HeaderValue> {
        let text = || std::str::from_utf8(value.as_bytes()).ok();
        let mapped = if [LOCATION, CONTENT_LOCATION].contains(name) {
            self.url(text()?)?
        } else if *name == REFRESH {
            self.refresh(text()?)?
        } else if *name == SET_COOKIE {
            self.cookie(text()?)?
        } else {
            return None;
        };
        HeaderValue::from_maybe_shared(Bytes::from(mapped)).ok()
    }

    /// A URL of the backend, as one of the caller.
    fn url(&self, url: &str) -> Option<String> {
        let schemes = [
            ("http:", ":80"),
            ("https:", ":443"),
            ("", self.default_port),
        ];
        let (behind, default_port) = schemes.iter().find_map(|(scheme, port)| {
            let (start, behind) = url.split_at_checked(scheme.len())?;
            let behind = behind.strip_prefix("//")?;
            start.eq_ignore_ascii_case(scheme).then_some((behind, port))
        })?;
        let end = behind.find(['/', '?', '#', '"', '\'']);
        let (authority, rest) = behind.split_at(end.unwrap_or(behind.len()));
        let sent = self.sent.as_str();
        let is_sent = authority.eq_ignore_ascii_case(sent)
            || without(authority, default_port)
                .eq_ignore_ascii_case(without(sent, self.default_port));
        is_sent.then(|| format!("https://{}{rest}", self.of_caller))
    }

    /// `SECONDS; url=URL`, as browsers read it: with any of `;` and `,`, with or without `url=` and
    /// quotes.
    fn refresh(&self, value: &str) -> Option<String> {
        let behind = value[value.find([';', ','])? + 1..].trim_start();
        let named = behind.split_at_checked(3).and_then(|(name, behind)| {
            let behind = behind.trim_start().strip_prefix('=')?;
            name.eq_ignore_ascii_case("url").then_some(behind)
        });
        let url = named.unwrap_or(behind).trim_start();
        let url = url.strip_prefix(['"', '\'']).unwrap_or(url);
        let before = &value[..value.len() - url.len()];
        Some(format!("{before}{}", self.url(url)?))
    }

    fn cookie(&self, cookie: &str) -> Option<String> {
        let is_of_backend = |attribute: &str| {
            let Some((name, value)) = attribute.split_once('=') else {
                return false;
            };
            // A leading dot has no meaning (RFC 6265 §5.2.3).
            let value = value.trim();
            let domain = value.strip_prefix('.').unwrap_or(value);
            name.trim().eq_ignore_ascii_case("domain")
                && domain.eq_ignore_ascii_case(self.sent.host())
        };
        let mut parts: Vec<&str> = cookie.split(';').collect();
        let before = parts.len();
        let mut is_name = true;
        // The first part is the cookie itself.
        parts.retain(|part| std::mem::take(&mut is_name) || !is_of_backend(part));
        (parts.len() < before).then(|| parts.join(";"))
    }
}

fn without<'a>(authority: &'a str, port: &str) -> &'a str {
    authority.strip_suffix(port).unwrap_or(authority)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(sent: &'static str, name: &'static str, value: &'static str) -> String {
        let mapping = HostMapping {
            sent: &Authority::from_static(sent),
            default_port: ":80",
            of_caller: &Authority::from_static("acme--app.eu1.example.com:8443"),
        };
        let value = HeaderValue::from_static(value);
        let fields = [(HeaderName::from_static(name), value)];
        let mapped = mapping.map_back(fields.into_iter().collect());
        mapped[name].to_str().unwrap().to_owned()
    }

    #[test]
    fn urls_of_the_backend_become_those_of_the_caller() {
        for name in ["location", "content-location"] {
            for (sent, url, rest) in [
                ("localhost:5173", "http://localhost:5173/a?b#c", "/a?b#c"),
                ("localhost:5173", "HTTPS://LocalHost:5173", ""),
                ("localhost:5173", "//localhost:5173/a", "/a"),
                ("app.internal", "http://app.internal?b", "?b"),
                ("app.internal", "http://app.internal:80/a", "/a"),
                ("app.internal", "https://app.internal:443/a", "/a"),
                ("app.internal", "//app.internal:80/a", "/a"),
                ("app.internal:80", "http://app.internal/a", "/a"),
                ("app.internal:80", "https://app.internal/a", "/a"),
                ("[::1]:3000", "http://[::1]:3000/a", "/a"),
            ] {
                let expected = format!("https://acme--app.eu1.example.com:8443{rest}");
                assert_eq!(map(sent, name, url), expected, "{url}");
            }
        }
    }

    #[test]
    fn relative_and_foreign_urls_stay_as_they_are() {
        for url in [
            "/a",
            "a",
            "?b",
            "",
            "http:/localhost:5173/a",
            "http://localhost/a",
            "http://localhost:5174/a",
            "http://localhost:5173.example.com/a",
            "http://user@localhost:5173/a",
            "http://example.com/?http://localhost:5173/",
            "ftp://localhost:5173/a",
            "https://localhost:443/a",
            "//example.com/a",
        ] {
            assert_eq!(map("localhost:5173", "location", url), url);
        }
        let other = "http://localhost:5173/";
        assert_eq!(map("localhost:5173", "link", other), other);
    }

    #[test]
    fn refresh_is_read_as_browsers_do() {
        // `@` stands for the origin of the caller.
        for (value, expected) in [
            ("5; url=http://h/a", "5; url=@/a"),
            ("0;URL = \"http://h\"", "0;URL = \"@\""),
            ("0, 'http://h/a'", "0, '@/a'"),
            ("0;http://h:80/", "0;@/"),
            ("5", "5"),
            ("5;", "5;"),
            ("5; url=/a", "5; url=/a"),
            ("5; url=http://other/a", "5; url=http://other/a"),
        ] {
            let expected = expected.replace('@', "https://acme--app.eu1.example.com:8443");
            assert_eq!(map("h", "refresh", value), expected);
        }
    }

    #[test]
    fn cookies_lose_the_domain_of_the_backend_only() {
        for (value, expected) in [
            ("a=b; Domain=app.internal; Path=/", "a=b; Path=/"),
            ("a=b;domain=.APP.internal", "a=b"),
            ("a=b; Domain=internal", "a=b; Domain=internal"),
            (
                "a=b; Domain=example.com; Secure",
                "a=b; Domain=example.com; Secure",
            ),
            ("domain=app.internal; Path=/", "domain=app.internal; Path=/"),
            ("a=b; Domain", "a=b; Domain"),
        ] {
            assert_eq!(map("app.internal:8080", "set-cookie", value), expected);
        }
    }
}
