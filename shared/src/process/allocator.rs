//! Return of freed memory to the kernel.
#![allow(unsafe_code, reason = "mimalloc's own interface is C")]

/// Returns memory that was freed some time ago to the kernel.
///
/// mimalloc checks for such memory only during allocations, so an idle process would keep the memory of its busiest
/// time. Cheap if there is nothing to return. No effect under another allocator.
pub fn give_back() {
    // SAFETY: takes no pointers and may be called on any thread at any time; `false` leaves memory in use alone.
    unsafe { libmimalloc_sys::mi_collect(false) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn calling_it_under_another_allocator_is_harmless() {
        let allocated = vec![1_u8; 1 << 20];
        super::give_back();
        assert_eq!(
            allocated.iter().map(|byte| u64::from(*byte)).sum::<u64>(),
            1 << 20
        );
    }
}
