//! Settings of an account and its orders: plain values, which the configuration of the gateway
//! fills.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use gw_shared::identity::secret::Secret;
use gw_shared::net::tls::Trusted;

/// The directory of Let's Encrypt.
pub const LETS_ENCRYPT: &str = "https://acme-v02.api.letsencrypt.org/directory";

/// Settings of an account and its orders.
#[derive(Debug, Clone)]
pub struct Settings {
    /// URL of the directory of the authority.
    pub directory: String,
    /// Mail addresses for the authority, without `mailto:`.
    pub contacts: Vec<String>,
    /// Whether the administrator accepts the terms of service of the authority.
    pub terms_accepted: bool,
    /// Binding to an account that exists at the authority already (RFC 8555 §7.3.4).
    pub external_account: Option<ExternalAccount>,
    /// Certificates that the directory's server is verified with; without them, those of the
    /// system.
    pub authorities: Option<Arc<Trusted>>,
    /// Names of the certificate. A wildcard needs DNS-01.
    pub names: Vec<String>,
}

/// Key of an account outside of ACME.
#[derive(Debug, Clone)]
pub struct ExternalAccount {
    /// Identifier that the authority gave.
    pub key_id: String,
    /// Key that the authority gave, base64url.
    pub key: Secret,
}

/// Settings of DNS updates (RFC 2136).
#[derive(Debug, Clone)]
pub struct Rfc2136Settings {
    /// The primary server of the zone.
    pub server: SocketAddr,
    /// Name of the key.
    pub key_name: String,
    /// File with the key: the output of `tsig-keygen`, or the key in base64 for HMAC-SHA256.
    pub key_file: PathBuf,
    /// Zone that is updated; without it, the server is asked.
    pub zone: Option<String>,
    /// Servers that are asked for CNAME records, and that must show a record before the authority
    /// looks.
    pub dns_servers: Vec<SocketAddr>,
}

/// Settings of a hook program.
#[derive(Debug, Clone)]
pub struct HookSettings {
    /// Path of the program.
    pub program: PathBuf,
    /// As [`Rfc2136Settings::dns_servers`].
    pub dns_servers: Vec<SocketAddr>,
}
