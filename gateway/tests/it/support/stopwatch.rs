//! Durations that tests bound, also on a machine that is busy with something else.

use std::fs;
use std::time::{Duration, Instant};

/// Times the limit that may pass on the busiest machine.
const BUSY_FACTOR: u32 = 10;

/// Measures a duration without the time in which the machine had too few CPUs: as long as a thread
/// that is due waits for one, it delays the program that is measured as well.
pub(crate) struct Stopwatch {
    begun: Instant,
    busy_before: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self {
            begun: Instant::now(),
            busy_before: busy(),
        }
    }

    /// Asserts that less than `limit` has passed.
    pub(crate) fn assert_within(&self, limit: Duration, what: &str) {
        let took = self.begun.elapsed();
        let busy = busy().saturating_sub(self.busy_before);
        let counted = took.saturating_sub(busy);
        assert!(
            counted < limit && took < BUSY_FACTOR * limit,
            "{what} took {took:?}, of which the machine was busy for {busy:?}"
        );
    }
}

/// Time since the start of the machine in which a thread waited for a CPU (pressure stall
/// information of Linux 4.20); zero where the kernel does not tell.
fn busy() -> Duration {
    let text = fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    let some = text.lines().find(|line| line.starts_with("some "));
    let total = some.and_then(|line| line.split_once("total=")?.1.trim().parse().ok());
    Duration::from_micros(total.unwrap_or_default())
}

/// Repeats an attempt until it returns a value; panics after five. An attempt returns `None` if it
/// shows nothing, because it took longer than a time limit of the program.
pub(crate) fn in_time<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    (0..5)
        .find_map(|_| attempt())
        .unwrap_or_else(|| panic!("the machine is too slow: {what}"))
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
