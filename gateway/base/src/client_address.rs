//! Address of the client, also behind trusted proxies.

use std::net::IpAddr;

use gw_shared::http::Fields;
use gw_shared::http::fields::X_FORWARDED_FOR;
use ipnet::{IpNet, Ipv4Net};

/// Proxies whose `X-Forwarded-For` is trusted, and the PROXY header of those that send one. The
/// most specific block that contains an address applies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedProxies(
    /// The longest prefix first.
    Vec<(IpNet, ProxyProtocol)>,
);

/// Whether the connections of a trusted proxy begin with a header of the PROXY protocol, which
/// announces the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyProtocol {
    /// With a header of version 1 or 2. A connection without one is closed.
    Required,
    /// Without a header. None is looked for.
    Off,
    /// With or without a header of version 2: the configuration does not say. A client of a proxy
    /// that sends none can send one, and so choose its address.
    Guessed,
}

impl TrustedProxies {
    /// Returns whether the proxy with this address is trusted.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.proxy_protocol(address).is_some()
    }

    /// The setting of the proxy with this address; `None` if it is not trusted.
    pub fn proxy_protocol(&self, address: IpAddr) -> Option<ProxyProtocol> {
        let address = address.to_canonical();
        self.0
            .iter()
            .find(|(block, _)| block.contains(&address))
            .map(|(_, setting)| *setting)
    }

    /// Adds a block. Returns false and keeps the first setting if the block is listed already. Two
    /// entries without a setting count as one, as in earlier versions.
    pub fn add(&mut self, block: IpNet, setting: ProxyProtocol) -> bool {
        let block = canonical(block).trunc();
        if let Some((_, present)) = self.0.iter().find(|(present, _)| *present == block) {
            return [*present, setting] == [ProxyProtocol::Guessed; 2];
        }
        let place = self
            .0
            .partition_point(|(other, _)| other.prefix_len() >= block.prefix_len());
        self.0.insert(place, (block, setting));
        true
    }

    /// Returns whether no proxy is trusted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Blocks without a setting.
    pub fn guessed(&self) -> impl Iterator<Item = IpNet> {
        self.0
            .iter()
            .filter(|(_, setting)| *setting == ProxyProtocol::Guessed)
            .map(|(block, _)| *block)
    }
}

/// Uses the first setting of each block.
impl FromIterator<(IpNet, ProxyProtocol)> for TrustedProxies {
    fn from_iter<I: IntoIterator<Item = (IpNet, ProxyProtocol)>>(blocks: I) -> Self {
        let mut proxies = Self::default();
        for (block, setting) in blocks {
            proxies.add(block, setting);
        }
        proxies
    }
}

/// Converts a block of IPv4-mapped addresses (RFC 4291 §2.5.5.2) into the block of IPv4 addresses.
fn canonical(block: IpNet) -> IpNet {
    const MAPPED_PREFIX: u8 = 96;
    match (
        block.addr().to_canonical(),
        block.prefix_len().checked_sub(MAPPED_PREFIX),
    ) {
        (IpAddr::V4(address), Some(length)) if matches!(block, IpNet::V6(_)) => {
            Ipv4Net::new(address, length).map_or(block, IpNet::V4)
        }
        _ => block,
    }
}

/// Address of the client that made a request which `peer` sent.
///
/// If `peer` is a trusted proxy, this is the rightmost address in `X-Forwarded-For` that is not a
/// trusted proxy: each proxy appends the address of its peer, and an untrusted client can forge the
/// elements to the left of its own. If all addresses are trusted, it is the leftmost. The search
/// stops at an element that is not an address.
pub fn client_address(peer: IpAddr, headers: &Fields, trusted: &TrustedProxies) -> IpAddr {
    let mut client = peer.to_canonical();
    if !trusted.contains(client) {
        return client;
    }
    let lines = headers.get_all(X_FORWARDED_FOR).rev();
    let elements = lines.flat_map(|line| line.as_bytes().rsplit(|byte| *byte == b','));
    // Empty elements are ignored (RFC 9110 §5.6.1.2).
    for element in elements
        .map(<[u8]>::trim_ascii)
        .filter(|element| !element.is_empty())
    {
        let Some(address) = parse_element(element) else {
            break;
        };
        client = address;
        if !trusted.contains(client) {
            break;
        }
    }
    client
}

