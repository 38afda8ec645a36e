//! Wall-clock time, for expiries, records and the audit log: of the system, or in a region of
//! PostgreSQL.
//!
//! A node of a region follows the clock of PostgreSQL: its last answer, and the monotonic clock
//! since then. Nodes thus agree about the expiry of tokens and certificates, also while the clock
//! of one of their machines is wrong.

use std::fmt;
use std::time::{Duration, SystemTime};

use gw_shared::clock::{followed, monotonic_us, now, unix_us};
use rustls::time_provider::TimeProvider;
use rustls_pki_types::UnixTime;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Whole seconds since the Unix epoch, UTC.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// The time now, by the clock that this process follows.
    pub fn now() -> Self {
        Self::of_us(unix_us(now()))
    }

    fn of_us(unix_us: i64) -> Self {
        Self(unix_us.div_euclid(1_000_000))
    }

    /// The time `duration` later, without fractions of a second.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add_unsigned(duration.as_secs()))
    }

    /// Time from `earlier` to `self`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_secs(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// Milliseconds since the Unix epoch.
    pub fn unix_ms(self) -> u64 {
        u64::try_from(self.0).unwrap_or(0).saturating_mul(1000)
    }

    pub(crate) fn to_datetime(self) -> OffsetDateTime {
        OffsetDateTime::from_unix_timestamp(self.0).unwrap_or(OffsetDateTime::UNIX_EPOCH)
    }
}

/// The first whole millisecond since the Unix epoch that has not begun.
pub fn next_unix_ms() -> u64 {
    u64::try_from(unix_us(now()) / 1000 + 1).unwrap_or(0)
}

/// RFC 3339, UTC: `2026-11-21T04:15:32Z`.
impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            &self
                .to_datetime()
                .format(&Rfc3339)
                .map_err(|_| fmt::Error)?,
        )
    }
}

/// The time as rustls has it.
pub fn unix_time() -> UnixTime {
    UnixTime::since_unix_epoch(
        now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

/// The clock of this process, for rustls.
#[derive(Debug)]
pub struct ProcessClock;

impl TimeProvider for ProcessClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(unix_time())
    }
}

/// An answer of PostgreSQL about its clock, with the clocks of this machine. In microseconds, in
/// the middle of the round trip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReading {
    server_us: i64,
    /// Largest error of `server_us`: half of the round trip.
    error_us: i64,
    system_us: i64,
    monotonic_us: i64,
}

impl ClockReading {
    /// The answer `server_us`, received now to a question that was sent at `sent_us` of the
    /// monotonic clock.
    pub fn received(server_us: i64, sent_us: i64) -> Self {
        let received_us = monotonic_us();
        let error_us = (received_us - sent_us) / 2;
        let system_us = unix_us(SystemTime::now()) - error_us;
        Self {
            server_us,
            error_us,
            system_us,
            monotonic_us: received_us - error_us,
        }
    }

    /// The clock of this machine beside that of PostgreSQL at the reading.
    pub fn difference(&self) -> ClockDifference {
        ClockDifference {
            system_us: self.system_us,
            server_us: self.server_us,
        }
    }

    /// Follows the clock of PostgreSQL from now on. Returns false where it has been set to a wrong
    /// time, and the time so far goes on.
    pub fn follow(&self) -> bool {
        let ahead_us = self.follow_from(followed());
        if let Some(ahead_us) = ahead_us {
            gw_shared::clock::follow(ahead_us);
        }
        ahead_us.is_some()
    }

    /// The offset of the time from the monotonic clock after this reading, in microseconds;
    /// `ahead_us` is the offset before it. `None` if PostgreSQL's clock was set to another time and
    /// the clock of this machine was not.
    fn follow_from(&self, ahead_us: Option<i64>) -> Option<i64> {
        let measured_us = self.server_us - self.monotonic_us;
        let Some(ahead_us) = ahead_us else {
            return Some(measured_us);
        };
        let is_far =
            |other_us: i64| ahead_us.abs_diff(other_us) > DIFFERENCE_MAX.as_micros() as u64;
        if is_far(measured_us) && !is_far(self.system_us - self.monotonic_us) {
            return None;
        }
        // Within the error of the reading, the time goes on without a step.
        Some(ahead_us.clamp(measured_us - self.error_us, measured_us + self.error_us))
    }
}

/// Largest difference from PostgreSQL's clock with which a node joins its region.
pub const DIFFERENCE_MAX: Duration = Duration::from_secs(60);
/// Smallest difference that is reported.
const REPORTED_FROM: Duration = Duration::from_secs(5);

/// The clock of this machine beside that of PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockDifference {
    system_us: i64,
    server_us: i64,
}

impl ClockDifference {
    /// The difference now; `None` where no other clock is followed.
    pub fn now() -> Option<Self> {
        followed().map(|_| Self {
            system_us: unix_us(SystemTime::now()),
            server_us: unix_us(now()),
        })
    }

    /// Seconds by which the clock of this machine is ahead; negative if it is behind.
    pub fn seconds(self) -> f64 {
        (self.system_us - self.server_us) as f64 / 1e6
    }

