//! The backend that requests are forwarded to.

mod h1;
mod pool;

use std::fmt;
use std::net::IpAddr;

use http::Uri;
use http::uri::Scheme;

pub(crate) use h1::{Body, Connection, ResponseError};
pub(crate) use pool::Pool;

/// Where a backend listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Backend {
    /// Name or address literal, brackets included.
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// Text that is not a backend this agent can forward to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a backend: give http://HOST:PORT, without a path")]
pub(crate) struct InvalidBackend {
    found: String,
}

impl Backend {
    pub(crate) fn parse(text: &str) -> Result<Self, InvalidBackend> {
        let invalid = || InvalidBackend { found: text.to_owned() };
        let uri: Uri = text.parse().map_err(|_| invalid())?;
        if uri.scheme() != Some(&Scheme::HTTP) || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(invalid());
        }
        let authority = uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(invalid)?;
        Ok(Self { host: authority.host().to_owned(), port: authority.port_u16().unwrap_or(80) })
    }

    /// The address, where the host is one: nothing to resolve then.
    pub(crate) fn literal_address(&self) -> Option<IpAddr> {
        self.host.trim_matches(['[', ']']).parse().ok()
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_http_origins() {
        let backend = Backend::parse("http://localhost:8080/").unwrap();
        assert_eq!((backend.host.as_str(), backend.port), ("localhost", 8080));
        assert_eq!(Backend::parse("http://[::1]:1").unwrap().literal_address(), Some("::1".parse().unwrap()));
        assert_eq!(Backend::parse("http://h").unwrap().port, 80);
        for bad in ["", "localhost:80", "https://h", "http://h/path", "http://u@h", "http://h?q", "http://"] {
            assert!(Backend::parse(bad).is_err(), "{bad}");
        }
    }
}
