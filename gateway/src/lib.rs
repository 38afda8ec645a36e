//! The regional gateway: authenticates callers, limits them, relays their requests through the agents' tunnels.
//!
//! A request's way is `accept` → `caller` → `relay` → `auth` → `exchange` → `limit` → `tunnel`, and back.

mod accept;
mod admin;
pub mod auth;
#[doc(hidden)]
pub mod bench_support;
mod caller;
mod certificate;
mod client_address;
pub mod clock;
pub mod config;
mod connections;
pub mod control;
pub mod counters;
pub mod demo;
pub mod doctor;
mod echo;
pub mod error;
mod exchange;
#[doc(hidden)]
pub mod fuzz_support;
mod handshakes;
pub mod hostname;
mod journey;
pub mod limit;
mod limits;
mod listeners;
mod mailbox;
mod memory;
pub mod ownership;
mod pipe;
mod pki;
mod platform;
mod proxy_protocol;
mod relay;
mod relay_memory;
pub mod request_log;
pub mod series;
mod server;
mod socket_memory;
pub mod store;
mod strict_json;
mod takeover;
mod tls;
mod trace;
mod tunnel;
mod worker;

pub use client_address::TrustedProxies;
pub use control::{Control, ControlError};
pub use server::{Gateway, Signals, StartError};
pub use takeover::{Predecessor, Program};
pub use tls::CertificateSource;
