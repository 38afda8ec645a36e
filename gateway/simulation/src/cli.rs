//! Arguments, and what they ask for.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use gw_simulation::scenario::Scenario;
use gw_simulation::scenario_file;
use tokio::signal::unix::{SignalKind, signal};

use crate::campaign::{Campaign, summary};
use crate::failure::{self, Printing};
use crate::isolated::{self, Runner};
use crate::state::State;

/// Runs the relay in simulated worlds, one for each seed, and checks what must always hold.
///
/// Exit codes: 0, all invariants hold; 1, one does not; 2, a mistake in the arguments or files;
/// 130, interrupted before a seed failed.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The first seed.
    #[arg(long, value_name = "SEED", conflicts_with_all = ["seed", "scenario"])]
    from: Option<u64>,
    /// Number of seeds. 1000 if no time is given either.
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["seed", "scenario"])]
    seeds: Option<u64>,
    /// Begins no further seed after this time.
    #[arg(long, conflicts_with_all = ["seed", "scenario", "hours"])]
    minutes: Option<u64>,
    /// Begins no further seed after this time.
    #[arg(long, conflicts_with_all = ["seed", "scenario"])]
    hours: Option<u64>,
    /// Threads that run seeds. All cores if not given.
    #[arg(long, value_name = "NUMBER")]
    jobs: Option<usize>,
    /// File from which the run resumes where it was stopped.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seed", "scenario"])]
    state: Option<PathBuf>,
    /// Runs this seed alone.
    #[arg(long, conflicts_with = "scenario")]
    seed: Option<u64>,
    /// Runs the scenario of a file alone.
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// Prints the scenario and all that happens.
    #[arg(long)]
    trace: bool,
    /// Scenarios to try, at most, to make a failing one smaller; 0 to leave it as it is.
    #[arg(long, value_name = "NUMBER", default_value_t = 500)]
    shrink: usize,
    /// Folder for the shrunk scenarios and their traces.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,
    /// Runs scenarios of a campaign.
    #[arg(long, hide = true)]
    runner: bool,
}

pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.runner {
        return match isolated::serve() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => mistake(&error),
        };
    }
    let stop = Arc::new(AtomicBool::new(false));
    let done = listen(&stop).and_then(|()| match (arguments.seed, &arguments.scenario) {
        (Some(seed), _) => one(&Scenario::new(seed), &arguments, &stop),
        (None, Some(path)) => one(&read(path)?, &arguments, &stop),
        (None, None) => campaign(&arguments, &stop),
    });
    match done {
        Ok(true) if stop.load(Ordering::Relaxed) => ExitCode::from(130),
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => mistake(&error),
    }
}

fn mistake(error: &io::Error) -> ExitCode {
    eprintln!("gw-simulation: {error}");
    ExitCode::from(2)
}

/// Sets `stop` at the first SIGINT or SIGTERM, and ends the process at the second.
fn listen(stop: &Arc<AtomicBool>) -> io::Result<()> {
    let stop = Arc::clone(stop);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let signals = {
        let _entered = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        )
    };
    let (mut interrupt, mut terminate) = signals;
    std::thread::spawn(move || {
        runtime.block_on(async {
            let mut next =
                async || tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} };
            next().await;
            stop.store(true, Ordering::Relaxed);
            next().await;
            std::process::exit(130);
        });
    });
    Ok(())
}

fn read(path: &Path) -> io::Result<Scenario> {
    let about = |problem: String| io::Error::other(format!("{}: {problem}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| about(error.to_string()))?;
    scenario_file::parse(&text).map_err(|error| about(error.to_string()))
}

/// Runs one scenario. Returns whether all invariants hold.
fn one(scenario: &Scenario, arguments: &Arguments, stop: &AtomicBool) -> io::Result<bool> {
    let report = Runner::start()?.run(scenario, arguments.trace)?;
    let mut out = io::stdout();
    if let Some(trace) = &report.trace {
        let text = scenario_file::to_text(scenario).map_err(io::Error::other)?;
        writeln!(out, "{text}\n{trace}")?;
    }
    writeln!(
        out,
        "seed {}: {} requests, {} relayed, fingerprint {}",
        scenario.seed, report.requests, report.relayed, report.fingerprint
    )?;
    let Some(violation) = report.violation else {
        return Ok(true);
    };
    failure::tell(scenario.seed, &violation)?;
    if !arguments.trace {
        printing(arguments).shrink(scenario, &violation.invariant, stop)?;
    }
    Ok(false)
}

fn printing(arguments: &Arguments) -> Printing {
    Printing {
        attempts: arguments.shrink,
        folder: arguments.keep.clone(),
    }
}

/// Runs many seeds. Returns whether all invariants hold in all of them.
fn campaign(arguments: &Arguments, stop: &AtomicBool) -> io::Result<bool> {
    let mut state = match &arguments.state {
        Some(path) => State::load(path, arguments.from)?,
        None => State::new(arguments.from.unwrap_or(0)),
    };
    let minutes = match (arguments.hours, arguments.minutes) {
        (Some(hours), _) => Some(hours * 60),
        (None, minutes) => minutes,
    };
    let seeds = match (arguments.seeds, minutes) {
        (Some(seeds), _) => seeds,
        (None, Some(_)) => u64::MAX,
        (None, None) => 1000,
    };
    let began = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let campaign = Campaign {
        end: state.from.saturating_add(seeds),
        until: minutes.map(|minutes| began + Duration::from_secs(minutes * 60)),
        jobs: arguments.jobs.unwrap_or(cores).max(1),
        state_file: arguments.state.clone(),
        printing: printing(arguments),
    };
    let (requests, next) = (state.requests, state.next);
    campaign.run(&mut state, stop)?;
    let seconds = began.elapsed().as_secs_f64();
    let requests = state.requests - requests;
    writeln!(
        io::stdout(),
        "{}\nthis run: {} seeds in {seconds:.0} seconds, {:.0} requests a second",
        summary(&state),
        state.next - next,
        requests as f64 / seconds.max(0.001)
    )?;
    Ok(state.failures.is_empty())
}
