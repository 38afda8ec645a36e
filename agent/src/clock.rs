//! The gateway's clock. Certificates are issued and checked by it, so their age is judged by it: the clock of the
//! agent's machine may be wrong.

use std::cell::Cell;
use std::time::{Duration, Instant, SystemTime};

use http::header::{self, HeaderMap};

/// Differences below this are not worth a line of the log.
const WORTH_A_WARNING: Duration = Duration::from_secs(30);

/// What the gateway last said the time is.
#[derive(Default)]
pub(crate) struct GatewayClock {
    /// Its time, and when it said so. The monotonic clock goes on from there: ours may be set meanwhile.
    heard: Cell<Option<(SystemTime, Instant)>>,
    /// Seconds that ours was ahead when that was last logged.
    logged: Cell<i64>,
}

impl GatewayClock {
    /// Takes the time from `Date` of an answer of the gateway (RFC 9110 §6.6.1), if it has one.
    pub(crate) fn hear(&self, headers: &HeaderMap) {
        if let Some(theirs) = date(headers) {
            self.set(theirs, SystemTime::now());
        }
    }

    /// The gateway says `theirs` while our clock says `ours`.
    pub(crate) fn set(&self, theirs: SystemTime, ours: SystemTime) {
        self.heard.set(Some((theirs, Instant::now())));
        let ahead = seconds_ahead(ours, theirs);
        if ahead.abs_diff(self.logged.get()) >= WORTH_A_WARNING.as_secs() {
            self.logged.set(ahead);
            match ahead {
                _ if ahead.unsigned_abs() < WORTH_A_WARNING.as_secs() => {
                    tracing::info!("this machine's clock agrees with the gateway's again");
                }
                0.. => tracing::warn!(
                    "this machine's clock is {ahead} seconds ahead of the gateway's; keep it right with NTP"
                ),
                _ => tracing::warn!(
                    "this machine's clock is {} seconds behind the gateway's; keep it right with NTP",
                    ahead.unsigned_abs()
                ),
            }
        }
    }

    /// The time by the gateway's clock, if it has said it.
    pub(crate) fn known(&self) -> Option<SystemTime> {
        self.heard.get().map(|(theirs, at)| theirs + at.elapsed())
    }

    /// The time by the gateway's clock; by ours while the gateway has not said it.
    pub(crate) fn now(&self) -> SystemTime {
        self.known().unwrap_or_else(SystemTime::now)
    }
}

fn date(headers: &HeaderMap) -> Option<SystemTime> {
    httpdate::parse_http_date(headers.get(header::DATE)?.to_str().ok()?).ok()
}

fn seconds_ahead(ours: SystemTime, theirs: SystemTime) -> i64 {
    let seconds = |difference: Duration| i64::try_from(difference.as_secs()).unwrap_or(i64::MAX);
    match ours.duration_since(theirs) {
        Ok(ahead) => seconds(ahead),
        Err(behind) => -seconds(behind.duration()),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn the_gateways_time_goes_on_from_what_it_said() {
        let clock = GatewayClock::default();
        assert_eq!(clock.known(), None);
        let headers = HeaderMap::from_iter([(header::DATE, HeaderValue::from_static("Sun, 06 Nov 1994 08:49:37 GMT"))]);
        clock.hear(&headers);
        let said = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let now = clock.now();
        assert!(now >= said && now < said + Duration::from_secs(60), "{now:?}");
        clock.hear(&HeaderMap::new());
        assert!(clock.now() < said + Duration::from_secs(60), "an answer without a date changes nothing");
    }

    #[test]
    fn differences_are_signed() {
        let now = SystemTime::now();
        assert_eq!(seconds_ahead(now + Duration::from_secs(90), now), 90);
        assert_eq!(seconds_ahead(now, now + Duration::from_secs(90)), -90);
    }
}
