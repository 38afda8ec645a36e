//! Connection of commands to an admin listener: its URL, the certificates that are trusted there, and what TLS errors mean.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use gw_base::tls::certificate;
use gw_interface::config::Config;
use gw_shared::net::resolve;
use gw_shared::net::tls::SPEAK_TLS;
use http::Uri;
use rustls::crypto::aws_lc_rs;
use rustls::{CertificateError, InvalidMessage};
use rustls_pki_types::CertificateDer;
use ureq::config::ConfigBuilder;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::typestate::AgentScope;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

/// Where commands look for the admin listener unless told otherwise.
pub const URL_DEFAULT: &str = "http://127.0.0.1:9080";

/// Name of the console on a loopback listener without TLS. Browsers and curl resolve names below `localhost` to loopback by
/// themselves (RFC 6761, section 6.3). Unlike `localhost` and addresses, other servers of the machine have no part in it.
pub const CONSOLE_NAME: &str = "console.gw.localhost";

/// Address of the console for browsers on this machine, on a listener without TLS.
pub fn console_url(admin_listen: SocketAddr) -> String {
    // What names below `localhost` resolve to.
    let has_name = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ]
    .contains(&admin_listen.ip());
    if has_name {
        format!("http://{CONSOLE_NAME}:{}/", admin_listen.port())
    } else {
        format!("http://{admin_listen}/")
    }
}

/// The URL of an admin listener, and how to reach it.
#[derive(Debug)]
pub struct AdminAddress {
    /// `http://…` or `https://…`, without a trailing slash.
    pub url: String,
    /// Where to connect, in place of what the name in the URL resolves to.
    connect_to: Option<SocketAddr>,
    trusted: Trusted,
}

/// Certificates trusted as issuers of the admin listener's certificate.
#[derive(Debug, Default)]
struct Trusted {
    /// From a file that was named; the system's if there was none.
    authorities: Option<Vec<CertificateDer<'static>>>,
    /// Those of the listener's own file.
    chain: Vec<CertificateDer<'static>>,
}

impl AdminAddress {
    /// The listener at `url`. `authorities` is a PEM file that replaces the authorities of the system.
    pub fn at(url: &str, authorities: Option<&Path>) -> Result<Self, String> {
        let trusted = Trusted {
            authorities: read_authorities(authorities)?,
            ..Trusted::default()
        };
        Ok(Self {
            url: checked_url(url)?,
            connect_to: None,
            trusted,
        })
    }

    /// The listener of a gateway on this machine. With TLS, connects to its address under a name of its certificate, which
    /// need not resolve here. Intermediate certificates of its file are trusted, so that a private authority does not have
    /// to be known here.
    pub fn of(config: &Config, authorities: Option<&Path>) -> Result<Self, String> {
        let address = local_address(config.admin_listen)?;
        let Some(files) = &config.admin_certificate else {
            return Self::at(&format!("http://{address}"), authorities);
        };
        let file = files.certificate.display();
        let chain = certificate::read_chain(&files.certificate)
            .map_err(|error| format!("admin_tls_certificate: {file}: {error}"))?;
        let name = certificate::names(&chain[0])
            .into_iter()
            .find_map(|name| url_host(&name));
        let name = name.ok_or_else(|| {
            format!("admin_tls_certificate: {file}: it has no name; give the address of the listener with --admin-url")
        })?;
        let trusted = Trusted {
            authorities: read_authorities(authorities)?,
            chain,
        };
        Ok(Self {
            url: format!("https://{name}:{}", address.port()),
            connect_to: Some(address),
            trusted,
        })
    }

    /// An HTTP client for this listener.
    pub fn agent(&self, config: ConfigBuilder<AgentScope>) -> ureq::Agent {
        let config = if self.url.starts_with("https:") {
            config.tls_config(self.trusted.tls())
        } else {
            config
        };
        let config = config.proxy(None).build();
        let connector = DefaultConnector::default();
        match self.connect_to {
            None => ureq::Agent::with_parts(config, connector, Named::default()),
            Some(address) => ureq::Agent::with_parts(config, connector, Fixed(address)),
        }
    }

