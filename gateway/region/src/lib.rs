//! A region of several nodes: which nodes are members, which of them owns a service, and what nodes
//! prove to each other.

#![warn(missing_docs)]

mod announcement;
mod engine;
mod key;
mod keys;
mod membership;
pub mod owners;
mod peering;
#[doc(hidden)]
pub mod random;
mod signals;
#[cfg(test)]
pub mod simulation;
mod status;
pub mod timing;

pub use announcement::{AnnouncementKeys, InvalidAnnouncement, TunnelAnnouncement};
pub use engine::{
    Call, CallResult, Join, NodeRow, NodeState, Replaced, Roster, Statement, is_rejoin,
};
pub use key::{RegionKey, RegionKeyError, derive_bytes};
pub use keys::{DerivedKeys, RegionKeys};
pub use membership::carried::CarriedMembership;
pub use membership::requests::OperatorError;
pub use membership::{
    Membership, MembershipAction, MembershipEvent, NodeConfig, NodeMessage, StopReason,
};
pub use owners::lease::Isolation;
pub use owners::placement::{Member, NodeSlot, Owner, Placement};
pub use owners::view::{ArrivedFrom, Decision, View};
pub use peering::{NextHop, Peering};
pub use signals::RegionSignals;
pub use status::{NodeStatus, RegionStatus, Standing, StateRefusal};
