//! What both programs measure of themselves, and the text in which Prometheus reads it.

pub mod exposition;
pub mod histogram;
pub mod process;

pub use exposition::{Exposition, Kind};
pub use histogram::Histogram;
