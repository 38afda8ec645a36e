//! Everything that runs on a core.
//!
//! The path of a request: `ingress` → `downstream` → `relay` → `gw_interface::auth` → `upstream` →
//! `gw_interface::rate_limit` → `tunnel`, and back.

#![warn(missing_docs)]

pub mod apex;
mod caller_session;
mod connections;
mod current;
mod downstream;
mod http1;
mod http2;
mod http_message;
pub mod ingress;
mod lifecycle;
pub mod limits;
pub mod memory;
mod peer;
mod pipe;
pub mod relay;
mod request_scope;
mod route;
#[doc(hidden)]
pub mod support;
pub mod tunnel;
mod upstream;
pub mod worker;
