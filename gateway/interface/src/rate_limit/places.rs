//! A bounded number of places, such as those of handshakes. When none is free, the holder of an
//! older one gives way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::{AddressKey, AddressSlot};

/// The client that takes a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claimant {
    /// A client address, which has at most its share of the places.
    Address(AddressKey),
    /// A client without a share, such as a trusted proxy, which brings many clients.
    Unshared,
    /// A client whose places are the last to be taken away: it has authenticated, or has the
    /// address of a node.
    Known,
}

impl Claimant {
    /// The client of a connection that is counted with `slot`.
    pub fn counted(slot: Option<&AddressSlot>) -> Self {
        slot.map_or(Self::Unshared, |slot| Self::Address(slot.address()))
    }
}

/// Places with their holders `H`. Each operation takes logarithmic time.
pub struct Places<H> {
    limit: usize,
    per_address: usize,
    /// By whether the client is known, then by age: the first gives way first.
    taken: BTreeMap<(bool, u64), (Claimant, H)>,
    /// Numbers of the places of each address.
    of_addresses: HashMap<AddressKey, BTreeSet<u64>>,
    next: u64,
}

impl<H> Places<H> {
    /// `limit` places, of which each address has at most `per_address`.
    pub fn new(limit: usize, per_address: usize) -> Self {
        Self {
            limit,
            per_address,
            taken: BTreeMap::new(),
            of_addresses: HashMap::new(),
            next: 0,
        }
    }

    /// Takes a place. Returns its number, and the holder that has to give way.
    pub fn take(&mut self, claimant: Claimant, holder: H) -> (u64, Option<H>) {
        let displaced = self.displaced(claimant).and_then(|key| self.remove(key));
        let number = self.next;
        self.next += 1;
        if let Claimant::Address(address) = claimant {
            self.of_addresses.entry(address).or_default().insert(number);
        }
        let key = (claimant == Claimant::Known, number);
        self.taken.insert(key, (claimant, holder));
        (number, displaced.map(|(_, holder)| holder))
    }

    /// Frees a place, unless another claimant has it by now.
    pub fn free(&mut self, number: u64) {
        if self.remove((false, number)).is_none() {
            self.remove((true, number));
        }
    }

    /// Lets a place be among the last to be taken away.
    pub fn keep(&mut self, number: u64) {
        if let Some((_, holder)) = self.remove((false, number)) {
            self.taken.insert((true, number), (Claimant::Known, holder));
        }
    }

    /// The holders, the first to give way first.
    pub fn holders(&self) -> impl Iterator<Item = &H> {
        self.taken.values().map(|(_, holder)| holder)
    }

    fn remove(&mut self, key: (bool, u64)) -> Option<(Claimant, H)> {
        let removed = self.taken.remove(&key)?;
        if let Claimant::Address(address) = removed.0
            && let Some(numbers) = self.of_addresses.get_mut(&address)
            && numbers.remove(&key.1)
            && numbers.is_empty()
        {
            self.of_addresses.remove(&address);
        }
        Some(removed)
    }

    /// The place that gives way to a further one of this claimant: the oldest of an address with
    /// its share, or the first of all.
    fn displaced(&self, claimant: Claimant) -> Option<(bool, u64)> {
        if let Claimant::Address(address) = claimant
            && let Some(numbers) = self.of_addresses.get(&address)
            && numbers.len() >= self.per_address
        {
            return numbers.first().map(|number| (false, *number));
        }
        let is_full = self.taken.len() >= self.limit;
        self.taken.keys().next().copied().filter(|_| is_full)
    }
}

/// Places of tasks on any thread.
#[derive(Clone)]
pub struct TaskPlaces(Arc<Mutex<Places<Arc<Notify>>>>);

/// The place of a task. Dropping it frees the place.
pub struct TaskPlace {
    places: TaskPlaces,
    number: u64,
    lost: Arc<Notify>,
}

impl TaskPlaces {
    /// As [`Places::new`].
    pub fn new(limit: usize, per_address: usize) -> Self {
        Self(Arc::new(Mutex::new(Places::new(limit, per_address))))
    }

