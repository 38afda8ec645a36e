//! The time of the next attempt: a function of what is known, without a clock and without random
//! numbers of its own.

use std::time::Duration;

use gw_base::clock::Timestamp;

use crate::error::FailureKind;
use crate::limits::RETRY_AFTER_MAX;

/// Waits after failures of the authority's server. An attempt costs nothing, and a service whose
/// certificate is about to expire must have a new one within a minute of the return of the
/// authority.
const UNREACHABLE: [u64; 4] = [5, 10, 20, 40];
/// Waits after refusals: authorities count those, Let's Encrypt for example five per name and hour.
const REFUSED: [u64; 5] = [60, 15 * 60, 30 * 60, 60 * 60, 3 * 60 * 60];
/// Wait after a rate limit that does not say when it ends.
const RATE_LIMITED: u64 = 60 * 60;

/// Time in which the authority wants a certificate renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Its start.
    pub start: Timestamp,
    /// Its end.
    pub end: Timestamp,
}

/// Validity of the certificate in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// Its start.
    pub not_before: Timestamp,
    /// Its end.
    pub not_after: Timestamp,
}

/// The failures since the last success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failures {
    /// Number of attempts that failed in a row.
    pub count: u32,
    /// Time of the last one.
    pub last: Timestamp,
    /// Kind of the last one.
    pub kind: FailureKind,
    /// Wait that the authority asked for.
    pub retry_after: Option<Duration>,
}

/// What the time of the next attempt depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Situation {
    /// Validity of the certificate, if there is one for the names that are wanted.
    pub validity: Option<Validity>,
    /// The authority's window for it.
    pub window: Option<Window>,
    /// Failures in a row.
    pub failures: Option<Failures>,
    /// Random number that stays the same for a certificate, so that not all gateways renew at once.
    pub seed: u64,
}

impl Situation {
    /// Time at which the certificate is to be renewed: in the authority's window, or at two thirds
    /// of the lifetime with up to a twelfth of it earlier. Without a certificate, at once.
    pub fn due(&self, now: Timestamp) -> Timestamp {
        let Some(validity) = self.validity else {
            return now;
        };
        match self.window {
            // A window that ends before it starts, or after the certificate, is a mistake of the
            // authority.
            Some(Window { start, end }) if start <= end && start < validity.not_after => {
                let end = end.min(validity.not_after);
                start.after(self.part_of(end.since(start)))
            }
            _ => {
                let lifetime = validity.not_after.since(validity.not_before);
                let early = self.part_of(lifetime / 12);
                validity
                    .not_before
                    .after((lifetime * 2 / 3).saturating_sub(early))
            }
        }
    }

    /// Time of the next attempt: when the certificate is due, and not before the wait after
    /// failures.
    pub fn next_attempt(&self, now: Timestamp) -> Timestamp {
        let due = self.due(now);
        match &self.failures {
            Some(failures) => due.max(failures.last.after(self.wait_after(failures))),
            None => due,
        }
    }

    fn wait_after(&self, failures: &Failures) -> Duration {
        let step = |waits: &[u64]| {
            let last = waits.len() - 1;
            let index = usize::try_from(failures.count.saturating_sub(1)).unwrap_or(last);
            Duration::from_secs(waits[index.min(last)])
        };
        let base = match failures.kind {
            FailureKind::Unreachable => step(&UNREACHABLE),
            FailureKind::Refused | FailureKind::Proof => step(&REFUSED),
            FailureKind::RateLimited => Duration::from_secs(RATE_LIMITED),
        };
        // Times of failures are cut to whole seconds.
        let cut = Duration::from_secs(1);
        let asked = failures
            .retry_after
            .map(|time| time.min(RETRY_AFTER_MAX) + cut);
        let wait = match failures.kind {
            FailureKind::RateLimited if failures.count <= 1 => asked.unwrap_or(base),
            // Each failure is a change: one that repeats is rare, whatever the authority asks for.
            FailureKind::RateLimited => asked.unwrap_or(base).max(step(&REFUSED)),
            _ => asked.unwrap_or_default().max(base),
        };
        wait + self.part_of(wait / 10)
    }

    /// A part of `whole` that the seed chooses.
    fn part_of(&self, whole: Duration) -> Duration {
        match whole.as_secs() {
            0 => Duration::ZERO,
            seconds => Duration::from_secs(mixed(self.seed) % seconds),
        }
    }
}

