//! Load from many concurrent callers.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::client::{Answer, Connection, Target};
use crate::failure::{Failure, ensure};

const SMALL: &str = "/hello";

/// Opens `count` connections.
pub(crate) fn connect(target: &Target, count: usize) -> Result<Vec<Connection>, Failure> {
    (0..count).map(|_| target.connect()).collect()
}

/// Runs `work` on every connection at the same time, one thread each.
pub(crate) fn at_once<T: Send>(
    connections: Vec<Connection>,
    work: impl Fn(Connection) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    let start = Barrier::new(connections.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = connections
            .into_iter()
            .map(|connection| {
                let start = &start;
                let work = &work;
                scope.spawn(move || {
                    start.wait();
                    work(connection)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(Failure::new("a panic")))
            })
            .collect()
    })
}

/// Responses of a run with their latencies, in no particular order.
pub(crate) struct Run(pub(crate) Vec<(Answer, Duration)>);

impl Run {
    /// Sorted latencies.
    pub(crate) fn latencies(self) -> Vec<Duration> {
        let mut latencies: Vec<Duration> = self.0.iter().map(|(_, latency)| *latency).collect();
        latencies.sort_unstable();
        latencies
    }
}

/// Sends `requests` requests on `callers` keep-alive connections, back to back. Fails unless each
/// response is a success.
pub(crate) fn requests(target: &Target, callers: usize, requests: usize) -> Result<Run, Failure> {
    let connections = connect(target, callers)?;
    let sent = AtomicUsize::new(0);
    let per_caller = at_once(connections, |mut connection| {
        let mut answers = Vec::new();
        while sent.fetch_add(1, Ordering::Relaxed) < requests {
            if !connection.is_reusable() {
                connection = target.connect()?;
            }
            let asked = Instant::now();
            let answer = connection.ask(SMALL)?;
            answers.push((answer, asked.elapsed()));
        }
        Ok(answers)
    })?;
    let answers: Vec<_> = per_caller.into_iter().flatten().collect();
    let failed = answers
        .iter()
        .filter(|(answer, _)| answer.head.status != 200)
        .count();
    ensure(failed == 0, || {
        format!("{failed} of {requests} requests failed")
    })?;
    Ok(Run(answers))
}

/// CPU time in microseconds that a request costs, by the difference of `spent`.
pub(crate) fn cpu_per_request(
    spent: impl Fn() -> Duration,
    target: &Target,
    callers: usize,
    count: usize,
) -> Result<f64, Failure> {
    let before = spent();
    requests(target, callers, count)?;
    Ok(spent().saturating_sub(before).as_secs_f64() * 1e6 / count as f64)
}
