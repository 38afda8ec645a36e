//! `gw-gateway request`

use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum, value_parser};
use gw_control_plane::control::ReplayEdits;
use gw_shared::id::{AccountId, RequestId, ServiceId};
use gw_telemetry::request_log::{AttemptView, CapturedView, RequestView, SearchQuery, TimingStage};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::cli::client::output::{CommandError, Listed, Output, Shown, or_dash};

/// Width of the longest bar of a waterfall, in characters.
const BAR: u64 = 40;

#[derive(Subcommand)]
pub(crate) enum RequestCommand {
    /// Show a request and its waterfall of durations.
    Show {
        /// As in X-Gw-Request-Id.
        id: RequestId,
    },
    /// Search the requests of the last 7 days, the newest first.
    Search(Box<SearchArguments>),
    /// Write a captured body to standard output, unchanged.
    Body { id: RequestId, side: SideArgument },
    /// Relay a captured request again, and show the result.
    Replay(Box<ReplayArguments>),
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum SideArgument {
    Request,
    Response,
}

#[derive(Args)]
pub(crate) struct SearchArguments {
    #[arg(long)]
    account: Option<AccountId>,
    #[arg(long, requires = "account")]
    service: Option<ServiceId>,
    /// Requests to the regional apex only.
    #[arg(long, conflicts_with = "account")]
    apex: bool,
    /// A status like 502, a class like 5xx, or `none` for requests without a response.
    #[arg(long)]
    status: Option<String>,
    /// Error code of the gateway, like AGENT_UNAVAILABLE.
    #[arg(long)]
    code: Option<String>,
    #[arg(long, value_name = "PATH")]
    path_prefix: Option<String>,
    /// Id of a credential (client id) or service key.
    #[arg(long, value_name = "ID")]
    caller_id: Option<String>,
    /// Requests that were sent to another agent after the first one had failed, or whose agents all
    /// failed.
    #[arg(long)]
    retried: bool,
    /// Earliest time: RFC 3339, or relative to now: 90s, 15m, 2h, 3d.
    #[arg(long, value_name = "TIME", value_parser = time_or_ago)]
    since: Option<String>,
    /// Latest time, exclusive; the same formats.
    #[arg(long, value_name = "TIME", value_parser = time_or_ago)]
    until: Option<String>,
    /// Shortest total duration, in milliseconds.
    #[arg(long, value_name = "MS")]
    min_ms: Option<u32>,
    /// Omit the requests of nodes of the region that do not answer.
    #[arg(long)]
    partial: bool,
    /// Most requests to print.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 50,
        value_parser = value_parser!(u32).range(1..),
    )]
    limit: u32,
}

#[derive(Args)]
pub(crate) struct ReplayArguments {
    id: RequestId,
    #[arg(long)]
    method: Option<String>,
    /// Path and query.
    #[arg(long)]
    target: Option<String>,
    /// Sets a field, or removes it if the value is empty (`Name:`). Credentials are not captured:
    /// give them here.
    #[arg(long = "header", value_name = "NAME: VALUE", value_parser = field)]
    headers: Vec<(String, Option<String>)>,
    /// A file with the body to send; `-` is standard input.
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
}

impl RequestCommand {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        match self {
            Self::Show { id } => output.show::<RequestView>(&format!("/requests/{id}")),
            Self::Search(search) => {
                let limit = usize::try_from(search.limit).unwrap_or(usize::MAX);
                let filter = search.filter();
                let filter: Vec<(&str, &str)> = filter
                    .iter()
                    .map(|(key, value)| (key.as_str(), value.as_str()))
                    .collect();
                output.list::<RequestView>("/requests", &filter, Some(limit))
            }
            Self::Body { id, side } => {
                let side = match side {
                    SideArgument::Request => "request",
                    SideArgument::Response => "response",
                };
                output.download(&format!("/requests/{id}/body/{side}"))
            }
            Self::Replay(replay) => {
                let path = format!("/requests/{}/replay", replay.id);
                let edits = replay.edits()?;
                output.wait_for::<RequestView>(&path, &json!(edits))
            }
        }
    }
}

impl SearchArguments {
    /// Query parameters of the API.
    fn filter(self) -> Vec<(String, String)> {
        let query = SearchQuery {
            account: self.account.map(String::from),
            service: self.service.map(String::from),
            apex: self.apex.then_some(true),
            status: self.status,
            code: self.code,
            path_prefix: self.path_prefix,
            caller_id: self.caller_id,
            retried: self.retried.then_some(true),
            since: self.since,
            until: self.until,
            min_ms: self.min_ms,
            limit: None,
            cursor: None,
            partial: self.partial.then_some(true),
        };
        let Value::Object(parameters) = json!(query) else {
            return Vec::new();
        };
        let value = |value| match value {
            Value::Null => None,
            Value::String(text) => Some(text),
            other => Some(other.to_string()),
        };
        parameters
            .into_iter()
            .filter_map(|(key, parameter)| Some((key, value(parameter)?)))
            .collect()
    }
}

impl ReplayArguments {
    fn edits(self) -> Result<ReplayEdits, CommandError> {
        use base64::Engine;
        let body = self.body.map(|path| {
            if path.as_os_str() == "-" {
                let mut body = Vec::new();
                io::stdin().read_to_end(&mut body).map(|_| body)
            } else {
                fs::read(&path)
            }
            .map_err(|error| CommandError::Input {
                name: path.display().to_string(),
                error,
            })
        });
        Ok(ReplayEdits {
            method: self.method,
            target: self.target,
            headers: None,
            set_headers: self.headers.into_iter().collect(),
            body: None,
            body_base64: body
                .transpose()?
                .map(|body| base64::engine::general_purpose::STANDARD.encode(body)),
        })
    }
}