/// Spreads the bits of a seed (the finaliser of SplitMix64), so that neighbouring seeds choose
/// different parts.
fn mixed(seed: u64) -> u64 {
    let seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let seed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let seed = (seed ^ (seed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    seed ^ (seed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 24 * 60 * 60;

    fn situation(days: i64) -> Situation {
        Situation {
            validity: Some(Validity {
                not_before: Timestamp(0),
                not_after: Timestamp(days * DAY),
            }),
            window: None,
            failures: None,
            seed: 7,
        }
    }

    fn failed(count: u32, kind: FailureKind, retry_after: Option<u64>) -> Option<Failures> {
        Some(Failures {
            count,
            last: Timestamp(1000),
            kind,
            retry_after: retry_after.map(Duration::from_secs),
        })
    }

    #[test]
    fn renewal_is_due_at_two_thirds_of_any_lifetime_with_jitter() {
        for days in [6, 47, 90] {
            let mut times: Vec<i64> = (0..100)
                .map(|seed| {
                    Situation {
                        seed,
                        ..situation(days)
                    }
                    .due(Timestamp(5))
                    .0
                })
                .collect();
            assert!(
                times.iter().all(|time| *time <= days * DAY * 2 / 3),
                "{times:?}"
            );
            assert!(
                times.iter().all(|time| *time >= days * DAY * 7 / 12),
                "{times:?}"
            );
            times.dedup();
            assert!(times.len() > 90, "the seeds spread the times");
        }
        let without = Situation {
            validity: None,
            ..situation(1)
        };
        assert_eq!(without.next_attempt(Timestamp(5)), Timestamp(5));
    }

    #[test]
    fn the_window_of_the_authority_decides_unless_it_is_a_mistake() {
        let window = |start, end| Situation {
            window: Some(Window {
                start: Timestamp(start),
                end: Timestamp(end),
            }),
            ..situation(90)
        };
        let due = window(10 * DAY, 12 * DAY).due(Timestamp(0)).0;
        assert!((10 * DAY..12 * DAY).contains(&due), "{due}");
        let past = window(-5, -5).next_attempt(Timestamp(100));
        assert!(past < Timestamp(100), "a window in the past means at once");
        let own = situation(90).due(Timestamp(0));
        assert_eq!(window(12 * DAY, 10 * DAY).due(Timestamp(0)), own);
        assert_eq!(window(91 * DAY, 92 * DAY).due(Timestamp(0)), own);
        let cut = window(89 * DAY, 300 * DAY).due(Timestamp(0)).0;
        assert!(cut < 90 * DAY, "{cut}");
    }

    #[test]
    fn an_unreachable_authority_is_asked_again_within_a_minute_however_long_it_is_away() {
        for count in [1, 2, 3, 4, 50, u32::MAX] {
            let failures = failed(count, FailureKind::Unreachable, None);
            let situation = Situation {
                failures,
                ..situation(0)
            };
            let wait = situation.next_attempt(Timestamp(1000)).0 - 1000;
            assert!((5..60).contains(&wait), "{count}: {wait}");
        }
    }

    #[test]
    fn refusals_are_tried_again_rarely_and_rate_limits_as_the_authority_asks() {
        let wait = |count, kind, retry_after| {
            let failures = failed(count, kind, retry_after);
            Situation {
                failures,
                ..situation(0)
            }
            .next_attempt(Timestamp(1000))
            .0 - 1000
        };
        let first_hour = (1..=5).scan(0, |at, count| {
            *at += wait(count, FailureKind::Refused, None);
            Some(*at)
        });
        assert!(first_hour.filter(|at| *at < 3600).count() < 5);
        assert!((7200..8000).contains(&wait(1, FailureKind::RateLimited, Some(7200))));
        assert!((3600..4000).contains(&wait(1, FailureKind::RateLimited, None)));
        assert!((30..34).contains(&wait(1, FailureKind::RateLimited, Some(30))));
        assert!(wait(1, FailureKind::Refused, Some(1)) >= 60);
        // A limit that repeats is a failure that is stored each time.
        assert!(wait(2, FailureKind::RateLimited, Some(1)) >= 15 * 60);
        assert!((7200..8000).contains(&wait(2, FailureKind::RateLimited, Some(7200))));
        let forever = wait(1, FailureKind::Unreachable, Some(u64::MAX));
        assert!(forever <= DAY * 11 / 10);
    }
}
