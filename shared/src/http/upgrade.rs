//! Protocols that a connection or stream can switch to (RFC 9110 §7.8, RFC 8441 §4).

use http::header::HeaderValue;

/// Most bytes of content of a request to switch protocols (RFC 9110 §7.8). `Upgrade` of one with
/// more is ignored.
pub const UPGRADE_CONTENT_MAX: u64 = 64 * 1024;

/// Name of a protocol other than HTTP and TLS, with an optional version after a slash.
///
/// Another form of HTTP would carry requests that the gateway does not see, and TLS would hide
/// them. Each hop parses its own input: the gateway `Upgrade` and `:protocol` of clients and the
/// agent's response, the agent `:protocol` of the tunnel.
#[derive(Debug, Clone)]
pub struct UpgradeProtocol(HeaderValue);

impl UpgradeProtocol {
    /// Parses the value of `Upgrade` or `:protocol`; `None` for a list, for any form of HTTP or
    /// TLS, and for an invalid name.
    pub fn parse(value: &HeaderValue) -> Option<Self> {
        is_acceptable(value.as_bytes()).then(|| Self(value.clone()))
    }

    /// As [`Self::parse`], for text.
    pub fn parse_str(text: &str) -> Option<Self> {
        if is_acceptable(text.as_bytes()) {
            HeaderValue::from_str(text).ok().map(Self)
        } else {
            None
        }
    }

    /// Makes a protocol of a constant.
    ///
    /// # Panics
    ///
    /// Panics if [`parse_str`](Self::parse_str) would return `None`.
    pub const fn from_static(text: &'static str) -> Self {
        assert!(
            is_acceptable(text.as_bytes()),
            "not a protocol to switch to"
        );
        Self(HeaderValue::from_static(text))
    }

    pub fn as_str(&self) -> &str {
        // A token is ASCII.
        self.0.to_str().unwrap_or_default()
    }

    /// The value of an `Upgrade` field.
    pub fn as_value(&self) -> &HeaderValue {
        &self.0
    }

    pub fn is_websocket(&self) -> bool {
        self.is(b"websocket")
    }

    /// Whether `value` names the same protocol, regardless of case.
    pub fn is(&self, value: &[u8]) -> bool {
        self.0.as_bytes().eq_ignore_ascii_case(value)
    }
}

impl PartialEq for UpgradeProtocol {
    /// Protocol names are compared regardless of case (RFC 9110 §7.8).
    fn eq(&self, other: &Self) -> bool {
        self.is(other.0.as_bytes())
    }
}

impl Eq for UpgradeProtocol {}

/// Whether `text` is `protocol-name [ "/" protocol-version ]`, both tokens, and not HTTP or TLS.
const fn is_acceptable(text: &[u8]) -> bool {
    let mut slash = None;
    let mut at = 0;
    while at < text.len() {
        if text[at] == b'/' && slash.is_none() {
            slash = Some(at);
        } else if !is_token_byte(text[at]) {
            return false;
        }
        at += 1;
    }
    let is_whole = match slash {
        Some(slash) => slash > 0 && slash + 1 < text.len(),
        None => !text.is_empty(),
    };
    is_whole && !is_http_or_tls(text)
}

/// Whether `text` begins like a form of HTTP or TLS: `HTTP/2.0`, `http2`, `h2`, `h2c`, drafts such
/// as `h2c-14` and `h3-29`, `tls`, `ssl`.
const fn is_http_or_tls(text: &[u8]) -> bool {
    let is_numbered =
        text.len() >= 2 && text[0].eq_ignore_ascii_case(&b'h') && text[1].is_ascii_digit();
    is_numbered
        || starts_with(text, b"http")
        || starts_with(text, b"tls")
        || starts_with(text, b"ssl")
}

const fn starts_with(text: &[u8], beginning: &[u8]) -> bool {
    text.len() >= beginning.len()
        && text
            .split_at(beginning.len())
            .0
            .eq_ignore_ascii_case(beginning)
}

/// Whether `byte` is a `tchar` (RFC 9110 §5.6.2).
pub(super) const fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_protocol_other_than_http_is_accepted() {
        for text in [
            "websocket",
            "WebSocket",
            "SPDY/3.1",
            "connect-udp",
            "gw-tunnel",
            "x",
            "hh2",
            "websocket/13",
            "h",
        ] {
            let protocol = UpgradeProtocol::parse_str(text).unwrap();
            assert_eq!(protocol.as_str(), text);
            assert_eq!(protocol.as_value(), text);
            assert_eq!(UpgradeProtocol::parse(protocol.as_value()), Some(protocol));
        }
    }

    #[test]
    fn protocols_are_compared_without_case() {
        let [lower, upper, other] = ["a/1", "A/1", "a/2"].map(UpgradeProtocol::from_static);
        assert_eq!(lower, upper);
        assert_ne!(lower, other);
        assert!(UpgradeProtocol::from_static("WebSocket").is_websocket());
    }

    #[test]
    fn http_tls_lists_and_invalid_names_are_refused() {
        for text in [
            "",
            "/",
            "/1",
            "a/",
            "a/1/2",
            "a b",
            " a",
            "a ",
            "a,b",
            "websocket, h2c",
            "a;q=1",
            "\"a\"",
            "ü",
            "a\0",
            "a\r\n",
            "h2",
            "H2",
            "h2c",
            "H2C",
            "h2c/1",
            "h2-16",
            "h2c-14",
            "h3",
            "h3-29",
            "h1",
            "http",
            "HTTP",
            "http/1.1",
            "HTTP/2.0",
            "HTTP/3",
            "HTTP2",
            "https",
            "tls",
            "TLS/1.0",
            "TLS/1.3",
            "ssl",
            "SSL/3",
        ] {
            assert_eq!(UpgradeProtocol::parse_str(text), None, "{text:?}");
            if let Ok(value) = HeaderValue::from_bytes(text.as_bytes()) {
                assert_eq!(UpgradeProtocol::parse(&value), None, "{text:?}");
            }
        }
    }
}
