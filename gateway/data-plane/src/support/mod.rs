//! Entry points for fuzz targets, benchmarks and the simulation, behind features.

#[cfg(feature = "bench_support")]
pub mod bench;
#[cfg(any(test, feature = "fuzz_support"))]
pub mod fuzz;
#[cfg(any(test, feature = "bench_support", feature = "fuzz_support"))]
mod http2_frames;
#[cfg(any(test, feature = "bench_support", feature = "fuzz_support"))]
pub(crate) mod memory_worker;
#[cfg(feature = "simulation_support")]
pub mod simulation;
