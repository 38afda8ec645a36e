//! The agent: keeps one tunnel per service to the gateway of its region and forwards the requests
//! that arrive on it to the service's backends.
//!
//! Types that gateway and agent have for the same purpose have one name in both: `Arguments`,
//! `Command`, `Config`, `RequestScope`, `Session` (an open tunnel), `StartError` and `Tracing`.
//!
//! A request takes the path `tunnel` → `forward` → `backend`. The modules are layers: a module
//! imports only from modules that come later in this list.
//!
//! ```text
//! main            the program: arguments, command, exit code
//! cli             command-line arguments
//! support         entry points of benchmarks and the simulation, behind features
//! doctor          checks whether the agent can serve
//! process         the program's processes: a supervisor, and the worker that serves
//! lifecycle       life cycle of an agent: starts and stops services, drains, gives way to a
//!                 successor
//! update          downloads the program that the gateway offers
//! admin           endpoints for metrics and health
//! tunnel          one tunnel per service: dial, session, control messages, reconnects
//! config          configuration file, options, environment
//! forward         a request from its tunnel stream to a backend, and the response back
//! backend         connections to backends: pool, load balancing, HTTP/1.1, HTTP/2
//! telemetry       counters, request scope, trace spans
//! program         offered and stored agent programs
//! identity        enrollment, private key and certificate, state folder, renewal
//! apex_client     enrollment and certificate requests to the gateway
//! clock           the gateway's clock
//! services        services that the gateway assigns to the agent
//! succession      messages between the agent's thread and its process
//! backoff         exponential backoff
//! tls             TLS client configurations
//! proxy           the HTTP proxy between agent and gateway
//! ```

#![recursion_limit = "256"]

mod admin;
mod apex_client;

mod backend;
mod backoff;
mod clock;
pub mod config;
pub mod doctor;
#[cfg(test)]
mod fake_gateway;
mod forward;
pub mod identity;
#[cfg(test)]
#[path = "../../shared/tests/later_member/mod.rs"]
mod later_member;
mod lifecycle;
pub mod process;
mod program;
mod proxy;
mod services;
mod succession;
#[doc(hidden)]
pub mod support;
mod telemetry;
#[cfg(test)]
mod testing;
mod tls;
mod tunnel;
mod update;

pub use apex_client::error::{ErrorReply, GatewayError};
pub use config::Config;
pub use forward::slots::VARIABLE as SLOTS_VARIABLE;
pub use lifecycle::{AgentHandle, StartError, start};
pub use proxy::ProxyError;
pub use tunnel::RelayedService;
