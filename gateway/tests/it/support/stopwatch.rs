//! Durations that tests bound, also on a machine that is busy with something else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Measures a duration without the time in which the machine was too busy: as long as it does not run a thread that is due,
/// it delays the program that is measured as well.
pub(crate) struct Stopwatch {
    begun: Instant,
    /// Sum of the delays of a thread that wakes up periodically.
    busy_us: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        const PERIOD: Duration = Duration::from_millis(5);
        let busy_us = Arc::<AtomicU64>::default();
        let ended = Arc::<AtomicBool>::default();
        let sum = Arc::clone(&busy_us);
        let stop = Arc::clone(&ended);
        thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let slept = Instant::now();
                thread::sleep(PERIOD);
                let late = slept.elapsed().saturating_sub(PERIOD);
                sum.fetch_add(u64::try_from(late.as_micros()).unwrap(), Ordering::Relaxed);
            }
        });
        Self {
            begun: Instant::now(),
            busy_us,
            ended,
        }
    }

    /// Asserts that less than `limit` has passed.
    pub(crate) fn assert_within(&self, limit: Duration, what: &str) {
        let took = self.begun.elapsed();
        let busy = Duration::from_micros(self.busy_us.load(Ordering::Relaxed));
        let counted = took.saturating_sub(busy);
        assert!(
            counted < limit,
            "{what} took {took:?}, of which the machine was busy for {busy:?}"
        );
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// Asserts that `action` takes less than `limit`.
pub(crate) fn within<T>(limit: Duration, what: &str, action: impl FnOnce() -> T) -> T {
    let watch = Stopwatch::start();
    let result = action();
    watch.assert_within(limit, what);
    result
}

/// Asserts that `action` takes less than a second.
pub(crate) fn within_a_second<T>(what: &str, action: impl FnOnce() -> T) -> T {
    within(Duration::from_secs(1), what, action)
}
