//! TunnelAnnouncement of a spliced tunnel: the header of the PROXY protocol, version 2, that a node
//! sends to the owner of a service before the bytes of the agent's connection.
//!
//! It has one extension, which proves that a node of the region wrote the header for this process
//! of the owner: version (u8), slot of the sender (u16), session of the owner (u128), random bytes
//! (16), and HMAC-SHA-256 of all bytes before it. It needs no clock: a header of an earlier process
//! has another session. A header that is sent again to the same process allows no more than a
//! handshake, in which the agent has to prove its identity.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use aws_lc_rs::hmac;
use ppp::v2::{
    Addresses, Builder, Command, Header, PROTOCOL_PREFIX, ParseError, Protocol, Version,
};

use super::{DerivedKeys, NodeSlot, RegionKeys};

/// Type of the extension, from the range for private use (proxy-protocol.txt §2.2.8).
const EXTENSION: u8 = 0xe0;
const EXTENSION_VERSION: u8 = 1;
const TAG: usize = 32;
const NONCE: usize = 16;
/// Bytes of the extension's value.
const VALUE: usize = 1 + 2 + 16 + NONCE + TAG;
/// Bytes of a header with the longer addresses.
const ANNOUNCEMENT_MAX: usize = 16 + 36 + 3 + VALUE;

/// Keys that authenticate announcements: made with the region key in use, accepted with each that
/// this node has.
pub struct AnnouncementKeys(DerivedKeys<hmac::Key>);

/// A tunnel that another node splices to this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunnelAnnouncement {
    /// The agent, as the sender saw it.
    pub agent: SocketAddr,
    /// Slot of the node that wrote the header.
    pub sender: NodeSlot,
    /// Session of the process that the tunnel is for.
    pub owner_session: u128,
}

/// Reason why a connection is not a spliced tunnel.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum InvalidAnnouncement {
    /// The PROXY header cannot be parsed.
    #[error("announcement of a tunnel: {0}")]
    Malformed(#[from] ParseError),
    /// The bytes are not a PROXY header of TCP whose only extension is that of a node.
    #[error(
        "announcement of a tunnel: it is not a PROXY header of TCP with the extension of a node"
    )]
    NotANode,
    /// No accepted region key made the authentication code.
    #[error(
        "announcement of a tunnel: wrong authentication code; region_key of that node may differ"
    )]
    Forged,
}

impl AnnouncementKeys {
    /// Derives the keys from the accepted region keys.
    pub fn new(keys: &RegionKeys) -> Self {
        Self(keys.derive(|key| key.derive("gw announcement of a spliced tunnel")))
    }

    /// The header. `nonce` is random.
    pub fn write(
        &self,
        announcement: &TunnelAnnouncement,
        nonce: [u8; NONCE],
    ) -> std::io::Result<Vec<u8>> {
        let TunnelAnnouncement {
            agent,
            sender,
            owner_session,
        } = announcement;
        let mut value = [0; VALUE];
        value[0] = EXTENSION_VERSION;
        value[1..3].copy_from_slice(&sender.get().to_be_bytes());
        value[3..19].copy_from_slice(&owner_session.to_be_bytes());
        value[19..19 + NONCE].copy_from_slice(&nonce);
        let nowhere = match agent {
            SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        };
        let addresses: Addresses = (*agent, SocketAddr::new(nowhere, 0)).into();
        let builder =
            Builder::with_addresses(Version::Two | Command::Proxy, Protocol::Stream, addresses);
        let mut header = builder.write_tlv(EXTENSION, &value)?.build()?;
        let tag_at = header.len() - TAG;
        let tag = hmac::sign(self.0.in_use(), &header[..tag_at]);
        header[tag_at..].copy_from_slice(tag.as_ref());
        Ok(header)
    }

