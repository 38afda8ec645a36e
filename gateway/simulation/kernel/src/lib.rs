//! The kernel of a simulation: clock, random numbers, sockets, network and scheduler, in memory and
//! on one thread.
//!
//! The product runs unchanged. The functions of libc that it calls are [replaced](syscalls) for
//! threads that run a simulation; other threads, and files on every thread, reach the real kernel.
//! All that happens follows from one seed: the order of ready tasks, the time that they take, the
//! delays and the sizes of what the network delivers.
//!
//! A host is a thread or a process of the product, or a peer of it. All hosts run as tasks of one
//! thread, see [`scheduler`]. A host can be killed, frozen and cut off.

pub mod clock;
mod entropy;
mod events;
pub mod network;
pub mod random;
pub mod scheduler;
pub mod sockets;
pub mod syscalls;
pub mod trace;

pub use scheduler::{Ended, Host, simulate};
