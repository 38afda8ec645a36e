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
            }),
            _ => None,
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
        Duration::from_nanos(60_000_000_000u64.div_ceil(u64::from(self.refill_per_minute())))
    }

    /// Time to fill an empty bucket.
    pub fn time_to_fill(self) -> Duration {
        self.interval() * self.burst()
    }
}
