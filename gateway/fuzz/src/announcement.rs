//! Announcements of spliced tunnels.

use std::net::SocketAddr;

use gw_region::{AnnouncementKeys, NodeSlot, RegionKey, TunnelAnnouncement};

/// The first bytes of a connection that may be a spliced tunnel. Only the announcements of
/// [`announcements`] are accepted, with their last byte.
pub fn announcement(data: &[u8]) {
    let keys = announcement_keys();
    let Ok(Some((announcement, length))) = keys.parse(data) else {
        return;
    };
    let signed = announcements()
        .into_iter()
        .find(|(_, header, _)| data.starts_with(header));
    let (_, header, signed) = signed.expect("accepted, and never signed");
    assert_eq!((announcement, length), (signed, header.len()));
    for end in 0..length {
        assert_eq!(keys.parse(&data[..end]), Ok(None), "{end} bytes");
    }
}

fn announcement_keys() -> AnnouncementKeys {
    AnnouncementKeys::new(&RegionKey::new([1; 32]).into())
}

/// Signed announcements with their names in the corpus.
pub fn announcements() -> Vec<(&'static str, Vec<u8>, TunnelAnnouncement)> {
    let sign = |(name, agent): (_, &str)| {
        let agent: SocketAddr = agent.parse().expect("an address");
        let announcement = TunnelAnnouncement {
            agent,
            sender: NodeSlot::new(7).expect("a slot"),
            owner_session: 1 << 100,
        };
        let header = announcement_keys().write(&announcement, [7; 16]);
        (name, header.expect("a header"), announcement)
    };
    [("ipv4", "198.51.100.7:4660"), ("ipv6", "[2001:db8::7]:443")]
        .into_iter()
        .map(sign)
        .collect()
}
