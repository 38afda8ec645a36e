//! Lines that repeat: of each place in the code that logs, some at once and then one a second. What is left out is
//! counted and said, so that a flood fills neither disk nor eyes.

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

/// Lines of one place that may come at once, and after how long there may be one more.
const BURST: u32 = 20;
const REFILL: Duration = Duration::from_secs(1);

static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// Lines that this process has left out so far.
pub fn suppressed() -> u64 {
    SUPPRESSED.load(Ordering::Relaxed)
}

/// Writes events as `inner` does, but not too many of the same kind. Whoever asks for details (`debug` and `trace`) gets
/// them all.
pub(super) struct Limited<F, C> {
    inner: F,
    format: LogFormat,
    now: C,
    /// Of each place that has logged: as many as the program has, at most.
    places: Mutex<HashMap<Identifier, Allowance>>,
}

/// What one place may log.
#[derive(Debug)]
struct Allowance {
    lines: u32,
    refilled: Instant,
    left_out: u64,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { lines: BURST, refilled: now, left_out: 0 }
    }

    /// Lets a line pass, with how many before it did not; or counts it.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let seconds = now.saturating_duration_since(self.refilled).as_secs() / REFILL.as_secs();
        if seconds > 0 {
            self.refilled += REFILL * u32::try_from(seconds).unwrap_or(u32::MAX);
            self.lines = self.lines.saturating_add(u32::try_from(seconds).unwrap_or(u32::MAX)).min(BURST);
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
        Self { inner, format, now, places: Mutex::default() }
    }

    fn admit(&self, event: &Event<'_>) -> Option<u64> {
        if *event.metadata().level() > Level::INFO {
            return Some(0);
        }
        let now = (self.now)();
        // A panic while it was held left it whole.
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.entry(event.metadata().callsite()).or_insert_with(|| Allowance::new(now)).admit(now)
    }
}

impl<S, N, F, C> FormatEvent<S, N> for Limited<F, C>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
    C: Fn() -> Instant,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let Some(left_out) = self.admit(event) else {
            SUPPRESSED.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        self.inner.format_event(context, out.by_ref(), event)?;
        if left_out == 0 {
            return Ok(());
        }
        let mut timestamp = String::new();
        SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
        let level = event.metadata().level();
        match self.format {
            LogFormat::Text => writeln!(out, "{timestamp} {level:>5} {left_out} more like it were left out"),
            LogFormat::Json => {
                let line =
                    LeftOut { timestamp, level: level.as_str(), message: "more like it were left out", left_out };
                writeln!(out, "{}", serde_json::to_string(&line).map_err(|_| fmt::Error)?)
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

    use super::*;

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

    /// Lines that `log` writes; it is given a hand on the clock.
    fn written(form: LogFormat, log: impl FnOnce(&dyn Fn(u64))) -> Vec<String> {
        let (out, start) = (Written::default(), Instant::now());
        let passed = Arc::new(AtomicU64::new(0));
        let clock = {
            let passed = Arc::clone(&passed);
            move || start + Duration::from_millis(passed.load(Ordering::Relaxed))
        };
        let advance = |ms: u64| {
            passed.fetch_add(ms, Ordering::Relaxed);
        };
        let logs = tracing_subscriber::fmt().with_max_level(Level::DEBUG).with_writer(out.clone()).with_ansi(false);
        match form {
            LogFormat::Text => {
                let logs = logs.event_format(Limited::new(format::format().with_target(false), form, clock)).finish();
                tracing::subscriber::with_default(logs, || log(&advance));
            }
            LogFormat::Json => {
                let inner = format::format().json().flatten_event(true);
                let logs = logs.fmt_fields(JsonFields::new()).event_format(Limited::new(inner, form, clock)).finish();
                tracing::subscriber::with_default(logs, || log(&advance));
            }
        }
        let bytes = out.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_flood_becomes_a_few_lines_that_say_how_many_there_were() {
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
        assert!(lines[19].ends_with("WARN again number=19"), "{}", lines[19]);
        assert!(lines[20].ends_with("WARN again number=0"), "{}", lines[20]);
        assert!(lines[21].ends_with("WARN 81 more like it were left out"), "{}", lines[21]);
        assert!(lines[22].ends_with("something else"));
        // At least: other tests log too.
        assert!(suppressed() - before >= 83);
    }

    #[test]
    fn after_a_rest_there_is_a_whole_burst_again_and_no_more() {
        let lines = written(LogFormat::Text, |advance| {
            let flood = || (0..50).for_each(|_| tracing::error!("again"));
            flood();
            advance(3_600_000);
            flood();
        });
        assert_eq!(lines.iter().filter(|line| line.ends_with("again")).count(), 40);
    }

    #[test]
    fn details_are_not_limited_and_json_stays_json() {
        let lines = written(LogFormat::Json, |advance| {
            (0..30).for_each(|_| tracing::debug!("detail"));
            let flood = || (0..25).for_each(|_| tracing::info!(request_id = "x", "line"));
            flood();
            advance(1000);
            flood();
        });
        let lines: Vec<serde_json::Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.iter().filter(|line| line["message"] == "detail").count(), 30);
        assert_eq!(lines.iter().filter(|line| line["message"] == "line" && line["request_id"] == "x").count(), 21);
        let last = lines.last().unwrap();
        assert_eq!((&last["left_out"], &last["level"]), (&5.into(), &"INFO".into()));
    }
}
