//! A gateway with many records beside one with few: start, memory, and CPU time in turns.

use std::path::Path;
use std::time::{Duration, Instant};

use gw_control_plane::control::records::account;
use gw_control_plane::control::{Actor, NewAccount};
use gw_gateway::Gateway;
use gw_interface::config::Config;
use tempfile::TempDir;

use crate::demo::{Demo, Options};
use crate::failure::Failure;
use crate::machine::procfs;
use crate::report::{mebibytes, median, say};

/// A demo on a data folder with this number of records.
pub(super) struct Started {
    pub(super) demo: Demo,
    pub(super) took: Duration,
    records: usize,
    /// Proportional set size, in bytes.
    memory: u64,
}

impl Started {
    pub(super) fn new(folder: TempDir, gateway: &Path, records: usize) -> Result<Self, Failure> {
        let began = Instant::now();
        let demo = Demo::start_in(folder, gateway, &Options::default())?;
        Ok(Self {
            took: began.elapsed(),
            records,
            memory: procfs::proportional_memory(demo.pid())?,
            demo,
        })
    }

    /// Memory of each record that `few` does not have, in bytes.
    pub(super) fn bytes_each(&self, few: &Self) -> f64 {
        let more = self.memory.saturating_sub(few.memory) as f64;
        more / (self.records - few.records).max(1) as f64
    }

    /// Prints start and memory of both, and the CPU time of `work` by the median of `rounds`
    /// rounds, in turns, so that noise of the machine affects both. Returns the part by which it is
    /// more with many.
    pub(super) fn compare(
        &self,
        few: &Self,
        name: &str,
        rounds: usize,
        work: impl Fn(&Demo) -> Result<f64, Failure>,
    ) -> Result<f64, Failure> {
        say(format_args!(
            "{name}: start {:.2} s with {}, {:.2} s with {}; memory {:.0} and {:.0} MiB, {:.0} \
             bytes each",
            few.took.as_secs_f64(),
            few.records,
            self.took.as_secs_f64(),
            self.records,
            mebibytes(few.memory),
            mebibytes(self.memory),
            self.bytes_each(few)
        ));
        // Warm-up.
        work(&few.demo)?;
        work(&self.demo)?;
        let mut micros = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            micros[0].push(work(&few.demo)?);
            micros[1].push(work(&self.demo)?);
        }
        let ratios = micros[0].iter().zip(&micros[1]);
        let more = median(ratios.map(|(few, many)| many / few)) - 1.0;
        let [with_few, with_many] = micros.map(median);
        say(format_args!(
            "{name}: {with_few:.1} µs of CPU with {}, {with_many:.1} with {}; medians of {rounds} \
             rounds, {:+.1} % in a round",
            few.records,
            self.records,
            more * 100.0
        ));
        Ok(more)
    }
}

/// Starts a gateway in this process, whose control plane makes records.
pub(super) fn start_on(folder: &Path) -> Result<Gateway, Failure> {
    let text = format!(
        "region = \"eu1\"\ndomain = \"gw.localhost\"\nlisten = \"127.0.0.1:0\"\n\
         admin_listen = \"127.0.0.1:0\"\nworkers = 1\ndata_dir = {folder:?}\n"
    );
    let config =
        Config::parse(&text, |_| None).map_err(|error| Failure::during("configuration", error))?;
    Gateway::start(&config).map_err(|error| Failure::during("start", error))
}

pub(super) fn create_account(gateway: &Gateway, id: String) -> Result<(), Failure> {
    let new = NewAccount {
        id,
        capture_allowed: None,
        domains_max: None,
        managed_by: None,
    };
    let created = account::create(gateway.control(), &Actor::Admin, &new);
    created
        .map(drop)
        .map_err(|error| Failure::during("a change", error))
}
