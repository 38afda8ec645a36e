//! Rate limit of log lines: a burst for each place in the code, then one line a second. Left-out
//! lines are counted, and the next line tells how many there were.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::LogFormat;
use crate::text::escaped_json;

/// Lines of a place that may come at once, and time until one more may come.
const BURST: u32 = 20;
const REFILL: Duration = Duration::from_secs(1);

static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// Number of lines that this process has left out.
pub fn suppressed() -> u64 {
    SUPPRESSED.load(Ordering::Relaxed)
}

/// Formats events like `inner`, with a rate limit for each place in the code. Events of `debug` and
/// `trace` have no limit.
pub(super) struct Limited<F, C> {
    inner: F,
    format: LogFormat,
    now: C,
    /// Allowance of each place that has logged; bounded by the number of places in the code.
    places: Mutex<HashMap<Identifier, Allowance>>,
}

/// Lines that a place may log.
#[derive(Debug)]
struct Allowance {
    lines: u32,
    refilled: Instant,
    left_out: u64,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self {
            lines: BURST,
            refilled: now,
            left_out: 0,
        }
    }

    /// Admits a line and returns the number of lines left out before it, or counts a left-out line
    /// and returns `None`.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let seconds = now.saturating_duration_since(self.refilled).as_secs() / REFILL.as_secs();
        if seconds > 0 {
            self.refilled += REFILL * u32::try_from(seconds).unwrap_or(u32::MAX);
            self.lines = self
                .lines
                .saturating_add(u32::try_from(seconds).unwrap_or(u32::MAX))
                .min(BURST);
        }
        if self.lines == 0 {
            self.left_out += 1;
            return None;
        }
        self.lines -= 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

impl<F, C: Fn() -> Instant> Limited<F, C> {
    pub(super) fn new(inner: F, format: LogFormat, now: C) -> Self {
        Self {
            inner,
            format,
            now,
            places: Mutex::default(),
        }
    }

    fn admit(&self, event: &Event<'_>) -> Option<u64> {
        if *event.metadata().level() > Level::INFO {
            return Some(0);
        }
        let now = (self.now)();
        // A panic under the lock leaves the map consistent.
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places
            .entry(event.metadata().callsite())
            .or_insert_with(|| Allowance::new(now))
            .admit(now)
    }
}

impl<S, N, F, C> FormatEvent<S, N> for Limited<F, C>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
    C: Fn() -> Instant,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let Some(left_out) = self.admit(event) else {
            SUPPRESSED.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        match self.format {
            LogFormat::Text => self.inner.format_event(context, out.by_ref(), event)?,
            LogFormat::Json => {
                let mut line = String::new();
                self.inner
                    .format_event(context, Writer::new(&mut line), event)?;
                out.write_str(&escaped_json(&line))?;
            }
        }
        if left_out == 0 {
            return Ok(());
        }
        let mut timestamp = String::new();
        SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
        let level = event.metadata().level();
        match self.format {
            LogFormat::Text => writeln!(
                out,
                "{timestamp} {level:>5} {left_out} more lines like this were left out"
            ),
            LogFormat::Json => {
                let line = LeftOut {
                    timestamp,
                    level: level.as_str(),
                    message: "more lines like this were left out",
                    left_out,
                };
                writeln!(
                    out,
                    "{}",
                    serde_json::to_string(&line).map_err(|_| fmt::Error)?
                )
            }
        }
    }
}

