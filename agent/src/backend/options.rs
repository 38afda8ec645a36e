//! What is said about the backends of a service, checked: where they are, what they speak, how they are trusted.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use http::Uri;
use http::uri::Authority;
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};

/// ALPN protocols (RFC 7301).
pub(super) const H2: &[u8] = b"h2";
pub(super) const HTTP_1_1: &[u8] = b"http/1.1";

/// The backends of a service: all serve the same.
#[derive(Debug, Clone)]
pub(crate) struct Backends {
    /// Never empty.
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) host: Host,
}

/// What a backend is told as `Host` or `:authority`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Host {
    /// What the caller said.
    Preserve,
    /// What the backend's URL says.
    Rewrite,
}

/// Where a backend listens, and what it speaks there.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    pub(super) address: Address,
    pub(super) protocol: Protocol,
    /// What `Host` is where it is rewritten.
    pub(super) authority: Authority,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    /// Name or address literal, brackets included.
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

#[derive(Debug, Clone)]
pub(super) enum Protocol {
    Http1,
    /// Without TLS, known beforehand (RFC 9113 §3.3).
    Http2,
    /// What ALPN selects.
    Tls(Tls),
}

#[derive(Debug, Clone)]
pub(super) struct Tls {
    pub(super) server_name: ServerName<'static>,
    /// Offers HTTP/2 and HTTP/1.1.
    pub(super) any: Arc<ClientConfig>,
    /// Offers HTTP/1.1 alone.
    pub(super) http1: Arc<ClientConfig>,
}

/// What configuration may say about backends, as it is written there.
#[derive(Debug, Default)]
struct Table {
    urls: Vec<String>,
    host: Option<String>,
    ca_file: Option<String>,
    server_name: Option<String>,
    client_certificate: Option<String>,
    client_key: Option<String>,
}

const KEYS: &str = "urls, host, ca_file, server_name, client_certificate, client_key";

impl Backends {
    /// Of URLs alone. What is wrong with them goes to `mistakes`, with `key`.
    pub(crate) fn of_urls(key: &str, urls: &[String], mistakes: &mut Vec<String>) -> Option<Self> {
        let before = mistakes.len();
        Self::check(key, &Table { urls: urls.to_vec(), ..Table::default() }, before, mistakes)
    }

    /// Of what configuration says: a URL, a list of them, or a table with options.
    pub(crate) fn of_toml(key: &str, value: &toml::Value, mistakes: &mut Vec<String>) -> Option<Self> {
        let before = mistakes.len();
        let table = match value {
            toml::Value::Table(entries) => {
                let mut table = Table::default();
                for (name, value) in entries {
                    let key = format!("{key}.{name}");
                    let field = match name.as_str() {
                        "urls" => {
                            table.urls = texts(&key, value, mistakes);
                            continue;
                        }
                        "host" => &mut table.host,
                        "ca_file" => &mut table.ca_file,
                        "server_name" => &mut table.server_name,
                        "client_certificate" => &mut table.client_certificate,
                        "client_key" => &mut table.client_key,
                        _ => {
                            mistakes.push(format!("{key}: no such key; there are {KEYS}"));
                            continue;
                        }
                    };
                    *field = text(&key, value, mistakes);
                }
                table
            }
            urls => Table { urls: texts(key, urls, mistakes), ..Table::default() },
        };
        Self::check(key, &table, before, mistakes)
    }

    /// `before` is how many mistakes there were before those of this key.
    fn check(key: &str, table: &Table, before: usize, mistakes: &mut Vec<String>) -> Option<Self> {
        if table.urls.is_empty() && mistakes.len() == before {
            mistakes.push(format!("{key}: no URL of a backend; {FORMS}"));
        }
        let is_tls = table.urls.iter().any(|url| url.starts_with("https:"));
        let tls_options = [
            ("ca_file", &table.ca_file),
            ("server_name", &table.server_name),
            ("client_certificate", &table.client_certificate),
            ("client_key", &table.client_key),
        ];
        for (name, _) in tls_options.iter().filter(|(_, value)| value.is_some() && !is_tls) {
            mistakes.push(format!("{key}.{name}: is for backends at https://, and there is none"));
        }
        let configs = is_tls.then(|| client_configs(key, table, mistakes)).flatten();
        let server_name = table.server_name.as_deref().and_then(|name| {
            let parsed = ServerName::try_from(name.to_owned());
            parsed.map_err(|_| mistakes.push(format!("{key}.server_name: {name:?} is not a name of a host"))).ok()
        });
        let host = match table.host.as_deref() {
            None | Some("preserve") => Host::Preserve,
            Some("rewrite") => Host::Rewrite,
            Some(other) => {
                mistakes.push(format!("{key}.host: {other:?} is neither \"preserve\" nor \"rewrite\""));
                Host::Preserve
            }
        };
        let mut endpoints = Vec::new();
        for url in &table.urls {
            match Endpoint::parse(url, configs.as_ref(), server_name.as_ref()) {
                // Without its TLS, which is a mistake already.
                Ok(None) => {}
                Ok(Some(endpoint)) => endpoints.push(endpoint),
                Err(invalid) => mistakes.push(format!("{key}: {invalid}")),
            }
        }
        (mistakes.len() == before && !endpoints.is_empty()).then_some(Self { endpoints, host })
    }
}

