//! A region under load, to which faults are applied one after another. Nodes, PostgreSQL and agents
//! are processes on machines that are Linux network namespaces. Needs root.

mod acts;
mod callers;
mod engine;
mod faults;
mod haproxy;
mod node;
mod revocations;
mod site;
mod trial;
mod world;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};

use self::faults::{Dice, Kind};
use self::site::Site;
use crate::failure::{Failure, ensure};
use crate::report::{Row, Table, say};

const NODES: usize = 3;

#[derive(Args)]
pub(crate) struct Options {
    /// Faults in this order; each kind once in an order that is drawn, if not given
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Kind>,
    /// Number of faults that are drawn instead, for a long run
    #[arg(long, conflicts_with = "only")]
    faults: Option<usize>,
    /// Seed of what is drawn; that of the time if not given
    #[arg(long)]
    seed: Option<u64>,
    /// Length of each fault
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Requests per second of each pair of node and service, of which there are twelve
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rate: u32,
    /// Folder with gw-gateway and gw-agent of the next release line, for `upgrade`
    #[arg(long, value_name = "FOLDER")]
    next: Option<PathBuf>,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    gw_shared::runtime::raise_open_file_limit();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs();
    let seed = options.seed.unwrap_or(now);
    let mut dice = Dice(seed);
    let kinds = options.kinds(&mut dice)?;
    say(format_args!("soak: {} faults, --seed {seed}", kinds.len()));
    let mut table = Table::new("fault");
    let mut site = None;
    for kind in kinds {
        let fault = kind.draw(&mut dice, Duration::from_secs(options.seconds));
        let mut region = match site.take() {
            Some(site) => site,
            None => Site::start(gateway, options.next.as_deref())?,
        };
        let row = trial::run(&mut region, &fault, options.rate);
        let row =
            row.unwrap_or_else(|failure| Row::new(fault.name).check(false, failure.to_string()));
        // A region that is not well is not used for the next fault.
        site = Some(region).filter(|_| !row.has_missed());
        table.add(row);
    }
    table.conclude()
}

impl Options {
    /// The kinds of the faults to apply. An upgrade is the last one, because no region goes back.
    fn kinds(&self, dice: &mut Dice) -> Result<Vec<Kind>, Failure> {
        if !self.only.is_empty() {
            let can_upgrade = self.next.is_some() || !self.only.contains(&Kind::Upgrade);
            ensure(can_upgrade, || {
                "--only upgrade needs --next FOLDER, with the programs of the next release line"
                    .to_owned()
            })?;
            return Ok(self.only.clone());
        }
        let all = Kind::value_variants().iter().copied();
        let mut kinds: Vec<Kind> = all.filter(|kind| *kind != Kind::Upgrade).collect();
        match self.faults {
            Some(count) => {
                let drawn = (0..count).map(|_| kinds[dice.below(kinds.len())]);
                kinds = drawn.collect();
            }
            None => dice.shuffle(&mut kinds),
        }
        kinds.extend(self.next.as_ref().map(|_| Kind::Upgrade));
        Ok(kinds)
    }
}