    /// What to do about an error of TLS; `None` for other errors.
    pub fn explain(&self, error: &ureq::Error) -> Option<String> {
        let url = &self.url;
        Some(match tls_error(error)? {
            rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => format!(
                "{url} speaks plain HTTP, not https: use http:// in the URL (--admin-url). If its configuration has got \
                 admin_tls_certificate since it was started, restart the gateway"
            ),
            rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => format!(
                "{url}: no authority that is trusted here has issued its certificate; name the PEM file of the authority with \
                 --admin-ca or GW_ADMIN_CA"
            ),
            rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext {
                expected,
                presented,
            }) => {
                let names: Vec<&str> = presented.iter().map(|name| bare(name)).collect();
                format!(
                    "{url}: its certificate is for {}, not for {}; use a name of the certificate in the URL (--admin-url), or \
                     have it issued for this one",
                    if names.is_empty() {
                        "no name".to_owned()
                    } else {
                        names.join(", ")
                    },
                    expected.to_str()
                )
            }
            rustls::Error::InvalidCertificate(
                error @ (CertificateError::Expired | CertificateError::ExpiredContext { .. }),
            ) => {
                format!(
                    "{url}: {error}; renew it (admin_tls_certificate) and send SIGHUP to the gateway"
                )
            }
            rustls::Error::InvalidCertificate(
                error @ (CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. }),
            ) => format!("{url}: {error}; check the clock of this machine"),
            rustls::Error::InvalidCertificate(error) => {
                format!(
                    "{url}: its certificate is refused: {error}; have another one issued (admin_tls_certificate)"
                )
            }
            error => format!(
                "{url}: the TLS handshake failed: {error}; check that the URL names an admin listener"
            ),
        })
    }
}

/// An HTTP client that connects to `address` whatever the URL names. `authorities` is a PEM file that replaces the
/// authorities of the system.
pub fn client_of(
    address: SocketAddr,
    authorities: Option<&Path>,
    config: ConfigBuilder<AgentScope>,
) -> Result<ureq::Agent, String> {
    let trusted = Trusted {
        authorities: authorities.map(certificate::read_chain).transpose()?,
        ..Trusted::default()
    };
    let config = config.tls_config(trusted.tls()).proxy(None).build();
    Ok(ureq::Agent::with_parts(
        config,
        DefaultConnector::default(),
        Fixed(address),
    ))
}

/// Whether `body` is the answer of a listener with TLS to a request in plain HTTP.
pub fn is_of_tls_listener(body: &[u8]) -> bool {
    !body.is_empty() && SPEAK_TLS.ends_with(body)
}

impl Trusted {
    fn tls(&self) -> TlsConfig {
        let system = || rustls_native_certs::load_native_certs().certs;
        let authorities = self.authorities.clone().unwrap_or_else(system);
        let roots: Vec<_> = authorities
            .iter()
            .chain(&self.chain)
            .map(|root| Certificate::from_der(root).to_owned())
            .collect();
        TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&roots))
            .unversioned_rustls_crypto_provider(Arc::new(aws_lc_rs::default_provider()))
            .build()
    }
}

/// The resolver of the system, with names below `localhost` as browsers and curl resolve them: the console has one.
#[derive(Debug, Default)]
struct Named(DefaultResolver);

impl Resolver for Named {
    fn resolve(
        &self,
        uri: &Uri,
        config: &ureq::config::Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let loopback = uri.host().filter(|host| resolve::is_loopback_name(host));
        let (Some(host), Some(port)) = (loopback, uri.port_u16()) else {
            return self.0.resolve(uri, config, timeout);
        };
        let mut addresses = self.0.empty();
        for address in resolve::without_lookup(host).unwrap_or_default() {
            addresses.push(SocketAddr::new(address, port));
        }
        Ok(addresses)
    }
}

/// A resolver that gives one address for every name.
#[derive(Debug)]
struct Fixed(SocketAddr);

impl Resolver for Fixed {
    fn resolve(
        &self,
        _: &Uri,
        _: &ureq::config::Config,
        _: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let mut addresses = DefaultResolver::default().empty();
        addresses.push(self.0);
        Ok(addresses)
    }
}

