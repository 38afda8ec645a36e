//! Entry points for fuzz targets and benchmarks.

pub mod bench;
pub mod fuzz;
