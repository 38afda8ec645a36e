//! Random numbers of AWS-LC, from which rustls and the product draw: also the pauses of agents.
//!
//! AWS-LC has a generator for each thread. It seeds that from the jitter of the CPU and from its
//! instructions for random numbers, so that no function of libc decides them. Its own tests replace
//! the source of these seeds; so does this module. The generators of the standard library and of
//! `rand` read getrandom(2).
#![allow(
    unsafe_code,
    reason = "AWS-LC takes the source of its seeds as a table of C functions"
)]

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Once;

// Links the library with the symbol below.
use aws_lc_sys as _;

use crate::syscalls::getrandom;

/// Bytes of a seed: `CTR_DRBG_ENTROPY_LEN`.
const SEED_BYTES: usize = 48;

/// `struct entropy_source_methods` of `aws-lc/crypto/fipsmodule/rand/entropy/internal.h`. The first
/// argument of each is a `struct entropy_source_t`, which is not used here.
#[repr(C)]
struct EntropySourceMethods {
    initialize: extern "C" fn(*mut c_void) -> c_int,
    zeroize_thread: extern "C" fn(*mut c_void),
    free_thread: extern "C" fn(*mut c_void),
    get_seed: extern "C" fn(*const c_void, *mut u8) -> c_int,
    get_extra_entropy: Option<extern "C" fn(*const c_void, *mut u8) -> c_int>,
    get_prediction_resistance: Option<extern "C" fn(*const c_void, *mut u8) -> c_int>,
    id: c_int,
}

static METHODS: EntropySourceMethods = EntropySourceMethods {
    initialize: succeed,
    zeroize_thread: ignore,
    free_thread: ignore,
    get_seed,
    get_extra_entropy: None,
    get_prediction_resistance: None,
    id: 0,
};

unsafe extern "C" {
    // The name has the version of aws-lc-sys, which Cargo.toml pins.
    #[link_name = "aws_lc_0_47_0_override_entropy_source_method_FOR_TESTING"]
    fn override_entropy_source_method(methods: *const EntropySourceMethods);
}

/// Lets the generators of AWS-LC seed themselves by getrandom(2), on threads that draw their first
/// number after this.
pub(crate) fn read_by_getrandom() {
    static REPLACED: Once = Once::new();
    // SAFETY: the table is static, and has the layout of the version in the symbol's name.
    REPLACED.call_once(|| unsafe { override_entropy_source_method(ptr::from_ref(&METHODS)) });
}

extern "C" fn succeed(_: *mut c_void) -> c_int {
    1
}

extern "C" fn ignore(_: *mut c_void) {}

extern "C" fn get_seed(_: *const c_void, seed: *mut u8) -> c_int {
    // SAFETY: AWS-LC passes an array of this length.
    let read = unsafe { getrandom(seed.cast(), SEED_BYTES, 0) };
    c_int::from(usize::try_from(read) == Ok(SEED_BYTES))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crate::{Ended, simulate};

    /// What a simulation of this seed draws.
    fn drawn(seed: u64) -> [u8; 64] {
        let simulation = move || {
            simulate(seed, false, async || {
                let mut bytes = [0; 64];
                aws_lc_rs::rand::fill(&mut bytes).unwrap();
                bytes
            })
        };
        match thread::spawn(simulation).join().unwrap() {
            Ended::Completed(bytes) => bytes,
            _ => panic!("the simulation did not end"),
        }
    }

    #[test]
    fn the_seed_of_a_simulation_decides_the_numbers_of_aws_lc() {
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
    }
}