const FORMS: &str = "give http://HOST:PORT, https://HOST:PORT, h2c://HOST:PORT (without a path) or unix:/PATH";

fn text(key: &str, value: &toml::Value, mistakes: &mut Vec<String>) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        _ => {
            mistakes.push(format!("{key}: must be a string"));
            None
        }
    }
}

fn texts(key: &str, value: &toml::Value, mistakes: &mut Vec<String>) -> Vec<String> {
    match value {
        toml::Value::String(text) => vec![text.clone()],
        toml::Value::Array(list) => list.iter().filter_map(|value| text(key, value, mistakes)).collect(),
        _ => {
            mistakes.push(format!("{key}: must be a URL, or a list of URLs"));
            Vec::new()
        }
    }
}

/// Text that is not a backend this agent can forward to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a backend: {FORMS}")]
struct InvalidUrl(String);

impl Endpoint {
    /// `None` for https without `configs`.
    fn parse(
        url: &str,
        configs: Option<&[Arc<ClientConfig>; 2]>,
        server_name: Option<&ServerName<'static>>,
    ) -> Result<Option<Self>, InvalidUrl> {
        let invalid = || InvalidUrl(url.to_owned());
        if let Some(path) = url.strip_prefix("unix:") {
            // An empty authority may be written.
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.starts_with('/') || rustix::net::SocketAddrUnix::new(path).is_err() {
                return Err(invalid());
            }
            let (address, authority) = (Address::Unix(path.into()), Authority::from_static("localhost"));
            return Ok(Some(Self { address, protocol: Protocol::Http1, authority }));
        }
        let uri: Uri = url.parse().map_err(|_| invalid())?;
        let authority = uri.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(invalid)?;
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(invalid());
        }
        let host = authority.host();
        let (protocol, default_port) = match (uri.scheme_str(), configs) {
            (Some("http"), _) => (Protocol::Http1, 80),
            (Some("h2c"), _) => (Protocol::Http2, 80),
            (Some("https"), None) => return Ok(None),
            (Some("https"), Some([any, http1])) => {
                let own_name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned());
                let server_name = server_name.cloned().map_or(own_name, Ok).map_err(|_| invalid())?;
                (Protocol::Tls(Tls { server_name, any: Arc::clone(any), http1: Arc::clone(http1) }), 443)
            }
            _ => return Err(invalid()),
        };
        let port = match authority.port() {
            Some(port) => port.as_u16(),
            // A port that is not a number up to 65535 is none too.
            None if authority.as_str().len() == host.len() => default_port,
            None => return Err(invalid()),
        };
        if host.is_empty() {
            return Err(invalid());
        }
        let address = Address::Tcp { host: host.to_owned(), port };
        Ok(Some(Self { address, protocol, authority: authority.clone() }))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.protocol {
            Protocol::Http1 => "http",
            Protocol::Http2 => "h2c",
            Protocol::Tls(_) => "https",
        };
        match &self.address {
            Address::Tcp { host, port } => write!(f, "{scheme}://{host}:{port}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The configuration that offers every protocol and the one that offers HTTP/1.1 alone.
fn client_configs(key: &str, table: &Table, mistakes: &mut Vec<String>) -> Option<[Arc<ClientConfig>; 2]> {
    let roots = match &table.ca_file {
        Some(file) => authorities(file).map(Arc::new).map_err(|error| mistakes.push(format!("{key}.ca_file: {error}"))),
        None => Ok(system_roots()),
    };
    let identity = identity(key, table).map_err(|errors| mistakes.extend(errors));
    let (roots, identity) = (roots.ok()?, identity.ok()?);
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map(|builder| builder.with_root_certificates(roots));
    let config = builder.and_then(|builder| match identity {
        Some((chain, private_key)) => builder.with_client_auth_cert(chain, private_key),
        None => Ok(builder.with_no_client_auth()),
    });
    let mut any = config.map_err(|error| mistakes.push(format!("{key}.client_certificate: {error}"))).ok()?;
    let mut http1 = any.clone();
    any.alpn_protocols = vec![H2.to_vec(), HTTP_1_1.to_vec()];
    http1.alpn_protocols = vec![HTTP_1_1.to_vec()];
    Some([any, http1].map(Arc::new))
}

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// What the agent shows to backends that ask for a certificate; `None` if nothing is said of it.
fn identity(key: &str, table: &Table) -> Result<Option<Identity>, Vec<String>> {
    let (chain, private_key) = match (&table.client_certificate, &table.client_key) {
        (None, None) => return Ok(None),
        (Some(chain), Some(private_key)) => (chain, private_key),
        (Some(_), None) => return Err(vec![format!("{key}.client_key: missing; client_certificate needs it")]),
        (None, Some(_)) => return Err(vec![format!("{key}.client_certificate: missing; client_key needs it")]),
    };
    let chain = certificates(chain).map_err(|error| format!("{key}.client_certificate: {error}"));
    let unread = |error| format!("{key}.client_key: {private_key}: {error}");
    match (chain, PrivateKeyDer::from_pem_file(private_key).map_err(unread)) {
        (Ok(chain), Ok(private_key)) => Ok(Some((chain, private_key))),
        (chain, private_key) => Err(chain.err().into_iter().chain(private_key.err()).collect()),
    }
}

/// Read once, when they are first wanted: configuration is checked before the reactor starts.
fn system_roots() -> Arc<RootCertStore> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let read = || {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Arc::new(roots)
    };
    Arc::clone(ROOTS.get_or_init(read))
}

fn authorities(file: &str) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(|error| format!("{file}: {error}"))?;
    }
    Ok(roots)
}

