//! Levels of the services' buckets, handed from one process to the next: in a message of a
//! takeover, or in a file between a stop and a start.

use crate::limits;
use gw_base::service::rate::Rate;
use serde::{Deserialize, Serialize};

/// The level of a bucket that is not full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Level {
    /// Label of the service.
    pub service: String,
    /// Rate of the bucket.
    pub rate: Rate,
    /// Time until the bucket is full, rounded up.
    pub until_full_ms: u64,
}

/// Keeps at most [`limits::LEVELS`] levels: those with the longest time until full.
pub fn bounded(mut levels: Vec<Level>) -> Vec<Level> {
    if levels.len() > limits::LEVELS {
        levels.select_nth_unstable_by_key(limits::LEVELS, |level| {
            std::cmp::Reverse(level.until_full_ms)
        });
        levels.truncate(limits::LEVELS);
    }
    levels
}

/// The levels after `elapsed_ms` of refill, without those of buckets that are full then.
pub fn refilled(levels: Vec<Level>, elapsed_ms: u64) -> Vec<Level> {
    let refill = |level: Level| {
        let until_full_ms = level
            .until_full_ms
            .checked_sub(elapsed_ms)
            .filter(|left| *left > 0)?;
        Some(Level {
            until_full_ms,
            ..level
        })
    };
    levels.into_iter().filter_map(refill).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(service: &str, until_full_ms: u64) -> Level {
        Level {
            service: service.to_owned(),
            rate: Rate::new(10, 60).unwrap(),
            until_full_ms,
        }
    }

    #[test]
    fn levels_are_refilled_for_the_time_between() {
        let levels = || vec![level("a--x", 10_000), level("a--y", 3000)];
        assert_eq!(refilled(levels(), 0), levels());
        assert_eq!(refilled(levels(), 4000), [level("a--x", 6000)]);
        assert_eq!(refilled(levels(), 10_000), []);
    }

    #[test]
    fn the_emptiest_buckets_are_kept_and_the_longest_entries_fit() {
        let most = Rate::new(u32::MAX, u32::MAX).unwrap();
        let longest = Level {
            service: "x".repeat(63),
            rate: most,
            until_full_ms: u64::MAX,
        };
        assert!(serde_json::to_vec(&longest).unwrap().len() < limits::LEVEL_BYTES);
        let levels: Vec<Level> = (0..limits::LEVELS as u64 + 5)
            .map(|ms| level("a--x", ms))
            .collect();
        let kept = bounded(levels);
        assert_eq!(kept.len(), limits::LEVELS);
        assert_eq!(kept.iter().map(|level| level.until_full_ms).min(), Some(5));
    }
}
