//! The agent: keeps one tunnel per service to the gateway of its region and forwards the requests that arrive on it to
//! the service's backends.
//!
//! A request takes the path `tunnel` → `forward` → `backend`. The modules are layers: a module imports only from modules
//! that come later in this list.
//!
//! ```text
//! main cli doctor supervisor admin tunnel config forward backend telemetry identity apex_client
//! clock gateway_events backoff tls
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
mod gateway_events;
pub mod identity;
mod supervisor;
mod telemetry;
mod tls;
mod tunnel;

pub use apex_client::error::{GatewayError, Refusal};
pub use config::Config;
pub use forward::slots::VARIABLE as SLOTS_VARIABLE;
pub use supervisor::{AgentHandle, StartError, start};
