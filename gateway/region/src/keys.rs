//! The region keys of one node: the one in use, and another one while the key of the region is
//! replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::RegionKey;

/// The keys that a node accepts, shared by all parts of the process. The row of the region in
/// PostgreSQL says which of them is in use; a node without PostgreSQL uses the first.
#[derive(Clone)]
pub struct RegionKeys(Arc<KeyRing>);

struct KeyRing {
    /// `region_key`, then `region_key_next`.
    accepted: Vec<RegionKey>,
    /// Opens objects of the archive that were written before a replacement, and nothing else.
    previous: Option<RegionKey>,
    /// Index of the key in `accepted` that new messages and rows are made with.
    in_use: AtomicUsize,
}

/// Something that is derived from each accepted key.
pub struct DerivedKeys<T> {
    keys: RegionKeys,
    derived: Vec<T>,
}

impl RegionKeys {
    /// The keys of a node. `key` is in use and `next` is accepted as well; `previous` only opens
    /// objects of the archive.
    pub fn new(key: RegionKey, next: Option<RegionKey>, previous: Option<RegionKey>) -> Self {
        let accepted = std::iter::once(key).chain(next).collect();
        Self(Arc::new(KeyRing {
            accepted,
            previous,
            in_use: AtomicUsize::new(0),
        }))
    }

    /// `region_key`, then `region_key_next`.
    pub fn accepted(&self) -> &[RegionKey] {
        &self.0.accepted
    }

    /// `region_key_previous`, if it is configured.
    pub fn previous(&self) -> Option<&RegionKey> {
        self.0.previous.as_ref()
    }

    /// Index of the key that is in use.
    pub fn in_use(&self) -> usize {
        self.0.in_use.load(Ordering::Relaxed)
    }

    /// Uses the accepted key at this index from now on. Returns whether it is another one than
    /// before.
    pub fn switch_to(&self, index: usize) -> bool {
        index < self.0.accepted.len() && self.0.in_use.swap(index, Ordering::Relaxed) != index
    }

    /// Derives something from each accepted key.
    pub fn derive<T>(&self, derive: impl FnMut(&RegionKey) -> T) -> DerivedKeys<T> {
        DerivedKeys {
            keys: self.clone(),
            derived: self.accepted().iter().map(derive).collect(),
        }
    }

    /// As [`Self::derive`]; fails with the first error of `derive`.
    pub fn try_derive<T, E>(
        &self,
        derive: impl FnMut(&RegionKey) -> Result<T, E>,
    ) -> Result<DerivedKeys<T>, E> {
        let derived = self
            .accepted()
            .iter()
            .map(derive)
            .collect::<Result<_, E>>()?;
        Ok(DerivedKeys {
            keys: self.clone(),
            derived,
        })
    }
}

impl From<RegionKey> for RegionKeys {
    fn from(key: RegionKey) -> Self {
        Self::new(key, None, None)
    }
}

impl<T> DerivedKeys<T> {
    /// That of the key in use.
    pub fn in_use(&self) -> &T {
        &self.derived[self.keys.in_use()]
    }

    /// In the order of the accepted keys.
    pub fn all(&self) -> &[T] {
        &self.derived
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_is_seen_by_all_that_was_derived_before() {
        let keys = RegionKeys::new(RegionKey::new([1; 32]), Some(RegionKey::new([2; 32])), None);
        let derived = keys.derive(|key| key.derive_bytes("a").to_vec());
        let of = |byte| RegionKey::new([byte; 32]).derive_bytes("a").to_vec();
        assert_eq!((derived.in_use(), derived.all().len()), (&of(1), 2));
        assert!(!keys.switch_to(0) && keys.clone().switch_to(1) && !keys.switch_to(1));
        assert_eq!(derived.in_use(), &of(2));
        assert!(!keys.switch_to(2), "a key that it does not have");
        assert!(keys.switch_to(0));
        assert_eq!(derived.in_use(), &of(1));
    }
}
