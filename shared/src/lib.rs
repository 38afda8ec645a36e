//! What the gateway and the agent have in common: the reactor, sockets and TLS, the HTTP/1.1 codec, and the
//! tunnel protocol between the two. Nothing here knows about tenants.

pub mod allocator;
pub mod command;
pub mod config;
pub mod doctor;
pub mod error_body;
pub mod error_code;
pub mod files;
pub mod http;
pub mod id;
pub mod identity;
pub mod net;
pub mod runtime;
pub mod telemetry;
pub mod tunnel;
pub mod version;
