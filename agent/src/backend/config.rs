//! Configuration of the backends of a service: addresses, protocols, TLS.

mod tls;

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use gw_shared::config::did_you_mean;
use http::Uri;
use http::uri::{Authority, PathAndQuery};
use rustls_pki_types::ServerName;

use self::tls::TlsSettings;
pub(super) use self::tls::{BackendTls, H2, HttpVersions};

/// The backends of a service. Any of them can serve any request.
#[derive(Debug, Clone)]
pub(crate) struct Backends {
    /// Never empty.
    pub(super) endpoints: Vec<BackendEndpoint>,
    pub(super) host: HostHeader,
    pub(super) connections: ConnectionSettings,
    /// `None` if the service has no setting of its own.
    pub(super) health_check: Option<HealthCheck>,
}

/// How the agent finds out by itself whether a backend works.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum HealthCheck {
    #[default]
    Off,
    /// It takes connections.
    Tcp,
    /// It answers GET of this path with a status below 400.
    Http(PathAndQuery),
}

impl HealthCheck {
    pub(crate) const FORMS: &str = "a path such as \"/healthz\", \"tcp\", or \"\" for none";

    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "" => Some(Self::Off),
            "tcp" => Some(Self::Tcp),
            // The URI of a request has no fragment (RFC 9110 §7.1).
            path if path.starts_with('/') && !path.contains('#') => {
                path.parse().ok().map(Self::Http)
            }
            _ => None,
        }
    }
}

impl fmt::Display for HealthCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("none"),
            Self::Tcp => f.write_str("a connection"),
            Self::Http(path) => write!(f, "GET {path}"),
        }
    }
}

/// Settings of the connections to a backend.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionSettings {
    /// Time limit of an attempt to connect.
    pub(super) timeout: Duration,
    /// Age after which a connection gets no further requests, varied by a tenth.
    pub(super) max_age: Duration,
}

impl Default for ConnectionSettings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            max_age: Duration::from_secs(5 * 60),
        }
    }
}

/// The `Host` or `:authority` that a backend receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostHeader {
    /// The caller's.
    Preserve,
    /// That of the backend's URL. Responses that name it get the caller's.
    Rewrite,
}

impl HostHeader {
    /// Parses the value of `key`.
    fn parse(key: &str, text: &str, mistakes: &mut Vec<String>) -> Self {
        match text {
            "preserve" => return Self::Preserve,
            "rewrite" => return Self::Rewrite,
            other => mistakes.push(format!(
                "{key}: {other:?} is neither \"preserve\" nor \"rewrite\""
            )),
        }
        Self::Preserve
    }
}

/// Address and protocol of a backend.
#[derive(Debug, Clone)]
pub(super) struct BackendEndpoint {
    pub(super) address: Address,
    pub(super) protocol: BackendProtocol,
    /// The authority for [`HostHeader::Rewrite`].
    pub(super) authority: Authority,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    /// Host name or address literal, with brackets.
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

#[derive(Debug, Clone)]
pub(super) enum BackendProtocol {
    Http1,
    /// Without TLS, with prior knowledge (RFC 9113 §3.3).
    Http2,
    /// The version that ALPN selects.
    Tls(BackendTls),
}

/// The settings of `backend` or one entry of `backends`, unchecked.
#[derive(Debug, Default)]
struct BackendTable {
    urls: Vec<String>,
    host: Option<String>,
    health_check: Option<String>,
    ca_file: Option<String>,
    server_name: Option<String>,
    client_certificate: Option<String>,
    client_key: Option<String>,
    http_version: Option<String>,
    connect_timeout: Option<Duration>,
    connection_max_age: Option<Duration>,
}

const KEYS: &str = "urls, host, health_check, connect_timeout_seconds, connection_max_age_seconds, \
                    http_version, ca_file, server_name, client_certificate, client_key";

impl Backends {
    /// Checks a list of URLs. Adds mistakes, prefixed with `key`, to `mistakes`.
    pub(crate) fn from_urls(
        key: &str,
        urls: &[String],
        mistakes: &mut Vec<String>,
    ) -> Option<Self> {
        let before = mistakes.len();
        Self::check(
            key,
            &BackendTable {
                urls: urls.to_vec(),
                ..BackendTable::default()
            },
            before,
            mistakes,
        )
    }

