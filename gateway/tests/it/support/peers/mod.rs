//! Callers, backends and other peers of the programs under test.

pub(crate) mod backend;
pub(crate) mod caller;
pub(crate) mod empty_dns;
pub(crate) mod gate;
pub(crate) mod held_backend;
pub(crate) mod http1_peer;
pub(crate) mod http2_backend;
pub(crate) mod http2_caller;
pub(crate) mod http2_frames;
pub(crate) mod node_peer;
pub(crate) mod proxy_protocol;
pub(crate) mod resuming_caller;
pub(crate) mod tinyproxy;

use super::SOON;
