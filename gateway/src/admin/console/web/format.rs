//! Formats of numbers and times for people.

use std::fmt;

use crate::clock::Timestamp;

/// `1.2 MiB`
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// `850 µs`, `12.3 ms`, `4.56 s`
pub(crate) fn micros(micros: u64) -> String {
    let value = micros as f64;
    match micros {
        0..1_000 => format!("{micros} µs"),
        1_000..100_000 => format!("{:.1} ms", value / 1e3),
        100_000..1_000_000 => format!("{:.0} ms", value / 1e3),
        1_000_000..60_000_000 => format!("{:.2} s", value / 1e6),
        _ => seconds(micros / 1_000_000),
    }
}

/// `42 s`, `5 min`, `3 h 20 min`, `12 d 4 h`
pub(crate) fn seconds(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{minutes} min"),
        3600..86_400 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

/// `12,345`
pub(crate) fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats an RFC 3339 time in UTC: `2026-11-21 04:15:32 UTC`.
pub(crate) fn time(time: impl fmt::Display) -> String {
    let time = time.to_string();
    let text = time.replacen('T', " ", 1);
    text.strip_suffix('Z').map_or(time, |text| format!("{text} UTC"))
}

/// Formats the time until or since an RFC 3339 time: `in 3 h 20 min`, `42 s ago`. Returns other text unchanged.
pub(crate) fn relative(time: &str, now: Timestamp) -> String {
    use time::OffsetDateTime;
    use time::format_description::well_known::Rfc3339;
    let Ok(at) = OffsetDateTime::parse(time, &Rfc3339) else { return time.to_owned() };
    let at = Timestamp(at.unix_timestamp());
    if at > now {
        format!("in {}", seconds(at.since(now).as_secs()))
    } else {
        format!("{} ago", seconds(now.since(at).as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_formatted_with_units() {
        assert_eq!([bytes(0), bytes(1023), bytes(1536), bytes(1 << 30)], ["0 B", "1023 B", "1.5 KiB", "1.0 GiB"]);
        assert_eq!(
            [micros(7), micros(1500), micros(250_000), micros(2_500_000), micros(60_000_000)],
            ["7 µs", "1.5 ms", "250 ms", "2.50 s", "1 min"]
        );
        assert_eq!(
            [seconds(59), seconds(3599), seconds(12_000), seconds(1_051_200)],
            ["59 s", "59 min", "3 h 20 min", "12 d 4 h"]
        );
        assert_eq!([count(0), count(999), count(1000), count(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(time("2026-11-21T04:15:32.123Z"), "2026-11-21 04:15:32.123 UTC");
        let now = Timestamp(1_795_234_532);
        assert_eq!(relative("2026-11-21T04:16:14Z", now), "in 42 s");
        assert_eq!(relative("2026-11-21T04:15:32Z", now), "0 s ago");
        assert_eq!(relative("soon", now), "soon");
    }
}
