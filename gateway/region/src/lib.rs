//! A region of several nodes: which nodes are members, which of them owns a service, and what nodes prove to each other.

#![warn(missing_docs)]

mod announcement;
mod carried;
mod engine;
mod key;
mod keys;
mod lease;
mod membership;
mod observer;
pub mod ownership;
mod peering;
mod placement;
#[doc(hidden)]
pub mod random;
mod requests;
mod signals;
#[cfg(test)]
pub mod simulation;
mod status;
mod succession;
pub mod timing;
mod view;

pub use announcement::{AnnouncementKeys, InvalidAnnouncement, TunnelAnnouncement};
pub use carried::CarriedMembership;
pub use engine::is_rejoin;
pub use engine::{Call, CallResult, Join, NodeRow, NodeState, Replaced, Roster, Statement};
pub use key::derive_bytes;
pub use key::{RegionKey, RegionKeyError};
pub use keys::DerivedKeys;
pub use keys::RegionKeys;
pub use lease::Isolation;
pub use membership::{
    Membership, MembershipAction, MembershipEvent, NodeConfig, NodeMessage, StopReason,
};
pub use peering::{NextHop, Peering};
pub use placement::{Member, NodeSlot, Owner, Placement};
pub use requests::OperatorError;
pub use signals::RegionSignals;
pub use status::{NodeStatus, RegionStatus, Standing, StateRefusal};
pub use view::{ArrivedFrom, Decision, OwnerAttempts, Retry, View};
