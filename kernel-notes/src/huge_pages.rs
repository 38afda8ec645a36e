//! Duration of the first touch of new memory, with pages of 4 KiB and of 2 MiB.
#![allow(unsafe_code, reason = "mmap, madvise and raw pointers are unsafe")]

use std::ptr;
use std::time::Instant;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::measure::{self, MEASURED_CORE, micros, pin};

const BLOCK: usize = 2 * 1024 * 1024;
const BLOCKS: usize = 64;
const SMALL_PAGE: usize = 4096;

pub(crate) fn probe() {
    measure::print_machine();
    pin(MEASURED_CORE);
    println!(
        "{BLOCKS} new blocks of 2 MiB: time until the first byte, and one in every 4 KiB, is \
         written, µs: median (least–most)"
    );
    for (pages, advice) in [
        ("4 KiB", Advice::LinuxNoHugepage),
        ("2 MiB", Advice::LinuxHugepage),
    ] {
        let (first, all) = touch(advice);
        println!(
            "  pages of {pages}: first byte {}, all {}",
            measure::spread(&first),
            measure::spread(&all)
        );
    }
}

/// Microseconds until the first byte of each block is written, and until one byte in every 4 KiB
/// is.
fn touch(advice: Advice) -> (Vec<f64>, Vec<f64>) {
    let length = (BLOCKS + 1) * BLOCK;
    // SAFETY: creates a new mapping at an address that the kernel chooses.
    let mapping = unsafe {
        mmap_anonymous(
            ptr::null_mut(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let mapping = mapping.unwrap();
    // SAFETY: the mapping above, which has not been used.
    unsafe { madvise(mapping, length, advice) }.unwrap();
    let aligned = mapping
        .cast::<u8>()
        .wrapping_add(mapping.addr().next_multiple_of(BLOCK) - mapping.addr());
    // SAFETY: at most `BLOCKS * BLOCK` bytes after the first aligned address, within the mapping,
    // which is one block longer.
    let write = |offset: usize| unsafe { aligned.add(offset).write_volatile(1) };
    let mut first = Vec::new();
    let mut all = Vec::new();
    for block in (0..BLOCKS).map(|block| block * BLOCK) {
        let began = Instant::now();
        write(block);
        first.push(micros(began.elapsed()));
        (block..block + BLOCK).step_by(SMALL_PAGE).for_each(write);
        all.push(micros(began.elapsed()));
    }
    // SAFETY: the mapping above, to which no references are left.
    unsafe { munmap(mapping, length) }.unwrap();
    (first, all)
}
