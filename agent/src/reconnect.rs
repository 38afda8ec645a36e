//! When to try again. Pure: takes its randomness.

use std::time::Duration;

const FIRST: Duration = Duration::from_secs(1);
const CAP: Duration = Duration::from_secs(120);

/// Exponential backoff from 1 s to 120 s with full jitter.
///
/// Full jitter spreads the agents of a region over the whole delay when its gateway restarts, instead of having them
/// come back together.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    ceiling: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { ceiling: FIRST }
    }

    /// The next delay: `random`, from 0 up to 1, of the ceiling, which doubles.
    pub(crate) fn next_delay(&mut self, random: f64) -> Duration {
        let delay = self.ceiling.mul_f64(random.clamp(0.0, 1.0));
        self.ceiling = (self.ceiling * 2).min(CAP);
        delay
    }

    /// A connection succeeded: begin with 1 s again.
    pub(crate) fn reset(&mut self) {
        *self = Self::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_from_one_second_to_two_minutes_and_starts_over_after_success() {
        let mut backoff = Backoff::new();
        let ceilings: Vec<u64> = (0..10).map(|_| backoff.next_delay(1.0).as_secs()).collect();
        assert_eq!(ceilings, [1, 2, 4, 8, 16, 32, 64, 120, 120, 120]);
        backoff.reset();
        assert_eq!(backoff.next_delay(1.0), FIRST);
    }

    #[test]
    fn jitter_is_full() {
        let mut backoff = Backoff::new();
        assert_eq!(backoff.next_delay(0.0), Duration::ZERO);
        assert_eq!(backoff.next_delay(0.25), Duration::from_millis(500));
    }
}
