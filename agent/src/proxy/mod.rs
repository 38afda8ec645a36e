//! The HTTP proxy between the agent and its gateway: which one, for which hosts, and connections
//! through it (CONNECT, RFC 9110 §9.3.6). Backends are never reached through it.

mod connect;
mod exceptions;
mod settings;

pub use connect::ProxyError;
pub(crate) use settings::ProxySettings;
