//! The one thing that the allocator has to be told.
#![allow(unsafe_code, reason = "mimalloc's own interface is C")]

/// Returns memory to the kernel that was freed a while ago. mimalloc looks what is due only when somebody allocates:
/// without this, a process that has nothing to do any more keeps what it held at its busiest.
///
/// Cheap where nothing is due. Does nothing where mimalloc is not the allocator.
pub fn give_back() {
    // SAFETY: takes no pointers, may be called on any thread at any time; `false`: nothing that is in use is looked at.
    unsafe { libmimalloc_sys::mi_collect(false) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn can_be_called_whoever_allocates() {
        let held = vec![1_u8; 1 << 20];
        super::give_back();
        assert_eq!(held.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 1 << 20);
    }
}
