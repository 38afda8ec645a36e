//! The agent: keeps one tunnel per service to the regional gateway and forwards its requests to a backend nobody else
//! can reach.

#![recursion_limit = "256"]

mod agent;
mod backend;
pub mod config;
mod dial;
mod forward;
mod reconnect;
mod session;
mod slots;
pub mod state;

pub use agent::{AgentHandle, StartError, start};
pub use config::Config;
