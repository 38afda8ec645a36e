//! `wrk`: its arguments and its report.

use std::path::{Path, PathBuf};

use super::load::{Load, Outcome, output};
use crate::failure::Failure;
use crate::process;

pub(super) fn find() -> Result<PathBuf, Failure> {
    process::find("wrk", "wrk")
}

/// Runs the load.
pub(super) fn run(wrk: &Path, load: &Load<'_>) -> Result<Outcome, Failure> {
    let Load { target, core, callers, seconds } = load;
    let mut command = process::command(wrk, Some(*core))?;
    command.args(["--latency", "-t1", &format!("-c{callers}"), &format!("-d{seconds}s"), "--timeout", "10s"]);
    // All setups get the same bytes, including the key that only the product reads.
    command.args(["-H", &format!("Host: {}", target.host), "-H", &format!("X-Gw-Service-Key: {}", target.service_key)]);
    command.arg(format!("https://127.0.0.1:{}/", target.port));
    let text = output("wrk", &mut command, *seconds)?;
    parse(&text).ok_or_else(|| Failure::new(format!("wrk reports nothing to measure:\n{text}")))
}

/// Parses a report; `None` if it is incomplete or has no requests.
fn parse(text: &str) -> Option<Outcome> {
    let after = |key: &str| text.lines().find_map(|line| line.trim().strip_prefix(key)).map(str::trim);
    let requests = text.lines().find_map(|line| line.trim().split_once(" requests in "))?.0.parse().ok()?;
    let errors = after("Socket errors:").unwrap_or_default();
    let outcome = Outcome {
        requests,
        per_second: after("Requests/sec:")?.parse().ok()?,
        latency_ms: Some((millis(after("50%")?)?, millis(after("99%")?)?)),
        refused: after("Non-2xx or 3xx responses:").map_or(Some(0), |count| count.parse().ok())?,
        socket_errors: errors.split([' ', ',']).filter_map(|word| word.parse::<u64>().ok()).sum(),
    };
    (requests > 0).then_some(outcome)
}

/// `1.50ms`, `900.00us` or `2.00s`, in milliseconds.
fn millis(text: &str) -> Option<f64> {
    // Longer units first, because each ends like a shorter one.
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
    fn reports_are_parsed() {
        let expected = Outcome {
            requests: 30_000,
            per_second: 29_970.12,
            latency_ms: Some((0.5, 1.25)),
            refused: 7,
            socket_errors: 3,
        };
        assert_eq!(parse(REPORT), Some(expected));
        let clean = REPORT.lines().filter(|line| !line.contains("errors") && !line.contains("Non-2xx"));
        let outcome = parse(&clean.collect::<Vec<_>>().join("\n")).unwrap();
        assert_eq!((outcome.refused, outcome.socket_errors), (0, 0));
        assert_eq!(parse(&REPORT.replace("30000 requests", "0 requests")), None);
        assert_eq!(millis("2.00s"), Some(2000.0));
    }
}
