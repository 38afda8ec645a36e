//! `NO_PROXY`: the hosts that are reached without a proxy. Pure.

use std::net::IpAddr;

use ipnet::IpNet;

/// Hosts that are reached without a proxy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Exceptions(Vec<Exception>);

/// One entry of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Exception {
    hosts: Hosts,
    /// `None` for every port.
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Hosts {
    All,
    /// A block, or a single address. Compared with literals only: names are not resolved for it.
    Block(IpNet),
    /// A name and the names below it, in lower case.
    Name(String),
}

impl Exceptions {
    /// Parses a list, separated by commas or spaces. Every program reads this variable in its own
    /// way, so entries of an unknown form are ignored.
    pub(super) fn parse(text: &str) -> Self {
        let entries = text
            .split([',', ' ', '\t'])
            .filter(|entry| !entry.is_empty());
        Self(entries.filter_map(Exception::parse).collect())
    }

    /// Whether `host`, a name or an address literal, is reached at `port` without a proxy.
    pub(super) fn contain(&self, host: &str, port: u16) -> bool {
        let host = host
            .trim_matches(['[', ']'])
            .trim_end_matches('.')
            .to_ascii_lowercase();
        let address = host.parse::<IpAddr>().ok();
        self.0.iter().any(|exception| {
            exception.port.is_none_or(|only| only == port)
                && match (&exception.hosts, address) {
                    (Hosts::All, _) => true,
                    (Hosts::Block(block), Some(address)) => block.contains(&address),
                    (Hosts::Name(name), None) => is_below(&host, name),
                    (Hosts::Block(_), None) | (Hosts::Name(_), Some(_)) => false,
                }
        })
    }
}

impl Exception {
    fn parse(entry: &str) -> Option<Self> {
        if let Some(hosts) = Hosts::parse(entry) {
            return Some(Self { hosts, port: None });
        }
        let (host, port) = entry.rsplit_once(':')?;
        let host = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        Some(Self {
            hosts: Hosts::parse(host)?,
            port: Some(port.parse().ok()?),
        })
    }
}

impl Hosts {
    fn parse(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::All);
        }
        let address = text
            .trim_matches(['[', ']'])
            .parse::<IpAddr>()
            .map(IpNet::from)
            .ok();
        if let Some(block) = text.parse().ok().or(address) {
            return Some(Self::Block(block));
        }
        let name = text
            .trim_start_matches('*')
            .trim_start_matches('.')
            .trim_end_matches('.');
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        (!name.is_empty() && name.bytes().all(is_name))
            .then(|| Self::Name(name.to_ascii_lowercase()))
    }
}

/// Whether `host` is `name` or a name below it.
fn is_below(host: &str, name: &str) -> bool {
    host.strip_suffix(name)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contain(list: &str, host: &str) -> bool {
        Exceptions::parse(list).contain(host, 443)
    }

    #[test]
    fn names_match_with_the_names_below_them() {
        for entry in [
            "example.com",
            ".example.com",
            "*.example.com",
            "EXAMPLE.com.",
            "a.org, example.com",
            "x example.com",
        ] {
            for host in ["example.com", "eu1.example.com", "EU1.Example.COM."] {
                assert!(contain(entry, host), "{entry}: {host}");
            }
            for host in ["notexample.com", "example.com.org", "com", "10.0.0.1"] {
                assert!(!contain(entry, host), "{entry}: {host}");
            }
        }
    }

    #[test]
    fn addresses_and_blocks_match_literals() {
        for (entry, host) in [
            ("10.1.2.3", "10.1.2.3"),
            ("10.0.0.0/8", "10.255.0.1"),
            ("2001:db8::/32", "2001:db8:1::1"),
            ("2001:db8::/32", "[2001:db8:1::1]"),
            ("::1", "::1"),
            ("[::1]", "[::1]"),
        ] {
            assert!(contain(entry, host), "{entry}: {host}");
        }
        for (entry, host) in [
            ("10.1.2.3", "10.1.2.30"),
            ("10.0.0.0/8", "11.0.0.1"),
            ("1.2.3.4", "x1.2.3.4"),
            ("3.4", "1.2.3.4"),
        ] {
            assert!(!contain(entry, host), "{entry}: {host}");
        }
    }

    #[test]
    fn entries_can_be_limited_to_a_port() {
        for (entry, host) in [
            ("example.com:443", "eu1.example.com"),
            ("[::1]:443", "::1"),
            ("*:443", "h"),
            ("10.0.0.0/8:443", "10.0.0.1"),
        ] {
            let exceptions = Exceptions::parse(entry);
            assert!(
                exceptions.contain(host, 443) && !exceptions.contain(host, 8443),
                "{entry}"
            );
        }
    }

    #[test]
    fn everything_or_nothing() {
        assert!(contain("*", "eu1.example.com") && contain("a,*", "10.0.0.1"));
        let invalid = ["example.com:x", "10.0.0.0/99", "http://example.com", "."];
        for nothing in ["", ",", " "].into_iter().chain(invalid) {
            let exceptions = Exceptions::parse(nothing);
            assert_eq!(exceptions, Exceptions::default(), "{nothing}");
        }
    }
}
