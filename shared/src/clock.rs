//! The time of this process: that of the system's clock, or of another machine that several
//! processes follow.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// The clock of this process.
static PROCESS: Clock = Clock::of_system();

/// The time of this process.
pub fn now() -> SystemTime {
    PROCESS.now()
}

/// Follows a clock from now on that is ahead of [`monotonic_us`] by this many microseconds.
pub fn follow(ahead_us: i64) {
    PROCESS.ahead_us.store(ahead_us, Ordering::Relaxed);
}

/// By how many microseconds the clock that is followed is ahead of [`monotonic_us`]; `None` if none
/// is followed.
pub fn followed() -> Option<i64> {
    PROCESS.followed()
}

/// Microseconds of the kernel's clock that cannot be set. It goes on while the machine sleeps.
pub fn monotonic_us() -> i64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec
        .saturating_mul(1_000_000)
        .saturating_add(time.tv_nsec / 1000)
}

/// Microseconds since the Unix epoch; negative before it.
pub fn unix_us(time: SystemTime) -> i64 {
    let micros = |duration: Duration| i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
    time.duration_since(UNIX_EPOCH)
        .map_or_else(|before| -micros(before.duration()), micros)
}

/// A clock that follows another one if it has been told to.
struct Clock {
    /// [`Self::SYSTEM`]: the system's clock.
    ahead_us: AtomicI64,
}

impl Clock {
    const SYSTEM: i64 = i64::MIN;

    const fn of_system() -> Self {
        Self {
            ahead_us: AtomicI64::new(Self::SYSTEM),
        }
    }

    fn now(&self) -> SystemTime {
        let Some(ahead_us) = self.followed() else {
            return SystemTime::now();
        };
        let since_epoch = monotonic_us().saturating_add(ahead_us);
        UNIX_EPOCH + Duration::from_micros(u64::try_from(since_epoch).unwrap_or(0))
    }

    fn followed(&self) -> Option<i64> {
        Some(self.ahead_us.load(Ordering::Relaxed)).filter(|ahead_us| *ahead_us != Self::SYSTEM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_the_systems_until_it_follows_another() {
        let clock = Clock::of_system();
        let before = SystemTime::now();
        assert!(clock.now() >= before && clock.now() <= SystemTime::now());
        // 2033-05-18T03:33:20Z
        let ahead_us = 2_000_000_000_000_000 - monotonic_us();
        clock.ahead_us.store(ahead_us, Ordering::Relaxed);
        let followed = unix_us(clock.now());
        let minute = 2_000_000_000_000_000..2_000_000_060_000_000;
        assert!(minute.contains(&followed), "{followed}");
        assert!(unix_us(clock.now()) >= followed);
        assert_eq!(unix_us(UNIX_EPOCH - Duration::from_secs(1)), -1_000_000);
    }
}
