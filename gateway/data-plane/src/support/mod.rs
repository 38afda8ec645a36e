//! Entry points for fuzz targets, benchmarks and the simulation, behind a feature.

#[cfg(feature = "support")]
pub mod bench;
#[cfg(any(test, feature = "support"))]
pub mod fuzz;
#[cfg(any(test, feature = "support"))]
mod http2_frames;
#[cfg(any(test, feature = "support"))]
pub(crate) mod memory_worker;
#[cfg(feature = "support")]
pub mod simulation;
