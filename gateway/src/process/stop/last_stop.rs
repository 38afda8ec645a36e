//! State that a stop writes to a file for the next start: levels of rate limits, and the services
//! that had tunnels.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::limits;
use gw_interface::rate_limit::levels::{self, Level};
use gw_shared::files;
use serde::{Deserialize, Serialize};

/// Name of the file in the data folder.
pub(crate) const FILE: &str = "last-stop.json";
/// Age beyond which the file is ignored.
const AGE_MAX: Duration = Duration::from_hours(24);
/// Age up to which the tunnels are expected back. After a longer stop, the pauses of the agents
/// exceed the time that callers wait.
const TUNNELS_EXPECTED: Duration = Duration::from_secs(60);
/// Longest file, in bytes.
const FILE_MAX: u64 = (limits::LEVELS * limits::LEVEL_BYTES
    + limits::EXPECTED_SERVICES * limits::EXPECTED_SERVICE_BYTES
    + 1024) as u64;

/// What a stopped process leaves to the next one.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LastStop {
    /// Levels of the buckets that are not full.
    pub(crate) levels: Vec<Level>,
    /// Number of tunnels, by label of their service.
    pub(crate) tunnels: BTreeMap<String, usize>,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    /// Milliseconds since the Unix epoch.
    written_at_ms: u64,
    levels: Vec<Level>,
    tunnels: BTreeMap<String, usize>,
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

impl LastStop {
    /// Writes the file as of `now`; removes it if there is nothing to write. Keeps
    /// [`limits::LEVELS`] levels and [`limits::EXPECTED_SERVICES`] services.
    pub(crate) fn store(self, path: &Path, now: SystemTime) -> io::Result<()> {
        if self.levels.is_empty() && self.tunnels.is_empty() {
            return files::remove_if_there(path);
        }
        let tunnels = self
            .tunnels
            .into_iter()
            .take(limits::EXPECTED_SERVICES)
            .collect();
        let stored = Stored {
            written_at_ms: unix_ms(now),
            levels: levels::bounded(self.levels),
            tunnels,
        };
        files::write_private(path, &serde_json::to_vec(&stored)?)
    }

    /// Reads the file: levels refilled for the time until `now`, and tunnels that are expected
    /// back. Empty if there is no file or it is unusable, which is logged.
    pub(crate) fn load(path: &Path, now: SystemTime) -> Self {
        match Self::read(path, now) {
            Ok(last) => last,
            Err(Unusable::Io(error)) if error.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error,
                    "state of the last stop not used: rate limits start full");
                Self::default()
            }
        }
    }

    fn read(path: &Path, now: SystemTime) -> Result<Self, Unusable> {
        let mut contents = Vec::new();
        File::open(path)?
            .take(FILE_MAX + 1)
            .read_to_end(&mut contents)?;
        if contents.len() as u64 > FILE_MAX {
            return Err(Unusable::TooLong);
        }
        let Stored {
            written_at_ms,
            levels,
            mut tunnels,
        } = serde_json::from_slice(&contents)?;
        let now_ms = unix_ms(now);
        if written_at_ms > now_ms {
            return Err(Unusable::FromTheFuture(Duration::from_millis(
                written_at_ms - now_ms,
            )));
        }
        let age_ms = now_ms - written_at_ms;
        let age = Duration::from_millis(age_ms);
        if age > AGE_MAX {
            return Err(Unusable::TooOld(age));
        }
        if age > TUNNELS_EXPECTED {
            tunnels.clear();
        }
        Ok(Self {
            levels: levels::refilled(levels, age_ms),
            tunnels,
        })
    }
}

/// Removes the file after a start. Used once: after a crash it would be out of date.
pub(crate) fn remove(path: &Path) {
    if let Err(error) = files::remove_if_there(path) {
        tracing::warn!(path = %path.display(), %error,
            "the used state of the last stop cannot be removed");
    }
}

fn unix_ms(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use gw_base::service::rate::Rate;

    use super::*;

    fn stopped() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(1_800_000_000)
    }

    fn level(service: &str, until_full_ms: u64) -> Level {
        Level {
            service: service.to_owned(),
            rate: Rate::new(10, 60).unwrap(),
            until_full_ms,
        }
    }

    fn tunnels() -> BTreeMap<String, usize> {
        BTreeMap::from([("a--x".to_owned(), 2)])
    }

    #[test]
    fn levels_are_refilled_and_tunnels_expected_for_a_minute() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let last = LastStop {
            levels: vec![level("a--x", 90_000)],
            tunnels: tunnels(),
        };
        last.store(&path, stopped()).unwrap();
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let after = |seconds| {
            let LastStop { levels, tunnels } =
                LastStop::load(&path, stopped() + Duration::from_secs(seconds));
            (levels, tunnels)
        };
        assert_eq!(after(0), (vec![level("a--x", 90_000)], tunnels()));
        assert_eq!(after(60), (vec![level("a--x", 30_000)], tunnels()));
        assert_eq!(after(61), (vec![level("a--x", 29_000)], BTreeMap::new()));
        assert_eq!(after(90), (Vec::new(), BTreeMap::new()));
        LastStop::default().store(&path, stopped()).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn implausible_files_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        assert!(matches!(
            LastStop::read(&path, stopped()),
            Err(Unusable::Io(_))
        ));
        LastStop {
            levels: Vec::new(),
            tunnels: tunnels(),
        }
        .store(&path, stopped())
        .unwrap();
        let moment = Duration::from_secs(1);
        assert!(matches!(
            LastStop::read(&path, stopped() - moment),
            Err(Unusable::FromTheFuture(_))
        ));
        assert!(LastStop::read(&path, stopped() + AGE_MAX).is_ok());
        assert!(matches!(
            LastStop::read(&path, stopped() + AGE_MAX + moment),
            Err(Unusable::TooOld(_))
        ));
        for text in ["", "{", "{\"levels\":[]}", "[1]", "\u{fffd}"] {
            std::fs::write(&path, text).unwrap();
            assert!(
                matches!(LastStop::read(&path, stopped()), Err(Unusable::Corrupt(_))),
                "{text}"
            );
            assert_eq!(LastStop::load(&path, stopped()), LastStop::default());
        }
        // A rate of zero is rejected when rates are parsed.
        let zero = "{\"written_at_ms\":0,\"tunnels\":{},\"levels\":[{\"service\":\"a\",\
                    \"rate\":{\"burst\":0,\"refill_per_minute\":1},\"until_full_ms\":1}]}";
        std::fs::write(&path, zero).unwrap();
        assert!(matches!(
            LastStop::read(&path, stopped()),
            Err(Unusable::Corrupt(_))
        ));
        File::create(&path).unwrap().set_len(FILE_MAX + 1).unwrap();
        assert!(matches!(
            LastStop::read(&path, stopped()),
            Err(Unusable::TooLong)
        ));
    }

    #[test]
    fn the_longest_file_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let most = Rate::new(u32::MAX, u32::MAX).unwrap();
        let long = |number: usize| format!("{number:0>63}");
        let level = |number| Level {
            service: long(number),
            rate: most,
            until_full_ms: u64::MAX,
        };
        let last = LastStop {
            levels: (0..=limits::LEVELS).map(level).collect(),
            tunnels: (0..=limits::EXPECTED_SERVICES)
                .map(|number| (long(number), usize::MAX))
                .collect(),
        };
        last.store(&path, stopped()).unwrap();
        let read = LastStop::load(&path, stopped());
        assert_eq!(
            (read.levels.len(), read.tunnels.len()),
            (limits::LEVELS, limits::EXPECTED_SERVICES)
        );
    }
}
