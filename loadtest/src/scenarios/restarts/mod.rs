//! A gateway and its agents are stopped, started, replaced and upgraded under load.

mod agent;
mod gateway;
mod installation;
mod upgrade;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::callers::{Failed, Outcome, What};
use crate::failure::Failure;
use crate::report::{millis, say};

/// A part of the scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Gateway,
    Agent,
    Upgrade,
}

#[derive(Args)]
pub(crate) struct Options {
    /// Parts to run; all if not given
    #[arg(long, value_delimiter = ',', value_enum)]
    only: Vec<Part>,
    /// How often gateway and agent are restarted
    #[arg(long, default_value_t = 5)]
    restarts: usize,
    /// Folder with gw-gateway and gw-agent of the next release line, for `upgrade`
    #[arg(long, value_name = "FOLDER")]
    next: Option<PathBuf>,
    /// Requests during the upgrade
    #[arg(long, default_value_t = 100_000)]
    requests: usize,
}

pub(crate) fn run(gateway: &Path, options: &Options) -> Result<(), Failure> {
    let is_chosen = |part: Part| options.only.is_empty() || options.only.contains(&part);
    if is_chosen(Part::Gateway) {
        gateway::run(gateway, options.restarts)?;
    }
    if is_chosen(Part::Agent) {
        agent::run(gateway, options.restarts)?;
    }
    match &options.next {
        Some(next) if is_chosen(Part::Upgrade) => upgrade::run(gateway, next, options.requests)?,
        None if options.only.contains(&Part::Upgrade) => {
            return Err(Failure::new(
                "--only upgrade needs --next FOLDER, with the programs of the next release line",
            ));
        }
        _ => {}
    }
    Ok(())
}

/// Prints what the callers have seen.
fn report(what: &str, outcome: &Outcome) {
    let (slowest, p50, p99) = outcome.figures();
    let refused = outcome
        .failed
        .iter()
        .filter(|failed| failed.what == What::Refused)
        .count();
    say(format_args!(
        "restarts: {what}: of {} requests {refused} refused, {} failed; p50 {:.2} ms, p99 {:.1} \
         ms, slowest {:.0} ms; {} sent again on a new connection",
        outcome.answered.len() + outcome.failed.len(),
        outcome.failed.len() - refused,
        millis(p50),
        millis(p99),
        millis(slowest),
        outcome.sent_again
    ));
    for Failed {
        began,
        ended,
        what: failure,
        ..
    } in others(outcome).take(10)
    {
        say(format_args!(
            "restarts: {what}: {failure} after {:.0} ms",
            millis(*ended - *began)
        ));
    }
}

/// Failed requests, without those that were refused.
fn others(outcome: &Outcome) -> impl Iterator<Item = &Failed> {
    outcome
        .failed
        .iter()
        .filter(|failed| failed.what != What::Refused)
}

/// Length of the time in which requests were refused.
fn refused_for(outcome: &Outcome) -> Duration {
    let refused = || {
        outcome
            .failed
            .iter()
            .filter(|failed| failed.what == What::Refused)
    };
    let first = refused().map(|failed| failed.began).min();
    let last = refused().map(|failed| failed.ended).max();
    first
        .zip(last)
        .map(|(first, last)| last - first)
        .unwrap_or_default()
}
