//! A region of three nodes: cost of a request that crosses nodes, losses, replacements, revocations, and a store that does
//! not answer.

mod crossing;
mod engine;
mod haproxy;
mod losses;
pub(crate) mod nodes;
mod replacement;
mod revocations;
mod tunnels;

use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::failure::Failure;

/// A part of the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Crossing,
    Losses,
    Replacement,
    Revocations,
    Tunnels,
    Engine,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Parts to run; all if not given
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Part>,
    /// Length of the losses and of the silence of PostgreSQL, and a third of it for the comparison
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Requests during the replacement of all nodes
    #[arg(long, default_value_t = 100_000)]
    requests: usize,
    #[arg(long, default_value_t = 1000)]
    revocations: usize,
    #[arg(long, default_value_t = 2000)]
    tunnels: usize,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let length = Duration::from_secs(options.seconds);
    let is_chosen = |part: Part| options.only.is_empty() || options.only.contains(&part);
    if is_chosen(Part::Crossing) {
        crossing::run(gateway)?;
    }
    if is_chosen(Part::Replacement) {
        replacement::run(gateway, options.requests)?;
    }
    if is_chosen(Part::Losses) {
        losses::run(gateway, length)?;
    }
    if is_chosen(Part::Revocations) {
        revocations::run(gateway, options.revocations)?;
    }
    if is_chosen(Part::Tunnels) {
        tunnels::run(gateway, options.tunnels)?;
    }
    if is_chosen(Part::Engine) {
        engine::run(gateway, length)?;
    }
    Ok(())
}
