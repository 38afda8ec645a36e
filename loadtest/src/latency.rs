//! Latency of callers that send requests at a moderate rate.

use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use crate::client::Target;
use crate::failure::{Failure, ensure};
use crate::report::percentile;

/// Number of callers, each on one keep-alive connection, and the interval of their requests.
const CALLERS: usize = 4;
const EVERY: Duration = Duration::from_millis(5);
const SMALL: &str = "/hello";
/// A p99 below this counts as this value: smaller differences come from the scheduler.
const NOISE: Duration = Duration::from_micros(500);

#[derive(Clone, Copy)]
pub(crate) struct Latency {
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
}

impl Latency {
    pub(crate) const MAX: Self = Self {
        p50: Duration::MAX,
        p99: Duration::MAX,
    };

    pub(crate) fn min(self, other: Self) -> Self {
        Self {
            p50: self.p50.min(other.p50),
            p99: self.p99.min(other.p99),
        }
    }

    /// Ratio of this p99 to the other's.
    pub(crate) fn p99_over(self, other: Self) -> f64 {
        self.p99.max(NOISE).as_secs_f64() / other.p99.max(NOISE).as_secs_f64()
    }

    /// Measures requests at a moderate rate, each of which must succeed.
    pub(crate) fn measure(target: &Target, length: Duration) -> Result<Self, Failure> {
        let mut latencies = std::thread::scope(|scope| {
            let callers: Vec<_> = (0..CALLERS)
                .map(|_| scope.spawn(|| ask_for(target, length)))
                .collect();
            joined(callers).collect::<Result<Vec<_>, _>>()
        })?
        .concat();
        latencies.sort_unstable();
        Ok(Self {
            p50: percentile(&latencies, 50),
            p99: percentile(&latencies, 99),
        })
    }
}

/// Joins threads and collects their results.
pub(crate) fn joined<'scope, T>(
    threads: Vec<ScopedJoinHandle<'scope, Result<T, Failure>>>,
) -> impl Iterator<Item = Result<T, Failure>> {
    threads.into_iter().map(|thread| {
        thread
            .join()
            .unwrap_or_else(|_| Err(Failure::new("a thread panicked")))
    })
}

fn ask_for(target: &Target, length: Duration) -> Result<Vec<Duration>, Failure> {
    let mut connection = target.connect()?;
    let until = Instant::now() + length;
    let mut latencies = Vec::new();
    while Instant::now() < until {
        let asked = Instant::now();
        let answer = connection.ask(SMALL)?;
        latencies.push(asked.elapsed());
        ensure(answer.head.status == 200, || {
            let said = String::from_utf8_lossy(&answer.body);
            format!("an ordinary caller got {}: {said}", answer.head.status)
        })?;
        std::thread::sleep(EVERY);
    }
    Ok(latencies)
}
