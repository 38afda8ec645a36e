//! What the kernel supports.

/// The simulated kernel behaves as io_uring does.
pub fn detect_uring() -> bool {
    true
}

/// Whether the reactor runs on epoll.
pub fn is_legacy() -> bool {
    false
}
