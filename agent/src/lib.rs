//! The agent: keeps one tunnel per service to the regional gateway and forwards its requests to a backend nobody else
//! can reach.

#![recursion_limit = "256"]

mod apex_client;
mod backend;
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
mod tunnel;

pub use apex_client::connection::{GatewayError, Refusal};
pub use config::Config;
pub use forward::slots::VARIABLE as SLOTS_VARIABLE;
pub use supervisor::{AgentHandle, StartError, start};
