//! Rate limit of the agent's certificate requests. Each certificate costs the gateway a disk write
//! and counts against the agent's quota, so a new certificate is not replaced at once, even if a
//! clock is wrong.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Least time between two certificates, unless their lifetime is shorter than three times that.
const INTERVAL: Duration = Duration::from_secs(180);
const INTERVAL_MIN: Duration = Duration::from_secs(1);

/// The last certificate issued to this process.
#[derive(Default)]
pub(crate) struct RequestInterval {
    /// When it was issued, and how long the agent requests no other after that.
    last: Cell<Option<(Instant, Duration)>>,
}

impl RequestInterval {
    /// Records a new certificate; `lifetime` is the time until it expires by the gateway's clock,
    /// if known.
    pub(crate) fn record(&self, lifetime: Option<Duration>) {
        let interval = lifetime.map_or(INTERVAL, |lifetime| {
            (lifetime / 3).clamp(INTERVAL_MIN, INTERVAL)
        });
        self.last.set(Some((Instant::now(), interval)));
    }

    /// Time until the next certificate may be requested; zero if now.
    pub(crate) fn wait(&self) -> Duration {
        self.last.get().map_or(Duration::ZERO, |(at, interval)| {
            interval.saturating_sub(at.elapsed())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_is_minutes_unless_the_lifetime_is_short() {
        let request_interval = RequestInterval::default();
        assert_eq!(request_interval.wait(), Duration::ZERO);
        for (lifetime, most) in [
            (None, INTERVAL),
            (Some(Duration::from_hours(24)), INTERVAL),
            (Some(INTERVAL), INTERVAL / 3),
            (Some(Duration::ZERO), INTERVAL_MIN),
        ] {
            request_interval.record(lifetime);
            let wait = request_interval.wait();
            assert!(
                !wait.is_zero() && wait <= most && wait > most / 2,
                "{lifetime:?}: {wait:?}"
            );
        }
    }
}