    /// Checks URLs of the command line, and the `Host` that their backends get.
    pub(crate) fn of_command_line(
        urls: &[String],
        host: Option<&str>,
        mistakes: &mut Vec<String>,
    ) -> Option<Self> {
        let before = mistakes.len();
        if let Some(text) = host {
            HostHeader::parse("--host-header (GW_HOST_HEADER)", text, mistakes);
        }
        let table = BackendTable {
            urls: urls.to_vec(),
            host: host.map(str::to_owned),
            ..BackendTable::default()
        };
        if mistakes.len() > before {
            return None;
        }
        Self::check("--backend (GW_BACKEND)", &table, before, mistakes)
    }

    /// Checks a value of the configuration file: a URL, a list of URLs, or a table with options.
    pub(crate) fn from_toml(
        key: &str,
        value: &toml::Value,
        mistakes: &mut Vec<String>,
    ) -> Option<Self> {
        let before = mistakes.len();
        let table = match value {
            toml::Value::Table(entries) => {
                let mut table = BackendTable::default();
                for (name, value) in entries {
                    let key = format!("{key}.{name}");
                    let field = match name.as_str() {
                        "urls" => {
                            table.urls = texts(&key, value, mistakes);
                            continue;
                        }
                        "connect_timeout_seconds" => {
                            table.connect_timeout = seconds(&key, value, 1..=300, mistakes);
                            continue;
                        }
                        "connection_max_age_seconds" => {
                            let range = 1..=24 * 60 * 60;
                            table.connection_max_age = seconds(&key, value, range, mistakes);
                            continue;
                        }
                        "host" => &mut table.host,
                        "health_check" => &mut table.health_check,
                        "http_version" => &mut table.http_version,
                        "ca_file" => &mut table.ca_file,
                        "server_name" => &mut table.server_name,
                        "client_certificate" => &mut table.client_certificate,
                        "client_key" => &mut table.client_key,
                        _ => {
                            let suggestion = did_you_mean(name, KEYS.split(", "));
                            mistakes.push(format!(
                                "{key}: no such key{suggestion}; the keys are {KEYS}"
                            ));
                            continue;
                        }
                    };
                    *field = text(&key, value, mistakes);
                }
                table
            }
            urls => BackendTable {
                urls: texts(key, urls, mistakes),
                ..BackendTable::default()
            },
        };
        Self::check(key, &table, before, mistakes)
    }

    /// `before` is the number of mistakes before those of this key.
    fn check(
        key: &str,
        table: &BackendTable,
        before: usize,
        mistakes: &mut Vec<String>,
    ) -> Option<Self> {
        if table.urls.is_empty() && mistakes.len() == before {
            mistakes.push(format!("{key}: no backend URL; {FORMS}"));
        }
        let host = table.host.as_deref().map_or(HostHeader::Preserve, |text| {
            HostHeader::parse(&format!("{key}.host"), text, mistakes)
        });
        let tls = TlsSettings::read(key, table, host, mistakes);
        let health_check = table.health_check.as_deref().and_then(|text| {
            let parsed = HealthCheck::parse(text);
            if parsed.is_none() {
                mistakes.push(format!(
                    "{key}.health_check: {text:?} is not {}",
                    HealthCheck::FORMS
                ));
            }
            parsed
        });
        let connections = ConnectionSettings::default();
        let connections = ConnectionSettings {
            timeout: table.connect_timeout.unwrap_or(connections.timeout),
            max_age: table.connection_max_age.unwrap_or(connections.max_age),
        };
        let mut endpoints = Vec::new();
        for url in &table.urls {
            match BackendEndpoint::parse(url, tls.as_ref()) {
                // The TLS settings are invalid and reported already.
                Ok(None) => {}
                Ok(Some(endpoint)) => endpoints.push(endpoint),
                Err(invalid) => mistakes.push(format!("{key}: {invalid}")),
            }
        }
        (mistakes.len() == before && !endpoints.is_empty()).then_some(Self {
            endpoints,
            host,
            connections,
            health_check,
        })
    }

    /// Sets the health check unless the service has a setting of its own.
    pub(crate) fn or_checked_by(mut self, default: &HealthCheck) -> Self {
        self.health_check.get_or_insert_with(|| default.clone());
        self
    }

