//! `gw-loadtest`: runs a scenario against the product.

mod abuse;
mod admin_api;
mod agents;
mod backend;
mod bucket;
mod bulk;
mod callers;
mod cancel;
mod client;
mod compare;
mod demo;
mod enrolled;
mod expiry;
mod failure;
mod http2;
mod latency;
mod load;
mod logging;
mod memory;
mod metrics;
mod process;
mod procfs;
mod region;
mod report;
mod request_log;
mod restarts;
mod scheduling;
mod services;
mod sink;
mod stalled;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::failure::{Failure, ensure};

/// The product's allocator, because scenario `log` runs a part of the product in this process.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Starts a gateway, puts load on it over loopback, and checks its guarantees.
#[derive(Parser)]
#[command(name = "gw-loadtest", version)]
struct Arguments {
    /// Path of gw-gateway
    #[arg(long, global = true, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/gw-gateway"),
          hide_default_value = true)]
    gateway: PathBuf,
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Subcommand)]
enum Scenario {
    /// CPU time, latency and memory beside haproxy, nginx and rathole, in one run.
    Compare(compare::Options),
    /// Large bodies in both directions: bytes unchanged, memory bounded.
    Bulk(bulk::Options),
    /// Callers that stop reading do not delay others.
    Stalled,
    /// Callers that disconnect release their slots; slots are neither lost nor exceeded.
    Cancel,
    /// The rate limit admits exactly the configured rate.
    Bucket,
    /// Attacks do not slow down other callers.
    Abuse(abuse::Options),
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
    /// A gateway with many services: cost of a change, start, memory, and CPU time per request.
    Services(services::Options),
    /// Three nodes: cost of crossing requests, losses, replacements, revocations, silence of PostgreSQL.
    Region(region::Options),
    /// Gateway and agents are stopped, started and upgraded under load.
    Restarts(restarts::Options),
    /// Several agents of one service, of which one is sick, lost, slow or restarted.
    Agents(agents::Options),
    /// CPU time of the request log's thread, and speed of searches.
    Log(request_log::Options),
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
    // The log is loaded in this process.
    let needs_gateway = !matches!(scenario, Scenario::Log(_));
    ensure(!needs_gateway || gateway.is_file(), || {
        format!(
            "{} does not exist: build it with cargo build --release -p gw-gateway, or give --gateway PATH",
            gateway.display()
        )
    })?;
    match scenario {
        Scenario::Compare(options) => compare::run(gateway, &options),
        Scenario::Bulk(options) => bulk::run(gateway, &options),
        Scenario::Stalled => stalled::run(gateway),
        Scenario::Cancel => cancel::run(gateway),
        Scenario::Bucket => bucket::run(gateway),
        Scenario::Abuse(options) => abuse::run(gateway, &options),
        Scenario::Logging => logging::run(gateway),
        Scenario::Expiry => expiry::run(gateway),
        Scenario::Memory { short } => memory::run(gateway, short),
        Scenario::Services(options) => services::run(gateway, &options),
        Scenario::Region(options) => region::run(gateway, &options),
        Scenario::Restarts(options) => restarts::run(gateway, &options),
        Scenario::Agents(options) => agents::run(gateway, &options),
        Scenario::Log(options) => request_log::run(&options),
    }
}
