//! This process: its memory, core dumps and signals.

pub mod allocator;
pub mod core_dump;
pub mod signal;
