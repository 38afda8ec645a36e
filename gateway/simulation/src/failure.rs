//! What is printed of a scenario that fails.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use gw_simulation::scenario::Scenario;
use gw_simulation::scenario_file;
use gw_simulation::shrink::shrink;

use crate::isolated::{Runner, Violation};

/// How much is printed, and where copies go.
pub(crate) struct Printing {
    /// Most scenarios that are tried to shrink one; 0 to shrink none.
    pub(crate) attempts: usize,
    /// Folder for scenarios and traces.
    pub(crate) folder: Option<PathBuf>,
}

/// Prints the seed and what is violated.
pub(crate) fn tell(seed: u64, violation: &Violation) -> io::Result<()> {
    let Violation { invariant, found } = violation;
    writeln!(io::stdout(), "seed {seed}: {invariant}: {found}")
}

impl Printing {
    /// Shrinks the scenario of a seed as long as it violates `invariant`, and prints what is left,
    /// with its trace.
    pub(crate) fn shrink(
        &self,
        scenario: &Scenario,
        invariant: &str,
        stop: &AtomicBool,
    ) -> io::Result<()> {
        if self.attempts == 0 {
            return Ok(());
        }
        let mut runner = Runner::start()?;
        let fails = |candidate: &Scenario| {
            if stop.load(Ordering::Relaxed) {
                return false;
            }
            // Without a runner, nothing is found to fail.
            let report = runner.run(candidate, false).ok();
            let violation = report.and_then(|report| report.violation);
            violation.is_some_and(|violation| violation.invariant == invariant)
        };
        let shrunk = shrink(scenario, self.attempts, fails);
        let size = |scenario: &Scenario| {
            let Scenario { agents, faults, .. } = scenario;
            let (requests, agents, faults) = (scenario.requests(), agents.len(), faults.len());
            format!("{requests} requests, {agents} agents and {faults} faults")
        };
        let how = if shrunk.is_minimal {
            "nothing smaller fails"
        } else {
            "there may be a smaller one"
        };
        let report = runner.run(&shrunk.scenario, true)?;
        let found = report.violation.map(|violation| violation.found);
        let text = scenario_file::to_text(&shrunk.scenario).map_err(io::Error::other)?;
        let text = format!("# seed {}: {invariant}\n{text}", scenario.seed);
        let trace = report.trace.unwrap_or_default();
        writeln!(
            io::stdout(),
            "shrunk from {} to {} in {} attempts ({how}):\n\n{text}\n{trace}\n{invariant}: {}\n",
            size(scenario),
            size(&shrunk.scenario),
            shrunk.attempts,
            found.unwrap_or_default()
        )?;
        let Some(folder) = &self.folder else {
            return Ok(());
        };
        fs::create_dir_all(folder)?;
        let seed = scenario.seed;
        fs::write(folder.join(format!("seed-{seed}.toml")), text)?;
        fs::write(folder.join(format!("seed-{seed}.trace")), trace)
    }
}
