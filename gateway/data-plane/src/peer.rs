//! The peer of a connection.

use std::cell::OnceCell;
use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;

use gw_shared::http::caller_connection::CallerConnection;
use gw_shared::http::connection_auth::authenticates_connection;
use gw_shared::http::{Fields, HttpVersion};
use gw_shared::id::{AccountId, DomainName};
use http::HeaderValue;

use crate::memory::sockets::SocketUse;

/// The peer of a connection.
pub(crate) struct Peer {
    /// An IPv4 address is stored as IPv4-mapped, which takes less memory than an [`IpAddr`].
    address: Ipv6Addr,
    /// The address as a value of `X-Forwarded-For`, formatted once because every request needs it.
    pub(crate) forwarded: HeaderValue,
    /// Kernel memory of the connection; `None` for a request without a connection.
    socket: Option<Rc<SocketUse>>,
    /// Boxed: idle connections keep it, and few have one.
    rare: OnceCell<Box<RareProperties>>,
}

#[derive(Default)]
struct RareProperties {
    /// The own domain that the connection was opened for; `None` for a name of the region, or none.
    domain: Option<DomainName>,
    /// Set once the caller has sent credentials for the connection.
    connection: OnceCell<CallerConnection>,
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
        let rare = domain.map(|domain| {
            Box::new(RareProperties {
                domain: Some(domain),
                ..RareProperties::default()
            })
        });
        Self {
            address: match address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            },
            forwarded,
            socket,
            rare: rare.map_or_else(OnceCell::new, OnceCell::from),
        }
    }

    /// The address. An IPv4-mapped IPv6 address is IPv4.
    pub(crate) fn address(&self) -> IpAddr {
        self.address.to_canonical()
    }

    /// The connection of a request with these fields, if a backend may authenticate it: named from
    /// the first request with credentials for a connection on. A connection of HTTP/2 may have
    /// requests of several users.
    pub(crate) fn connection(
        &self,
        version: HttpVersion,
        headers: &Fields,
    ) -> Option<CallerConnection> {
        let named = self.rare.get().and_then(|rare| rare.connection.get());
        match version {
            _ if named.is_some() => named.copied(),
            _ if !authenticates_connection(headers) => None,
            HttpVersion::Http2 => Some(CallerConnection::Unnamed),
            HttpVersion::Http10 | HttpVersion::Http11 => {
                let connection = &self.rare.get_or_init(Box::default).connection;
                Some(*connection.get_or_init(CallerConnection::name_randomly))
            }
        }
    }

    /// The own domain that the connection was opened for.
    pub(crate) fn domain(&self) -> Option<&DomainName> {
        self.rare.get()?.domain.as_ref()
    }

    /// Records that the connection carries an authenticated request for a service of `account`.
    pub(crate) fn serves(&self, account: &AccountId) {
        self.socket.iter().for_each(|socket| socket.serves(account));
    }
}
