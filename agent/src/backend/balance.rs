//! Load balancing over the backends of a service, and the health on which it depends. Pure: the
//! time is an argument.

use std::time::{Duration, Instant};

use gw_shared::tunnel::control::BackendHealth;

/// First and longest pause in which an unreachable backend receives no requests.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Failed health checks in a row after which a backend is down, and successful ones after which it
/// is up again.
const DOWN_AFTER: u32 = 2;
const UP_AFTER: u32 = 3;

/// Verdict of the health checks of a backend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct HealthVerdict {
    is_down: bool,
    /// Results in a row that contradict the verdict.
    contrary: u32,
}

impl HealthVerdict {
    #[must_use]
    fn after(self, is_good: bool) -> Self {
        let needed = if self.is_down { UP_AFTER } else { DOWN_AFTER };
        if is_good != self.is_down {
            Self {
                contrary: 0,
                ..self
            }
        } else if self.contrary + 1 < needed {
            Self {
                contrary: self.contrary + 1,
                ..self
            }
        } else {
            Self {
                is_down: !self.is_down,
                contrary: 0,
            }
        }
    }
}

/// Health of a backend, from the results of connection attempts and of health checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Health {
    /// Failed attempts since the last success.
    failures: u32,
    ejected_until: Option<Instant>,
    /// An attempt has succeeded.
    has_succeeded: bool,
    checks: HealthVerdict,
}

impl Health {
    /// Whether the backend may receive requests.
    pub(super) fn is_available(self, now: Instant) -> bool {
        !self.checks.is_down && self.ejected_until.is_none_or(|until| now >= until)
    }

    /// Whether the last attempt failed, or the health checks do.
    pub(super) fn is_failing(self) -> bool {
        self.failures > 0 || self.checks.is_down
    }

    /// As the gateway is told.
    pub(super) fn report(self) -> BackendHealth {
        match self {
            _ if self.is_failing() => BackendHealth::Unhealthy,
            Self {
                has_succeeded: true,
                ..
            } => BackendHealth::Healthy,
            _ => BackendHealth::Unknown,
        }
    }

    #[must_use]
    pub(super) fn connected(self) -> Self {
        Self {
            failures: 0,
            ejected_until: None,
            has_succeeded: true,
            ..self
        }
    }

    /// State after a health check. A good one is a successful attempt to connect, too.
    #[must_use]
    pub(super) fn checked(self, is_good: bool) -> Self {
        let health = if is_good { self.connected() } else { self };
        Self {
            checks: self.checks.after(is_good),
            ..health
        }
    }

    /// State while an attempt runs. After a failure only one attempt runs at a time, so that few
    /// requests wait for a backend that is still unreachable.
    #[must_use]
    pub(super) fn attempting(self, now: Instant) -> Self {
        if self.failures == 0 {
            self
        } else {
            Self {
                ejected_until: Some(now + self.pause()),
                ..self
            }
        }
    }

    #[must_use]
    pub(super) fn failed(self, now: Instant) -> Self {
        let failed = Self {
            failures: self.failures.saturating_add(1),
            ..self
        };
        Self {
            ejected_until: Some(now + failed.pause()),
            ..failed
        }
    }

    fn pause(self) -> Duration {
        let doublings = self.failures.saturating_sub(1).min(16);
        (FIRST_PAUSE * 2u32.pow(doublings)).min(LONGEST_PAUSE)
    }
}

/// Health of the backends of a service together.
pub(super) fn joint_health(backends: impl Iterator<Item = BackendHealth> + Clone) -> BackendHealth {
    if backends
        .clone()
        .any(|health| health == BackendHealth::Healthy)
    {
        BackendHealth::Healthy
    } else if backends
        .into_iter()
        .all(|health| health == BackendHealth::Unhealthy)
    {
        BackendHealth::Unhealthy
    } else {
        BackendHealth::Unknown
    }
}

