//! Rate limits.

mod addresses;
mod arrivals;
pub mod bucket;
pub(crate) mod levels;
mod table;

pub(crate) use addresses::{AddressKey, AddressLimits, Exhausted};
pub(crate) use arrivals::{Arrivals, Place};
pub use bucket::{Bucket, Rate};
pub(crate) use levels::Level;
pub(crate) use table::{Admitted, Buckets, admit, serve_predecessor};
