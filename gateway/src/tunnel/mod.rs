//! The gateway's end of the tunnels.

mod control;
pub(crate) mod expected;
pub(crate) mod handshake;
mod openings;
mod outbox;
pub(crate) mod pace;
mod registry;
pub(crate) mod session;

pub(crate) use registry::Registry;
