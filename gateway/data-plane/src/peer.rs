//! The peer of a connection.

use std::net::IpAddr;
use std::rc::Rc;

use gw_shared::id::{AccountId, DomainName};
use http::HeaderValue;

use crate::memory::sockets::SocketUse;

/// The peer of a connection.
pub(crate) struct Peer {
    /// An IPv4-mapped IPv6 address is stored as IPv4.
    pub(crate) address: IpAddr,
    /// `address` as a value of `X-Forwarded-For`, formatted once because every request needs it.
    pub(crate) forwarded: HeaderValue,
    /// The own domain that the connection was opened for; `None` for a name of the region, or none.
    pub(crate) domain: Option<DomainName>,
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
            address,
            forwarded,
            domain,
            socket,
        }
    }

    /// Records that the connection carries an authenticated request for a service of `account`.
    pub(crate) fn serves(&self, account: &AccountId) {
        self.socket.iter().for_each(|socket| socket.serves(account));
    }
}
