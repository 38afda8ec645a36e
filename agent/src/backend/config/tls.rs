//! TLS to backends.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use gw_shared::net::tls::{TlsFailure, Trusted, pem};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;

use super::{BackendTable, HostHeader};
use crate::tls::{self, ClientAuth};

/// ALPN protocols (RFC 7301).
pub(in crate::backend) const H2: &[u8] = b"h2";
pub(in crate::backend) const HTTP_1_1: &[u8] = b"http/1.1";

#[derive(Debug, Clone)]
pub(in crate::backend) struct BackendTls {
    /// The configured name, or the host of the URL.
    pub(in crate::backend) server_name: ServerName<'static>,
    /// The backend gets the host of each request as the server name.
    pub(in crate::backend) sends_host: bool,
    pub(in crate::backend) versions: HttpVersions,
    /// Offers the versions.
    pub(in crate::backend) any: Arc<ClientConfig>,
    /// Offers HTTP/1.1 only, if it is among the versions.
    pub(in crate::backend) http1: Arc<ClientConfig>,
}

/// The HTTP versions that are offered to a backend by ALPN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::backend) enum HttpVersions {
    Any,
    Http1,
    Http2,
}

impl HttpVersions {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::Any),
            "1.1" => Some(Self::Http1),
            "2" => Some(Self::Http2),
            _ => None,
        }
    }

    fn alpn(self) -> &'static [&'static [u8]] {
        match self {
            Self::Any => &[H2, HTTP_1_1],
            Self::Http1 => &[HTTP_1_1],
            Self::Http2 => &[H2],
        }
    }
}

/// The settings of TLS for the backends of one table.
pub(super) struct TlsSettings {
    trusted: Arc<Trusted>,
    auth: Option<ClientAuth>,
    versions: HttpVersions,
    server_name: Option<ServerName<'static>>,
    host: HostHeader,
}

impl TlsSettings {
    /// Builds the TLS settings of the backend whose URL has `host`.
    pub(super) fn backend(&self, host: ServerName<'static>) -> Result<BackendTls, rustls::Error> {
        let sends_host = self.host == HostHeader::Preserve && self.server_name.is_none();
        let or_names = sends_host.then(|| host.clone()).into_iter().collect();
        let any = tls::client_config(
            rustls::DEFAULT_VERSIONS,
            Arc::clone(&self.trusted),
            or_names,
            self.auth.as_ref().map(ClientAuth::copy),
            self.versions.alpn(),
        )?;
        let mut http1 = any.clone();
        if self.versions == HttpVersions::Any {
            http1.alpn_protocols = vec![HTTP_1_1.to_vec()];
        }
        Ok(BackendTls {
            server_name: self.server_name.clone().unwrap_or(host),
            sends_host,
            versions: self.versions,
            any: Arc::new(any),
            http1: Arc::new(http1),
        })
    }

    /// Reads the settings of a table. Returns `None` if it has no https:// backend, or if they are
    /// wrong.
    pub(super) fn read(
        key: &str,
        table: &BackendTable,
        host: HostHeader,
        mistakes: &mut Vec<String>,
    ) -> Option<Self> {
        let is_tls = table.urls.iter().any(|url| url.starts_with("https:"));
        let options = [
            ("http_version", &table.http_version),
            ("ca_file", &table.ca_file),
            ("server_name", &table.server_name),
            ("client_certificate", &table.client_certificate),
            ("client_key", &table.client_key),
        ];
        let set = options.iter().filter(|(_, value)| value.is_some());
        for (name, _) in set.filter(|_| !is_tls) {
            mistakes.push(format!(
                "{key}.{name}: applies to https:// backends only, and there is none"
            ));
        }
        let versions = table.http_version.as_deref();
        let versions = versions.map_or(HttpVersions::Any, |text| {
            HttpVersions::parse(text).unwrap_or_else(|| {
                mistakes.push(format!(
                    "{key}.http_version: {text:?} is neither \"auto\" nor \"1.1\" nor \"2\""
                ));
                HttpVersions::Any
            })
        });
        let server_name = table.server_name.as_deref().and_then(|name| {
            let parsed = ServerName::try_from(name.to_owned());
            let invalid =
                |_| mistakes.push(format!("{key}.server_name: {name:?} is not a host name"));
            parsed.map_err(invalid).ok()
        });
        if !is_tls {
            return None;
        }
        let trusted = match &table.ca_file {
            Some(file) => Trusted::read(Path::new(file))
                .map(Arc::new)
                .map_err(|error| mistakes.push(format!("{key}.ca_file: {file}: {error}"))),
            None => Ok(system_roots()),
        };
        let auth = client_auth(key, table).map_err(|errors| mistakes.extend(errors));
        let settings = Self {
            trusted: trusted.ok()?,
            auth: auth.ok()?,
            versions,
            server_name,
            host,
        };
        // Only the client certificate can be wrong.
        let any_host = ServerName::from(Ipv4Addr::LOCALHOST);
        match settings.backend(any_host) {
            Ok(_) => Some(settings),
            Err(error) => {
                let problem = TlsFailure(error);
                mistakes.push(format!(
                    "{key}.client_certificate: {problem}; use a certificate and its key"
                ));
                None
            }
        }
    }
}

/// Reads the client certificate and its key, if configured.
fn client_auth(key: &str, table: &BackendTable) -> Result<Option<ClientAuth>, Vec<String>> {
    let (chain, private_key) = match (&table.client_certificate, &table.client_key) {
        (None, None) => return Ok(None),
        (Some(chain), Some(private_key)) => (chain, private_key),
        (Some(_), None) => {
            return Err(vec![format!(
                "{key}.client_key: missing; client_certificate needs it"
            )]);
        }
        (None, Some(_)) => {
            return Err(vec![format!(
                "{key}.client_certificate: missing; client_key needs it"
            )]);
        }
    };
    let unread_chain = |error| format!("{key}.client_certificate: {chain}: {error}");
    let chain = pem::read_certificates(Path::new(chain)).map_err(unread_chain);
    let unread = |error| format!("{key}.client_key: {private_key}: {error}");
    match (
        chain,
        pem::read_private_key(Path::new(private_key)).map_err(unread),
    ) {
        (Ok(chain), Ok(key)) => Ok(Some(ClientAuth { chain, key })),
        (chain, private_key) => Err(chain.err().into_iter().chain(private_key.err()).collect()),
    }
}

/// The system's trusted roots. Loaded once, on first use, which is before the reactor starts.
fn system_roots() -> Arc<Trusted> {
    static ROOTS: OnceLock<Arc<Trusted>> = OnceLock::new();
    Arc::clone(ROOTS.get_or_init(|| Arc::new(Trusted::system())))
}
