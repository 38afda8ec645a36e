//! Levels of the services' buckets, handed from one process to the next: in a message of a takeover, or in a file
//! between a stop and a start.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gw_shared::files;
use serde::{Deserialize, Serialize};

use crate::limits;
use crate::rate::Rate;

/// Age beyond which a file is ignored.
const AGE_MAX: Duration = Duration::from_hours(24);
/// Longest file, in bytes.
const FILE_MAX: u64 = limits::LEVELS as u64 * limits::LEVEL_BYTES as u64 + 1024;

/// The level of a bucket that is not full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Level {
    /// Label of the service.
    pub(crate) service: String,
    pub(crate) rate: Rate,
    /// Time until the bucket is full, rounded up.
    pub(crate) until_full_ms: u64,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    /// Milliseconds since the Unix epoch.
    written_at_ms: u64,
    levels: Vec<Level>,
}

/// Why a file is ignored.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it is longer than {FILE_MAX} bytes")]
    TooLong,
    #[error("it is not what a gateway writes: {0}")]
    Corrupt(#[from] serde_json::Error),
    #[error("its time is {} s ahead of the clock", .0.as_secs())]
    FromTheFuture(Duration),
    #[error("it is {} s old", .0.as_secs())]
    TooOld(Duration),
}

/// Keeps at most [`limits::LEVELS`] levels: those with the longest time until full.
pub(crate) fn bounded(mut levels: Vec<Level>) -> Vec<Level> {
    if levels.len() > limits::LEVELS {
        levels.select_nth_unstable_by_key(limits::LEVELS, |level| std::cmp::Reverse(level.until_full_ms));
        levels.truncate(limits::LEVELS);
    }
    levels
}

/// Removes the file after a start. Used once: after a crash the file would be out of date.
pub(crate) fn remove(path: &Path) {
    if let Err(error) = files::remove_if_there(path) {
        tracing::warn!(path = %path.display(), %error, "the used levels of rate limits cannot be removed");
    }
}

/// Writes `levels` as of `now`; removes the file if there are none.
pub(crate) fn store(path: &Path, levels: Vec<Level>, now: SystemTime) -> io::Result<()> {
    if levels.is_empty() {
        return files::remove_if_there(path);
    }
    let stored = Stored { written_at_ms: unix_ms(now), levels: bounded(levels) };
    files::write_private(path, &serde_json::to_vec(&stored)?)
}

/// Reads the levels of a file, refilled for the time since it was written until `now`. Empty if there is no file or it
/// is unusable, which is logged.
pub(crate) fn load(path: &Path, now: SystemTime) -> Vec<Level> {
    match read(path, now) {
        Ok(levels) => levels,
        Err(Unusable::Io(error)) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "levels of rate limits not used: limits start full");
            Vec::new()
        }
    }
}

fn read(path: &Path, now: SystemTime) -> Result<Vec<Level>, Unusable> {
    let mut contents = Vec::new();
    File::open(path)?.take(FILE_MAX + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 > FILE_MAX {
        return Err(Unusable::TooLong);
    }
    let Stored { written_at_ms, levels } = serde_json::from_slice(&contents)?;
    let now_ms = unix_ms(now);
    if written_at_ms > now_ms {
        return Err(Unusable::FromTheFuture(Duration::from_millis(written_at_ms - now_ms)));
    }
    let age_ms = now_ms - written_at_ms;
    if Duration::from_millis(age_ms) > AGE_MAX {
        return Err(Unusable::TooOld(Duration::from_millis(age_ms)));
    }
    let refilled = levels.into_iter().filter_map(|level| {
        let until_full_ms = level.until_full_ms.checked_sub(age_ms).filter(|left| *left > 0)?;
        Some(Level { until_full_ms, ..level })
    });
    Ok(refilled.collect())
}

fn unix_ms(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn level(service: &str, until_full_ms: u64) -> Level {
        Level { service: service.to_owned(), rate: Rate::new(10, 60).unwrap(), until_full_ms }
    }

    #[test]
    fn levels_are_refilled_for_the_time_between() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("levels");
        let stopped = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        store(&path, vec![level("a--x", 10_000), level("a--y", 3000)], stopped).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(load(&path, stopped), [level("a--x", 10_000), level("a--y", 3000)]);
        assert_eq!(load(&path, stopped + Duration::from_secs(4)), [level("a--x", 6000)]);
        assert_eq!(load(&path, stopped + Duration::from_secs(10)), []);
        store(&path, Vec::new(), stopped).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn implausible_files_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("levels");
        let stopped = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        assert!(matches!(read(&path, stopped), Err(Unusable::Io(_))));
        store(&path, vec![level("a--x", 10_000)], stopped).unwrap();
        assert!(matches!(read(&path, stopped - Duration::from_secs(1)), Err(Unusable::FromTheFuture(_))));
        assert!(read(&path, stopped + AGE_MAX).is_ok());
        assert!(matches!(read(&path, stopped + AGE_MAX + Duration::from_secs(1)), Err(Unusable::TooOld(_))));
        for text in ["", "{", "{\"levels\":[]}", "[1]", "\u{fffd}"] {
            std::fs::write(&path, text).unwrap();
            assert!(matches!(read(&path, stopped), Err(Unusable::Corrupt(_))), "{text}");
            assert_eq!(load(&path, stopped), []);
        }
        // A rate of zero is rejected when rates are parsed.
        let zero = "{\"written_at_ms\":0,\"levels\":[{\"service\":\"a\",\"rate\":{\"burst\":0,\
                    \"refill_per_minute\":1},\"until_full_ms\":1}]}";
        std::fs::write(&path, zero).unwrap();
        assert!(matches!(read(&path, stopped), Err(Unusable::Corrupt(_))));
        File::create(&path).unwrap().set_len(FILE_MAX + 1).unwrap();
        assert!(matches!(read(&path, stopped), Err(Unusable::TooLong)));
    }

    #[test]
    fn the_emptiest_buckets_are_kept_and_the_longest_entries_fit() {
        let most = Rate::new(u32::MAX, u32::MAX).unwrap();
        let longest = Level { service: "x".repeat(63), rate: most, until_full_ms: u64::MAX };
        assert!(serde_json::to_vec(&longest).unwrap().len() < limits::LEVEL_BYTES);
        let levels: Vec<Level> = (0..limits::LEVELS as u64 + 5).map(|ms| level("a--x", ms)).collect();
        let kept = bounded(levels);
        assert_eq!(kept.len(), limits::LEVELS);
        assert_eq!(kept.iter().map(|level| level.until_full_ms).min(), Some(5));
    }
}
