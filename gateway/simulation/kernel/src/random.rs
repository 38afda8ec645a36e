//! Random numbers from the seed of the simulation.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use fastrand::Rng;

thread_local! {
    /// Decides what the kernel and the network do.
    static CHOICES: RefCell<Rng> = const { RefCell::new(Rng::with_seed(0)) };
    /// What the product reads with getrandom(2). Separate, so that reading more of it changes no
    /// choice.
    static ENTROPY: RefCell<Rng> = const { RefCell::new(Rng::with_seed(0)) };
}

pub(crate) fn start(seed: u64) {
    CHOICES.set(Rng::with_seed(seed));
    ENTROPY.set(Rng::with_seed(!seed));
}

/// A number in `range`.
pub fn between(range: RangeInclusive<u64>) -> u64 {
    CHOICES.with_borrow_mut(|rng| rng.u64(range))
}

/// An index below `length`, which is not 0.
pub fn below(length: usize) -> usize {
    CHOICES.with_borrow_mut(|rng| rng.usize(0..length))
}

/// True in `share` of 1000 cases.
pub fn per_mille(share: u64) -> bool {
    share > 0 && between(0..=999) < share
}

/// Fills `buffer` as getrandom(2).
pub(crate) fn fill(buffer: &mut [u8]) {
    ENTROPY.with_borrow_mut(|rng| rng.fill(buffer));
}
