//! Code that the gateway and the agent share: the reactor, sockets and TLS, the HTTP/1.1 codec, the
//! tunnel protocol between the two programs, and telemetry. It does not know about tenants.
//!
//! A module imports only from modules below it in this list:
//!
//! - [`doctor`]: checks of the machine and of a configuration
//! - [`telemetry`]: logs, metrics, traces, masking of secrets
//! - [`tunnel`]: the tunnel protocol
//! - [`identity`]: messages of an enrollment, secrets
//! - [`net`]: sockets, listeners, TLS, name resolution
//! - [`http`]: heads, bodies and fields of HTTP messages, without I/O
//! - [`runtime`]: the reactor and its tasks
//! - [`process`]: core dumps, signals and memory of the process
//! - [`config`]: configuration files
//! - [`command`]: outcome of a command
//! - [`error_body`], [`error_code`]: error responses
//! - [`text`]: text from outside, made safe for terminals and logs
//! - [`files`], [`version`], [`id`], [`clock`]

pub mod clock;
pub mod command;
pub mod config;
pub mod doctor;
pub mod error_body;
pub mod error_code;
pub mod files;
pub mod http;
pub mod http2;
pub mod id;
pub mod identity;
pub mod net;
pub mod process;
pub mod runtime;
pub mod telemetry;
#[cfg(test)]
mod testing;
pub mod text;
pub mod tunnel;
pub mod version;
