//! Structured logs on standard error, as text or JSON.

mod filter;
mod repeats;

use std::fmt::{Debug, Write};
use std::io::{self, IsTerminal};
use std::time::Instant;

use serde::Deserialize;
use tracing::field::Field;
use tracing::level_filters::{LevelFilter, STATIC_MAX_LEVEL};
use tracing::{Level, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{self, JsonFields, Writer};
use tracing_subscriber::layer::{Filter, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use repeats::Limited;
pub use repeats::suppressed;

use crate::text::Escaping;
use crate::text::documentation::located;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!(
                "log format is {other:?}; it must be \"text\" or \"json\""
            )),
        }
    }
}

/// Starts logging. Limits repeated lines. Only the first call of a process has an effect.
///
/// `GW_LOG` is a filter such as `info,rustls=off`. Without it, or if it is invalid, the filter is
/// `default`, and rustls and h2 log only errors, since they log a warning for every malformed
/// message of an unauthenticated peer. Colours are for terminals only, and not where `NO_COLOR` is
/// set.
pub fn start(format: LogFormat, default: Level) {
    let default = Targets::new()
        .with_default(default)
        .with_targets([("rustls", Level::ERROR), ("h2", Level::ERROR)]);
    let (filter, problem) = match std::env::var_os("GW_LOG") {
        None => (default, None),
        Some(text) => match filter::filter(&text.to_string_lossy()) {
            Ok(filter) => (filter, None),
            Err(problem) => (default, Some(problem)),
        },
    };
    // Fails only if logging has already started.
    if subscriber(format, filter).try_init().is_err() {
        return;
    }
    if let Some(problem) = problem {
        let page = located("docs/configuration.md");
        tracing::warn!("GW_LOG is ignored: {problem}; {page} describes log filters");
    }
    if LevelFilter::current() > STATIC_MAX_LEVEL {
        tracing::warn!("GW_LOG: this program logs nothing below {STATIC_MAX_LEVEL}");
    }
}

fn subscriber(format: LogFormat, filter: Targets) -> Box<dyn Subscriber + Send + Sync> {
    // https://no-color.org: any text but the empty one turns colours off.
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let has_colours = io::stderr().is_terminal() && !no_colour;
    // The level of the whole subscriber is the highest one of its parts. Below it, an event costs a
    // comparison.
    let level = Filter::<Registry>::max_level_hint(&filter).unwrap_or(LevelFilter::TRACE);
    let logs = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_ansi(has_colours);
    // An error of standard error would be printed there, and end the process: the terminal may have
    // been closed.
    let logs = logs.log_internal_errors(false);
    match format {
        LogFormat::Text => {
            let text = format::format().with_target(false);
            let logs = logs.fmt_fields(text_fields()).event_format(Limited::new(
                text,
                format,
                Instant::now,
            ));
            Box::new(logs.finish().with(filter))
        }
        LogFormat::Json => {
            let json = format::format().json().flatten_event(true);
            let logs = logs
                .fmt_fields(JsonFields::new())
                .event_format(Limited::new(json, format, Instant::now));
            Box::new(logs.finish().with(filter))
        }
    }
}

/// Formats the fields of an event as text. Escapes them, because they may hold text from outside.
/// Colours are for time and level only.
fn text_fields() -> impl for<'a> FormatFields<'a> + 'static {
    format::debug_fn(
        |out: &mut Writer<'_>, field: &Field, value: &dyn Debug| match field.name() {
            "message" => write!(Escaping(out), "{value:?}"),
            // Where a crate that uses `log` has written the event.
            name if name.starts_with("log.") => Ok(()),
            name => write!(Escaping(out), " {name}={value:?}"),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_of_all_events_is_the_highest_of_the_filter() {
        for (text, level) in [
            ("info,h2=error", LevelFilter::INFO),
            ("warn,h2=debug", LevelFilter::DEBUG),
            ("off", LevelFilter::OFF),
        ] {
            for format in [LogFormat::Text, LogFormat::Json] {
                let subscriber = subscriber(format, filter::filter(text).unwrap());
                assert_eq!(subscriber.max_level_hint(), Some(level), "{text}");
            }
        }
    }
}
