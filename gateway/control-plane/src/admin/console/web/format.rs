//! Formats of numbers and times for people, by bytesize, humantime and num-format. The standard
//! library formats durations below a minute: humantime writes `12ms 345us`, which is harder to
//! compare.

use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;
use gw_base::clock::Timestamp;
use num_format::{Locale, ToFormattedString};

/// `1.2 MiB`
pub(crate) fn bytes(count: u64) -> String {
    ByteSize(count).display().iec().to_string()
}

/// `850µs`, `12.3ms`, `4.6s`, `1m 30s`
pub(crate) fn micros(micros: u64) -> String {
    let duration = Duration::from_micros(micros);
    match micros {
        0..1_000 => format!("{duration:?}"),
        1_000..60_000_000 => format!("{duration:.1?}"),
        _ => seconds(duration.as_secs()),
    }
}

/// The two largest units: `42s`, `5m 12s`, `3h 20m`, `12days 4h`
pub(crate) fn seconds(seconds: u64) -> String {
    let exact = humantime::format_duration(Duration::from_secs(seconds)).to_string();
    exact.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// `12,345`
pub(crate) fn count(count: u64) -> String {
    count.to_formatted_string(&Locale::en)
}

/// Formats an RFC 3339 time in UTC: `2026-11-21 04:15:32 UTC`.
pub(crate) fn time(time: impl fmt::Display) -> String {
    let time = time.to_string();
    let text = time.replacen('T', " ", 1);
    text.strip_suffix('Z')
        .map_or(time, |text| format!("{text} UTC"))
}

/// Formats the time until or since an RFC 3339 time: `in 3h 20m`, `42s ago`. Returns other text
/// unchanged.
pub(crate) fn relative(time: &str, now: Timestamp) -> String {
    use time::OffsetDateTime;
    use time::format_description::well_known::Rfc3339;
    let Ok(at) = OffsetDateTime::parse(time, &Rfc3339) else {
        return time.to_owned();
    };
    let at = Timestamp(at.unix_timestamp());
    if at > now {
        format!("in {}", seconds(at.since(now).as_secs()))
    } else {
        format!("{} ago", seconds(now.since(at).as_secs()))
    }
}

/// Which part of a page is missing, because these nodes of the region do not answer; `None` without
/// any.
pub(crate) fn missing(what: &str, nodes: &[u16]) -> Option<String> {
    let slots: Vec<String> = nodes.iter().map(u16::to_string).collect();
    (!nodes.is_empty()).then(|| {
        format!(
            "{what} of these nodes are missing, because they do not answer: {}.",
            slots.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_units_and_separators() {
        assert_eq!(
            [bytes(0), bytes(1023), bytes(1536), bytes(1 << 30)],
            ["0 B", "1023 B", "1.5 KiB", "1.0 GiB"]
        );
        assert_eq!(
            [
                micros(7),
                micros(1500),
                micros(250_000),
                micros(2_500_000),
                micros(60_000_000)
            ],
            ["7µs", "1.5ms", "250.0ms", "2.5s", "1m"]
        );
        assert_eq!(
            [
                seconds(0),
                seconds(59),
                seconds(3599),
                seconds(12_005),
                seconds(1_051_200)
            ],
            ["0s", "59s", "59m 59s", "3h 20m", "12days 4h"]
        );
        assert_eq!(
            [count(0), count(999), count(1000), count(1_234_567)],
            ["0", "999", "1,000", "1,234,567"]
        );
    }

    #[test]
    fn times_are_absolute_or_relative() {
        assert_eq!(
            time("2026-11-21T04:15:32.123Z"),
            "2026-11-21 04:15:32.123 UTC"
        );
        let now = Timestamp(1_795_234_532);
        assert_eq!(relative("2026-11-21T04:16:14Z", now), "in 42s");
        assert_eq!(relative("2026-11-21T04:15:32Z", now), "0s ago");
        assert_eq!(relative("soon", now), "soon");
    }
}
