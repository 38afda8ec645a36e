//! The simulated kernel as a program sees it.

#![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

mod hosts;
mod sockets;
mod support;
