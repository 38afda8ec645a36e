//! Rate limits.

pub mod bucket;
mod table;

pub use bucket::{Bucket, Rate};
pub(crate) use table::{Admitted, Buckets};
