//! Rate limits.

mod addresses;
mod arrivals;
pub mod bucket;
pub(crate) mod levels;
mod places;
mod service_buckets;
mod takeover;

pub(crate) use addresses::{AddressKey, ClientLimits, Exhausted};
pub(crate) use arrivals::{AddressSlot, Arrivals};
pub use bucket::Bucket;
pub(crate) use levels::Level;
pub(crate) use places::{Claimant, Places, TaskPlace, TaskPlaces};
pub(crate) use service_buckets::{Admitted, Buckets, charge_for_predecessor, charge_or_wait};
pub(crate) use takeover::{ChargeAnswer, PredecessorCharge, SuccessorBuckets, SuccessorCharge};
