//! Connection of commands to an admin listener: its URL, the certificates that are trusted there,
//! and what TLS errors mean.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use gw_interface::config::Config;
use gw_shared::net::tls::{Remedies, SPEAK_TLS, Trusted, names, pem};
use gw_shared::net::{https, resolve};
use http::Uri;
use ureq::config::ConfigBuilder;
use ureq::typestate::AgentScope;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

/// Where commands look for the admin listener unless told otherwise.
pub const URL_DEFAULT: &str = "http://127.0.0.1:9080";

/// Name of the console on a loopback listener without TLS. Browsers and curl resolve names below
/// `localhost` to loopback by themselves (RFC 6761, section 6.3). Unlike `localhost` and addresses,
/// other servers of the machine have no part in it.
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
    trusted: Arc<Trusted>,
}

impl AdminAddress {
    /// The listener at `url`. `authorities` is a PEM file that replaces the authorities of the
    /// system.
    pub fn at(url: &str, authorities: Option<&Path>) -> Result<Self, String> {
        let url = checked_url(url)?;
        let trusted = match authorities {
            // Those of the system take a while to read.
            None if url.starts_with("http:") => Trusted::only(Vec::new())?,
            authorities => trusted(authorities)?,
        };
        Ok(Self {
            url,
            connect_to: None,
            trusted: Arc::new(trusted),
        })
    }

    /// The listener of a gateway on this machine. With TLS, connects to its address under a name of
    /// its certificate, which need not resolve here. The certificates of its file are trusted, so
    /// that a private authority does not have to be known here.
    pub fn of(config: &Config, authorities: Option<&Path>) -> Result<Self, String> {
        let address = local_address(config.admin_listen)?;
        let Some(files) = &config.admin_certificate else {
            return Self::at(&format!("http://{address}"), authorities);
        };
        let file = files.certificate.display();
        let chain = pem::read_certificates(&files.certificate)
            .map_err(|error| format!("admin_tls_certificate: {file}: {error}"))?;
        let name = names(&chain[0])
            .into_iter()
            .find_map(|name| url_host(&name));
        let name = name.ok_or_else(|| {
            format!(
                "admin_tls_certificate: {file}: it has no name; give the address of the \
                     listener with --admin-url"
            )
        })?;
        let mut trusted = trusted(authorities)?;
        trusted
            .add(chain)
            .map_err(|error| format!("admin_tls_certificate: {file}: {error}"))?;
        Ok(Self {
            url: format!("https://{name}:{}", address.port()),
            connect_to: Some(address),
            trusted: Arc::new(trusted),
        })
    }

    /// An HTTP client for this listener.
    pub fn agent(&self, config: ConfigBuilder<AgentScope>) -> ureq::Agent {
        let config = config.proxy(None).build();
        let trusted = Arc::clone(&self.trusted);
        match self.connect_to {
            None => https::agent_with(config, trusted, Named::default()),
            Some(address) => https::agent_with(config, trusted, Fixed(address)),
        }
    }

    /// What to do about an error of TLS; `None` for other errors.
    pub fn explain(&self, error: &ureq::Error) -> Option<String> {
        const REMEDIES: Remedies = Remedies {
            issuer: "name a PEM file of the authority's certificate, or of this certificate \
                     itself, with --admin-ca or GW_ADMIN_CA",
            name: "use a name of the certificate in the URL (--admin-url), or have it issued for \
                   this one",
            certificate: "have another one issued (admin_tls_certificate) and send SIGHUP to the \
                          gateway, or set the clock of this machine",
            client_certificate: "check that the URL names an admin listener, which asks for none",
            not_tls: "use http:// in the URL (--admin-url). If its configuration has got \
                      admin_tls_certificate since it was started, restart the gateway",
            other: "check that the URL names an admin listener",
            versions: "TLS 1.3 and 1.2",
        };
        let explained = REMEDIES.explain(https::failure(error)?);
        Some(format!("{}: {explained}", self.url))
    }
}

/// An HTTP client that connects to `address` whatever the URL names. `authorities` is a PEM file
/// that replaces the authorities of the system.
pub fn client_of(
    address: SocketAddr,
    authorities: Option<&Path>,
    config: ConfigBuilder<AgentScope>,
) -> Result<ureq::Agent, String> {
    let trusted = authorities.map_or_else(|| Ok(Trusted::system()), Trusted::read)?;
    let config = config.proxy(None).build();
    Ok(https::agent_with(config, Arc::new(trusted), Fixed(address)))
}

/// Whether `body` is the answer of a listener with TLS to a request in plain HTTP.
pub fn is_of_tls_listener(body: &[u8]) -> bool {
    !body.is_empty() && SPEAK_TLS.ends_with(body)
}

/// The resolver of the system, with names below `localhost` as browsers and curl resolve them: the
/// console has one.
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

/// The certificates of a file that was named; the system's if there was none.
fn trusted(file: Option<&Path>) -> Result<Trusted, String> {
    let read = |file: &Path| {
        Trusted::read(file).map_err(|error| format!("--admin-ca {}: {error}", file.display()))
    };
    file.map_or_else(|| Ok(Trusted::system()), read)
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
}
