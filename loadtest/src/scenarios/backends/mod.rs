//! Backends as they are: a server that takes connections over, and a name server that falls silent. Each section needs the software that it names, and is skipped without it.

mod docker;
mod names;

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};

use crate::agents::{Plan, Pool};
use crate::demo::{self, Demo};
use crate::failure::Failure;
use crate::machine::process::{self, output};
use crate::report::{Row, Table};

/// A section of the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// exec, attach and run of a Docker daemon on a Unix socket
    Docker,
    /// The name server of a backend's name stops answering
    Names,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Sections to run; all if not given
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Section>,
}

/// What the sections have in common.
struct Bench {
    gateway: PathBuf,
    demo: Demo,
}

/// Why a section did not hold, or did not run.
enum Missed {
    /// Its software is not installed, or cannot run here.
    Skipped(Failure),
    Failed(Failure),
}

impl<E: Into<Failure>> From<E> for Missed {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Figures of a section.
type Figures = Result<String, Missed>;

/// Runs the sections, and fails if one of them misses a figure.
pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    gw_shared::runtime::raise_open_file_limit();
    let bench = Bench {
        gateway: gateway.to_owned(),
        demo: Demo::start(gateway, &demo::Options::default())?,
    };
    let mut table = Table::new(["section"]);
    for section in Section::value_variants() {
        if !options.only.is_empty() && !options.only.contains(section) {
            continue;
        }
        let row = Row::new([format!("{section:?}")]);
        table.add(match section.run(&bench) {
            Ok(figures) => row.note(figures),
            Err(Missed::Skipped(reason)) => row.note(format!("skipped: {reason}")),
            Err(Missed::Failed(failure)) => row.check(false, failure.to_string()),
        });
    }
    bench.demo.stop()?;
    table.conclude()
}

impl Section {
    fn run(self, bench: &Bench) -> Figures {
        match self {
            Self::Docker => docker::run(bench),
            Self::Names => names::run(bench),
        }
    }
}

impl Bench {
    /// A new service with one agent.
    fn pool(&self, plan: Plan) -> Result<Pool, Failure> {
        Pool::start(&self.gateway, &self.demo, vec![plan])
    }
}

/// A program; without it, the section is skipped.
fn find(program: &str, package: &str) -> Result<PathBuf, Missed> {
    process::find(program, package).map_err(Missed::Skipped)
}

/// Skips the section unless this process may make mount namespaces.
fn need_root() -> Result<(), Missed> {
    let mut trial = Command::new(find("unshare", "util-linux")?);
    output(trial.args(["--mount", "true"]))
        .map(drop)
        .map_err(|_| Missed::Skipped(Failure::new("it needs root")))
}
