//! `h2load`: HTTP/2 callers with many concurrent requests on few connections, or HTTP/1.1 callers.
//! Unlike wrk, it names the service in the ClientHello.

use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::machine::process;
use crate::scenarios::compare::LOAD_CORE;
use crate::scenarios::compare::load::{Load, Outcome, output};

/// Concurrent requests on one connection.
const STREAMS: u32 = 32;

pub(crate) fn find() -> Result<PathBuf, Failure> {
    process::find("h2load", "nghttp2-client")
}

/// Runs the load with `callers` concurrent requests: streams of HTTP/2, or connections of HTTP/1.1.
pub(crate) fn run(h2load: &Path, load: &Load<'_>, http1: bool) -> Result<Outcome, Failure> {
    let Load {
        target,
        callers,
        seconds,
    } = load;
    let connections = if http1 {
        *callers
    } else {
        callers.div_ceil(STREAMS)
    };
    let mut command = process::command(h2load, &[LOAD_CORE])?;
    command.args([
        format!("-c{connections}"),
        format!("-m{}", callers / connections),
        format!("-D{seconds}"),
    ]);
    if http1 {
        command.arg("--h1");
    }
    let (name, value) = target.credential();
    command.args(["-t1", "--header", &format!("{name}: {value}")]);
    command.arg(format!("--connect-to=127.0.0.1:{}", target.port));
    // Over plain TCP, the callers begin with the preface of HTTP/2 (RFC 9113 §3.3).
    command.arg(format!(
        "{}://{}:{}/",
        target.scheme(),
        target.host,
        target.port
    ));
    let text = output("h2load", &mut command, *seconds)?;
    parse(&text).ok_or_else(|| Failure::new(format!("h2load reports nothing to measure:\n{text}")))
}

/// Parses a report; `None` if it is incomplete or has no requests.
fn parse(text: &str) -> Option<Outcome> {
    let line = |key: &str| {
        text.lines()
            .find_map(|line| line.trim().strip_prefix(key))
            .map(str::trim)
    };
    let (_, rate) = line("finished in")?.split_once(", ")?;
    let count = |kind: &str| -> Option<u64> {
        line("requests:")?
            .split(", ")
            .find_map(|part| part.strip_suffix(kind))?
            .trim()
            .parse()
            .ok()
    };
    let not_2xx = line("status codes:")?
        .split(", ")
        .filter(|part| !part.ends_with("2xx"));
    let requests = count("succeeded")?;
    let outcome = Outcome {
        requests,
        per_second: rate.split_once(" req/s")?.0.parse().ok()?,
        latency_ms: None,
        refused: not_2xx
            .filter_map(|part| part.split(' ').next()?.parse::<u64>().ok())
            .sum(),
        socket_errors: count("errored")? + count("timeout")?,
    };
    (requests > 0).then_some(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_parsed() {
        let report = "starting benchmark...
finished in 3.01s, 23456.70 req/s, 5.51MB/s
requests: 70370 total, 70626 started, 70370 done, 70368 succeeded, 2 failed, 1 errored, 1 timeout
status codes: 70366 2xx, 0 3xx, 0 4xx, 2 5xx
traffic: 16.53MB (17332421) total, 5.69MB (5964610) headers (space savings 60.81%), \
    6.58MB (6896456) data
                     min         max         mean         sd        +/- sd
time for request:     1.03ms     20.55ms      8.49ms      2.73ms    68.52%
";
        let expected = Outcome {
            requests: 70_368,
            per_second: 23_456.7,
            latency_ms: None,
            refused: 2,
            socket_errors: 2,
        };
        assert_eq!(parse(report), Some(expected));
        assert_eq!(
            parse(&report.replace("70368 succeeded", "0 succeeded")),
            None
        );
        assert_eq!(parse("nothing"), None);
    }
}
