//! Rate limits.

mod addresses;
mod arrivals;
pub mod bucket;
pub(crate) mod levels;
mod table;

pub use crate::rate::Rate;
pub(crate) use addresses::{AddressKey, AddressLimits, Exhausted};
pub(crate) use arrivals::{Arrivals, Place};
pub use bucket::Bucket;
pub(crate) use levels::Level;
pub(crate) use table::{Admitted, Buckets, admit, serve_predecessor};
