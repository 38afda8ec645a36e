//! Load from many concurrent callers.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::client::{Answer, Connection, Target};
use crate::failure::{Failure, ensure};

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

/// Results of a run of requests.
pub(crate) struct Run {
    /// Time from the first request to the last response.
    pub(crate) elapsed: Duration,
    /// Responses with their latencies, in no particular order.
    pub(crate) answers: Vec<(Answer, Duration)>,
}

impl Run {
    /// Sorted latencies. Fails unless each response is a success; `what` names the requests.
    pub(crate) fn latencies(self, what: &str) -> Result<Vec<Duration>, Failure> {
        let count = self.answers.len();
        let failed = self
            .answers
            .iter()
            .filter(|(answer, _)| answer.head.status != 200)
            .count();
        ensure(failed == 0, || format!("{failed} of {count} {what} failed"))?;
        let mut latencies: Vec<Duration> = self
            .answers
            .into_iter()
            .map(|(_, latency)| latency)
            .collect();
        latencies.sort_unstable();
        Ok(latencies)
    }
}

/// Sends `requests` requests for `path` on `callers` keep-alive connections, back to back.
pub(crate) fn requests(
    target: &Target,
    callers: usize,
    requests: usize,
    path: &str,
) -> Result<Run, Failure> {
    let connections = connect(target, callers)?;
    let sent = AtomicUsize::new(0);
    let start = Instant::now();
    let per_caller = at_once(connections, |mut connection| {
        let mut answers = Vec::new();
        while sent.fetch_add(1, Ordering::Relaxed) < requests {
            if !connection.is_reusable() {
                connection = target.connect()?;
            }
            let asked = Instant::now();
            let answer = connection.ask(path)?;
            answers.push((answer, asked.elapsed()));
        }
        Ok(answers)
    })?;
    Ok(Run {
        elapsed: start.elapsed(),
        answers: per_caller.into_iter().flatten().collect(),
    })
}
