//! Entry points for fuzz targets, benchmarks and the simulation, behind a feature. What callers and
//! agents send is in `gw-bed`.

#[cfg(feature = "support")]
pub mod bench;
#[cfg(any(test, feature = "support"))]
pub mod fuzz;
#[cfg(feature = "support")]
pub mod http1_caller;
#[cfg(any(test, feature = "support"))]
pub mod memory_worker;
#[cfg(feature = "support")]
pub mod simulation;
