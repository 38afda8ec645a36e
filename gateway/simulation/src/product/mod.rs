//! The product in a simulation: what its programs do when they start, without threads, processes
//! and a store.
//!
//! [`Region`] has the records and the certificates. A [`Gateway`] makes the set-up of each of its
//! workers from them, and an [`AgentPlan`] the state folder and the configuration of an agent. Two
//! gateways of the same region are two processes of one node, one after the other or at the same
//! time, or of two of its [`Nodes`].

pub mod agent;
pub mod certificates;
pub mod control;
pub mod gateway;
pub mod nodes;
pub mod region;
pub mod takeover;

use std::io;

use gw_base::tls::TlsError;
use gw_base::tls::pki::PkiError;
use gw_shared::id::InvalidId;

pub use self::agent::AgentPlan;
pub use self::certificates::Certificates;
pub use self::gateway::{Gateway, GatewayPlan};
pub use self::nodes::{NodeSetup, Nodes};
pub use self::region::{PlannedService, Region, ServicePlan};

/// Reason why a part of the product cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file or socket cannot be used.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A certificate cannot be made.
    #[error(transparent)]
    Certificate(#[from] rcgen::Error),
    /// A certificate of an agent cannot be issued.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The TLS configuration of the gateway cannot be built.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// rustls refuses a configuration of callers.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
    /// A name of the plan is not an id.
    #[error(transparent)]
    Id(#[from] InvalidId),
    /// The state folder of an agent cannot be written.
    #[error(transparent)]
    State(#[from] gw_agent::identity::state::StateError),
    /// The configuration of an agent is refused.
    #[error(transparent)]
    Agent(#[from] gw_agent::config::ConfigError),
    /// The plan contradicts itself.
    #[error("{0}")]
    Plan(String),
}
