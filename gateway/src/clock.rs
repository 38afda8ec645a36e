//! Wall-clock time, for expiries, records and the audit log.

use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Whole seconds since the Unix epoch, UTC.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

impl Timestamp {
    pub fn now() -> Self {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self(i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX))
    }

    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add_unsigned(duration.as_secs()))
    }

    /// Time from `earlier` to `self`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_secs(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    pub(crate) fn to_datetime(self) -> OffsetDateTime {
        OffsetDateTime::from_unix_timestamp(self.0).unwrap_or(OffsetDateTime::UNIX_EPOCH)
    }
}

/// RFC 3339, UTC: `2026-11-21T04:15:32Z`.
impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_datetime().format(&Rfc3339).map_err(|_| fmt::Error)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_format_as_rfc_3339_with_second_precision() {
        assert_eq!(Timestamp(1_795_234_532).to_string(), "2026-11-21T04:15:32Z");
        let later = Timestamp(10).after(Duration::from_secs(5));
        assert_eq!(
            (later, later.since(Timestamp(12)).as_secs(), Timestamp(12).since(later)),
            (Timestamp(15), 3, Duration::ZERO)
        );
    }
}
