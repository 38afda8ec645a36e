//! This node as a member of its region: what the control planes of the nodes tell each other, and the loop that runs the
//! membership.

mod driver;
mod messages;
mod outbox;

pub(crate) use driver::{Delivery, Members, MembersSetup, Messenger, RegionInputs};
pub(crate) use messages::StateMessage;
