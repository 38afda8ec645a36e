//! Histograms, metrics of the process, and Prometheus' text format, for both programs.

pub mod exposition;
pub mod histogram;
pub mod process;

pub use exposition::{Exposition, Kind};
pub use histogram::Histogram;
