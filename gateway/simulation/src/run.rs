//! Runs simulations, each on a thread of its own.

use std::path::PathBuf;
use std::sync::Once;

use gw_simulated_kernel::{Ended, clock, trace};

use crate::log::TraceLog;
use crate::scenario::Scenario;
use crate::world::{self, Report, Violation};

/// What came of a simulation.
#[derive(Debug)]
pub struct Outcome {
    pub report: Report,
    /// The same for the same scenario, on every machine.
    pub fingerprint: u64,
    /// What happened, if it was wanted.
    pub trace: Option<String>,
}

/// Runs a scenario. The thread is new, so that thread-local state of the product is, too.
pub fn run(scenario: &Scenario, with_trace: bool) -> Outcome {
    trace_panics();
    let scenario = scenario.clone();
    let thread = std::thread::Builder::new().stack_size(STACK);
    let outcome = thread
        .spawn(move || simulate(scenario, with_trace))
        .map(std::thread::JoinHandle::join);
    match outcome {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => failed(
            "the simulation ends",
            "the thread of the simulation panicked".into(),
        ),
        Err(error) => failed("the simulation begins", error.to_string()),
    }
}

/// Lets panics of simulations be lines of their traces, as the product counts on panics of tasks
/// being caught. Those of other threads are printed.
fn trace_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if clock::now().is_some() {
                trace::line(|line| line.push_str(&panic.to_string().replace('\n', " ")));
            } else {
                print(panic);
            }
        }));
    });
}

/// The product's futures are large when they are not optimised.
const STACK: usize = 8 * 1024 * 1024;

fn simulate(scenario: Scenario, with_trace: bool) -> Outcome {
    let folder = match Folder::new() {
        Ok(folder) => folder,
        Err(error) => return failed("the simulation begins", error.to_string()),
    };
    let path = folder.0.clone();
    let name = path.display().to_string();
    let seed = scenario.seed;
    fastrand::seed(seed);
    let _log = with_trace.then(|| tracing::subscriber::set_default(TraceLog));
    let ended = gw_simulated_kernel::simulate(seed, with_trace, async move || {
        world::run(scenario, &path).await
    });
    let report = match ended {
        Ended::Completed(Ok(report)) => report,
        Ended::Completed(Err(error)) => return failed("the simulation begins", error.to_string()),
        Ended::Panicked(message) => violation("nothing panics", message),
        Ended::Stuck => violation("something can happen", "all hosts wait".to_owned()),
        Ended::Endless => violation("the simulation ends", "too many polls".to_owned()),
    };
    Outcome {
        report,
        fingerprint: trace::fingerprint(),
        trace: text_without(&name),
    }
}

/// The text of the trace, the same on every machine.
fn text_without(folder: &str) -> Option<String> {
    Some(trace::take_text()?.replace(folder, "/simulation"))
}

fn violation(invariant: &'static str, found: String) -> Report {
    Report {
        violation: Some(Violation { invariant, found }),
        ..Report::default()
    }
}

fn failed(invariant: &'static str, found: String) -> Outcome {
    Outcome {
        report: violation(invariant, found),
        fingerprint: 0,
        trace: trace::take_text(),
    }
}

/// A folder for state folders, in memory if there is such a file system: their files are synced.
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Self> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let shared_memory = PathBuf::from("/dev/shm");
        let base = if shared_memory.is_dir() {
            shared_memory
        } else {
            std::env::temp_dir()
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // A fixed length: the folder's name is in errors, and so in the trace.
        let folder = base.join(format!(
            "gw-simulation-{:010}-{number:010}",
            std::process::id()
        ));
        std::fs::create_dir_all(&folder)?;
        Ok(Self(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left is overwritten by nothing, and small.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
