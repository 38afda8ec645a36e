//! Faults of nodes, links and clocks, on machines that are Linux network namespaces. Needs root.

mod engine;
mod lost;
mod rejoin;
mod site;
mod table;
mod watch;
mod world;

use std::path::Path;

use clap::Args;

use self::table::{Row, Table};
use crate::failure::Failure;

/// A fault, or a group of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Lost,
    Rejoin,
}

#[derive(Args)]
pub(super) struct FaultOptions {
    /// Time without packets of the lost machine
    #[arg(long, default_value_t = 40)]
    lost_seconds: u64,
    /// Time without PostgreSQL, after a node has rejoined
    #[arg(long, default_value_t = 25)]
    away_seconds: u64,
}

/// Whether this process may make network namespaces.
pub(super) fn is_possible() -> bool {
    world::is_possible()
}

/// Runs faults, each in a region of its own, and fails if a figure is missed.
pub(super) fn run(gateway: &Path, faults: &[Fault], options: &FaultOptions) -> Result<(), Failure> {
    gw_shared::runtime::raise_open_file_limit();
    let mut table = Table::default();
    for fault in faults {
        let rows = match fault {
            Fault::Lost => lost::run(gateway, options),
            Fault::Rejoin => rejoin::run(gateway, options),
        };
        table.add(rows.unwrap_or_else(|failure| vec![Row::failed(&format!("{fault:?}"), &failure)]));
    }
    table.conclude()
}
