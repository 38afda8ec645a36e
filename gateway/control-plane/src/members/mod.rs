//! This node as a member of its region: runs the membership against PostgreSQL, and exchanges its
//! messages with other nodes.

mod acknowledgment;
mod clock_gate;
mod driver;
mod inputs;
pub(crate) mod messages;
mod messenger;
mod node_file;
mod outbox;
pub(crate) mod pending;
mod probes;
mod publications;
mod refusals;

pub use acknowledgment::{WITHIN as CHANGED_WITHIN, nodes_behind};
pub use driver::{Members, MembersSetup};
pub(crate) use inputs::RegionInputs;
pub use messages::CarriedNode;
pub use messenger::routes;
pub use node_file::remember_primary;
pub(crate) use pending::OtherNodes;
