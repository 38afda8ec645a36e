//! The whole relay in a simulated world.
//!
//! The product's code runs unchanged on a [simulated kernel](gw_simulated_kernel). A [`scenario`]
//! says what takes place, a [world](world) of callers, gateways, agents and backends lets it take
//! place, and checks say what must hold meanwhile.

mod checks;
mod log;
pub mod product;
pub mod run;
pub mod scenario;
pub mod scenario_file;
pub mod shrink;
pub mod world;
