//! Limits per client address, for clients that have not authenticated, per agent, per account and
//! per service.

use std::collections::hash_map::RandomState;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use gw_base::service::rate::Rate;
use gw_region::owners::ownership;
use gw_region::owners::ownership::WorkerId;
use gw_shared::id::AgentId;
use lru::LruCache;

use super::Bucket;

/// A bucket for each recently seen client, which is an address, an agent, an account or a service.
///
/// Bounded: beyond [`limits::ADDRESSES`] the least recently used client is forgotten; its bucket
/// had the most time to refill.
pub struct ClientLimits<K> {
    rate: Rate,
    /// Callers choose the keys: keyed hashing prevents chosen collisions.
    buckets: LruCache<K, Bucket, RandomState>,
}

/// An address that counts as one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AddressKey {
    /// An IPv4 address, also of a client with the IPv4-mapped IPv6 address (RFC 4291 §2.5.5.2).
    V4(Ipv4Addr),
    /// The /64 of one link (RFC 4291 §2.5.4): a client that has one of its addresses has all of
    /// them.
    V6([u8; 8]),
}

impl From<IpAddr> for AddressKey {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let [network @ .., _, _, _, _, _, _, _, _] = address.octets();
                Self::V6(network)
            }
        }
    }
}

/// Places in the hash table of a full table. hashbrown fills seven eighths, half of them possibly
/// with removed entries, before it cleans up.
const PLACES: usize = limits::ADDRESSES.get() * 16 / 7;
/// Bytes of one entry. The id of an agent is a pointer to its text.
const ENTRY: usize = size_of::<(AddressKey, Bucket)>();
/// Bytes of a full table: entries with their two links, and for each place of the hash table two
/// pointers and a byte.
const TABLE_BYTES: usize = limits::ADDRESSES.get() * (ENTRY + 2 * size_of::<usize>())
    + PLACES * (2 * size_of::<usize>() + 1);

// Bounds the memory of a flood of addresses.
const _: () = assert!(PLACES.is_power_of_two() && TABLE_BYTES <= 3 * 1024 * 1024 / 2);
const _: () = assert!(size_of::<(AgentId, Bucket)>() <= ENTRY);
const _: () = assert!(size_of::<(Arc<str>, Bucket)>() <= ENTRY);

impl AddressKey {
    /// The worker out of `workers` (at least one) that counts the apex requests of this client.
    pub fn owner(self, workers: usize) -> WorkerId {
        match self {
            Self::V4(address) => ownership::owner(address.octets(), workers),
            Self::V6(network) => ownership::owner(network, workers),
        }
    }

    /// Index of the node, out of the slots of the members, that counts them for the whole region;
    /// `None` without members.
    pub fn owner_node(self, slots: impl Iterator<Item = u64>) -> Option<usize> {
        match self {
            Self::V4(address) => ownership::owner_node(address.octets(), slots),
            Self::V6(network) => ownership::owner_node(network, slots),
        }
    }
}

/// The bucket of a client is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exhausted {
    /// Time until one more request is admitted.
    pub until_one: Duration,
    /// Time until the bucket is full.
    pub until_full: Duration,
}

impl<K: Hash + Eq> ClientLimits<K> {
    /// Returns the rate of each client.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// A table in which each client has its own bucket of this `rate`.
    pub fn new(rate: Rate) -> Self {
        Self {
            rate,
            buckets: LruCache::with_hasher(limits::ADDRESSES, RandomState::new()),
        }
    }

    /// Takes one request out of the bucket of a client, which is full for a new one. Fails if it is
    /// empty.
    pub fn take(&mut self, client: impl Into<K>, now: Instant) -> Result<(), Exhausted> {
        let bucket = self
            .buckets
            .get_or_insert_mut(client.into(), || Bucket::new(self.rate, now));
        bucket.take(now).map_err(|until_one| Exhausted {
            until_one,
            until_full: bucket.until_full(now),
        })
    }

    /// Takes time out of the bucket of a client, as [`Bucket::spend`].
    pub fn spend(&mut self, client: K, time: Duration, now: Instant) {
        let bucket = || Bucket::new(self.rate, now);
        let bucket = self.buckets.get_or_insert_mut(client, bucket);
        bucket.spend(time, now);
    }

