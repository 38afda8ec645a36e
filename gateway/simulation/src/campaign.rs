//! Runs many seeds on several threads. Results are taken in the order of the seeds, whichever
//! thread is first.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use gw_simulation::scenario::Scenario;

use crate::failure::{self, Printing};
use crate::isolated::{Report, Runner};
use crate::state::{Failure, State};

/// Interval between writes of the state.
const STORE_EVERY: Duration = Duration::from_secs(5);
/// Interval between lines that tell how far the campaign is.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// What to run.
pub(crate) struct Campaign {
    /// The first seed that does not run.
    pub(crate) end: u64,
    /// When no further seed begins.
    pub(crate) until: Option<Instant>,
    pub(crate) jobs: usize,
    pub(crate) state_file: Option<PathBuf>,
    pub(crate) printing: Printing,
}

struct Finished {
    seed: u64,
    report: Report,
}

impl Campaign {
    /// Runs the seeds that `state` leaves, until `stop`. Prints each failing seed, and for each
    /// invariant the first failing scenario, shrunk.
    pub(crate) fn run(&self, state: &mut State, stop: &AtomicBool) -> io::Result<()> {
        self.store(state)?;
        let next = AtomicU64::new(state.next);
        let (finished, results) = mpsc::channel();
        std::thread::scope(|scope| {
            for _ in 0..self.jobs {
                let finished = finished.clone();
                let next = &next;
                scope.spawn(move || self.work(next, stop, &finished));
            }
            drop(finished);
            let taken = self.take(&results, state, stop);
            if taken.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            taken
        })
    }

    fn work(
        &self,
        next: &AtomicU64,
        stop: &AtomicBool,
        finished: &mpsc::Sender<io::Result<Finished>>,
    ) {
        let mut runner = Runner::start();
        let is_over = || {
            let is_late = self.until.is_some_and(|until| Instant::now() >= until);
            is_late || stop.load(Ordering::Relaxed)
        };
        while !is_over() {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= self.end {
                return;
            }
            let report = match &mut runner {
                Ok(runner) => runner.run_seed(seed),
                Err(error) => Err(io::Error::other(error.to_string())),
            };
            let result = report.map(|report| Finished { seed, report });
            if finished.send(result).is_err() {
                return;
            }
        }
    }

    /// Takes results in the order of their seeds, until the threads have ended.
    fn take(
        &self,
        results: &mpsc::Receiver<io::Result<Finished>>,
        state: &mut State,
        stop: &AtomicBool,
    ) -> io::Result<()> {
        let mut early = BTreeMap::new();
        let mut shrunk = BTreeSet::new();
        let (mut stored, mut told) = (Instant::now(), Instant::now());
        for finished in results {
            let finished = finished?;
            early.insert(finished.seed, finished);
            while let Some(finished) = early.remove(&state.next) {
                self.add(finished, state, &mut shrunk, stop)?;
            }
            if stored.elapsed() >= STORE_EVERY {
                self.store(state)?;
                stored = Instant::now();
            }
            if told.elapsed() >= TELL_EVERY {
                eprintln!("{}", summary(state));
                told = Instant::now();
            }
        }
        self.store(state)
    }

    fn store(&self, state: &State) -> io::Result<()> {
        match &self.state_file {
            Some(path) => state.store(path),
            None => Ok(()),
        }
    }

    fn add(
        &self,
        finished: Finished,
        state: &mut State,
        shrunk: &mut BTreeSet<String>,
        stop: &AtomicBool,
    ) -> io::Result<()> {
        let report = finished.report;
        state.next += 1;
        state.requests += report.requests;
        state.relayed += report.relayed;
        state.cpu_seconds += report.cpu_seconds;
        let Some(violation) = report.violation else {
            return Ok(());
        };
        state.failures.push(Failure {
            seed: finished.seed,
            invariant: violation.invariant.clone(),
        });
        self.store(state)?;
        failure::tell(finished.seed, &violation)?;
        let invariant = violation.invariant;
        if shrunk.insert(invariant.clone()) {
            let scenario = Scenario::new(finished.seed);
            self.printing.shrink(&scenario, &invariant, stop)?;
        }
        Ok(())
    }
}

/// A line about all seeds so far.
pub(crate) fn summary(state: &State) -> String {
    let State {
        from,
        next,
        requests,
        relayed,
        cpu_seconds,
        failures,
    } = state;
    let failed = failures.len();
    format!(
        "seeds {from} to {}: {failed} failed; {requests} requests, {relayed} relayed, \
         {cpu_seconds:.0} seconds of CPU",
        next.saturating_sub(1)
    )
}
