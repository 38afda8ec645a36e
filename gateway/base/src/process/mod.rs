//! This process: its tasks and threads, its memory and disk, freezes, and work with the rights of
//! another user.

pub mod background;
pub mod disk;
pub mod file_owner;
pub mod freeze;
pub mod memory_limit;
pub mod reserve;
