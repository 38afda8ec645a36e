//! A region of several nodes: which nodes are members, and which of them owns a service.

mod placement;

pub use placement::{Member, NodeSlot, Owner, Placement};
