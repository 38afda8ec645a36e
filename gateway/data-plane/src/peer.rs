//! The peer of a connection.

use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;

use gw_shared::id::{AccountId, DomainName};
use http::HeaderValue;

use crate::memory::sockets::SocketUse;

/// The peer of a connection.
pub(crate) struct Peer {
    /// An IPv4 address is stored as IPv4-mapped, which takes less memory than an [`IpAddr`].
    address: Ipv6Addr,
    /// The address as a value of `X-Forwarded-For`, formatted once because every request needs it.
    pub(crate) forwarded: HeaderValue,
    /// The own domain that the connection was opened for; `None` for a name of the region, or none.
    /// Boxed: idle connections keep it, and few have one.
    pub(crate) domain: Option<Box<DomainName>>,
    /// Kernel memory of the connection; `None` for a request without a connection.
    socket: Option<Rc<SocketUse>>,
}

impl Peer {
    pub(crate) fn new(
        address: IpAddr,
        domain: Option<DomainName>,
        socket: Option<Rc<SocketUse>>,
    ) -> Self {
        let address = address.to_canonical();
        // Never fails: an address is a valid field value.
        let forwarded = address
            .to_string()
            .parse()
            .unwrap_or_else(|_| HeaderValue::from_static("unknown"));
        Self {
            address: match address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            },
            forwarded,
            domain: domain.map(Box::new),
            socket,
        }
    }

    /// The address. An IPv4-mapped IPv6 address is IPv4.
    pub(crate) fn address(&self) -> IpAddr {
        self.address.to_canonical()
    }

    /// Records that the connection carries an authenticated request for a service of `account`.
    pub(crate) fn serves(&self, account: &AccountId) {
        self.socket.iter().for_each(|socket| socket.serves(account));
    }
}
