//! Connections per client address: how many are open, and the rate of new ones. Checked before a
//! connection costs anything.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Instant;

use gw_base::service::rate::Rate;

use super::{AddressKey, ClientLimits};

/// Connections of each client address on one worker. Bounded by the number of connections.
pub struct Arrivals {
    per_address: usize,
    open: RefCell<HashMap<AddressKey, usize>>,
    rate: RefCell<ClientLimits<AddressKey>>,
}

/// One counted connection of an address; released when dropped.
pub struct AddressSlot {
    arrivals: Rc<Arrivals>,
    address: AddressKey,
}

/// The limit that an address has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TooMany {
    /// The address has the highest number of open connections.
    Open,
    /// The address opens connections faster than its rate.
    New,
}

impl TooMany {
    /// Name of the reason in metrics.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Open => "address_connections",
            Self::New => "address_rate",
        }
    }
}

impl Arrivals {
    /// Allows each address `per_address` connections, and new ones at `rate`.
    pub fn new(per_address: usize, rate: Rate) -> Rc<Self> {
        Rc::new(Self {
            per_address,
            open: RefCell::default(),
            rate: RefCell::new(ClientLimits::new(rate)),
        })
    }

    /// Number of counted connections.
    pub fn open(&self) -> usize {
        self.open.borrow().values().sum()
    }

    /// Counts a new connection, and charges the rate of its address.
    pub fn count_new(
        self: &Rc<Self>,
        address: IpAddr,
        now: Instant,
    ) -> Result<AddressSlot, TooMany> {
        let slot = self.count(address)?;
        self.rate
            .borrow_mut()
            .take(address, now)
            .map_err(|_| TooMany::New)?;
        Ok(slot)
    }

    /// Counts a connection. The rate of a connection that was handed over is charged where it was
    /// accepted.
    pub fn count(self: &Rc<Self>, address: IpAddr) -> Result<AddressSlot, TooMany> {
        let address = address.into();
        let mut open = self.open.borrow_mut();
        let of_address = open.entry(address).or_default();
        if *of_address >= self.per_address {
            return Err(TooMany::Open);
        }
        *of_address += 1;
        Ok(AddressSlot {
            arrivals: Rc::clone(self),
            address,
        })
    }
}

impl AddressSlot {
    /// The address that the connection is counted for.
    pub fn address(&self) -> AddressKey {
        self.address
    }
}

impl Drop for AddressSlot {
    fn drop(&mut self) {
        let mut open = self.arrivals.open.borrow_mut();
        if let Some(of_address) = open.get_mut(&self.address) {
            *of_address -= 1;
            if *of_address == 0 {
                open.remove(&self.address);
            }
        }
        // Shrinks the table after a flood.
        if open.len() < open.capacity() / 8 {
            open.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn connections_of_an_address_are_bounded_and_released() {
        let arrivals = Arrivals::new(2, Rate::new(100, 100).unwrap());
        let now = Instant::now();
        let client = address("192.0.2.1");
        let first = arrivals.count_new(client, now).unwrap();
        let second = arrivals.count(client).unwrap();
        assert_eq!(arrivals.count_new(client, now).err(), Some(TooMany::Open));
        assert_eq!(arrivals.count(client).err(), Some(TooMany::Open));
        assert!(arrivals.count_new(address("192.0.2.2"), now).is_ok());
        drop(first);
        drop(arrivals.count_new(client, now).unwrap());
        drop(second);
        assert!(arrivals.open.borrow().is_empty());
    }

    #[test]
    fn new_connections_are_limited_by_rate_and_refused_ones_do_not_count() {
        let arrivals = Arrivals::new(1000, Rate::new(2, 60).unwrap());
        let now = Instant::now();
        let client = address("2001:db8::1");
        // Addresses of one /64 count as one client.
        let refused = |now| arrivals.count_new(address("2001:db8::2"), now).err();
        let _open = [
            arrivals.count_new(client, now).unwrap(),
            arrivals.count_new(client, now).unwrap(),
        ];
        assert_eq!(refused(now), Some(TooMany::New));
        assert_eq!(arrivals.open.borrow().values().sum::<usize>(), 2);
        assert_eq!(refused(now + Duration::from_secs(1)), None);
    }

    #[test]
    fn a_flood_of_addresses_leaves_no_memory_behind() {
        let arrivals = Arrivals::new(1, Rate::new(1, 1).unwrap());
        let places: Vec<AddressSlot> = (0..10_000u32)
            .map(|n| arrivals.count(IpAddr::V4(n.into())).unwrap())
            .collect();
        assert_eq!(arrivals.open.borrow().len(), 10_000);
        drop(places);
        assert!(arrivals.open.borrow().capacity() < 100);
    }
}
