//! The agent's end of the tunnels.

pub(crate) mod dial;
pub(crate) mod reconnect;
pub(crate) mod service;
pub(crate) mod session;