    /// The refusal that [`Self::take`] would return, if any. Takes nothing and adds no client: a
    /// check before each request costs clients that are not limited nothing.
    pub fn is_exhausted(&mut self, client: impl Into<K>, now: Instant) -> Option<Exhausted> {
        // A client that keeps asking stays in the table.
        let bucket = self.buckets.get(&client.into())?;
        let until_one = bucket.until_one(now);
        (!until_one.is_zero()).then(|| Exhausted {
            until_one,
            until_full: bucket.until_full(now),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use proptest::prelude::*;

    use super::*;

    fn limits(per_minute: u32) -> ClientLimits<AddressKey> {
        ClientLimits::new(Rate::new(per_minute, per_minute).unwrap())
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_gets_exactly_its_rate() {
        let mut limits = limits(60);
        let start = Instant::now();
        let client = address("192.0.2.1");
        for _ in 0..60 {
            assert_eq!(limits.is_exhausted(client, start), None);
            limits.take(client, start).unwrap();
        }
        let exhausted = Exhausted {
            until_one: Duration::from_secs(1),
            until_full: Duration::from_secs(60),
        };
        for _ in 0..100 {
            assert_eq!(limits.is_exhausted(client, start), Some(exhausted));
            assert_eq!(limits.take(client, start), Err(exhausted));
        }
        assert_eq!(limits.take(address("192.0.2.2"), start), Ok(()));

        let one_refilled = start + exhausted.until_one;
        assert_eq!(limits.is_exhausted(client, one_refilled), None);
        limits.take(client, one_refilled).unwrap();
        limits.take(client, one_refilled).unwrap_err();
        let refilled = one_refilled + exhausted.until_full;
        assert_eq!(
            (0..100)
                .filter(|_| limits.take(client, refilled).is_ok())
                .count(),
            60
        );
    }

    #[test]
    fn a_flood_of_addresses_is_bounded_and_keeps_active_addresses_limited() {
        let mut limits = limits(1);
        let now = Instant::now();
        let stubborn = address("192.0.2.1");
        limits.take(stubborn, now).unwrap();
        let capacity = u32::try_from(limits::ADDRESSES.get()).unwrap();
        for n in 0..capacity * 2 {
            let network = u128::from(n) << 64;
            limits
                .take(IpAddr::V6(Ipv6Addr::from(0x2001_0db8 << 96 | network)), now)
                .unwrap();
            if n % 1000 == 0 {
                assert!(limits.is_exhausted(stubborn, now).is_some(), "after {n}");
            }
        }
        assert_eq!(limits.buckets.len(), limits::ADDRESSES.get());
        // The first address of the flood is the least recently used one.
        limits.take(address("2001:db8::"), now).unwrap();
        assert_eq!(limits.buckets.len(), limits::ADDRESSES.get());
    }

    #[test]
    fn a_check_adds_no_address() {
        let mut limits = limits(1);
        assert_eq!(
            limits.is_exhausted(address("192.0.2.1"), Instant::now()),
            None
        );
        assert!(limits.buckets.is_empty());
    }

    #[test]
    fn a_client_is_an_ipv4_address_or_an_ipv6_64_bit_network() {
        let key = |text: &str| AddressKey::from(address(text));
        assert_eq!(key("::ffff:192.0.2.1"), key("192.0.2.1"));
        assert_ne!(key("::ffff:192.0.2.1"), key("::ffff:192.0.2.2"));
        assert_ne!(key("192.0.2.1"), key("192.0.2.2"));
        assert_eq!(
            key("2001:db8:1:2::"),
            key("2001:db8:1:2:ffff:ffff:ffff:ffff")
        );
        assert_ne!(key("2001:db8:1:2::"), key("2001:db8:1:3::"));
    }

    proptest! {
        /// Each client has the bucket it would have alone, however they mix.
        #[test]
        fn clients_do_not_see_each_other(
            per_minute in 1u32..20,
            requests in prop::collection::vec((0u8..4, any::<u64>(), 0u64..5_000), 1..200),
        ) {
            let start = Instant::now();
            let mut limits = limits(per_minute);
            let mut alone = vec![Bucket::new(Rate::new(per_minute, per_minute).unwrap(), start); 4];
            let mut now = start;
            for (client, host, gap) in requests {
                now += Duration::from_millis(gap);
                let network = u128::from(client) << 64 | 0x2001_0db8 << 96;
                let address = IpAddr::V6(Ipv6Addr::from(network | u128::from(host)));
                let asked = limits.is_exhausted(address, now);
                let taken = limits.take(address, now);
                prop_assert_eq!(asked, taken.err());
                prop_assert_eq!(
                    taken.map_err(|exhausted| exhausted.until_one),
                    alone[usize::from(client)].take(now)
                );
            }
        }
    }
}