    /// Takes a place, and has the task end that has to give way.
    pub fn take(&self, claimant: Claimant) -> TaskPlace {
        let lost = Arc::new(Notify::new());
        let (number, older) = self.lock().take(claimant, Arc::clone(&lost));
        if let Some(older) = older {
            older.notify_one();
        }
        TaskPlace {
            places: self.clone(),
            number,
            lost,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Places<Arc<Notify>>> {
        // Consistent even after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TaskPlace {
    /// Resolves when the task has to give way.
    pub async fn lost(&self) {
        self.lost.notified().await;
    }

    /// Makes the place one of a known client.
    pub fn keep(&self) {
        self.places.lock().keep(self.number);
    }
}

impl Drop for TaskPlace {
    fn drop(&mut self) {
        self.places.lock().free(self.number);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(last: u8) -> Claimant {
        Claimant::Address(std::net::IpAddr::from([192, 0, 2, last]).into())
    }

    #[test]
    fn the_oldest_of_an_address_with_its_share_gives_way_or_the_oldest_of_all() {
        let mut places = Places::new(4, 2);
        let mut take = |claimant, holder| places.take(claimant, holder);
        assert_eq!(take(address(1), "a"), (0, None));
        assert_eq!(take(Claimant::Unshared, "b"), (1, None));
        assert_eq!(take(Claimant::Unshared, "c"), (2, None));
        assert_eq!(take(address(1), "d"), (3, None));
        assert_eq!(take(address(1), "e"), (4, Some("a")));
        assert_eq!(take(Claimant::Unshared, "f"), (5, Some("b")));
        places.free(1);
        places.free(4);
        assert!(places.holders().eq(&["c", "d", "f"]));
        assert_eq!(places.take(address(2), "g"), (6, None));
    }

    /// The number of the place that gives way, found by a look at all places.
    fn displaced(places: &[(u64, Claimant)], claimant: Claimant) -> Option<u64> {
        let of_address = places.iter().filter(|(_, other)| *other == claimant);
        if matches!(claimant, Claimant::Address(_)) && of_address.clone().count() >= SHARE {
            return of_address.map(|(number, _)| *number).next();
        }
        let of_others = places.iter().find(|(_, it)| *it != Claimant::Known);
        let oldest = of_others.or(places.first());
        oldest
            .map(|(number, _)| *number)
            .filter(|_| places.len() >= LIMIT)
    }

    const LIMIT: usize = 12;
    const SHARE: usize = 3;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Take(Claimant),
        Free(u64),
        Keep(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let claimant = prop_oneof![
            4 => (0..6u8).prop_map(address),
            1 => Just(Claimant::Unshared),
            1 => Just(Claimant::Known),
        ];
        prop_oneof![
            6 => claimant.prop_map(Step::Take),
            1 => (0..100u64).prop_map(Step::Free),
            1 => (0..100u64).prop_map(Step::Keep),
        ]
    }

    proptest! {
        #[test]
        fn the_same_places_give_way_as_after_a_look_at_all(
            steps in prop::collection::vec(step(), 1..200),
        ) {
            let mut places = Places::new(LIMIT, SHARE);
            let mut all: Vec<(u64, Claimant)> = Vec::new();
            let mut next = 0;
            for step in steps {
                match step {
                    Step::Take(claimant) => {
                        let expected = displaced(&all, claimant);
                        prop_assert_eq!(places.take(claimant, next), (next, expected));
                        all.retain(|(number, _)| Some(*number) != expected);
                        all.push((next, claimant));
                        next += 1;
                    }
                    Step::Free(number) => {
                        places.free(number);
                        all.retain(|(other, _)| *other != number);
                    }
                    Step::Keep(number) => {
                        places.keep(number);
                        let kept = all.iter_mut().find(|(other, _)| *other == number);
                        kept.into_iter().for_each(|(_, it)| *it = Claimant::Known);
                    }
                }
                let mut held: Vec<u64> = places.holders().copied().collect();
                held.sort_unstable();
                prop_assert!(held.iter().eq(all.iter().map(|(number, _)| number)));
                let counted: usize = places.of_addresses.values().map(BTreeSet::len).sum();
                let addresses = all.iter().filter(|(_, it)| matches!(it, Claimant::Address(_)));
                prop_assert_eq!(counted, addresses.count());
                prop_assert!(places.of_addresses.values().all(|it| !it.is_empty()));
            }
        }
    }

    #[test]
    fn known_clients_give_way_last() {
        let mut places = Places::new(3, 2);
        for (number, claimant) in [Claimant::Known, address(1), Claimant::Known]
            .into_iter()
            .enumerate()
        {
            places.take(claimant, number);
        }
        assert_eq!(places.take(address(2), 3).1, Some(1));
        assert_eq!(places.take(Claimant::Known, 4).1, Some(3));
        assert_eq!(places.take(Claimant::Known, 5).1, Some(0));
        let (kept, _) = places.take(address(3), 6);
        places.keep(kept);
        let (_, displaced) = places.take(address(3), 7);
        assert_eq!(displaced, Some(4), "all are known");
    }
}
