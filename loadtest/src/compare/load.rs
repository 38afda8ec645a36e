//! One run's load, and what the program that makes it saw.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::process::Process;

/// One run's load.
pub(super) struct Load<'a> {
    pub(super) target: &'a Target,
    pub(super) core: usize,
    pub(super) callers: u32,
    pub(super) seconds: u32,
}

/// What came of it.
#[derive(Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) requests: u64,
    pub(super) per_second: f64,
    /// Median and 99th percentile, where the program reports them.
    pub(super) latency_ms: Option<(f64, f64)>,
    /// Answers other than 2xx and 3xx.
    pub(super) refused: u64,
    pub(super) socket_errors: u64,
}

/// Beyond the run itself: connecting, and printing the report.
const PATIENCE: Duration = Duration::from_secs(30);

/// What `command` prints, which takes about `seconds`.
pub(super) fn output(name: &'static str, command: &mut Command, seconds: u32) -> Result<String, Failure> {
    let mut process = Process::spawn(name, command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let status = process.wait(Duration::from_secs(seconds.into()) + PATIENCE)?;
    ensure(status.is_some_and(|status| status.success()), || format!("{name} did not end well: {status:?}"))?;
    let mut text = String::new();
    process.take_stdout().ok_or_else(|| Failure::new(format!("{name} has no output")))?.read_to_string(&mut text)?;
    Ok(text)
}