    /// The node may join its region.
    pub fn is_allowed(self) -> bool {
        self.is_within(DIFFERENCE_MAX)
    }

    /// Too small to report.
    pub fn is_small(self) -> bool {
        self.is_within(REPORTED_FROM)
    }

    fn is_within(self, most: Duration) -> bool {
        u128::from(self.system_us.abs_diff(self.server_us)) <= most.as_micros()
    }
}

impl fmt::Display for ClockDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [system, server] = [self.system_us, self.server_us].map(Timestamp::of_us);
        let seconds = self.seconds();
        let side = if seconds < 0.0 { "behind" } else { "ahead of" };
        write!(
            f,
            "the clock of this machine ({system}) is {:.1} s {side} that of PostgreSQL ({server})",
            seconds.abs()
        )
    }
}

/// Follows PostgreSQL's clock, and logs when it and that of this machine begin to differ and agree
/// again.
#[derive(Default)]
pub struct ClockWatch {
    /// PostgreSQL's clock is not followed any more.
    is_left: bool,
    /// A difference was logged.
    differs: bool,
}

impl ClockWatch {
    /// Follows a reading; logs when PostgreSQL's clock is left or followed again, and when the two
    /// clocks begin or cease to differ.
    pub fn note(&mut self, reading: &ClockReading) {
        let is_left = !reading.follow();
        match (std::mem::replace(&mut self.is_left, is_left), is_left) {
            (false, true) => tracing::error!(
                "the clock of PostgreSQL was set: {}. The time before goes on, with which this \
                 machine agrees. Set the clock of the database server, and synchronise it with NTP",
                reading.difference()
            ),
            (true, false) => tracing::info!("the clock of PostgreSQL is followed again"),
            _ => {}
        }
        let differs = !is_left && !reading.difference().is_small();
        match (std::mem::replace(&mut self.differs, differs), differs) {
            (false, true) => tracing::warn!(
                "{}, which this node follows for tokens, certificates and expiry. Synchronise both \
                 with NTP",
                reading.difference()
            ),
            (true, false) => {
                tracing::info!("the clock of this machine agrees with that of PostgreSQL again");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000_000;

    /// A reading one second after boot, with these differences from the right time, in
    /// microseconds.
    fn reading(server: i64, system: i64) -> ClockReading {
        let right = 1_800_000_000_000_000;
        ClockReading {
            server_us: right + server,
            error_us: 10_000,
            system_us: right + system,
            monotonic_us: 1_000_000,
        }
    }

    #[test]
    fn steps_of_the_systems_clock_do_not_move_the_time() {
        let first = reading(0, 0).follow_from(None).unwrap();
        for step in [HOUR, -HOUR, 24 * HOUR, -24 * HOUR] {
            assert_eq!(reading(0, step).follow_from(Some(first)), Some(first));
        }
        // The error of a reading does not move it, either; a real difference does.
        assert_eq!(reading(9_000, 0).follow_from(Some(first)), Some(first));
        assert_eq!(
            reading(-30_000, 0).follow_from(Some(first)),
            Some(first - 20_000)
        );
        assert_eq!(
            reading(30_000_000, 0).follow_from(Some(first)),
            Some(first + 29_990_000)
        );
    }

    #[test]
    fn a_step_of_postgresqls_clock_is_followed_unless_this_machine_agrees_with_the_time_before() {
        let first = reading(0, 0).follow_from(None).unwrap();
        for step in [HOUR, -HOUR, 24 * HOUR, -24 * HOUR] {
            assert_eq!(reading(step, 0).follow_from(Some(first)), None);
            let followed = reading(step, step).follow_from(Some(first)).unwrap();
            assert!(followed.abs_diff(first + step) <= 10_000);
        }
    }

    #[test]
    fn a_difference_names_both_times() {
        let hour = reading(0, HOUR).difference();
        let text = "the clock of this machine (2027-01-15T09:00:00Z) is 3600.0 s ahead of that of \
                    PostgreSQL (2027-01-15T08:00:00Z)";
        assert_eq!(hour.to_string(), text);
        assert_eq!(
            (hour.seconds(), hour.is_allowed(), hour.is_small()),
            (3600.0, false, false)
        );
        let minute = reading(0, -60_000_000).difference();
        assert_eq!(
            (minute.seconds(), minute.is_allowed(), minute.is_small()),
            (-60.0, true, false)
        );
        assert!(
            reading(5_000_000, 0).difference().is_small()
                && !reading(0, 60_000_001).difference().is_allowed()
        );
    }

    #[test]
    fn times_format_as_rfc_3339_with_second_precision() {
        assert_eq!(Timestamp(1_795_234_532).to_string(), "2026-11-21T04:15:32Z");
        let later = Timestamp(10).after(Duration::from_secs(5));
        assert_eq!(
            (
                later,
                later.since(Timestamp(12)).as_secs(),
                Timestamp(12).since(later)
            ),
            (Timestamp(15), 3, Duration::ZERO)
        );
    }
}
