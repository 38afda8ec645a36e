//! A region of several nodes: which nodes are members, and which of them owns a service.

mod engine;
mod lease;
mod membership;
mod observer;
mod placement;
mod requests;
#[cfg(test)]
mod simulation;
mod status;
mod succession;
pub mod timing;
mod view;

pub use engine::{Call, CallResult, Join, NodeRow, NodeState, Replaced, Roster, Statement};
pub use lease::Isolation;
pub use membership::{Action, Event, Membership, NodeConfig, PeerState, StopReason};
pub use placement::{Member, NodeSlot, Owner, Placement};
pub use requests::OperatorError;
pub use status::{NodeStatus, RegionStatus, Standing};
pub use view::{Arrival, Attempts, Decision, Retry, View};