    /// Parses the header at the beginning of `received`; also returns its length. `None` if more
    /// bytes are needed.
    pub fn parse(
        &self,
        received: &[u8],
    ) -> Result<Option<(TunnelAnnouncement, usize)>, InvalidAnnouncement> {
        let begin = received.len().min(PROTOCOL_PREFIX.len());
        if received[..begin] != PROTOCOL_PREFIX[..begin] {
            return Err(InvalidAnnouncement::NotANode);
        }
        let Some(&[_, _, high, low]) = received[begin..].first_chunk() else {
            return Ok(None);
        };
        if PROTOCOL_PREFIX.len() + 4 + usize::from(u16::from_be_bytes([high, low]))
            > ANNOUNCEMENT_MAX
        {
            return Err(InvalidAnnouncement::NotANode);
        }
        let header = match Header::try_from(received) {
            Ok(header) => header,
            Err(ParseError::Incomplete(_) | ParseError::Partial(..)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let bytes = header.as_bytes();
        let (Some(agent), Some(value)) = (source(&header), extension(&header)) else {
            return Err(InvalidAnnouncement::NotANode);
        };
        let (signed, tag) = bytes.split_at(bytes.len() - TAG);
        if !self
            .0
            .all()
            .iter()
            .any(|key| hmac::verify(key, signed, tag).is_ok())
        {
            return Err(InvalidAnnouncement::Forged);
        }
        let (sender, owner_session) = contents(value).ok_or(InvalidAnnouncement::NotANode)?;
        Ok(Some((
            TunnelAnnouncement {
                agent,
                sender,
                owner_session,
            },
            bytes.len(),
        )))
    }
}

fn source(header: &Header<'_>) -> Option<SocketAddr> {
    if header.protocol != Protocol::Stream || header.command != Command::Proxy {
        return None;
    }
    match header.addresses {
        Addresses::IPv4(addresses) => {
            Some((addresses.source_address, addresses.source_port).into())
        }
        Addresses::IPv6(addresses) => {
            Some((addresses.source_address, addresses.source_port).into())
        }
        Addresses::Unspecified | Addresses::Unix(_) => None,
    }
}

/// The value of the extension, if it is the only one. Its tag is then at the end of the header.
fn extension<'a>(header: &'a Header<'_>) -> Option<&'a [u8; VALUE]> {
    let bytes = header.tlv_bytes();
    let [EXTENSION, high, low, value @ ..] = bytes else {
        return None;
    };
    if usize::from(u16::from_be_bytes([*high, *low])) != VALUE {
        return None;
    }
    value.try_into().ok()
}

fn contents(value: &[u8; VALUE]) -> Option<(NodeSlot, u128)> {
    let [version, high, low, rest @ ..] = value;
    if *version != EXTENSION_VERSION {
        return None;
    }
    let sender = NodeSlot::new(u16::from_be_bytes([*high, *low]))?;
    Some((sender, u128::from_be_bytes(*rest.first_chunk()?)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::RegionKey;

    fn key(byte: u8) -> AnnouncementKeys {
        AnnouncementKeys::new(&RegionKey::new([byte; 32]).into())
    }

    fn announcement(agent: &str) -> TunnelAnnouncement {
        TunnelAnnouncement {
            agent: agent.parse().unwrap(),
            sender: NodeSlot::new(1023).unwrap(),
            owner_session: 1 << 100,
        }
    }

    #[test]
    fn headers_parse_back_with_their_last_byte() {
        for agent in [
            "198.51.100.7:4660",
            "[2001:db8::7]:443",
            "[::ffff:10.0.0.1]:9",
        ] {
            let sent = announcement(agent);
            let header = key(1).write(&sent, [7; NONCE]).unwrap();
            assert!(header.len() <= ANNOUNCEMENT_MAX);
            for end in 0..header.len() {
                assert_eq!(key(1).parse(&header[..end]), Ok(None), "{end} bytes");
            }
            let with_more = [&header[..], b"\x16\x03\x01"].concat();
            assert_eq!(key(1).parse(&with_more), Ok(Some((sent, header.len()))));
        }
    }

    #[test]
    fn while_the_key_is_replaced_either_is_accepted() {
        let [old, new] = [1, 2].map(|byte| RegionKey::new([byte; 32]));
        let both = RegionKeys::new(old, Some(new), None);
        let keys = AnnouncementKeys::new(&both);
        let sent = announcement("198.51.100.7:4660");
        for (in_use, only) in [(0, key(1)), (1, key(2))] {
            both.switch_to(in_use);
            let header = keys.write(&sent, [7; NONCE]).unwrap();
            assert_eq!(
                only.parse(&header),
                Ok(Some((sent, header.len()))),
                "made with the key in use"
            );
            let header = only.write(&sent, [7; NONCE]).unwrap();
            assert_eq!(keys.parse(&header), Ok(Some((sent, header.len()))));
        }
        let other = key(3).write(&sent, [7; NONCE]).unwrap();
        assert_eq!(keys.parse(&other), Err(InvalidAnnouncement::Forged));
    }

    #[test]
    fn no_byte_can_be_changed() {
        let header = key(1)
            .write(&announcement("198.51.100.7:4660"), [7; NONCE])
            .unwrap();
        for at in 0..header.len() {
            let mut changed = header.clone();
            changed[at] ^= 1;
            assert!(!matches!(key(1).parse(&changed), Ok(Some(_))), "byte {at}");
        }
        assert_eq!(key(2).parse(&header), Err(InvalidAnnouncement::Forged));
    }

    #[test]
    fn other_headers_are_refused() {
        let addresses: (SocketAddr, SocketAddr) = (
            "192.0.2.1:1".parse().unwrap(),
            "192.0.2.2:2".parse().unwrap(),
        );
        let builder = |command| {
            Builder::with_addresses(
                Version::Two | command,
                Protocol::Stream,
                Addresses::from(addresses),
            )
        };
        let value = [0; VALUE];
        let none = builder(Command::Proxy).build().unwrap();
        let other = builder(Command::Proxy)
            .write_tlv(EXTENSION + 1, &value)
            .unwrap()
            .build()
            .unwrap();
        let short = builder(Command::Proxy)
            .write_tlv(EXTENSION, &value[1..])
            .unwrap()
            .build()
            .unwrap();
        let local = builder(Command::Local)
            .write_tlv(EXTENSION, &value)
            .unwrap()
            .build()
            .unwrap();
        for header in [
            &none[..],
            &other,
            &short,
            &local,
            b"GET / HTTP/1.1",
            b"\x16\x03\x01",
        ] {
            assert_eq!(
                key(1).parse(header),
                Err(InvalidAnnouncement::NotANode),
                "{header:?}"
            );
        }
        let long = [PROTOCOL_PREFIX, b"\x21\x11\xff\xff"].concat();
        assert_eq!(key(1).parse(&long), Err(InvalidAnnouncement::NotANode));
    }

    proptest! {
        #[test]
        fn noise_is_never_an_announcement(
            after_signature in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let received = [PROTOCOL_PREFIX, &after_signature].concat();
            prop_assert!(!matches!(key(1).parse(&received), Ok(Some(_))));
        }
    }
}
