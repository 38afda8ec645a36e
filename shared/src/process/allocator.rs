//! The allocator of all programs, and the return of freed memory to the kernel.
#![allow(unsafe_code, reason = "mimalloc's own interface is C")]

use std::alloc::{GlobalAlloc, Layout};

use mimalloc::MiMalloc;

/// Alignment in bytes of each block that is not smaller (`MI_MAX_ALIGN_SIZE` of mimalloc).
const ALIGNED: usize = 16;

/// mimalloc, for `#[global_allocator]`.
///
/// The mimalloc crate asks for an alignment with each allocation. Beyond 1 KiB, mimalloc then
/// reserves a larger block, in which it aligns the memory, and takes several times as long; the
/// task of a request is such an allocation. This type asks for an alignment only if a block would
/// not have it anyway.
#[derive(Debug)]
pub struct Allocator;

fn is_aligned_anyway(layout: Layout) -> bool {
    layout.align() <= ALIGNED && layout.align() <= layout.size()
}

// SAFETY: the functions of mimalloc keep the contract, and their blocks can be passed to each
// other.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_aligned_anyway(layout) {
            // SAFETY: any size may be passed.
            return unsafe { libmimalloc_sys::mi_malloc(layout.size()) }.cast();
        }
        // SAFETY: the contract of the caller.
        unsafe { MiMalloc.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_aligned_anyway(layout) {
            // SAFETY: any size may be passed.
            return unsafe { libmimalloc_sys::mi_zalloc(layout.size()) }.cast();
        }
        // SAFETY: the contract of the caller.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the contract of the caller.
        unsafe { MiMalloc.dealloc(block, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if layout.align() <= ALIGNED && layout.align() <= size {
            // SAFETY: the block is one of mimalloc, by the contract of the caller.
            return unsafe { libmimalloc_sys::mi_realloc(block.cast(), size) }.cast();
        }
        // SAFETY: the contract of the caller.
        unsafe { MiMalloc.realloc(block, layout, size) }
    }
}

/// Returns memory that was freed some time ago to the kernel.
///
/// mimalloc checks for such memory only during allocations, so an idle process would keep the
/// memory of its busiest time. Cheap if there is nothing to return. No effect under another
/// allocator.
pub fn give_back() {
    // SAFETY: takes no pointers and may be called on any thread at any time; `false` leaves memory
    // in use alone.
    unsafe { libmimalloc_sys::mi_collect(false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_alignment_and_keep_their_content() {
        let sizes = [
            1,
            7,
            8,
            15,
            16,
            24,
            100,
            1024,
            1025,
            3000,
            5000,
            70_000,
            1 << 20,
        ];
        for (size, align) in sizes
            .into_iter()
            .flat_map(|size| [1, 2, 8, 16, 32, 128, 4096].map(|align| (size, align)))
        {
            let layout = Layout::from_size_align(size, align).unwrap();
            let larger = Layout::from_size_align(size * 3, align).unwrap();
            // SAFETY: the sizes are not zero, and each block is used within its size and freed
            // once.
            unsafe {
                let zeroed = Allocator.alloc_zeroed(layout);
                assert!((0..size).all(|at| *zeroed.add(at) == 0));
                let block = Allocator.alloc(layout);
                block.write_bytes(7, size);
                let grown = Allocator.realloc(block, layout, size * 3);
                assert!((0..size).all(|at| *grown.add(at) == 7));
                for block in [zeroed, grown] {
                    assert!(block.addr().is_multiple_of(align), "{layout:?}");
                }
                Allocator.dealloc(zeroed, layout);
                Allocator.dealloc(grown, larger);
            }
        }
    }

    #[test]
    fn calling_it_under_another_allocator_is_harmless() {
        let allocated = vec![1_u8; 1 << 20];
        give_back();
        assert_eq!(
            allocated.iter().map(|byte| u64::from(*byte)).sum::<u64>(),
            1 << 20
        );
    }
}