    pub(crate) fn health_check(&self) -> Option<&HealthCheck> {
        self.health_check
            .as_ref()
            .filter(|check| **check != HealthCheck::Off)
    }
}

const FORMS: &str =
    "use http://HOST:PORT, https://HOST:PORT, h2c://HOST:PORT (without a path) or unix:/PATH";

fn text(key: &str, value: &toml::Value, mistakes: &mut Vec<String>) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        _ => {
            mistakes.push(format!("{key}: must be a string"));
            None
        }
    }
}

fn seconds(
    key: &str,
    value: &toml::Value,
    range: RangeInclusive<u64>,
    mistakes: &mut Vec<String>,
) -> Option<Duration> {
    let seconds = value.as_integer().and_then(|it| u64::try_from(it).ok());
    let seconds = seconds.filter(|seconds| range.contains(seconds));
    if seconds.is_none() {
        let (least, most) = range.into_inner();
        mistakes.push(format!(
            "{key}: {value} is not a whole number of seconds from {least} to {most}"
        ));
    }
    seconds.map(Duration::from_secs)
}

fn texts(key: &str, value: &toml::Value, mistakes: &mut Vec<String>) -> Vec<String> {
    match value {
        toml::Value::String(text) => vec![text.clone()],
        toml::Value::Array(list) => list
            .iter()
            .filter_map(|value| text(key, value, mistakes))
            .collect(),
        _ => {
            mistakes.push(format!(
                "{key}: must be a URL such as \"http://127.0.0.1:8080\", or a list of URLs"
            ));
            Vec::new()
        }
    }
}

/// A text that is not the URL of a backend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the URL of a backend; {FORMS}")]
struct InvalidUrl(String);

impl BackendEndpoint {
    /// Parses the URL of a backend. Returns `None` for an https URL if `tls` is `None`.
    fn parse(url: &str, tls: Option<&TlsSettings>) -> Result<Option<Self>, InvalidUrl> {
        let invalid = || InvalidUrl(url.to_owned());
        if let Some(path) = url.strip_prefix("unix:") {
            // The URL may have an empty authority.
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.starts_with('/') || rustix::net::SocketAddrUnix::new(path).is_err() {
                return Err(invalid());
            }
            let address = Address::Unix(path.into());
            let authority = Authority::from_static("localhost");
            return Ok(Some(Self {
                address,
                protocol: BackendProtocol::Http1,
                authority,
            }));
        }
        let uri: Uri = url.parse().map_err(|_| invalid())?;
        let authority = uri
            .authority()
            .filter(|authority| !authority.as_str().contains('@'))
            .ok_or_else(invalid)?;
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(invalid());
        }
        let host = authority.host();
        let (protocol, default_port) = match (uri.scheme_str(), tls) {
            (Some("http"), _) => (BackendProtocol::Http1, 80),
            (Some("h2c"), _) => (BackendProtocol::Http2, 80),
            (Some("https"), None) => return Ok(None),
            (Some("https"), Some(tls)) => {
                let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned());
                let name = name.map_err(|_| invalid())?;
                let tls = tls.backend(name).map_err(|_| invalid())?;
                (BackendProtocol::Tls(tls), 443)
            }
            _ => return Err(invalid()),
        };
        let port = match authority.port() {
            Some(port) => port.as_u16(),
            // `port()` is also `None` for a port that is not a number up to 65535.
            None if authority.as_str().len() == host.len() => default_port,
            None => return Err(invalid()),
        };
        if host.is_empty() {
            return Err(invalid());
        }
        let address = Address::Tcp {
            host: host.to_owned(),
            port,
        };
        Ok(Some(Self {
            address,
            protocol,
            authority: authority.clone(),
        }))
    }
}

impl fmt::Display for BackendEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.protocol {
            BackendProtocol::Http1 => "http",
            BackendProtocol::Http2 => "h2c",
            BackendProtocol::Tls(_) => "https",
        };
        match &self.address {
            Address::Tcp { host, port } => write!(f, "{scheme}://{host}:{port}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Lists the URLs.
impl fmt::Display for Backends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, endpoint) in self.endpoints.iter().enumerate() {
            write!(f, "{}{endpoint}", if at > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
