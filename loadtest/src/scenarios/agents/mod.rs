//! Several agents of one service: what callers notice if one of them is sick, lost, slow or
//! restarted.

mod losses;
mod refusals;
mod rolling;
mod sick;
pub(crate) mod site;
mod slots;
mod slow;
mod sticky;
mod table;
mod wire;

use std::path::Path;

use clap::{Args, ValueEnum};

use self::site::Site;
use self::table::{Row, Table};
use crate::failure::Failure;
use crate::scenarios::region::nodes::NODES;

/// A section of the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// The backend of one of two agents refuses connections
    Refuse,
    /// The backend of one of two agents does not answer a connect
    Blackhole,
    /// The TLS handshake with the backend of one of two agents fails
    Tls,
    /// One agent has 1 slot, the other 128
    Slots,
    /// One of two agents is killed
    Kill,
    /// One of two agents is stopped
    Stop,
    /// One of two agents is 100 times slower
    Slow,
    /// The backends of all agents refuse connections, then one does not
    AllRefuse,
    /// The tunnel of the only agent is cut
    Cut,
    /// Agents are restarted in turn
    Rolling,
    /// One of four agents is lost, with an affinity by cookie
    Sticky,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Sections to run; all if not given
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Section>,
    /// Nodes: 1, or 3 for a region whose agents and callers are at all nodes
    #[arg(long, default_value_t = 1, value_parser = nodes)]
    nodes: usize,
    /// Numbers of callers of `refuse`, `blackhole` and `tls`
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32, 256])]
    callers: Vec<u32>,
    /// Requests of each number of callers, at least
    #[arg(long, default_value_t = 5000)]
    requests: usize,
    /// Agents of `rolling`
    #[arg(long, default_value_t = 64)]
    agents: usize,
}

fn nodes(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(nodes @ (1 | NODES)) => Ok(nodes),
        _ => Err(format!("1 or {NODES}")),
    }
}

/// Runs the sections, and fails if one of them misses a figure.
pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    gw_shared::runtime::raise_open_file_limit();
    let site = Site::start(gateway, options.nodes)?;
    let mut table = Table::default();
    for section in Section::value_variants() {
        if options.only.is_empty() || options.only.contains(section) {
            let rows = section.run(&site, options);
            table.add(
                rows.unwrap_or_else(|failure| vec![Row::failed(&format!("{section:?}"), &failure)]),
            );
        }
    }
    site.stop()?;
    table.conclude()
}

impl Section {
    fn run(self, site: &Site, options: &Options) -> Result<Vec<Row>, Failure> {
        match self {
            Self::Refuse => sick::run(site, sick::Sickness::Refuses, options),
            Self::Blackhole => sick::run(site, sick::Sickness::DoesNotAnswer, options),
            Self::Tls => sick::run(site, sick::Sickness::FailsTls, options),
            Self::Slots => slots::run(site),
            Self::Kill => losses::kill(site),
            Self::Stop => losses::stop(site),
            Self::Slow => slow::run(site),
            Self::AllRefuse => refusals::run(site),
            Self::Cut => losses::cut(site),
            Self::Rolling => rolling::run(site, options.agents),
            Self::Sticky => sticky::run(site),
        }
    }
}
