//! Entry points for benchmarks and the simulation, behind features.

#[cfg(feature = "bench_support")]
pub mod bench;
#[cfg(feature = "simulation_support")]
pub mod simulation;
