//! The rate of a token bucket: burst and refill.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Capacity and refill of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// Requests that a full bucket admits at once.
    pub burst: NonZeroU32,
    /// Requests that are added per minute, up to `burst`.
    pub refill_per_minute: NonZeroU32,
    /// Whether they are added per hour, which no setting is.
    #[serde(skip)]
    pub is_hourly: bool,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} at once and {} per minute",
            self.burst, self.refill_per_minute
        )
    }
}

impl Rate {
    /// `burst` requests at once and `refill_per_minute` sustained; `None` if either is zero.
    pub const fn new(burst: u32, refill_per_minute: u32) -> Option<Self> {
        match (NonZeroU32::new(burst), NonZeroU32::new(refill_per_minute)) {
            (Some(burst), Some(refill_per_minute)) => Some(Self {
                burst,
                refill_per_minute,
                is_hourly: false,
            }),
            _ => None,
        }
    }

    /// The same burst, with the refill added per hour.
    #[must_use]
    pub const fn hourly(self) -> Self {
        Self {
            is_hourly: true,
            ..self
        }
    }

    /// Returns the capacity, in requests.
    pub const fn burst(self) -> u32 {
        self.burst.get()
    }

    /// Returns the refill, in requests per minute.
    pub const fn refill_per_minute(self) -> u32 {
        self.refill_per_minute.get()
    }

    /// Time to refill one request, rounded up so that the rate is never exceeded.
    pub fn interval(self) -> Duration {
        let period = if self.is_hourly { 3600 } else { 60 } * 1_000_000_000u64;
        Duration::from_nanos(period.div_ceil(u64::from(self.refill_per_minute())))
    }

    /// Time to fill an empty bucket.
    pub fn time_to_fill(self) -> Duration {
        self.interval() * self.burst()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests stop at the first surprise")]

    use super::*;

    #[test]
    fn a_rate_refills_per_minute_or_per_hour() {
        let rate = Rate::new(20, 4).unwrap();
        assert_eq!(rate.interval(), Duration::from_secs(15));
        assert_eq!(rate.hourly().interval(), Duration::from_secs(15 * 60));
        assert_eq!(rate.hourly().time_to_fill(), Duration::from_secs(5 * 3600));
    }
}
