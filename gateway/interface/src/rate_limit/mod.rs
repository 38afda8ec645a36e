//! Rate limits.

mod addresses;
mod arrivals;
pub mod bucket;
pub mod levels;
mod places;
mod service_buckets;
mod takeover;

pub use addresses::{AddressKey, ClientLimits, Exhausted};
pub use arrivals::{AddressSlot, Arrivals};
pub use bucket::Bucket;
pub use levels::Level;
pub use places::{Claimant, Places, TaskPlace, TaskPlaces};
pub use service_buckets::{Admitted, Buckets};
pub use service_buckets::{charge_for_predecessor, charge_or_wait};
pub use takeover::{ChargeAnswer, PredecessorCharge, SuccessorBuckets, SuccessorCharge};
