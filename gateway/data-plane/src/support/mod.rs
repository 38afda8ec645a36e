//! Entry points for fuzz targets and benchmarks, behind features.

#[cfg(feature = "bench_support")]
pub mod bench;
#[cfg(any(test, feature = "fuzz_support"))]
pub mod fuzz;
