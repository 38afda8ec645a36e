//! `gw-loadtest`: arguments, scenario, exit code.

mod abuse;
mod bucket;
mod bulk;
mod cancel;
mod client;
mod compare;
mod demo;
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
mod report;
mod request_log;
mod sink;
mod stalled;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The product's: scenario `log` runs a part of it in this process.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Puts load on a gateway that it starts itself, on loopback, and says whether the product keeps its promises.
#[derive(Parser)]
#[command(name = "gw-loadtest", version)]
struct Arguments {
    /// The product's program; the workspace's release build if not given.
    #[arg(long, global = true, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/release/gw-gateway"),
          hide_default_value = true)]
    gateway: PathBuf,
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Subcommand)]
enum Scenario {
    /// CPU per request, requests per second and latency beside nginx and haproxy, in one run.
    Compare(compare::Options),
    /// Large bodies both ways: every byte as sent, memory bounded.
    Bulk(bulk::Options),
    /// Callers that stop reading do not delay others.
    Stalled,
    /// Callers that leave free their slots; slots are neither lost nor exceeded.
    Cancel,
    /// The rate limit admits what it says.
    Bucket,
    /// Callers that mean ill do not slow down those who mean well.
    Abuse(abuse::Options),
    /// What the request log costs, and that it loses nothing at full speed.
    Logging,
    /// A day of the request log that expires is not felt by callers.
    Expiry,
    /// What thousands of connections that do nothing hold, and that it is given back.
    Memory {
        /// A tenth of each scenario.
        #[arg(long)]
        short: bool,
    },
    /// What the request log's thread spends, and how fast it finds.
    Log(request_log::Options),
}

fn main() -> ExitCode {
    let Arguments { gateway, scenario } = Arguments::parse();
    let result = match scenario {
        Scenario::Compare(options) => compare::run(&gateway, &options),
        Scenario::Bulk(options) => bulk::run(&gateway, &options),
        Scenario::Stalled => stalled::run(&gateway),
        Scenario::Cancel => cancel::run(&gateway),
        Scenario::Bucket => bucket::run(&gateway),
        Scenario::Abuse(options) => abuse::run(&gateway, &options),
        Scenario::Logging => logging::run(&gateway),
        Scenario::Expiry => expiry::run(&gateway),
        Scenario::Memory { short } => memory::run(&gateway, short),
        Scenario::Log(options) => request_log::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("gw-loadtest: {failure}");
            ExitCode::FAILURE
        }
    }
}
