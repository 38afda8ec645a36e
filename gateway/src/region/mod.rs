//! A region of several nodes: which nodes are members, which of them owns a service, and what nodes prove to each other.

mod announcement;
mod key;
mod peering;
mod placement;

pub(crate) use announcement::{AnnouncementKey, InvalidAnnouncement, TunnelAnnouncement};
pub use key::{RegionKey, RegionKeyError};
pub(crate) use peering::Peering;
pub use placement::{Member, NodeSlot, Owner, Placement};
