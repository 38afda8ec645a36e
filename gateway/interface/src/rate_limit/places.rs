//! A bounded number of places, such as those of handshakes. When none is free, the holder of an older one gives way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::AddressKey;

/// The client that takes a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claimant {
    /// A client address, which has at most its share of the places.
    Address(AddressKey),
    /// A client without a share, such as a trusted proxy, which brings many clients.
    Unshared,
    /// A client whose places are the last to be taken away: it has authenticated, or has the address of a node.
    Known,
}

/// Places with their holders `H`, in the order in which they were taken.
pub struct Places<H> {
    limit: usize,
    per_address: usize,
    taken: BTreeMap<u64, (Claimant, H)>,
    next: u64,
}

impl<H> Places<H> {
    /// `limit` places, of which each address has at most `per_address`.
    pub fn new(limit: usize, per_address: usize) -> Self {
        Self {
            limit,
            per_address,
            taken: BTreeMap::new(),
            next: 0,
        }
    }

    /// Takes a place. Returns its number, and the holder that has to give way.
    pub fn take(&mut self, claimant: Claimant, holder: H) -> (u64, Option<H>) {
        let displaced = self
            .displaced(claimant)
            .and_then(|number| self.taken.remove(&number));
        let number = self.next;
        self.next += 1;
        self.taken.insert(number, (claimant, holder));
        (number, displaced.map(|(_, holder)| holder))
    }

    /// Frees a place, unless another claimant has it by now.
    pub fn free(&mut self, number: u64) {
        self.taken.remove(&number);
    }

    /// Lets a place be among the last to be taken away.
    pub fn keep(&mut self, number: u64) {
        if let Some((claimant, _)) = self.taken.get_mut(&number) {
            *claimant = Claimant::Known;
        }
    }

    /// The holders, the oldest place first.
    pub fn holders(&self) -> impl Iterator<Item = &H> {
        self.taken.values().map(|(_, holder)| holder)
    }

    /// The place that is taken away for a further one of this claimant: the oldest of an address that has its share, or the
    /// oldest of all.
    fn displaced(&self, claimant: Claimant) -> Option<u64> {
        // With fewer of all, an address cannot have its share.
        if matches!(claimant, Claimant::Address(_)) && self.taken.len() >= self.per_address {
            let mut of_address = self
                .taken
                .iter()
                .filter(|(_, (other, _))| *other == claimant);
            let oldest = of_address.next().map(|(number, _)| *number);
            if of_address.count() + 1 >= self.per_address && oldest.is_some() {
                return oldest;
            }
        }
        if self.taken.len() < self.limit {
            return None;
        }
        let of_others = self
            .taken
            .iter()
            .find(|(_, (other, _))| *other != Claimant::Known);
        of_others
            .or_else(|| self.taken.first_key_value())
            .map(|(number, _)| *number)
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