/// The error of TLS in `error`.
pub fn tls_error(error: &ureq::Error) -> Option<&rustls::Error> {
    match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// The name in a description such as `DnsName("gw.example.com")`.
fn bare(name: &str) -> &str {
    let inner = name
        .split_once('(')
        .map_or(name, |(_, rest)| rest.trim_end_matches(')'));
    inner.trim_matches('"')
}

fn read_authorities(file: Option<&Path>) -> Result<Option<Vec<CertificateDer<'static>>>, String> {
    let read = |file: &Path| {
        certificate::read_chain(file)
            .map_err(|error| format!("--admin-ca {}: {error}", file.display()))
    };
    file.map(read).transpose()
}

fn checked_url(text: &str) -> Result<String, String> {
    let wrong = || {
        format!("{text:?} is not a URL such as {URL_DEFAULT} or https://gateway.example.com:9080")
    };
    let url: Uri = text.parse().map_err(|_| wrong())?;
    match url.scheme_str() {
        Some("http" | "https") if url.query().is_none() => {
            // The documentation of the API begins its paths with it.
            let text = text.trim_end_matches('/');
            Ok(text.strip_suffix("/api/v1").unwrap_or(text).to_owned())
        }
        _ => Err(wrong()),
    }
}

/// The address of a listener on this machine.
fn local_address(listen: SocketAddr) -> Result<SocketAddr, String> {
    if listen.port() == 0 {
        return Err(
            "admin_listen has port 0, so the port is not known; give the address with --admin-url"
                .to_owned(),
        );
    }
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Ok(SocketAddr::new(ip, listen.port()))
}

/// A host for which a certificate with this name is valid, as part of a URL.
fn url_host(name: &str) -> Option<String> {
    match name.parse() {
        Ok(IpAddr::V6(address)) => Some(format!("[{address}]")),
        Ok(IpAddr::V4(address)) => Some(address.to_string()),
        Err(_) => Some(name.replacen('*', "gw", 1))
            .filter(|host| host.parse::<http::uri::Authority>().is_ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked() {
        for (given, url) in [
            ("http://127.0.0.1:9080/", "http://127.0.0.1:9080"),
            ("http://127.0.0.1:9080/api/v1/", "http://127.0.0.1:9080"),
            ("https://gw.example.com:9080", "https://gw.example.com:9080"),
            (
                "https://proxy.example.com/gw/",
                "https://proxy.example.com/gw",
            ),
        ] {
            assert_eq!(AdminAddress::at(given, None).unwrap().url, url);
        }
        for wrong in [
            "127.0.0.1:9080",
            "localhost",
            "ftp://localhost",
            "http://",
            "http://localhost/?a=b",
            "",
        ] {
            let error = AdminAddress::at(wrong, None).unwrap_err();
            assert!(
                error.starts_with(&format!("{wrong:?} is not a URL such as {URL_DEFAULT}")),
                "{error}"
            );
        }
        let missing =
            AdminAddress::at(URL_DEFAULT, Some(Path::new("/nowhere/ca.pem"))).unwrap_err();
        assert!(
            missing.starts_with("--admin-ca /nowhere/ca.pem: cannot be read: "),
            "{missing}"
        );
    }

    #[test]
    fn a_listener_on_this_machine_is_reached_under_a_name_of_its_certificate() {
        for (listen, local) in [
            ("0.0.0.0:1", "127.0.0.1:1"),
            ("[::]:1", "[::1]:1"),
            ("10.0.0.1:1", "10.0.0.1:1"),
        ] {
            assert_eq!(
                local_address(listen.parse().unwrap()).unwrap(),
                local.parse().unwrap()
            );
        }
        assert!(
            local_address(SocketAddr::from(([127, 0, 0, 1], 0)))
                .unwrap_err()
                .contains("--admin-url")
        );
        for (name, host) in [
            ("gw.example.com", Some("gw.example.com")),
            ("*.example.com", Some("gw.example.com")),
            ("10.0.0.1", Some("10.0.0.1")),
            ("::1", Some("[::1]")),
            ("no name", None),
        ] {
            assert_eq!(url_host(name).as_deref(), host, "{name}");
        }
    }

    #[test]
    fn names_of_a_certificate_are_read_out_of_the_error() {
        for (described, name) in [
            ("DnsName(\"a.example\")", "a.example"),
            ("IpAddress(127.0.0.1)", "127.0.0.1"),
            ("other", "other"),
        ] {
            assert_eq!(bare(described), name);
        }
    }
}
