//! The regional gateway: authenticates callers, limits them, relays their requests through the agents' tunnels.
//!
//! The path of a request: `ingress` → `downstream` → `relay` → `auth` → `upstream` → `rate_limit` → `tunnel`, and back.

mod admin;
pub mod admin_client;
pub mod affinity;
pub mod agent_releases;
mod apex;
pub mod auth;
pub mod background;
pub mod backup;
pub mod caller_session;
mod client_address;
pub mod clock;
mod cluster;
pub mod config;
mod connections;
pub mod control;
mod control_plane;
mod current;
#[cfg(any(test, feature = "demo"))]
pub mod demo;
mod downstream;
pub mod error;
pub mod file_owner;
mod freeze;
pub mod hostname;
mod http1;
mod http2;
mod http_message;
mod http_server;
mod ingress;
mod lifecycle;
mod limits;
mod mailbox;
mod members;
mod memory;
mod memory_limit;
mod node_connections;
pub mod ownership;
pub mod page;
mod peer;
mod pipe;
pub mod principal;
pub mod process;
pub mod rate;
pub mod rate_limit;
pub mod region;
mod relay;
mod replay;
mod request_scope;
mod route;
pub mod service_settings;
mod sqlite_file;
pub mod store;
mod strict_json;
#[doc(hidden)]
pub mod support;
pub mod telemetry;
mod tls;
mod tunnel;
mod upstream;
mod worker;
mod workers;

pub use client_address::TrustedProxies;
pub use control::{Control, ControlError};
pub use process::gateway::{Gateway, StartError};
pub use process::signals::{RunError, Signals};
pub use process::takeover::{Predecessor, Program};
pub use tls::{CertificateFiles, CertificateSource};
