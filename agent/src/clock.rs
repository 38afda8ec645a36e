//! The gateway's clock. Certificates are issued and checked against it, so the agent judges their
//! age by it too: the clock of the agent's machine may be wrong.

use std::cell::Cell;
use std::time::{Duration, Instant, SystemTime};

use gw_shared::http::Fields;
use http::header;

/// Smallest clock difference, or change of it, that is logged.
pub(crate) const WARN_FROM: Duration = Duration::from_secs(30);

/// The gateway's time, extrapolated from its last answer.
#[derive(Default)]
pub(crate) struct GatewayClock {
    /// The gateway's time and when it was received. The monotonic clock measures the time since
    /// then, because the machine's clock may be set meanwhile.
    received: Cell<Option<(SystemTime, Instant)>>,
    /// Seconds by which the machine's clock was ahead when the difference was last logged.
    logged: Cell<i64>,
}

impl GatewayClock {
    /// Sets the clock from the `Date` field of a gateway's answer (RFC 9110 §6.6.1), if present.
    pub(crate) fn set_from_headers(&self, headers: &Fields) {
        if let Some(gateway) = date(headers) {
            self.set(gateway, SystemTime::now());
        }
    }

    /// Sets the clock to `gateway`, received when the machine's clock read `local`.
    pub(crate) fn set(&self, gateway: SystemTime, local: SystemTime) {
        self.received.set(Some((gateway, Instant::now())));
        let ahead = seconds_ahead(local, gateway);
        if ahead.abs_diff(self.logged.get()) >= WARN_FROM.as_secs() {
            self.logged.set(ahead);
            match ahead {
                _ if ahead.unsigned_abs() < WARN_FROM.as_secs() => {
                    tracing::info!("this machine's clock agrees with the gateway's again");
                }
                _ => {
                    let side = if ahead > 0 { "ahead of" } else { "behind" };
                    let difference = in_words(Duration::from_secs(ahead.unsigned_abs()));
                    tracing::warn!(
                        "this machine's clock is {difference} {side} the gateway's; synchronise it \
                         with NTP"
                    );
                }
            }
        }
    }

    /// The gateway's time, if it has been received.
    pub(crate) fn known(&self) -> Option<SystemTime> {
        self.received
            .get()
            .map(|(gateway, at)| gateway + at.elapsed())
    }

    /// The gateway's time, or the machine's time until the gateway's has been received.
    pub(crate) fn now(&self) -> SystemTime {
        self.known().unwrap_or_else(SystemTime::now)
    }
}

/// The time in the `Date` field (RFC 9110 §6.6.1), if present and valid.
pub(crate) fn date(headers: &Fields) -> Option<SystemTime> {
    httpdate::parse_http_date(headers.get(header::DATE)?.to_str().ok()?).ok()
}

/// Seconds by which `local` is ahead of `gateway`; negative if it is behind.
pub(crate) fn seconds_ahead(local: SystemTime, gateway: SystemTime) -> i64 {
    let seconds = |difference: Duration| i64::try_from(difference.as_secs()).unwrap_or(i64::MAX);
    match local.duration_since(gateway) {
        Ok(ahead) => seconds(ahead),
        Err(behind) => -seconds(behind.duration()),
    }
}

/// A difference of clocks, in its largest unit of which there are two at least.
pub(crate) fn in_words(difference: Duration) -> String {
    let seconds = difference.as_secs();
    let units = [(86_400, "days"), (3600, "hours"), (60, "minutes")];
    match units.into_iter().find(|(unit, _)| seconds >= 2 * unit) {
        Some((unit, word)) => format!("{} {word}", seconds / unit),
        None => format!("{seconds} seconds"),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn clock_continues_from_the_received_time() {
        let clock = GatewayClock::default();
        assert_eq!(clock.known(), None);
        let date = HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT");
        clock.set_from_headers(&Fields::from_iter([(header::DATE, date)]));
        let received = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let soon = received..received + Duration::from_secs(60);
        assert!(soon.contains(&clock.now()));
        // An answer without a date changes nothing.
        clock.set_from_headers(&Fields::new());
        assert!(soon.contains(&clock.now()));
    }

    #[test]
    fn differences_are_signed() {
        let now = SystemTime::now();
        assert_eq!(seconds_ahead(now + Duration::from_secs(90), now), 90);
        assert_eq!(seconds_ahead(now, now + Duration::from_secs(90)), -90);
    }

    #[test]
    fn words_are_of_the_largest_unit_that_is_used_twice() {
        for (seconds, words) in [
            (0, "0 seconds"),
            (119, "119 seconds"),
            (120, "2 minutes"),
            (7199, "119 minutes"),
            (7200, "2 hours"),
            (172_799, "47 hours"),
            (172_800, "2 days"),
        ] {
            assert_eq!(in_words(Duration::from_secs(seconds)), words);
        }
    }
}
