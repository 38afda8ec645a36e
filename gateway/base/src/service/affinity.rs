//! Affinity of a service with several agents: what makes requests of one session go to the same
//! agent.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::hmac;
use gw_shared::http::{fields, framing};
use http::header::{self, HeaderName};
use serde::{Deserialize, Serialize};

/// Longest name of a cookie or a field, in bytes.
const NAME_MAX: usize = 64;

/// What the requests of one session have in common.
///
/// As text: `none`, `cookie`, `cookie:NAME`, `header:NAME` or `client`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Affinity {
    /// Requests have no session.
    #[default]
    None,
    /// A cookie that the gateway sets.
    Cookie(CookieName),
    /// The value of a field that callers send.
    Header(Box<HeaderName>),
    /// The address of the client.
    Client,
}

/// Name of a cookie: a token (RFC 6265 §4.1.1) of at most 64 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CookieName(Box<str>);

/// Text that is not an [`Affinity`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidAffinity {
    /// The text has none of the known forms.
    #[error("must be \"none\", \"cookie\", \"cookie:NAME\", \"header:NAME\" or \"client\"")]
    Unknown,
    /// The name of the cookie is empty, longer than 64 bytes, or not a token (RFC 9110 §5.6.2).
    #[error(
        "the name of the cookie must have 1 to {NAME_MAX} characters of a-z, A-Z, 0-9 and \
         !#$%&'*+-.^_`|~"
    )]
    CookieName,
    /// The name of the field is empty, longer than 64 bytes, or not a token (RFC 9110 §5.6.2).
    #[error(
        "the name of the field must have 1 to {NAME_MAX} characters of a-z, A-Z, 0-9 and \
         !#$%&'*+-.^_`|~"
    )]
    HeaderName,
    /// The field does not reach the agent as the caller sent it: the gateway or another hop sets or
    /// removes it.
    #[error(
        "{0} does not reach the agent as the caller sent it; name a field that callers set for \
         each session and that is not Host, Via, a field of the connection, or one that the \
         gateway sets (X-Gw-*, X-Forwarded-*); \"client\" takes the address of the client"
    )]
    NotOfCaller(HeaderName),
    /// The field is `Cookie`, which carries all cookies of a caller.
    #[error(
        "one Cookie field carries all cookies of a caller and changes with each; \"cookie\" sets a \
         cookie of its own"
    )]
    CookieField,
}

impl Affinity {
    /// Returns whether requests of the service have no session.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    fn header(name: &str) -> Result<Self, InvalidAffinity> {
        let name = HeaderName::from_bytes(name.as_bytes())
            .ok()
            .filter(|name| name.as_str().len() <= NAME_MAX);
        let name = name.ok_or(InvalidAffinity::HeaderName)?;
        if name == header::COOKIE {
            return Err(InvalidAffinity::CookieField);
        }
        let is_of_hop =
            fields::is_own(&name) || fields::is_forwarding(&name) || framing::is_framing(&name);
        if is_of_hop || [header::HOST, header::TE, header::VIA].contains(&name) {
            return Err(InvalidAffinity::NotOfCaller(name));
        }
        Ok(Self::Header(Box::new(name)))
    }
}

impl CookieName {
    /// Name of the cookie unless a service has another one.
    const DEFAULT: &'static str = "gw_affinity";

    fn new(name: &str) -> Result<Self, InvalidAffinity> {
        let is_token =
            |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(is_token) {
            return Err(InvalidAffinity::CookieName);
        }
        Ok(Self(name.into()))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for CookieName {
    fn default() -> Self {
        Self(Self::DEFAULT.into())
    }
}

impl fmt::Display for Affinity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Cookie(name) if name.as_str() == CookieName::DEFAULT => f.write_str("cookie"),
            Self::Cookie(name) => write!(f, "cookie:{}", name.as_str()),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Client => f.write_str("client"),
        }
    }
}

impl FromStr for Affinity {
    type Err = InvalidAffinity;

