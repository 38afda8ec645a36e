//! The agent: keeps one tunnel per service to the regional gateway and forwards its requests to a backend nobody else
//! can reach.

#![recursion_limit = "256"]

mod agent;
mod backend;
mod clock;
pub mod config;
mod desk;
mod dial;
pub mod doctor;
pub mod enroll;
#[cfg(test)]
mod fake_gateway;
mod forward;
mod gateway;
mod identity;
mod issuance;
mod observe;
mod passage;
mod platform;
mod reconnect;
mod recovery;
mod renewal;
mod service;
mod session;
mod slots;
pub mod state;
mod trace;
mod upgrade;

pub use agent::{AgentHandle, StartError, start};
pub use config::Config;
pub use gateway::{GatewayError, Refusal};
pub use slots::VARIABLE as SLOTS_VARIABLE;