/// The index below `count` with the least load. Indices without a load are skipped; `turn` decides
/// between equal loads.
pub(super) fn least_loaded(
    count: usize,
    turn: usize,
    load: impl Fn(usize) -> Option<u32>,
) -> Option<usize> {
    let turns = (0..count).map(|offset| (turn.wrapping_add(offset)) % count);
    turns
        .filter_map(|at| Some((load(at)?, at)))
        .min_by_key(|(load, _)| *load)
        .map(|(_, at)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_backend_is_ejected_for_longer_each_time() {
        let mut now = Instant::now();
        let mut health = Health::default();
        assert!(health.attempting(now).is_available(now));
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            health = health.failed(now);
            let end = now + Duration::from_secs(seconds);
            let at_times = [now, end - Duration::from_millis(1), end];
            let is_available = at_times.map(|time| health.is_available(time));
            assert_eq!(is_available, [false, false, true], "{seconds}");
            now = end;
        }
    }

    #[test]
    fn one_attempt_at_a_time_is_made_after_a_failure() {
        let start = Instant::now();
        let later = start + Duration::from_secs(5);
        let health = Health::default().failed(start);
        assert!(health.is_available(later));
        assert!(!health.attempting(later).is_available(later));
    }

    #[test]
    fn two_failed_checks_take_a_backend_down_and_three_good_ones_up() {
        let now = Instant::now();
        let mut health = Health::default();
        for (number, (is_good, expected)) in [
            (false, BackendHealth::Unknown),
            // The first good one is enough at the start.
            (true, BackendHealth::Healthy),
            (false, BackendHealth::Healthy),
            (true, BackendHealth::Healthy),
            (false, BackendHealth::Healthy),
            (false, BackendHealth::Unhealthy),
            (true, BackendHealth::Unhealthy),
            (true, BackendHealth::Unhealthy),
            (false, BackendHealth::Unhealthy),
            (true, BackendHealth::Unhealthy),
            (true, BackendHealth::Unhealthy),
            (true, BackendHealth::Healthy),
            (false, BackendHealth::Healthy),
            (false, BackendHealth::Unhealthy),
        ]
        .into_iter()
        .enumerate()
        {
            health = health.checked(is_good);
            assert_eq!(health.report(), expected, "{number}");
            let is_available = expected != BackendHealth::Unhealthy;
            assert_eq!(health.is_available(now), is_available, "{number}");
        }
        // A connection does not prove more than a check.
        assert_eq!(health.connected().report(), BackendHealth::Unhealthy);
    }

    #[test]
    fn one_good_check_ends_the_pause_of_a_backend_that_was_not_reached() {
        let now = Instant::now();
        let health = Health::default().failed(now);
        assert!(!health.is_available(now));
        assert!(health.checked(true).is_available(now));
        assert!(!health.checked(false).is_available(now));
    }

    #[test]
    fn one_backend_that_takes_connections_makes_the_service_healthy() {
        let now = Instant::now();
        let unknown = Health::default();
        let [up, down] = [unknown.connected(), unknown.connected().failed(now)];
        for (backends, expected) in [
            ([unknown, unknown], BackendHealth::Unknown),
            ([unknown, down], BackendHealth::Unknown),
            ([unknown, up], BackendHealth::Healthy),
            ([down, up], BackendHealth::Healthy),
            ([down, down], BackendHealth::Unhealthy),
            ([down.connected(), down], BackendHealth::Healthy),
        ] {
            let joint = joint_health(backends.iter().map(|health| health.report()));
            assert_eq!(joint, expected, "{backends:?}");
        }
    }

    #[test]
    fn least_loaded_is_chosen_and_equal_loads_take_turns() {
        let loads = [Some(2), Some(1), None, Some(1)];
        let chosen = |turn| least_loaded(loads.len(), turn, |at| loads[at]);
        assert_eq!([0, 1, 2, 3, 4].map(chosen), [1, 1, 3, 3, 1].map(Some));
        assert_eq!(least_loaded(2, 7, |_| None), None);
        assert_eq!(least_loaded(0, 7, |_| Some(0)), None);
    }
}
