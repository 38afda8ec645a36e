//! The rate of a token bucket: burst and refill.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Capacity and refill of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Rate {
    burst: u32,
    refill_per_minute: u32,
}

/// A rate as it is stored, before its fields are checked.
#[derive(Deserialize)]
struct Unchecked {
    burst: u32,
    refill_per_minute: u32,
}

impl TryFrom<Unchecked> for Rate {
    type Error = &'static str;

    fn try_from(
        Unchecked {
            burst,
            refill_per_minute,
        }: Unchecked,
    ) -> Result<Self, Self::Error> {
        Self::new(burst, refill_per_minute).ok_or("burst and refill_per_minute must be at least 1")
    }
}

impl Rate {
    /// `burst` requests at once and `refill_per_minute` sustained; `None` if either is zero.
    pub const fn new(burst: u32, refill_per_minute: u32) -> Option<Self> {
        if burst == 0 || refill_per_minute == 0 {
            None
        } else {
            Some(Self {
                burst,
                refill_per_minute,
            })
        }
    }

    pub const fn burst(self) -> u32 {
        self.burst
    }

    pub const fn refill_per_minute(self) -> u32 {
        self.refill_per_minute
    }

    /// Time to refill one request, rounded up so that the rate is never exceeded.
    pub(crate) fn interval(self) -> Duration {
        Duration::from_nanos(60_000_000_000u64.div_ceil(u64::from(self.refill_per_minute)))
    }

    /// Time to fill an empty bucket.
    pub(crate) fn time_to_fill(self) -> Duration {
        self.interval() * self.burst
    }
}
