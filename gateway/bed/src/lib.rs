//! Callers, backends and agents for tests and tools: what they send, how they read answers, and
//! what they check. Without I/O, but for the drivers in [`memory`], [`threads`] and [`dns`].

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a peer of a test fails by panicking"
)]

pub mod agent;
pub mod body;
pub mod dns;
pub mod http1;
pub mod http2;
pub mod memory;
pub mod threads;
pub mod tls;
pub mod tunnel;
