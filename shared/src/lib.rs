//! What the gateway and the agent have in common: the reactor, sockets and TLS, the HTTP/1.1 codec, and the
//! tunnel protocol between the two. Nothing here knows about tenants.

pub mod allocator;
pub mod doctor;
pub mod enrollment;
pub mod error_body;
pub mod files;
pub mod http;
pub mod id;
pub mod logging;
pub mod mask;
pub mod metrics;
pub mod net;
pub mod runtime;
pub mod secret;
pub mod trace;
pub mod tunnel;
pub mod version;
