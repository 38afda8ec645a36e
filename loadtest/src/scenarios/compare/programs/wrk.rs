//! `wrk`: its arguments and its report.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::client::Target;
use crate::failure::Failure;
use crate::machine::process;
use crate::machine::process::Process;
use crate::scenarios::compare::LOAD_CORE;
use crate::scenarios::compare::load::{Load, Outcome, finish, output};

pub(crate) fn find() -> Result<PathBuf, Failure> {
    process::find("wrk", "wrk")
}

/// Runs the load.
pub(crate) fn run(wrk: &Path, load: &Load<'_>) -> Result<Outcome, Failure> {
    let Load {
        target,
        callers,
        seconds,
    } = load;
    let mut command = process::command(wrk, &[LOAD_CORE])?;
    command.args(arguments(target, "/", *callers, *seconds));
    let text = output("wrk", &mut command, *seconds)?;
    parse(&text).ok_or_else(|| Failure::new(format!("wrk reports nothing to measure:\n{text}")))
}

/// Downloads that take the time that other programs leave over.
pub(crate) struct Downloads {
    process: Process,
    seconds: u32,
}

impl Downloads {
    pub(crate) fn start(
        wrk: &Path,
        target: &Target,
        path: &str,
        count: u32,
        seconds: u32,
    ) -> Result<Self, Failure> {
        let mut command = process::command(&process::find("chrt", "util-linux")?, &[LOAD_CORE])?;
        command
            .args(["--idle", "0"])
            .arg(wrk)
            .args(arguments(target, path, count, seconds));
        let process = Process::spawn("wrk", command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        Ok(Self { process, seconds })
    }

    /// Waits for the end; returns the speed of all downloads together, in MB/s.
    pub(crate) fn finish(self) -> Result<f64, Failure> {
        let text = finish(self.process, "wrk", self.seconds)?;
        megabytes_per_second(&text)
            .ok_or_else(|| Failure::new(format!("wrk reports no transfer:\n{text}")))
    }
}

fn arguments(target: &Target, path: &str, callers: u32, seconds: u32) -> Vec<String> {
    let (name, value) = target.credential();
    [
        "--latency",
        "-t1",
        &format!("-c{callers}"),
        &format!("-d{seconds}s"),
        "--timeout",
        "10s",
        // All setups get the same bytes, including the credential that only the product reads.
        "-H",
        &format!("Host: {}", target.host),
        "-H",
        &format!("{name}: {value}"),
        &format!("{}://127.0.0.1:{}{path}", target.scheme(), target.port),
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Speed in a report. The units of wrk are powers of 1,024.
fn megabytes_per_second(text: &str) -> Option<f64> {
    let speed = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("Transfer/sec:"))?
        .trim();
    let units = [
        ("KB", 1024.0),
        ("MB", 1_048_576.0),
        ("GB", 1_073_741_824.0),
        ("B", 1.0),
    ];
    let bytes = units
        .into_iter()
        .find_map(|(unit, size)| Some(speed.strip_suffix(unit)?.parse::<f64>().ok()? * size));
    Some(bytes? / 1e6)
}

/// Parses a report; `None` if it is incomplete or has no requests.
fn parse(text: &str) -> Option<Outcome> {
    let after = |key: &str| {
        text.lines()
            .find_map(|line| line.trim().strip_prefix(key))
            .map(str::trim)
    };
    let requests = text
        .lines()
        .find_map(|line| line.trim().split_once(" requests in "))?
        .0
        .parse()
        .ok()?;
    let errors = after("Socket errors:").unwrap_or_default();
    let outcome = Outcome {
        requests,
        per_second: after("Requests/sec:")?.parse().ok()?,
        latency_ms: Some((millis(after("50%")?)?, millis(after("99%")?)?)),
        refused: after("Non-2xx or 3xx responses:").map_or(Some(0), |count| count.parse().ok())?,
        socket_errors: errors
            .split([' ', ','])
            .filter_map(|word| word.parse::<u64>().ok())
            .sum(),
    };
    (requests > 0).then_some(outcome)
}

/// `1.50ms`, `900.00us` or `2.00s`, in milliseconds.
fn millis(text: &str) -> Option<f64> {
    // Longer units first, because each ends like a shorter one.
    let units = [("us", 1e-3), ("ms", 1.0), ("s", 1e3), ("m", 60e3)];
    units
        .into_iter()
        .find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor))
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
    fn reports_are_parsed() {
        let expected = Outcome {
            requests: 30_000,
            per_second: 29_970.12,
            latency_ms: Some((0.5, 1.25)),
            refused: 7,
            socket_errors: 3,
        };
        assert_eq!(parse(REPORT), Some(expected));
        let clean = REPORT
            .lines()
            .filter(|line| !line.contains("errors") && !line.contains("Non-2xx"));
        let outcome = parse(&clean.collect::<Vec<_>>().join("\n")).unwrap();
        assert_eq!((outcome.refused, outcome.socket_errors), (0, 0));
        assert_eq!(parse(&REPORT.replace("30000 requests", "0 requests")), None);
        assert_eq!(millis("2.00s"), Some(2000.0));
        assert_eq!(megabytes_per_second(REPORT), Some(8.388_608));
        assert_eq!(megabytes_per_second("Transfer/sec:  500.00B"), Some(0.0005));
    }
}