    fn from_str(text: &str) -> Result<Self, InvalidAffinity> {
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            None if text == "cookie" => Ok(Self::Cookie(CookieName::default())),
            None if text == "client" => Ok(Self::Client),
            Some(("cookie", name)) => CookieName::new(name).map(Self::Cookie),
            Some(("header", name)) => Self::header(name),
            _ => Err(InvalidAffinity::Unknown),
        }
    }
}

impl TryFrom<String> for Affinity {
    type Error = InvalidAffinity;

    fn try_from(text: String) -> Result<Self, InvalidAffinity> {
        text.parse()
    }
}

impl From<Affinity> for String {
    fn from(affinity: Affinity) -> Self {
        affinity.to_string()
    }
}

/// Signs the cookies of all services. `Debug` does not print it; dropping it wipes it.
#[derive(Clone)]
pub struct AffinityKey(hmac::Key);

impl AffinityKey {
    /// Name of the key that it is derived as.
    pub const PURPOSE: &'static str = "gw affinity 1";

    /// Wraps a key of HMAC-SHA-256, derived as [`Self::PURPOSE`].
    pub fn new(key: hmac::Key) -> Self {
        Self(key)
    }

    /// Returns the key that signs and verifies cookies.
    pub fn hmac(&self) -> &hmac::Key {
        &self.0
    }
}

impl fmt::Debug for AffinityKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<String, InvalidAffinity> {
        text.parse::<Affinity>()
            .map(|affinity| affinity.to_string())
    }

    #[test]
    fn an_affinity_is_one_text() {
        for (text, canonical) in [
            ("none", "none"),
            ("cookie", "cookie"),
            ("cookie:gw_affinity", "cookie"),
            ("cookie:__Host-Session", "cookie:__Host-Session"),
            ("header:X-Session-Id", "header:x-session-id"),
            ("header:authorization", "header:authorization"),
            ("client", "client"),
        ] {
            assert_eq!(parsed(text).unwrap(), canonical);
            let json = serde_json::to_string(&text.parse::<Affinity>().unwrap()).unwrap();
            assert_eq!(json, format!("{canonical:?}"));
            assert_eq!(
                serde_json::from_str::<Affinity>(&json).unwrap().to_string(),
                canonical
            );
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "None",
            "cookies",
            "client:",
            "none:x",
            "header",
            " cookie",
            "session:x",
        ] {
            assert_eq!(parsed(text), Err(InvalidAffinity::Unknown), "{text:?}");
        }
        let long = "x".repeat(NAME_MAX + 1);
        for name in [
            "",
            "a b",
            "a=b",
            "a;b",
            "a,b",
            "\u{e9}",
            "a\"",
            long.as_str(),
        ] {
            assert_eq!(
                parsed(&format!("cookie:{name}")),
                Err(InvalidAffinity::CookieName),
                "{name:?}"
            );
            assert_eq!(
                parsed(&format!("header:{name}")),
                Err(InvalidAffinity::HeaderName),
                "{name:?}"
            );
        }
        assert!(
            parsed(&format!("cookie:{}", &long[1..])).is_ok()
                && parsed(&format!("header:{}", &long[1..])).is_ok()
        );
    }

    #[test]
    fn fields_that_do_not_reach_the_agent_as_sent_are_refused() {
        for name in [
            "Connection",
            "Content-Length",
            "Host",
            "Keep-Alive",
            "TE",
            "Transfer-Encoding",
            "Upgrade",
            "Via",
            "X-Forwarded-For",
            "X_Forwarded_Host",
            "X-Gw-Request-Id",
            "X-Gw-Service-Key",
        ] {
            let refused = parsed(&format!("header:{name}")).unwrap_err();
            assert!(matches!(refused, InvalidAffinity::NotOfCaller(_)), "{name}");
            assert!(
                refused.to_string().contains(&name.to_lowercase()),
                "{refused}"
            );
        }
        assert_eq!(parsed("header:Cookie"), Err(InvalidAffinity::CookieField));
    }
}
