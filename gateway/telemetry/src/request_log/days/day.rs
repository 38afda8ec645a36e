//! Days of the log, each of which has its own file.

use std::fmt;
use std::sync::Arc;

use gw_base::clock::Timestamp;
use time::{Date, OffsetDateTime};

pub(crate) const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// Whole days kept besides the current one, so that a record is kept for at least seven days.
pub(crate) const DAYS_KEPT: u32 = 7;

/// Day in UTC, as days since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Day(pub(crate) u32);

/// Clock of the log. Tests use their own.
#[derive(Clone)]
pub(crate) struct Now(pub(crate) Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Day {
    pub(crate) fn of_ms(unix_ms: u64) -> Self {
        Self(u32::try_from(unix_ms / DAY_MS).unwrap_or(u32::MAX))
    }

    pub(crate) fn start_ms(self) -> u64 {
        u64::from(self.0) * DAY_MS
    }

    /// Returns the day of a file of the log, whose name begins with the date.
    pub(crate) fn of_file_name(name: &str) -> Option<Self> {
        let (date, _) = name.split_once('.')?;
        let mut parts = date.splitn(3, '-');
        let mut next = |length: usize| {
            parts
                .next()
                .filter(|part| part.len() == length)?
                .parse::<u16>()
                .ok()
        };
        let year = next(4)?;
        let month = next(2)?;
        let day = next(2)?;
        let month = time::Month::try_from(u8::try_from(month).ok()?).ok()?;
        let date = Date::from_calendar_date(year.into(), month, u8::try_from(day).ok()?).ok()?;
        u32::try_from((date - OffsetDateTime::UNIX_EPOCH.date()).whole_days())
            .ok()
            .map(Self)
    }

    pub(crate) fn file_name(self) -> String {
        format!("{self}.sqlite")
    }
}

/// `2026-11-21`
impl fmt::Display for Day {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days = time::Duration::days(self.0.into());
        let date = OffsetDateTime::UNIX_EPOCH
            .date()
            .checked_add(days)
            .unwrap_or(Date::MAX);
        write!(
            f,
            "{:04}-{:02}-{:02}",
            date.year(),
            u8::from(date.month()),
            date.day()
        )
    }
}

impl Now {
    pub(crate) fn today(&self) -> Day {
        Day::of_ms(u64::try_from((self.0)().0).unwrap_or(0) * 1000)
    }

    /// Today, and the hour of the day.
    pub(crate) fn hour(&self) -> (Day, u64) {
        let seconds = u64::try_from((self.0)().0).unwrap_or(0);
        (Day::of_ms(seconds * 1000), seconds / 3600 % 24)
    }

    /// All of [`Self::days`], the oldest first.
    pub(crate) fn each_day(&self) -> impl Iterator<Item = Day> + use<> {
        let days = self.days();
        (days.start().0..=days.end().0).map(Day)
    }

    /// Days whose records are written and found: the days kept, and tomorrow because clocks differ.
    pub(crate) fn days(&self) -> std::ops::RangeInclusive<Day> {
        let today = self.today().0;
        Day(today.saturating_sub(DAYS_KEPT))..=Day(today.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_contain_the_date() {
        let day = Day::of_ms(1_795_234_532_123);
        assert_eq!(day.file_name(), "2026-11-21.sqlite");
        for name in [
            "2026-11-21.sqlite",
            "2026-11-21.sqlite-wal",
            "2026-11-21.sqlite.corrupt",
        ] {
            assert_eq!(Day::of_file_name(name), Some(day), "{name}");
        }
        for name in [
            "",
            "2026-11-21",
            "x.sqlite",
            "2026-13-01.sqlite",
            "26-11-21.sqlite",
            "2026-11-21-3.sqlite",
        ] {
            assert_eq!(Day::of_file_name(name), None, "{name}");
        }
        assert_eq!(Day::of_ms(day.start_ms()), day);
        assert_eq!(Day::of_ms(day.start_ms() - 1), Day(day.0 - 1));
        let now = Now(Arc::new(move || {
            Timestamp((day.start_ms() / 1000) as i64 + 5)
        }));
        assert_eq!(
            (now.today(), now.days()),
            (day, Day(day.0 - 7)..=Day(day.0 + 1))
        );
    }
}
