//! Mapping of a Host, `:authority` or server name to a tenant.

use std::borrow::Cow;

use gw_shared::id::{AccountId, ServiceId};
pub use gw_shared::id::{split_tenant_label, tenant_label};

/// The host names of one region: the apex `{region}.{domain}` and its tenants
/// `{account}--{service}.{region}.{domain}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    apex: String,
}

/// The destination that a host name denotes.
#[derive(Debug, PartialEq, Eq)]
pub enum Destination<'a> {
    /// The apex of the region.
    Apex,
    /// One label under the apex, lower case. The directory knows whether such a service exists.
    Tenant(Cow<'a, str>),
    /// Not a name of this region.
    Elsewhere,
}

impl Region {
    /// The names of the region with this label under this domain, in lower case.
    pub fn new(region: &str, domain: &str) -> Self {
        Self {
            apex: format!("{region}.{domain}").to_ascii_lowercase(),
        }
    }

    /// `{region}.{domain}`
    pub fn apex(&self) -> &str {
        &self.apex
    }

    /// The URL of the apex, also the issuer of access tokens. Never with a port.
    pub fn base_url(&self) -> String {
        format!("https://{}", self.apex)
    }

    /// The hostname of a service; `None` if its label is longer than DNS allows.
    pub fn tenant_hostname(&self, account: &AccountId, service: &ServiceId) -> Option<String> {
        let label = tenant_label(account, service)?;
        Some(format!("{label}.{}", self.apex))
    }

    /// Parses a host in any case, optionally with a port or a final dot.
    pub fn destination<'a>(&self, host: &'a str) -> Destination<'a> {
        let host = host_name(host);
        if *host == self.apex {
            return Destination::Apex;
        }
        let Some(label) = host
            .strip_suffix(self.apex.as_str())
            .and_then(|rest| rest.strip_suffix('.'))
        else {
            return Destination::Elsewhere;
        };
        if label.is_empty() || label.contains('.') {
            return Destination::Elsewhere;
        }
        let length = label.len();
        Destination::Tenant(match host {
            Cow::Borrowed(host) => Cow::Borrowed(&host[..length]),
            Cow::Owned(mut host) => {
                host.truncate(length);
                Cow::Owned(host)
            }
        })
    }
}

/// The name of a host, in lower case and without its port or final dot.
pub fn host_name(host: &str) -> Cow<'_, str> {
    let host = host.rsplit_once(':').map_or(host, |(name, port)| {
        if port.bytes().all(|byte| byte.is_ascii_digit()) {
            name
        } else {
            host
        }
    });
    let host = host.strip_suffix('.').unwrap_or(host);
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(host.to_ascii_lowercase())
    } else {
        Cow::Borrowed(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destination(host: &str) -> Destination<'_> {
        Region::new("eu1", "Example.com").destination(host)
    }

    #[test]
    fn hosts_are_parsed_in_any_case_with_port_or_final_dot() {
        let tenant = |label: &'static str| Destination::Tenant(label.into());
        assert_eq!(
            destination("acme--api.eu1.example.com"),
            tenant("acme--api")
        );
        assert_eq!(
            destination("ACME--Api.EU1.example.COM:8443"),
            tenant("acme--api")
        );
        assert_eq!(
            destination("acme--api.eu1.example.com.:443"),
            tenant("acme--api")
        );
        assert_eq!(destination("eu1.example.com"), Destination::Apex);
        assert_eq!(destination("Eu1.example.com.:8443"), Destination::Apex);
        for elsewhere in [
            "eu2.example.com",
            "acme--api.eu2.example.com",
            "example.com",
            "a.b.eu1.example.com",
            ".eu1.example.com",
            "eu1.example.com..",
            "xeu1.example.com",
            "",
            ":443",
            "[::1]:443",
            "127.0.0.1",
            "acme--api.eu1.example.com:x",
        ] {
            assert_eq!(
                destination(elsewhere),
                Destination::Elsewhere,
                "{elsewhere}"
            );
        }
    }

    #[test]
    fn labels_split_at_the_first_double_hyphen() {
        let split = |label: &str| {
            split_tenant_label(label).map(|(account, service)| format!("{account}|{service}"))
        };
        assert_eq!(split("acme--api").as_deref(), Some("acme|api"));
        assert_eq!(split("acme--a--b").as_deref(), Some("acme|a--b"));
        for bad in [
            "acme",
            "acme--",
            "ac--api",
            "acme---api",
            "acme--api-",
            "a-b--c",
            "--api",
        ] {
            assert_eq!(split(bad), None, "{bad}");
        }
        assert_eq!(split(&format!("acme--{}", "a".repeat(58))), None);
        assert!(split(&format!("acme--{}", "a".repeat(57))).is_some());
    }

    #[test]
    fn labels_longer_than_dns_allows_are_refused() {
        let account = AccountId::new("abcdefghijklmno").unwrap();
        let region = Region::new("eu1", "example.com");
        let fits = ServiceId::new(&"s".repeat(46)).unwrap();
        assert!(region.tenant_hostname(&account, &fits).is_some());
        let too_long = ServiceId::new(&"s".repeat(47)).unwrap();
        assert_eq!(region.tenant_hostname(&account, &too_long), None);
    }
}
