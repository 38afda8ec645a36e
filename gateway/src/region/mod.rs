//! A region of several nodes: which nodes are members, and which of them owns a service.

mod key;
mod placement;

pub use key::{RegionKey, RegionKeyError};
pub use placement::{Member, NodeSlot, Owner, Placement};
