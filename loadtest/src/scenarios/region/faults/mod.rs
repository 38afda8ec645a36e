//! Faults of nodes, links and clocks, on machines that are Linux network namespaces. Needs root.

mod clock;
mod cuts;
mod engine;
mod lost;
mod rejoin;
mod revoked;
mod site;
mod table;
mod tokens;
mod watch;
mod world;

use std::path::Path;

use clap::{Args, ValueEnum};

use self::revoked::Kind;
use self::table::{Row, Table};
use crate::failure::Failure;

/// A group of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Lost,
    Rejoin,
    Revoked,
    Cuts,
    Clock,
    Tokens,
}

#[derive(Args)]
pub(super) struct FaultOptions {
    /// Time without packets of the lost machine
    #[arg(long, default_value_t = 40)]
    lost_seconds: u64,
    /// Time without PostgreSQL, after a node has rejoined
    #[arg(long, default_value_t = 25)]
    away_seconds: u64,
    /// Length of each one-way cut
    #[arg(long, default_value_t = 30)]
    cut_seconds: u64,
    /// Time in which links are cut again and again
    #[arg(long, default_value_t = 180)]
    flap_seconds: u64,
    /// Length of the load beside each wrong clock
    #[arg(long, default_value_t = 15)]
    clock_seconds: u64,
    /// Faults during which keys are revoked; all if not given
    #[arg(long, value_delimiter = ',', value_enum)]
    kinds: Vec<Kind>,
}

impl FaultOptions {
    /// In the order of their declaration.
    fn kinds(&self) -> Vec<Kind> {
        let is_chosen = |kind: &&Kind| self.kinds.is_empty() || self.kinds.contains(kind);
        Kind::value_variants()
            .iter()
            .filter(is_chosen)
            .copied()
            .collect()
    }
}

/// Whether this process may make network namespaces.
pub(super) fn is_possible() -> bool {
    world::is_possible()
}

/// Tries faults, each group in a region of its own, and fails if a figure is missed.
pub(super) fn run(
    gateway: &Path,
    faults: &[Fault],
    options: &FaultOptions,
    revocations: usize,
) -> Result<(), Failure> {
    gw_shared::runtime::raise_open_file_limit();
    let mut table = Table::default();
    for fault in faults {
        let done = match fault {
            Fault::Lost => lost::run(gateway, options, &mut table),
            Fault::Rejoin => rejoin::run(gateway, options, &mut table),
            Fault::Revoked => revoked::run(gateway, options, revocations, &mut table),
            Fault::Cuts => cuts::run(gateway, options, &mut table),
            Fault::Clock => clock::run(gateway, options, &mut table),
            Fault::Tokens => tokens::run(gateway, &mut table),
        };
        if let Err(failure) = done {
            table.add(Row::new(format!("{fault:?}")).check(false, failure.to_string()));
        }
    }
    table.conclude()
}
