//! Rate limits.

mod addresses;
pub mod bucket;
mod table;

pub(crate) use addresses::{AddressKey, AddressLimits, Exhausted};
pub use bucket::{Bucket, Rate};
pub(crate) use table::{Admitted, Buckets};
