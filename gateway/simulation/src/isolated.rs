//! Runs each scenario in a process of its own.
//!
//! A process has state that no seed decides: tokio, for example, seeds the random numbers of a
//! thread, by which it chooses among waiting tasks, from a counter of the process. So a scenario
//! does the same each time only in a process that has run nothing else. Starting the program takes
//! as long as a small scenario. A [`Runner`] is therefore a process that has run one scenario,
//! always the same, and forks for each further one. A scenario that aborts ends nothing but its own
//! process.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use gw_simulation::run;
use gw_simulation::scenario::Scenario;
use gw_simulation::scenario_file;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The option that makes this program the process of a runner.
const OPTION: &str = "--runner";

/// What came of a scenario.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) requests: u64,
    pub(crate) relayed: u64,
    /// CPU time of the process, in seconds.
    #[serde(default)]
    pub(crate) cpu_seconds: f64,
    pub(crate) fingerprint: String,
    pub(crate) trace: Option<String>,
    pub(crate) violation: Option<Violation>,
}

/// An invariant that does not hold.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Violation {
    pub(crate) invariant: String,
    pub(crate) found: String,
}

/// A process that forks for each scenario.
pub(crate) struct Runner {
    process: Child,
    /// `None` once it shall end.
    scenarios: Option<ChildStdin>,
    reports: ChildStdout,
}

impl Runner {
    pub(crate) fn start() -> io::Result<Self> {
        // SIGINT of a terminal is for the campaign, which waits for the scenarios that have begun.
        let mut process = Command::new(std::env::current_exe()?)
            .arg(OPTION)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let missing = || io::Error::other("a runner has no pipes");
        Ok(Self {
            scenarios: Some(process.stdin.take().ok_or_else(missing)?),
            reports: process.stdout.take().ok_or_else(missing)?,
            process,
        })
    }

    pub(crate) fn run(&mut self, scenario: &Scenario, with_trace: bool) -> io::Result<Report> {
        let text = scenario_file::to_text(scenario).map_err(io::Error::other)?;
        self.order(&Order {
            what: What::Scenario(text),
            with_trace,
        })
    }

    /// Runs the scenario of a seed.
    pub(crate) fn run_seed(&mut self, seed: u64) -> io::Result<Report> {
        self.order(&Order {
            what: What::Seed(seed.to_string()),
            with_trace: false,
        })
    }

    fn order(&mut self, order: &Order) -> io::Result<Report> {
        let ended = || io::Error::other("a runner has ended");
        send(self.scenarios.as_mut().ok_or_else(ended)?, order)?;
        receive(&mut self.reports)?.ok_or_else(ended)
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        drop(self.scenarios.take());
        // It ends with its input.
        let _ = self.process.wait();
    }
}

#[derive(Serialize, Deserialize)]
struct Order {
    with_trace: bool,
    what: What,
}

/// Integers of TOML have a sign: seeds are texts.
#[derive(Serialize, Deserialize)]
enum What {
    Seed(String),
    Scenario(String),
}

/// Sends a value with its length before it.
fn send(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let text = toml::to_string(value).map_err(io::Error::other)?;
    to.write_all(&(text.len() as u64).to_ne_bytes())?;
    to.write_all(text.as_bytes())?;
    to.flush()
}

/// Receives what [`send`] has sent; `None` at the end of the input.
fn receive<T: for<'a> Deserialize<'a>>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 8];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = usize::try_from(u64::from_ne_bytes(length)).map_err(io::Error::other)?;
    let mut text = vec![0; length];
    from.read_exact(&mut text)?;
    toml::from_slice(&text).map(Some).map_err(io::Error::other)
}

/// The process of a runner: runs the scenarios of its input, until that ends.
pub(crate) fn serve() -> io::Result<()> {
    // What is initialised once is the same for all scenarios then, and done.
    run::run(&Scenario::new(0), false);
    while let Some(order) = receive::<Order>(&mut io::stdin())? {
        let status = in_child(|| {
            let reported = report(&order).and_then(|report| send(&mut io::stdout(), &report));
            i32::from(reported.is_err())
        })?;
        if status != 0 {
            let violation = Violation {
                invariant: "the process lives".to_owned(),
                found: format!("it ended with status {status:#x}"),
            };
            let report = Report {
                requests: 0,
                relayed: 0,
                cpu_seconds: 0.0,
                fingerprint: String::new(),
                trace: None,
                violation: Some(violation),
            };
            send(&mut io::stdout(), &report)?;
        }
    }
    Ok(())
}

fn report(order: &Order) -> io::Result<Report> {
    let scenario = match &order.what {
        What::Seed(seed) => Scenario::new(seed.parse().map_err(io::Error::other)?),
        What::Scenario(text) => scenario_file::parse(text).map_err(io::Error::other)?,
    };
    let outcome = run::run(&scenario, order.with_trace);
    let violation = outcome.report.violation;
    Ok(Report {
        requests: outcome.report.requests as u64,
        relayed: outcome.report.relayed as u64,
        cpu_seconds: cpu_seconds(),
        fingerprint: format!("{:016x}", outcome.fingerprint),
        trace: outcome.trace,
        violation: violation.map(|violation| Violation {
            invariant: violation.invariant.to_owned(),
            found: violation.found,
        }),
    })
}

/// CPU time of this process.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Calls `call` in a child process, whose exit code is what it returns. Returns the status of
/// wait(2).
#[expect(unsafe_code, reason = "no library forks")]
fn in_child(call: impl FnOnce() -> i32) -> io::Result<i32> {
    // SAFETY: this process has one thread: those of simulations have ended. So the child finds no
    // lock held.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        // Coverage is written as the process ends.
        0 => std::process::exit(call()),
        child => {
            let mut status = 0;
            // SAFETY: the pointer is valid for the call.
            match unsafe { libc::waitpid(child, &raw mut status, 0) } {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(status),
            }
        }
    }
}
