//! The gateway's end of the tunnels.

mod control;
pub(crate) mod flow_control;
pub(crate) mod grace;
pub(crate) mod handshake;
mod openings;
mod outbox;
mod registry;
pub(crate) mod session;

pub(crate) use registry::Registry;
