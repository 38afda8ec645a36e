//! Ownership of services and client addresses: rendezvous hashing (Thaler and Ravishankar, 1998)
//! over the workers.
//!
//! Each member gets an equal share. Adding or removing a member moves only the services of that
//! member. The hash is fixed, so that every process of every version agrees.

/// A worker of a process: the index into its list of workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub usize);

/// The worker out of `workers` (at least one) that owns `name`, for example a hostname.
pub fn owner(name: impl AsRef<[u8]>, workers: usize) -> WorkerId {
    let key = fnv1a(name.as_ref());
    WorkerId(
        (0..workers)
            .max_by_key(|worker| weight(key, *worker as u64 + 1))
            .unwrap_or(0),
    )
}

/// Index of the node, out of the slots of the members, that owns `name`; `None` without members.
/// Independent of [`owner`], so that the services of one node are spread over all its workers.
pub fn owner_node(name: impl AsRef<[u8]>, slots: impl Iterator<Item = u64>) -> Option<usize> {
    const SALT: u64 = 0x6e6f_6465_735f_6777;
    let key = mix(fnv1a(name.as_ref()) ^ SALT);
    slots
        .enumerate()
        .max_by_key(|(_, slot)| (weight(key, slot + 1), *slot))
        .map(|(index, _)| index)
}

/// Weight of a member for the hash of a name: the member with the highest one owns it.
pub fn weight(key: u64, member: u64) -> u64 {
    mix(key ^ mix(member))
}

/// FNV-1a, 64 bits.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The finalizer of SplitMix64: every bit of the input affects every bit of the output.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hostnames() -> impl Iterator<Item = String> {
        (0..10_000).map(|n| format!("acme{n}--api.eu1.example.com"))
    }

    #[test]
    fn shares_are_even() {
        for workers in [1, 2, 3, 8] {
            let mut shares = vec![0usize; workers];
            hostnames().for_each(|name| shares[owner(&name, workers).0] += 1);
            let fair = 10_000 / workers;
            assert!(
                shares.iter().all(|share| share.abs_diff(fair) < fair / 5),
                "{shares:?}"
            );
        }
    }

    #[test]
    fn a_new_worker_moves_only_its_own_share() {
        for name in hostnames() {
            let before = owner(&name, 4);
            let after = owner(&name, 5);
            assert!(after == before || after == WorkerId(4));
        }
    }

    #[test]
    fn the_hash_never_changes() {
        // Nodes of other versions must agree, so these values must never change.
        let owners: Vec<usize> = ["demo--echo.eu1.gw.localhost", "a", ""]
            .iter()
            .map(|name| owner(name, 1000).0)
            .collect();
        assert_eq!(owners, [707, 350, 835]);
    }
}
