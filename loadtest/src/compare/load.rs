//! Load of one run, and the results that the load generator reports.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::process::Process;

/// Load of one run.
pub(super) struct Load<'a> {
    pub(super) target: &'a Target,
    pub(super) core: usize,
    pub(super) callers: u32,
    pub(super) seconds: u32,
}

/// Results of one run.
#[derive(Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) requests: u64,
    pub(super) per_second: f64,
    /// Median and 99th percentile, if the load generator reports them.
    pub(super) latency_ms: Option<(f64, f64)>,
    /// Responses other than 2xx and 3xx.
    pub(super) refused: u64,
    pub(super) socket_errors: u64,
}

/// Time beyond the run for connecting and printing the report.
const PATIENCE: Duration = Duration::from_secs(30);

/// Output of `command`, which runs for about `seconds`.
pub(super) fn output(name: &'static str, command: &mut Command, seconds: u32) -> Result<String, Failure> {
    let mut process = Process::spawn(name, command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let status = process.wait(Duration::from_secs(seconds.into()) + PATIENCE)?;
    ensure(status.is_some_and(|status| status.success()), || format!("{name} failed: {status:?}"))?;
    let mut text = String::new();
    process.take_stdout().ok_or_else(|| Failure::new(format!("{name} has no output")))?.read_to_string(&mut text)?;
    Ok(text)
}
