//! Requests of many callers, back to back or at a moderate rate, each of which must succeed.

use std::time::{Duration, Instant};

use crate::callers::{Callers, Load, Methods, Outcome};
use crate::client::Target;
use crate::failure::{Failure, ensure, wait_until};
use crate::report::per_mille;

const SENT_WITHIN: Duration = Duration::from_secs(600);
/// Callers at a moderate rate, each on one keep-alive connection, and their requests per second.
const CALLERS: u32 = 4;
const RATE: u32 = 800;
/// A p99 below this counts as this value: smaller differences come from the scheduler.
const NOISE: Duration = Duration::from_micros(500);

/// Sends at least `count` requests on `callers` keep-alive connections, back to back.
pub(crate) fn requests(target: &Target, callers: u32, count: usize) -> Result<Outcome, Failure> {
    let callers = start(target, callers, None);
    let late = || format!("{count} requests take more than {SENT_WITHIN:?}");
    wait_until(SENT_WITHIN, late, || Ok(callers.sent() >= count))?;
    stop(callers)
}

/// CPU time in microseconds that a request costs, by the difference of `spent`.
pub(crate) fn cpu_per_request(
    spent: impl Fn() -> Duration,
    target: &Target,
    callers: u32,
    count: usize,
) -> Result<f64, Failure> {
    let before = spent();
    let sent = requests(target, callers, count)?.answered.len();
    Ok(spent().saturating_sub(before).as_secs_f64() * 1e6 / sent as f64)
}

fn start(target: &Target, callers: u32, rate: Option<u32>) -> Callers {
    Callers::send(&Load {
        targets: vec![target.clone()],
        callers,
        rate,
        methods: Methods::Get,
        per_connection: usize::MAX,
    })
}

fn stop(callers: Callers) -> Result<Outcome, Failure> {
    let outcome = callers.stop()?;
    let failed = outcome.failed.first().map(|failed| failed.what.to_string());
    ensure(failed.is_none(), || {
        let first = failed.unwrap_or_default();
        format!("{} requests failed: {first}", outcome.failed.len())
    })?;
    Ok(outcome)
}

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

    /// Measures requests at a moderate rate.
    pub(crate) fn measure(target: &Target, length: Duration) -> Result<Self, Failure> {
        let began = Instant::now();
        let callers = start(target, CALLERS, Some(RATE));
        std::thread::sleep(length);
        let sorted = stop(callers)?.durations(began, Instant::now());
        Ok(Self {
            p50: per_mille(&sorted, 500),
            p99: per_mille(&sorted, 990),
        })
    }
}