fn certificates(file: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = fs::read(Path::new(file)).map_err(|error| format!("{file}: {error}"))?;
    match CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>() {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(format!("{file}: no certificate in it; PEM is wanted")),
        Err(error) => Err(format!("{file}: {error}")),
    }
}

/// As they would be written.
impl fmt::Display for Backends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, endpoint) in self.endpoints.iter().enumerate() {
            write!(f, "{}{endpoint}", if at > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(toml: &str) -> Result<Backends, Vec<String>> {
        let value: toml::Table = toml.parse().unwrap();
        let mut mistakes = Vec::new();
        let backends = Backends::of_toml("b", &value["b"], &mut mistakes);
        backends.filter(|_| mistakes.is_empty()).ok_or(mistakes)
    }

    #[test]
    fn a_url_a_list_and_a_table() {
        for (toml, written) in [
            ("b = 'http://localhost:8080/'", "http://localhost:8080"),
            ("b = ['http://[::1]', 'unix:/run/b.sock']", "http://[::1]:80, unix:/run/b.sock"),
            ("b = { urls = ['https://h', 'h2c://h:1'], host = 'rewrite' }", "https://h:443, h2c://h:1"),
            ("b = { urls = 'unix:///run/b' }", "unix:/run/b"),
        ] {
            assert_eq!(checked(toml).unwrap().to_string(), written);
        }
        let rewriting = checked("b = { urls = ['http://h:8'], host = 'rewrite' }").unwrap();
        assert_eq!((rewriting.host, rewriting.endpoints[0].authority.as_str()), (Host::Rewrite, "h:8"));
    }

    #[test]
    fn what_is_not_an_origin_is_refused() {
        for bad in [
            "",
            "localhost:80",
            "ftp://h",
            "http://h/path",
            "http://u@h",
            "http://h?q",
            "http://",
            "http://h:99999",
            "http://h:",
            "unix:relative",
            "unix:",
            "https://a b",
        ] {
            let mistakes = checked(&format!("b = '{bad}'")).unwrap_err();
            assert!(mistakes.len() == 1 && mistakes[0].starts_with("b: "), "{bad}: {mistakes:?}");
        }
        let long = format!("b = 'unix:/{}'", "a".repeat(200));
        assert!(checked(&long).is_err());
    }

    #[test]
    fn every_mistake_is_reported_with_its_key() {
        let mistakes = checked(
            "b = { urls = ['https://h', 'gopher://h', 7], host = 'keep', ca_file = '/none.pem', server_name = 'a b',\n\
             client_key = '/none.key', colour = 'red' }",
        )
        .unwrap_err();
        for key in
            ["b: ", "b.urls: ", "b.host: ", "b.ca_file: ", "b.server_name: ", "b.client_certificate: ", "b.colour: "]
        {
            assert!(mistakes.iter().any(|mistake| mistake.starts_with(key)), "{key}: {mistakes:?}");
        }
        assert_eq!(mistakes.len(), 7, "{mistakes:?}");
        let unused = checked("b = { urls = 'http://h', ca_file = '/none.pem' }").unwrap_err();
        assert_eq!((unused.len(), unused[0].contains("https://")), (1, true));
        for empty in ["b = []", "b = {}", "b = { urls = [] }", "b = 5"] {
            assert_eq!(checked(empty).unwrap_err().len(), 1, "{empty}");
        }
    }
}
