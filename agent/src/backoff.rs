//! Exponential backoff. Pure: the random numbers are arguments.

use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
const CAP: Duration = Duration::from_secs(120);

/// Exponential backoff with full jitter; from 1 s to 120 s by default.
///
/// Full jitter spreads the agents of a region over the whole delay when their gateway restarts, so
/// that they do not all reconnect at once.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    ceiling: Duration,
    cap: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::between(FIRST, CAP)
    }
}

impl Backoff {
    /// Backoff with this first and largest ceiling.
    pub(crate) fn between(first: Duration, cap: Duration) -> Self {
        Self {
            first,
            ceiling: first,
            cap,
        }
    }

    /// Returns the ceiling times `random` (0 to 1) as the next delay, and doubles the ceiling.
    pub(crate) fn next_delay(&mut self, random: f64) -> Duration {
        let delay = self.ceiling.mul_f64(random.clamp(0.0, 1.0));
        self.ceiling = (self.ceiling * 2).min(self.cap);
        delay
    }

    /// Returns to the first delay, after a success.
    pub(crate) fn reset(&mut self) {
        self.ceiling = self.first;
    }
}

/// A random number between 0 and 1, uniformly distributed.
pub(crate) fn random() -> f64 {
    let mut bytes = [0; 4];
    // Without a random source every delay is the longest one, which does no harm.
    if aws_lc_rs::rand::fill(&mut bytes).is_err() {
        return 1.0;
    }
    f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ceiling_doubles_from_one_second_to_two_minutes_and_resets() {
        let mut backoff = Backoff::default();
        let ceilings: Vec<u64> = (0..10).map(|_| backoff.next_delay(1.0).as_secs()).collect();
        assert_eq!(ceilings, [1, 2, 4, 8, 16, 32, 64, 120, 120, 120]);
        backoff.reset();
        assert_eq!(backoff.next_delay(1.0), FIRST);
    }

    #[test]
    fn jitter_is_full() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.next_delay(0.0), Duration::ZERO);
        assert_eq!(backoff.next_delay(0.25), Duration::from_millis(500));
    }
}
