//! Rate limits.

mod addresses;
mod arrivals;
pub mod bucket;
pub(crate) mod levels;
mod table;
mod takeover;

pub(crate) use addresses::{AddressKey, AddressLimits, Exhausted};
pub(crate) use arrivals::{AddressSlot, Arrivals};
pub use bucket::Bucket;
pub(crate) use levels::Level;
pub(crate) use table::{Admitted, Buckets, admit, admit_for_predecessor};
pub(crate) use takeover::{PredecessorCharge, SuccessorBuckets, SuccessorCharge};
