//! Structured logs on standard error, as text or JSON.

mod repeats;

use std::fmt::{Debug, Write};
use std::io::{self, IsTerminal};
use std::time::Instant;

use serde::Deserialize;
use tracing::field::Field;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{self, JsonFields, Writer};

use repeats::Limited;
pub use repeats::suppressed;

use crate::text::Escaping;

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
/// `GW_LOG` is a filter of `tracing_subscriber::EnvFilter`. Without it the filter is `default`, and rustls and h2 log
/// only errors, since they log a warning for every malformed message of an unauthenticated peer. Colours are for
/// terminals only, and not where `NO_COLOR` is set.
pub fn start(format: LogFormat, default: &str) {
    let filter = EnvFilter::try_from_env("GW_LOG")
        .unwrap_or_else(|_| EnvFilter::new(format!("{default},rustls=error,h2=error")));
    // https://no-color.org: any text but the empty one turns colours off.
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let has_colours = io::stderr().is_terminal() && !no_colour;
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(has_colours);
    // An error of standard error would be printed there, and end the process: the terminal may have been closed.
    let logs = logs.log_internal_errors(false);
    // Fails only if logging has already started.
    drop(match format {
        LogFormat::Text => {
            let text = format::format().with_target(false);
            logs.fmt_fields(text_fields())
                .event_format(Limited::new(text, format, Instant::now))
                .try_init()
        }
        LogFormat::Json => {
            let json = format::format().json().flatten_event(true);
            logs.fmt_fields(JsonFields::new())
                .event_format(Limited::new(json, format, Instant::now))
                .try_init()
        }
    });
}

/// Formats the fields of an event as text. Escapes them, because they may hold text from outside. Colours are for time
/// and level only.
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
