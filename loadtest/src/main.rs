//! `gw-loadtest`: runs a scenario against the product.

mod admin_api;
mod agents;
mod backend;
mod callers;
mod client;
mod demo;
mod failure;
mod http2;
mod load;
mod machine;
mod metrics;
mod null_relay;
mod report;
mod scenarios;
mod sink;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gw_shared::process::allocator::Allocator;

use crate::failure::{Failure, ensure};

/// The product's allocator, because scenario `log` runs a part of the product in this process.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Starts a gateway, puts load on it over loopback, and checks its guarantees.
#[derive(Parser)]
#[command(name = "gw-loadtest", version)]
struct Arguments {
    /// Path of gw-gateway
    #[arg(
        long,
        global = true,
        default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/gw-gateway"),
        hide_default_value = true,
    )]
    gateway: PathBuf,
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Subcommand)]
enum Scenario {
    /// CPU time, latency and memory beside haproxy, nginx and rathole, in one run.
    Compare(scenarios::compare::Options),
    /// Large bodies in both directions: bytes unchanged, memory bounded.
    Bulk(scenarios::bulk::Options),
    /// Attacks do not slow down other callers.
    Abuse(scenarios::abuse::Options),
    /// CPU cost of the request log, and its completeness at full speed.
    Logging,
    /// Expiry of a day of the request log does not slow down callers.
    Expiry,
    /// Memory of thousands of idle and stalled connections, and its release.
    Memory {
        /// Runs a tenth of each scenario.
        #[arg(long)]
        short: bool,
    },
    /// A gateway with many own domains: start, memory, and CPU time per handshake.
    Domains(scenarios::domains::Options),
    /// A gateway with many services: cost of a change, start, memory, and CPU time per request.
    Services(scenarios::services::Options),
    /// Three nodes: cost of crossing requests, time of a revocation, and of the return of tunnels.
    Region(scenarios::region::Options),
    /// A region under load, to which faults are applied one after another.
    Soak(scenarios::soak::Options),
    /// Two agents of one service, of which one is slow.
    SlowAgent,
    /// CPU time of the request log's thread, and speed of searches.
    Log(scenarios::request_log::Options),
    /// The relay of bytes that `compare` starts.
    #[command(hide = true)]
    NullRelay(null_relay::Options),
}

fn main() -> ExitCode {
    let Arguments { gateway, scenario } = Arguments::parse();
    match run(scenario, &gateway) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("gw-loadtest: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(scenario: Scenario, gateway: &Path) -> Result<(), Failure> {
    // These run in this process.
    let needs_gateway = !matches!(scenario, Scenario::Log(_) | Scenario::NullRelay(_));
    ensure(!needs_gateway || gateway.is_file(), || {
        format!(
            "{} does not exist: build it with cargo build --release -p gw-gateway, or give \
             --gateway PATH",
            gateway.display()
        )
    })?;
    match scenario {
        Scenario::Compare(options) => scenarios::compare::run(gateway, &options),
        Scenario::Bulk(options) => scenarios::bulk::run(gateway, &options),
        Scenario::Abuse(options) => scenarios::abuse::run(gateway, &options),
        Scenario::Logging => scenarios::logging::run(gateway),
        Scenario::Expiry => scenarios::expiry::run(gateway),
        Scenario::Memory { short } => scenarios::memory::run(gateway, short),
        Scenario::Domains(options) => scenarios::domains::run(gateway, &options),
        Scenario::Services(options) => scenarios::services::run(gateway, &options),
        Scenario::Region(options) => scenarios::region::run(gateway, &options),
        Scenario::Soak(options) => scenarios::soak::run(gateway, &options),
        Scenario::SlowAgent => scenarios::slow_agent::run(gateway),
        Scenario::Log(options) => scenarios::request_log::run(&options),
        Scenario::NullRelay(options) => null_relay::run(&options),
    }
}
