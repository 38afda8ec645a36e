//! Which of several backends a request goes to. Pure: takes the time.

use std::time::{Duration, Instant};

/// How long a backend that cannot be reached is left alone: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What is known of a backend from trying to reach it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Health {
    /// Attempts that failed since the last that did not.
    failures: u32,
    aside_until: Option<Instant>,
}

impl Health {
    /// Whether requests should go there.
    pub(super) fn is_good(self, now: Instant) -> bool {
        self.aside_until.is_none_or(|until| now >= until)
    }

    /// The last attempt failed.
    pub(super) fn is_failing(self) -> bool {
        self.failures > 0
    }

    /// An attempt begins. After a failure there is one at a time, so that few requests wait for a backend that is
    /// still away.
    #[must_use]
    pub(super) fn tried(self, now: Instant) -> Self {
        if self.failures == 0 { self } else { Self { aside_until: Some(now + self.pause()), ..self } }
    }

    #[must_use]
    pub(super) fn failed(self, now: Instant) -> Self {
        let failed = Self { failures: self.failures.saturating_add(1), ..self };
        Self { aside_until: Some(now + failed.pause()), ..failed }
    }

    fn pause(self) -> Duration {
        let doublings = self.failures.saturating_sub(1).min(16);
        (FIRST_PAUSE * 2u32.pow(doublings)).min(LONGEST_PAUSE)
    }
}

/// The one of `count` with the least load; those without a load are out of the question. `turn` decides between equals.
pub(super) fn least_loaded(count: usize, turn: usize, load: impl Fn(usize) -> Option<u32>) -> Option<usize> {
    let turns = (0..count).map(|offset| (turn.wrapping_add(offset)) % count);
    turns.filter_map(|at| Some((load(at)?, at))).min_by_key(|(load, _)| *load).map(|(_, at)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_that_fails_is_set_aside_for_longer_each_time() {
        let mut now = Instant::now();
        let mut health = Health::default();
        assert!(health.tried(now).is_good(now));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            health = health.failed(now);
            let just_before = now + Duration::from_secs(seconds) - Duration::from_millis(1);
            assert!(!health.is_good(now) && !health.is_good(just_before), "{seconds}");
            now += Duration::from_secs(seconds);
            assert!(health.is_good(now), "{seconds}");
        }
    }

    #[test]
    fn after_a_failure_one_attempt_at_a_time_is_made() {
        let start = Instant::now();
        let later = start + Duration::from_secs(5);
        let health = Health::default().failed(start);
        assert!(health.is_good(later));
        assert!(!health.tried(later).is_good(later));
    }

    #[test]
    fn the_least_loaded_is_chosen_and_equals_take_turns() {
        let loads = [Some(2), Some(1), None, Some(1)];
        let chosen = |turn| least_loaded(loads.len(), turn, |at| loads[at]);
        assert_eq!([0, 1, 2, 3, 4].map(chosen), [Some(1), Some(1), Some(3), Some(3), Some(1)]);
        assert_eq!(least_loaded(2, 7, |_| None), None);
        assert_eq!(least_loaded(0, 7, |_| Some(0)), None);
    }
}
