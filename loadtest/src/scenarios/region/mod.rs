//! A region of three nodes (`gw-gateway demo --nodes 3`): what a request costs that crosses nodes,
//! how soon a revocation is in force, and how soon thousands of tunnels are back.

mod crossing;
mod revocations;
mod tunnels;

use std::path::Path;

use clap::{Args, ValueEnum};

use crate::demo::{Demo, Options as DemoOptions};
use crate::failure::{Failure, ensure};
use crate::metrics;

const NODES: usize = 3;

/// A part of the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Cost of a request at another node than the owner of its service
    Crossing,
    /// Time until a revoked key is refused at all nodes
    Revocations,
    /// Time until thousands of tunnels are back after the loss of a node
    Tunnels,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Parts to run; all if not given
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Part>,
    #[arg(long, default_value_t = 1000)]
    revocations: usize,
    #[arg(long, default_value_t = 2000)]
    tunnels: usize,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    for part in Part::value_variants() {
        if !options.only.is_empty() && !options.only.contains(part) {
            continue;
        }
        let region = start(gateway)?;
        match part {
            Part::Crossing => crossing::run(&region)?,
            Part::Revocations => revocations::run(&region, options.revocations)?,
            Part::Tunnels => tunnels::run(gateway, &region, options.tunnels)?,
        }
        region.stop()?;
    }
    Ok(())
}

fn start(gateway: &Path) -> Result<Demo, Failure> {
    let options = DemoOptions {
        workers: 1,
        nodes: NODES,
        ..DemoOptions::default()
    };
    let region = Demo::start(gateway, &options)?;
    ensure(region.nodes.len() == NODES, || {
        "the demo has another number of nodes".to_owned()
    })?;
    Ok(region)
}

/// The node that has the tunnel of the demo's service.
fn owner(region: &Demo) -> Result<usize, Failure> {
    for (number, node) in region.nodes.iter().enumerate() {
        if metrics::read(&node.admin_url, "gw_tunnels")? > 0 {
            return Ok(number);
        }
    }
    Err(Failure::new("no node has a tunnel"))
}
