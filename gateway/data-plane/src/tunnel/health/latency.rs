//! Peak-sensitive decaying average of a tunnel's latency, as Finagle's peak EWMA.

use std::time::{Duration, Instant};

/// Time in which a latency without a higher sample decays to 1/e.
const DECAY: Duration = Duration::from_secs(10);

/// Rises to a higher sample at once. Decays towards zero, so that a tunnel without requests gets
/// one again after a while.
#[derive(Debug)]
pub(super) struct Latency {
    seconds: f64,
    at: Instant,
}

impl Latency {
    pub(super) fn new(latency: Duration, now: Instant) -> Self {
        Self {
            seconds: latency.as_secs_f64(),
            at: now,
        }
    }

    /// Takes a sample, of a request that took so long or still takes.
    pub(super) fn observe(&mut self, sample: Duration, now: Instant) {
        *self = Self {
            seconds: self.seconds(now).max(sample.as_secs_f64()),
            at: now,
        };
    }

    pub(super) fn get(&self, now: Instant) -> Duration {
        Duration::try_from_secs_f64(self.seconds(now)).unwrap_or(Duration::MAX)
    }

    fn seconds(&self, now: Instant) -> f64 {
        let elapsed = now.saturating_duration_since(self.at);
        if elapsed.is_zero() {
            return self.seconds;
        }
        self.seconds * (-elapsed.as_secs_f64() / DECAY.as_secs_f64()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(latency: &Latency, now: Instant) -> u128 {
        latency.get(now).as_millis()
    }

    #[test]
    fn it_rises_at_once_and_decays_by_time() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut latency = Latency::new(Duration::from_millis(10), start);
        assert_eq!(millis(&latency, start), 10);
        latency.observe(Duration::from_secs(1), start);
        assert_eq!(millis(&latency, start), 1000);
        assert_eq!(millis(&latency, after(10)), 367);
        latency.observe(Duration::from_millis(5), after(10));
        assert_eq!(
            (millis(&latency, after(10)), millis(&latency, after(20))),
            (367, 135)
        );
        latency.observe(Duration::from_millis(500), after(20));
        assert_eq!(millis(&latency, after(20)), 500);
        assert_eq!(millis(&latency, after(1_000_000)), 0);
    }

    #[test]
    fn a_clock_that_stands_still_and_the_longest_sample_are_valid() {
        let start = Instant::now();
        let mut latency = Latency::new(Duration::MAX, start + Duration::from_secs(1));
        assert_eq!(latency.get(start), Duration::MAX);
        latency.observe(Duration::ZERO, start);
        assert_eq!(latency.get(start), Duration::MAX);
    }
}
