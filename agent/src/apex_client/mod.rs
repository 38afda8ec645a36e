//! Connections to the gateway, and the requests to its apex.

pub(crate) mod apex;
pub(crate) mod connection;
