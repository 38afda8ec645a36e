//! Histogram of durations with fixed buckets, so that histograms of several workers, minutes or
//! processes add up exactly.

use std::time::Duration;

/// Upper bounds of the buckets in nanoseconds. Each is 2 to 3 times the one before, from a request
/// on one machine to a minute. One more bucket without a bound follows.
pub const BOUNDS_NS: [u64; 17] = [
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
    30_000_000_000,
    60_000_000_000,
];

/// Number of buckets, including the last one without a bound.
pub const BUCKETS: usize = BOUNDS_NS.len() + 1;

/// Number of durations in each bucket, and their sum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    sum_ns: u64,
}

impl Histogram {
    pub fn observe(&mut self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.counts[BOUNDS_NS.partition_point(|bound| *bound < ns)] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Creates a histogram with the count of each bucket. Its sum is unknown and set to zero.
    pub fn from_counts(counts: [u64; BUCKETS]) -> Self {
        Self { counts, sum_ns: 0 }
    }

    /// Count of each bucket, not cumulative. The last bucket has no bound.
    pub fn counts(&self) -> &[u64; BUCKETS] {
        &self.counts
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    pub fn add(&mut self, other: &Self) {
        self.counts
            .iter_mut()
            .zip(other.counts)
            .for_each(|(count, more)| *count += more);
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// Returns the durations observed since `earlier`; all of them if a count is lower than in
    /// `earlier`, which means that counting restarted.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        if self
            .counts
            .iter()
            .zip(earlier.counts)
            .any(|(now, before)| *now < before)
        {
            return self.clone();
        }
        let mut delta = self.clone();
        delta
            .counts
            .iter_mut()
            .zip(earlier.counts)
            .for_each(|(count, before)| *count -= before);
        delta.sum_ns = self.sum_ns.saturating_sub(earlier.sum_ns);
        delta
    }

    /// Estimates the `quantile` (0 to 1) by linear interpolation within its bucket; `None` if the
    /// histogram is empty. Durations beyond the last bound count as that bound.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let rank = self.count() as f64 * quantile.clamp(0.0, 1.0);
        let mut below = 0;
        for (at, count) in self
            .counts
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
        {
            if (below + count) as f64 >= rank {
                let Some(upper) = BOUNDS_NS.get(at).copied() else {
                    break;
                };
                let lower = at.checked_sub(1).map_or(0, |before| BOUNDS_NS[before]);
                let within = (rank - below as f64).max(0.0) / *count as f64;
                return Some(
                    Duration::from_nanos(lower)
                        + Duration::from_nanos(upper - lower).mul_f64(within),
                );
            }
            below += count;
        }
        (self.count() > 0).then(|| Duration::from_nanos(BOUNDS_NS[BOUNDS_NS.len() - 1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(durations_us: &[u64]) -> Histogram {
        let mut histogram = Histogram::default();
        durations_us
            .iter()
            .for_each(|us| histogram.observe(Duration::from_micros(*us)));
        histogram
    }

    #[test]
    fn duration_is_counted_in_the_first_bucket_whose_bound_is_not_below_it() {
        for (ns, bucket) in [
            (0, 0),
            (250_000, 0),
            (250_001, 1),
            (1_000_000, 2),
            (60_000_000_000, 16),
            (60_000_000_001, 17),
        ] {
            let mut histogram = Histogram::default();
            histogram.observe(Duration::from_nanos(ns));
            assert_eq!(histogram.counts()[bucket], 1, "{ns}");
            assert_eq!(histogram.count(), 1);
            assert_eq!(histogram.sum(), Duration::from_nanos(ns));
        }
        of(&[1]).observe(Duration::MAX);
    }

    #[test]
    fn add_and_since_are_inverse() {
        let first = of(&[100, 900, 70_000_000]);
        let second = of(&[100, 3_000]);
        let mut whole = first.clone();
        whole.add(&second);
        assert_eq!(whole, of(&[100, 900, 70_000_000, 100, 3_000]));
        assert_eq!(whole.since(&first), second);
        assert_eq!(whole.since(&second), first);
        assert_eq!(second.since(&whole), second, "counting restarted");
    }

    #[test]
    fn quantiles_are_interpolated_within_their_bucket() {
        assert_eq!(Histogram::default().quantile(0.5), None);
        let even: Vec<u64> = (1..=1000).map(|ms| ms * 1000).collect();
        let even = of(&even);
        for (quantile, ms) in [(0.5, 500), (0.25, 250), (0.99, 990), (1.0, 1000), (0.0, 0)] {
            let found = even.quantile(quantile).unwrap().as_secs_f64() * 1000.0;
            assert!((found - f64::from(ms)).abs() < 5.0, "{quantile}: {found}");
        }
        for (durations_us, quantile) in [(&[99_000_000][..], 0.5), (&[1, 99_000_000], 0.99)] {
            let found = of(durations_us).quantile(quantile);
            assert_eq!(found, Some(Duration::from_secs(60)));
        }
    }
}
