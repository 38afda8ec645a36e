//! Token bucket without a clock of its own.
//!
//! State as in the generic cell rate algorithm (ITU-T I.371): one instant, at which the bucket will
//! be full. Integer nanoseconds do not drift.

use std::time::{Duration, Instant};

use gw_base::service::rate::Rate;

/// A bucket of requests, connections or messages.
#[derive(Debug, Clone)]
pub struct Bucket {
    rate: Rate,
    full_at: Instant,
}

impl Bucket {
    /// A full bucket.
    pub fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, full_at: now }
    }

    /// A bucket that is full after `until_full`, or empty if that is longer than it takes to fill.
    pub fn filling(rate: Rate, until_full: Duration, now: Instant) -> Self {
        Self {
            rate,
            full_at: now + until_full.min(rate.time_to_fill()),
        }
    }

    /// Returns the rate of the bucket.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Takes one request, or returns the time until there is one.
    pub fn take(&mut self, now: Instant) -> Result<(), Duration> {
        let wait = self.until_one(now);
        if wait.is_zero() {
            self.full_at = self.full_at.max(now) + self.rate.interval();
            Ok(())
        } else {
            Err(wait)
        }
    }

    /// Takes this time from a bucket of microseconds, at most a burst. Later refills pay for
    /// missing tokens.
    pub fn spend(&mut self, time: Duration, now: Instant) {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        let spent = self.rate.interval() * micros.min(self.rate.burst());
        self.full_at = self.full_at.max(now) + spent;
    }

    /// Time until there is a request to take; zero if there is one.
    pub fn until_one(&self, now: Instant) -> Duration {
        (self.until_full(now) + self.rate.interval()).saturating_sub(self.rate.time_to_fill())
    }

    /// Time until the whole burst is available; zero if it is.
    pub fn until_full(&self, now: Instant) -> Duration {
        self.full_at.saturating_duration_since(now)
    }

    /// Whether the bucket is equal to a new one.
    pub fn is_full(&self, now: Instant) -> bool {
        self.until_full(now).is_zero()
    }

    /// Changes the rate and keeps consumed requests, up to the new capacity.
    pub fn set_rate(&mut self, rate: Rate, now: Instant) {
        if rate == self.rate {
            return;
        }
        // The same share of a request is missing after the change, in whole nanoseconds.
        let missing = (self.until_full(now).as_nanos() * rate.interval().as_nanos())
            .div_ceil(self.rate.interval().as_nanos());
        let missing = u64::try_from(missing).map_or(Duration::MAX, Duration::from_nanos);
        self.full_at = now + missing.min(rate.time_to_fill());
        self.rate = rate;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rate(burst: u32, refill: u32) -> Rate {
        Rate::new(burst, refill).unwrap()
    }

    #[test]
    fn the_defaults_admit_a_thousand_then_five_a_second() {
        let start = Instant::now();
        let mut bucket = Bucket::new(rate(1000, 300), start);
        for _ in 0..1000 {
            bucket.take(start).unwrap();
        }
        assert_eq!(bucket.take(start), Err(Duration::from_millis(200)));
        let later = start + Duration::from_millis(150);
        assert_eq!(bucket.take(later), Err(Duration::from_millis(50)));
        let admitted = (0..60_000)
            .filter(|ms| bucket.take(start + Duration::from_millis(*ms + 1)).is_ok())
            .count();
        assert_eq!(admitted, 300);
    }

    #[test]
    fn a_caller_at_the_refill_rate_is_never_limited() {
        let start = Instant::now();
        let mut bucket = Bucket::new(rate(1, 300), start);
        for n in 0..10_000 {
            bucket.take(start + Duration::from_millis(200 * n)).unwrap();
        }
    }

    #[test]
    fn the_reported_wait_is_exact() {
        let start = Instant::now();
        let mut bucket = Bucket::new(rate(2, 7), start);
        bucket.take(start).unwrap();
        bucket.take(start).unwrap();
        let wait = bucket.take(start).unwrap_err();
        assert!(
            bucket
                .clone()
                .take(start + wait - Duration::from_nanos(1))
                .is_err()
        );
        assert!(bucket.take(start + wait).is_ok());
    }

    #[test]
    fn a_query_takes_no_request() {
        let start = Instant::now();
        let mut bucket = Bucket::new(rate(2, 60), start);
        assert_eq!(
            (bucket.until_one(start), bucket.until_full(start)),
            (Duration::ZERO, Duration::ZERO)
        );
        bucket.take(start).unwrap();
        bucket.take(start).unwrap();
        let seconds = |until: Duration| until.as_secs_f64();
        assert_eq!(
            (
                seconds(bucket.until_one(start)),
                seconds(bucket.until_full(start))
            ),
            (1.0, 2.0)
        );
        let later = start + Duration::from_millis(1500);
        assert_eq!(
            (
                seconds(bucket.until_one(later)),
                seconds(bucket.until_full(later))
            ),
            (0.0, 0.5)
        );
        assert!(!bucket.is_full(later));
        bucket.take(later).unwrap();
    }

    #[test]
    fn a_bucket_continues_at_the_level_of_another() {
        let start = Instant::now();
        let mut bucket = Bucket::new(rate(10, 60), start);
        (0..7).for_each(|_| bucket.take(start).unwrap());
        let mut next = Bucket::filling(bucket.rate(), bucket.until_full(start), start);
        assert_eq!((0..10).filter(|_| next.take(start).is_ok()).count(), 3);
        // A bucket is never emptier than empty.
        let empty = Bucket::filling(rate(10, 60), Duration::from_hours(1), start);
        assert_eq!(
            (empty.until_one(start), empty.until_full(start)),
            (Duration::from_secs(1), Duration::from_secs(10))
        );
    }

    #[test]
    fn a_change_of_rate_returns_no_requests() {
        let start = Instant::now();
        let mut bucket = Bucket::new(rate(10, 60), start);
        (0..10).for_each(|_| bucket.take(start).unwrap());
        bucket.set_rate(rate(20, 600), start);
        let admitted = (0..20).filter(|_| bucket.take(start).is_ok()).count();
        assert_eq!(admitted, 10);
        bucket.set_rate(rate(5, 600), start);
        assert_eq!(bucket.take(start), Err(Duration::from_millis(100)));
    }

    #[test]
    fn a_change_of_rate_keeps_what_is_refilled_of_a_request() {
        let start = Instant::now();
        let mut bucket = Bucket::new(rate(10, 60), start);
        (0..10).for_each(|_| bucket.take(start).unwrap());
        let half = start + Duration::from_millis(500);
        bucket.set_rate(rate(10, 600), half);
        assert_eq!(bucket.take(half), Err(Duration::from_millis(50)));
        bucket.set_rate(rate(10, 60), half);
        assert_eq!(bucket.take(half), Err(Duration::from_millis(500)));
    }

    proptest! {
        /// In any period, steps that wait take the burst, the rate and one step at most.
        #[test]
        fn steps_that_are_charged_after_them_keep_to_the_rate(
            steps in prop::collection::vec((1u64..20_000, 0u64..30_000), 1..200),
        ) {
            // A quarter of the time, in microseconds.
            let mut bucket = Bucket::new(rate(50_000, 60 * 250_000), Instant::now());
            let mut now = bucket.full_at;
            let mut taken: Vec<(Instant, Duration)> = Vec::new();
            for (step, pause) in steps {
                now += bucket.until_one(now);
                let step = Duration::from_micros(step);
                taken.push((now, step));
                now += step;
                bucket.spend(step, now);
                let last = bucket.until_full(now).as_micros();
                prop_assert!(last <= 4 * (50_000 + step.as_micros()), "owes at most the step");
                for (at, (began, _)) in taken.iter().enumerate() {
                    let all: Duration = taken[at..].iter().map(|(_, step)| *step).sum();
                    let most = Duration::from_millis(50) + (now - *began) / 4 + step;
                    prop_assert!(all <= most, "{all:?} in {:?}", now - *began);
                }
                now += Duration::from_micros(pause);
            }
            // A step that took longer than the burst owes no more.
            bucket.spend(Duration::from_hours(1), now);
            bucket.spend(Duration::ZERO, now);
            prop_assert!(bucket.until_full(now) <= Duration::from_millis(4 * (50 + 50 + 20)));
        }
    }

    proptest! {
        /// Compares with a model: a level that refills with time, in exact fractions of a request.
        #[test]
        fn agrees_with_a_model(
            burst in 1u32..50,
            // Rates with an interval of whole nanoseconds, which the model represents exactly.
            refill in prop::sample::select(vec![1u32, 6, 60, 300, 600, 6000]),
            gaps in prop::collection::vec(prop_oneof![Just(0u64), 0u64..3_000_000_000], 1..300),
        ) {
            let start = Instant::now();
            let mut bucket = Bucket::new(rate(burst, refill), start);
            let interval = u128::from(60_000_000_000 / u64::from(refill));
            let capacity = u128::from(burst) * interval;
            let mut level = capacity;
            let mut now = start;
            for gap in gaps {
                now += Duration::from_nanos(gap);
                level = (level + u128::from(gap)).min(capacity);
                let expected = if level >= interval {
                    level -= interval;
                    Ok(())
                } else {
                    Err(Duration::from_nanos(u64::try_from(interval - level).unwrap()))
                };
                let until_one = bucket.until_one(now);
                let taken = bucket.take(now);
                prop_assert_eq!(taken, expected);
                prop_assert_eq!(until_one, expected.err().unwrap_or_default());
                let missing = Duration::from_nanos(u64::try_from(capacity - level).unwrap());
                prop_assert_eq!(bucket.until_full(now), missing);
            }
        }
    }
}
