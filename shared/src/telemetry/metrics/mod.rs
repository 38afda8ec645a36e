//! Metrics of both programs, and their text format for Prometheus.

pub mod exposition;
pub mod histogram;
pub mod process;

pub use exposition::{Exposition, Kind};
pub use histogram::Histogram;