#[derive(Serialize)]
struct LeftOut<'a> {
    timestamp: String,
    level: &'a str,
    message: &'a str,
    left_out: u64,
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use tracing_subscriber::fmt::MakeWriter;
    use tracing_subscriber::fmt::format::{self, JsonFields};

    use super::super::text_fields;
    use super::*;
    use crate::text::is_hidden;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Written {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    /// Returns the lines that `log` writes. `log` gets a function that advances the clock by
    /// milliseconds.
    fn written(form: LogFormat, log: impl FnOnce(&dyn Fn(u64))) -> Vec<String> {
        let out = Written::default();
        let start = Instant::now();
        let passed = Arc::new(AtomicU64::new(0));
        let clock = {
            let passed = Arc::clone(&passed);
            move || start + Duration::from_millis(passed.load(Ordering::Relaxed))
        };
        let advance = |ms: u64| {
            passed.fetch_add(ms, Ordering::Relaxed);
        };
        let logs = tracing_subscriber::fmt()
            .with_max_level(Level::DEBUG)
            .with_writer(out.clone())
            .with_ansi(false);
        match form {
            LogFormat::Text => {
                let inner = format::format().with_target(false);
                let logs = logs
                    .fmt_fields(text_fields())
                    .event_format(Limited::new(inner, form, clock))
                    .finish();
                tracing::subscriber::with_default(logs, || log(&advance));
            }
            LogFormat::Json => {
                let inner = format::format().json().flatten_event(true);
                let logs = logs
                    .fmt_fields(JsonFields::new())
                    .event_format(Limited::new(inner, form, clock))
                    .finish();
                tracing::subscriber::with_default(logs, || log(&advance));
            }
        }
        let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_flood_becomes_a_few_lines_and_a_count() {
        let before = suppressed();
        let flood = |times: u32| (0..times).for_each(|number| tracing::warn!(number, "again"));
        let lines = written(LogFormat::Text, |advance| {
            flood(100);
            advance(999);
            flood(1);
            advance(1);
            flood(3);
            tracing::warn!("something else");
        });
        assert_eq!(lines.len(), 20 + 2 + 1, "{lines:#?}");
        for (line, end) in lines[19..].iter().zip([
            "WARN again number=19",
            "WARN again number=0",
            "WARN 81 more lines like this were left out",
            "something else",
        ]) {
            assert!(line.ends_with(end), "{line}");
        }
        // Other tests of this process may leave out lines too.
        assert!(suppressed() - before >= 83);
    }

    #[test]
    fn text_from_outside_begins_no_line_and_controls_no_terminal() {
        let hostile = "x\n2026-11-24T00:00:00Z  WARN forged\r\x1b[2J\x7f\u{9b}2J\u{202e}\u{2028}";
        for form in [LogFormat::Text, LogFormat::Json] {
            let lines = written(form, |_| {
                tracing::warn!(display = %hostile, debug = ?hostile, text = hostile,
                    "cannot read {hostile}");
            });
            let [line] = &lines[..] else {
                panic!("{lines:#?}")
            };
            assert!(!line.contains(is_hidden), "{line:?}");
            match form {
                LogFormat::Text => {
                    let expected = r" WARN cannot read x\u{a}2026-11-24T00:00:00Z  WARN";
                    assert!(line.contains(expected), "{line}");
                }
                LogFormat::Json => {
                    let line: serde_json::Value = serde_json::from_str(line).unwrap();
                    assert_eq!(line["display"], hostile);
                    assert_eq!(line["text"], hostile);
                }
            }
        }
    }

    #[test]
    fn a_pause_restores_one_burst() {
        let lines = written(LogFormat::Text, |advance| {
            let flood = || (0..50).for_each(|_| tracing::error!("again"));
            flood();
            advance(3_600_000);
            flood();
        });
        let again = lines.iter().filter(|line| line.ends_with("again"));
        assert_eq!(again.count(), 40);
    }

    #[test]
    fn debug_lines_are_not_limited_and_json_lines_stay_valid() {
        let lines = written(LogFormat::Json, |advance| {
            (0..30).for_each(|_| tracing::debug!("detail"));
            let flood = || (0..25).for_each(|_| tracing::info!(request_id = "x", "line"));
            flood();
            advance(1000);
            flood();
        });
        let lines = lines.iter().map(|line| serde_json::from_str(line).unwrap());
        let lines: Vec<serde_json::Value> = lines.collect();
        let count = |is_counted: fn(&serde_json::Value) -> bool| {
            lines.iter().filter(|line| is_counted(line)).count()
        };
        assert_eq!(count(|line| line["message"] == "detail"), 30);
        let limited = count(|line| line["message"] == "line" && line["request_id"] == "x");
        assert_eq!(limited, 21);
        let last = lines.last().unwrap();
        assert_eq!(last["left_out"], 5);
        assert_eq!(last["level"], "INFO");
    }
}