/// Converts a relative time to RFC 3339; returns RFC 3339 unchanged.
fn time_or_ago(text: &str) -> Result<String, String> {
    if OffsetDateTime::parse(text, &Rfc3339).is_ok() {
        return Ok(text.to_owned());
    }
    let ago = humantime::parse_duration(text)
        .ok()
        .and_then(|ago| ago.try_into().ok());
    let time = ago.and_then(|ago| OffsetDateTime::now_utc().checked_sub(ago));
    time.and_then(|time| time.format(&Rfc3339).ok())
        .ok_or_else(|| {
            "a time like 2026-11-21T08:00:00Z, or how long ago: 90s, 15m, 2h, 3d".to_owned()
        })
}

fn field(text: &str) -> Result<(String, Option<String>), String> {
    let (name, value) = text
        .split_once(':')
        .ok_or("a field like `Accept: text/plain`")?;
    let value = value.trim();
    Ok((
        name.trim().to_owned(),
        (!value.is_empty()).then(|| value.to_owned()),
    ))
}

impl Shown for RequestView {
    fn facts(&self) -> Vec<(&'static str, String)> {
        let target = match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        };
        let mut facts = vec![
            ("request", self.id.clone()),
            ("time", self.time.clone()),
            (
                "service",
                if self.account.is_empty() {
                    "apex".to_owned()
                } else {
                    format!("{}/{}", self.account, self.service)
                },
            ),
            ("status", or_dash(self.status.as_ref())),
            ("code", or_dash(self.code.as_ref())),
            ("total ms", millis(self.durations_us.total)),
            ("method", self.method.clone()),
            ("target", target),
            ("ended", self.ended.clone()),
            ("caller", self.caller_address.clone()),
            ("protocol", self.protocol.clone()),
            ("authenticated by", or_dash(self.auth_mode.as_ref())),
            ("caller id", or_dash(self.caller_id.as_ref())),
            ("agent", or_dash(self.agent_id.as_ref())),
            ("bytes in", self.bytes_in.to_string()),
            ("bytes taken", or_dash(self.bytes_taken.as_ref())),
            ("bytes out", self.bytes_out.to_string()),
            ("replayed from", or_dash(self.replayed_from.as_ref())),
        ];
        let as_they_are = self.facts_as_they_are().into_iter();
        facts.extend(as_they_are.map(|(label, value)| (label, or_dash(value.as_ref()))));
        facts.extend([
            ("captured request", captured(self.captured_request.as_ref())),
            (
                "captured response",
                captured(self.captured_response.as_ref()),
            ),
        ]);
        let attempts = self.attempts.iter();
        facts.extend(attempts.map(|attempt| ("failed attempt", attempt_in_words(attempt))));
        let total_us = self.durations_us.total;
        let waterfall = self.durations_us.waterfall().into_iter();
        facts.extend(waterfall.map(|stage| (stage.name, bar(&stage, total_us))));
        facts
    }
}

fn attempt_in_words(attempt: &AttemptView) -> String {
    let agent = match attempt.agent_id.as_str() {
        "" => "unknown agent",
        agent => agent,
    };
    let duration = millis(attempt.duration_us.into());
    format!("{agent}: {} after {duration} ms", attempt.reason)
}

/// Duration of a stage, and a bar at its time in the request.
fn bar(stage: &TimingStage, total_us: u64) -> String {
    let of_total = |part: u64| (part * BAR / total_us.max(1)) as usize;
    let before = " ".repeat(of_total(stage.start_us));
    let bar = "█".repeat(of_total(stage.length_us).max(1));
    format!("{:>10} ms  {before}{bar}", millis(stage.length_us))
}

fn captured(message: Option<&CapturedView>) -> String {
    let Some(message) = message else {
        return "no".to_owned();
    };
    let cut = match (message.truncated, message.truncated_by) {
        (false, _) => String::new(),
        (true, None) => ", cut off".to_owned(),
        (true, Some(reason)) => format!(", cut off ({})", reason.as_str()),
    };
    format!("{} bytes{cut}", message.bytes)
}

/// Milliseconds with three decimals. All rows have the same unit, so that they can be compared.
fn millis(microseconds: u64) -> String {
    format!("{}.{:03}", microseconds / 1000, microseconds % 1000)
}

impl Listed for RequestView {
    const PLURAL: &'static str = "requests";
    const COLUMNS: usize = 8;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_absolute_or_relative() {
        assert_eq!(
            time_or_ago("2026-11-21T08:00:00+01:00").unwrap(),
            "2026-11-21T08:00:00+01:00"
        );
        for good in ["0s", "15m", "2h", "3d", "1h 30m"] {
            assert!(
                OffsetDateTime::parse(&time_or_ago(good).unwrap(), &Rfc3339).is_ok(),
                "{good}"
            );
        }
        for bad in ["", "h", "1", "-1h", "é", "yesterday", "99999999999d"] {
            assert!(time_or_ago(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn fields_are_set_or_removed() {
        assert_eq!(
            field("Accept: a:b ").unwrap(),
            ("Accept".to_owned(), Some("a:b".to_owned()))
        );
        assert_eq!(field("Accept:").unwrap(), ("Accept".to_owned(), None));
        assert!(field("Accept").is_err());
    }
}
