//! How many connections one client address has, and how fast it opens them: asked before anything is spent on one.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Instant;

use super::{AddressKey, AddressLimits, Rate};

/// What one worker has of each client address. Bounded by the connections that it may have.
pub(crate) struct Arrivals {
    per_address: usize,
    open: RefCell<HashMap<AddressKey, usize>>,
    rate: RefCell<AddressLimits>,
}

/// One connection of an address; no longer counted when dropped.
pub(crate) struct AddressSlot {
    arrivals: Rc<Arrivals>,
    address: AddressKey,
}

/// What an address has had too much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TooMany {
    Open,
    New,
}

impl TooMany {
    /// As metrics name it.
    pub(crate) const fn reason(self) -> &'static str {
        match self {
            Self::Open => "address_connections",
            Self::New => "address_rate",
        }
    }
}

impl Arrivals {
    /// Each address may have `per_address` connections, and new ones at `rate`.
    pub(crate) fn new(per_address: usize, rate: Rate) -> Rc<Self> {
        Rc::new(Self { per_address, open: RefCell::default(), rate: RefCell::new(AddressLimits::new(rate)) })
    }

    /// Counts a new connection in.
    pub(crate) fn admit(self: &Rc<Self>, address: IpAddr, now: Instant) -> Result<AddressSlot, TooMany> {
        let place = self.keep(address)?;
        self.rate.borrow_mut().take(address, now).map_err(|_| TooMany::New)?;
        Ok(place)
    }

    /// Counts in a connection that another worker has admitted.
    pub(crate) fn keep(self: &Rc<Self>, address: IpAddr) -> Result<AddressSlot, TooMany> {
        let address = address.into();
        let mut open = self.open.borrow_mut();
        let of_address = open.entry(address).or_default();
        if *of_address >= self.per_address {
            return Err(TooMany::Open);
        }
        *of_address += 1;
        Ok(AddressSlot { arrivals: Rc::clone(self), address })
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
        // A flood leaves no table of its size behind.
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
    fn an_address_has_so_many_and_gets_back_what_ended() {
        let arrivals = Arrivals::new(2, Rate::new(100, 100).unwrap());
        let (now, client) = (Instant::now(), address("192.0.2.1"));
        let first = arrivals.admit(client, now).unwrap();
        let second = arrivals.keep(client).unwrap();
        assert_eq!(arrivals.admit(client, now).err(), Some(TooMany::Open));
        assert_eq!(arrivals.keep(client).err(), Some(TooMany::Open));
        assert!(arrivals.admit(address("192.0.2.2"), now).is_ok());
        drop(first);
        drop(arrivals.admit(client, now).unwrap());
        drop(second);
        assert!(arrivals.open.borrow().is_empty());
    }

    #[test]
    fn new_ones_come_at_a_rate_and_what_is_refused_is_not_open() {
        let arrivals = Arrivals::new(1000, Rate::new(2, 60).unwrap());
        let (now, client) = (Instant::now(), address("2001:db8::1"));
        // A network of 64 bits is one client.
        let admit = |now| arrivals.admit(address("2001:db8::2"), now).err();
        let _open = [arrivals.admit(client, now).unwrap(), arrivals.admit(client, now).unwrap()];
        assert_eq!(admit(now), Some(TooMany::New));
        assert_eq!(arrivals.open.borrow().values().sum::<usize>(), 2);
        assert_eq!(admit(now + Duration::from_secs(1)), None);
    }

    #[test]
    fn a_flood_of_addresses_leaves_nothing_behind() {
        let arrivals = Arrivals::new(1, Rate::new(1, 1).unwrap());
        let places: Vec<AddressSlot> = (0..10_000u32).map(|n| arrivals.keep(IpAddr::V4(n.into())).unwrap()).collect();
        assert_eq!(arrivals.open.borrow().len(), 10_000);
        drop(places);
        assert!(arrivals.open.borrow().capacity() < 100);
    }
}
