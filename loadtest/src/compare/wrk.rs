//! `wrk`: how it is run and what its report says.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::process::{self, Process};

/// One run's load.
pub(super) struct Load<'a> {
    pub(super) target: &'a Target,
    pub(super) core: usize,
    pub(super) callers: u32,
    pub(super) seconds: u32,
}

/// What `wrk` saw.
#[derive(Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) requests: u64,
    pub(super) per_second: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    /// Answers other than 2xx and 3xx.
    pub(super) refused: u64,
    pub(super) socket_errors: u64,
}

/// Beyond the run itself: connecting, and printing the report.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn find() -> Result<PathBuf, Failure> {
    process::find("wrk", "wrk")
}

/// Runs the load to its end.
pub(super) fn run(wrk: &Path, load: &Load<'_>) -> Result<Outcome, Failure> {
    let Load { target, core, callers, seconds } = load;
    let mut command = process::command(wrk, Some(*core))?;
    command.args(["--latency", "-t1", &format!("-c{callers}"), &format!("-d{seconds}s"), "--timeout", "10s"]);
    // All setups get the same bytes, the key that only the product reads included.
    command.args(["-H", &format!("Host: {}", target.host), "-H", &format!("X-Gw-Service-Key: {}", target.service_key)]);
    command.arg(format!("https://127.0.0.1:{}/", target.port)).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut process = Process::spawn("wrk", &mut command)?;
    let status = process.wait(Duration::from_secs((*seconds).into()) + PATIENCE)?;
    ensure(status.is_some_and(|status| status.success()), || format!("wrk did not end well: {status:?}"))?;
    let mut text = String::new();
    process.take_stdout().ok_or_else(|| Failure::new("wrk has no output"))?.read_to_string(&mut text)?;
    Outcome::parse(&text).ok_or_else(|| Failure::new(format!("wrk reports nothing to measure:\n{text}")))
}

impl Outcome {
    /// `None` if there is something missing, or there were no requests.
    fn parse(text: &str) -> Option<Self> {
        let after = |key: &str| text.lines().find_map(|line| line.trim().strip_prefix(key)).map(str::trim);
        let requests = text.lines().find_map(|line| line.trim().split_once(" requests in "))?.0.parse().ok()?;
        let errors = after("Socket errors:").unwrap_or_default();
        let outcome = Self {
            requests,
            per_second: after("Requests/sec:")?.parse().ok()?,
            p50_ms: millis(after("50%")?)?,
            p99_ms: millis(after("99%")?)?,
            refused: after("Non-2xx or 3xx responses:").map_or(Some(0), |count| count.parse().ok())?,
            socket_errors: errors.split([' ', ',']).filter_map(|word| word.parse::<u64>().ok()).sum(),
        };
        (requests > 0).then_some(outcome)
    }
}

/// `1.50ms`, `900.00us` or `2.00s`, in milliseconds.
fn millis(text: &str) -> Option<f64> {
    // The longer units first: each ends like a shorter one.
    let units = [("us", 1e-3), ("ms", 1.0), ("s", 1e3), ("m", 60e3)];
    units.into_iter().find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "Running 1s test @ https://127.0.0.1:1/
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   510.77us  120.00us   3.00ms   90.00%
  Latency Distribution
     50%  500.00us
     75%  600.00us
     90%  700.00us
     99%    1.25ms
  30000 requests in 1.00s, 8.00MB read
  Socket errors: connect 0, read 2, write 0, timeout 1
  Non-2xx or 3xx responses: 7
Requests/sec:  29970.12
Transfer/sec:      8.00MB
";

    #[test]
    fn reports_are_read() {
        let expected = Outcome {
            requests: 30_000,
            per_second: 29_970.12,
            p50_ms: 0.5,
            p99_ms: 1.25,
            refused: 7,
            socket_errors: 3,
        };
        assert_eq!(Outcome::parse(REPORT), Some(expected));
        let clean = REPORT.lines().filter(|line| !line.contains("errors") && !line.contains("Non-2xx"));
        let outcome = Outcome::parse(&clean.collect::<Vec<_>>().join("\n")).unwrap();
        assert_eq!((outcome.refused, outcome.socket_errors), (0, 0));
        assert_eq!(Outcome::parse(&REPORT.replace("30000 requests", "0 requests")), None);
        assert_eq!(millis("2.00s"), Some(2000.0));
    }
}