/// Parses `ip`, `ip:port`, `[v6]` or `[v6]:port`, the forms that proxies write.
fn parse_element(element: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(element).ok()?;
    let bracketed = || {
        text.strip_prefix('[')?
            .strip_suffix(']')?
            .parse()
            .map(IpAddr::V6)
            .ok()
    };
    let with_port = || {
        text.parse()
            .map(|address: std::net::SocketAddr| address.ip())
            .ok()
    };
    let address = text.parse().ok().or_else(bracketed).or_else(with_port)?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn trusted(blocks: &[&str]) -> TrustedProxies {
        blocks
            .iter()
            .map(|block| (block.parse().unwrap(), ProxyProtocol::Off))
            .collect()
    }

    /// The client of a request from `peer` with these field lines, behind proxies in 10.0.0.0/8 and
    /// fd00::/8.
    fn client(peer: &str, lines: &[&str]) -> String {
        let mut headers = Fields::new();
        for line in lines {
            headers.append(
                X_FORWARDED_FOR,
                HeaderValue::from_bytes(line.as_bytes()).unwrap(),
            );
        }
        client_address(
            peer.parse().unwrap(),
            &headers,
            &trusted(&["10.0.0.0/8", "fd00::/8"]),
        )
        .to_string()
    }

    #[test]
    fn an_untrusted_peer_is_the_client_whatever_it_claims() {
        assert_eq!(client("192.0.2.1", &["198.51.100.7"]), "192.0.2.1");
        assert_eq!(
            client("2001:db8::1", &["198.51.100.7, 10.0.0.1"]),
            "2001:db8::1"
        );
        assert_eq!(client("::ffff:192.0.2.1", &[]), "192.0.2.1");
        let mut headers = Fields::new();
        headers.insert(X_FORWARDED_FOR, HeaderValue::from_static("198.51.100.7"));
        let none = TrustedProxies::default();
        assert_eq!(
            client_address("10.0.0.1".parse().unwrap(), &headers, &none).to_string(),
            "10.0.0.1"
        );
    }

    #[test]
    fn the_rightmost_untrusted_address_is_the_client() {
        assert_eq!(client("10.0.0.1", &["198.51.100.7"]), "198.51.100.7");
        assert_eq!(client("::ffff:10.0.0.1", &["198.51.100.7"]), "198.51.100.7");
        assert_eq!(
            client("10.0.0.1", &["6.6.6.6, 198.51.100.7"]),
            "198.51.100.7"
        );
        assert_eq!(
            client("10.0.0.1", &["6.6.6.6, 198.51.100.7,10.9.9.9 ,\t10.8.8.8"]),
            "198.51.100.7"
        );
        assert_eq!(
            client("fd00::1", &["2001:db8::7, ::ffff:10.0.0.1"]),
            "2001:db8::7"
        );
    }

    #[test]
    fn field_lines_are_one_list() {
        assert_eq!(
            client("10.0.0.1", &["6.6.6.6", "198.51.100.7", "10.0.0.2"]),
            "198.51.100.7"
        );
        assert_eq!(
            client("10.0.0.1", &["198.51.100.7, ,", "", " , 10.0.0.2,"]),
            "198.51.100.7"
        );
    }

    #[test]
    fn ports_and_brackets_are_parsed() {
        for (element, address) in [
            ("198.51.100.7:443", "198.51.100.7"),
            ("2001:db8::7", "2001:db8::7"),
            ("[2001:db8::7]", "2001:db8::7"),
            ("[2001:db8::7]:443", "2001:db8::7"),
            ("::ffff:198.51.100.7", "198.51.100.7"),
            ("[::ffff:198.51.100.7]:1", "198.51.100.7"),
        ] {
            assert_eq!(client("10.0.0.1", &[element]), address, "{element}");
        }
    }

    #[test]
    fn the_leftmost_address_is_the_client_if_all_are_trusted() {
        assert_eq!(client("10.0.0.1", &["10.0.0.3, 10.0.0.2"]), "10.0.0.3");
        assert_eq!(client("10.0.0.1", &[]), "10.0.0.1");
        assert_eq!(client("::ffff:10.0.0.1", &[""]), "10.0.0.1");
    }

    #[test]
    fn an_element_that_is_not_an_address_ends_the_search() {
        for garbage in [
            "unknown",
            "_hidden",
            "198.51.100",
            "198.51.100.7:x",
            "[198.51.100.7]",
            "[::1",
            "1.2.3.4 5",
            "é",
        ] {
            assert_eq!(
                client("10.0.0.1", &[&format!("6.6.6.6, {garbage}")]),
                "10.0.0.1",
                "{garbage}"
            );
            assert_eq!(
                client("10.0.0.1", &[&format!("6.6.6.6, {garbage}, 10.0.0.2")]),
                "10.0.0.2",
                "{garbage}"
            );
            assert_eq!(
                client("10.0.0.1", &[&format!("{garbage}, 198.51.100.7")]),
                "198.51.100.7",
                "{garbage}"
            );
        }
    }

    #[test]
    fn blocks_of_mapped_addresses_become_ipv4_blocks() {
        let mapped = trusted(&["::ffff:10.0.0.0/104", "::ffff:192.0.2.1/128"]);
        assert_eq!(mapped, trusted(&["10.0.0.0/8", "192.0.2.1/32"]));
        assert!(mapped.contains("10.255.0.1".parse().unwrap()));
        assert!(mapped.contains("::ffff:192.0.2.1".parse().unwrap()));
        assert!(!mapped.contains("192.0.2.2".parse().unwrap()));
        let all = trusted(&["::/0"]);
        assert!(
            all.contains("2001:db8::1".parse().unwrap())
                && !all.contains("192.0.2.1".parse().unwrap())
        );
        assert!(!trusted(&["::ffff:0:0/95"]).contains("192.0.2.1".parse().unwrap()));
    }
}
