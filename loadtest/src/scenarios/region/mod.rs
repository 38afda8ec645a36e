//! A region of three nodes: cost of a request that crosses nodes, losses, replacements,
//! revocations, a store that does not answer, and faults of machines and links.

mod crossing;
mod engine;
mod faults;
mod haproxy;
mod losses;
pub(crate) mod nodes;
mod replacement;
mod revocations;
mod tunnels;

use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};

use self::faults::Fault;
use crate::failure::Failure;
use crate::report::say;

/// A part of the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Crossing,
    Losses,
    Replacement,
    Revocations,
    Tunnels,
    Engine,
    /// A node without packets
    Lost,
    /// A node is frozen, declared dead, and rejoins
    Rejoin,
    /// Keys are revoked during faults of ten kinds
    Revoked,
    /// One-way cuts between machines
    Cuts,
    /// The clock of a node is wrong
    Clock,
    /// The token endpoint of a node that is cut off
    Tokens,
}

impl Part {
    /// The fault that the part tries in network namespaces.
    fn fault(self) -> Option<Fault> {
        match self {
            Self::Lost => Some(Fault::Lost),
            Self::Rejoin => Some(Fault::Rejoin),
            Self::Revoked => Some(Fault::Revoked),
            Self::Cuts => Some(Fault::Cuts),
            Self::Clock => Some(Fault::Clock),
            Self::Tokens => Some(Fault::Tokens),
            Self::Crossing
            | Self::Losses
            | Self::Replacement
            | Self::Revocations
            | Self::Tunnels
            | Self::Engine => None,
        }
    }
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
    #[command(flatten)]
    faults: faults::FaultOptions,
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
    let chosen = Part::value_variants()
        .iter()
        .filter(|part| is_chosen(**part));
    let chosen: Vec<Fault> = chosen.filter_map(|part| part.fault()).collect();
    if options.only.is_empty() && !faults::is_possible() {
        say(format_args!(
            "region: faults of machines are left out: network namespaces need root"
        ));
        return Ok(());
    }
    if chosen.is_empty() {
        Ok(())
    } else {
        faults::run(gateway, &chosen, &options.faults, options.revocations)
    }
}
