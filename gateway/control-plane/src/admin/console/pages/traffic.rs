//! Charts of rate, latency, status, errors and bytes, for one service or all.

use askama::Template;
use axum::Json;
use axum::extract::{Query, State};
use axum::response::Response;
use gw_base::clock::Timestamp;
use gw_shared::clock;
use gw_store::ServicePath;
use gw_telemetry::timeseries::{self, Point, Selection, SeriesPlan};
use serde::{Deserialize, Serialize};

use crate::admin::Admin;
use crate::admin::console::web::failure::ErrorPage;
use crate::admin::console::web::format;
use crate::admin::console::web::page::{Chrome, Section, Visit, render};
use crate::control::Control;

/// Length of the charts and of their steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(crate) enum Range {
    #[default]
    #[serde(rename = "1h")]
    Hour,
    #[serde(rename = "6h")]
    SixHours,
    #[serde(rename = "24h")]
    Day,
    #[serde(rename = "7d")]
    Week,
}

impl Range {
    pub(crate) const ALL: [Self; 4] = [Self::Hour, Self::SixHours, Self::Day, Self::Week];

    /// The value in addresses.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Hour => "1h",
            Self::SixHours => "6h",
            Self::Day => "24h",
            Self::Week => "7d",
        }
    }

    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Self::Hour => "Last hour",
            Self::SixHours => "6 hours",
            Self::Day => "24 hours",
            Self::Week => "7 days",
        }
    }

    /// Total seconds, and seconds of one step.
    fn seconds(self) -> (u32, u32) {
        match self {
            Self::Hour => (3600, 30),
            Self::SixHours => (6 * 3600, 120),
            Self::Day => (24 * 3600, 600),
            Self::Week => (7 * 24 * 3600, 3600),
        }
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct TrafficQuery {
    /// `{account}--{service}`; empty for all.
    #[serde(default)]
    service: String,
    #[serde(default)]
    range: Range,
}

/// Data of the charts, in columns. Each is as long as `at`.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct ChartColumns {
    step_seconds: u32,
    /// Recorded seconds of the last step.
    last_seconds: u32,
    at: Vec<i64>,
    requests: Vec<u64>,
    by_class: [Vec<u64>; 4],
    /// Error codes and their counts.
    errors: Vec<(String, Vec<u64>)>,
    bytes_in: Vec<u64>,
    bytes_out: Vec<u64>,
    /// In milliseconds; null without requests.
    p50: Vec<Option<f64>>,
    p90: Vec<Option<f64>>,
    p99: Vec<Option<f64>>,
}

impl ChartColumns {
    /// Fills every step from the first to the last, including those without a point.
    fn new(
        points: &[Point],
        ChartSpan {
            since,
            until,
            step_seconds,
            last_seconds,
        }: ChartSpan,
    ) -> Self {
        let step = i64::from(step_seconds);
        let length = usize::try_from((until - since) / step).unwrap_or(0);
        let zeros = || vec![0; length];
        let mut columns = Self {
            step_seconds,
            last_seconds,
            at: (0..length as i64)
                .map(|index| since + index * step)
                .collect(),
            requests: zeros(),
            by_class: std::array::from_fn(|_| zeros()),
            errors: Vec::new(),
            bytes_in: zeros(),
            bytes_out: zeros(),
            p50: vec![None; length],
            p90: vec![None; length],
            p99: vec![None; length],
        };
        for point in points {
            let Ok(index) = usize::try_from((point.at.0 - since).div_euclid(step)) else {
                continue;
            };
            if index >= length {
                continue;
            }
            columns.requests[index] += point.requests;
            // 2xx to 5xx: a final status is not 1xx, and the last class has no status.
            for (class, count) in columns.by_class.iter_mut().zip(&point.classes[1..5]) {
                class[index] += count;
            }
            columns.bytes_in[index] += point.bytes_in;
            columns.bytes_out[index] += point.bytes_out;
            if let Some([p50, p90, p99]) = point.quantiles_ms {
                (columns.p50[index], columns.p90[index], columns.p99[index]) =
                    (Some(p50), Some(p90), Some(p99));
            }
            for (code, count) in &point.errors {
                let at = columns
                    .errors
                    .iter()
                    .position(|(other, _)| other == code)
                    .unwrap_or_else(|| {
                        columns.errors.push((code.clone(), zeros()));
                        columns.errors.len() - 1
                    });
                columns.errors[at].1[index] += count;
            }
        }
        columns.errors.sort();
        columns
    }
}

/// Totals of the charts as text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ChartTotals {
    pub(crate) requests: String,
    pub(crate) failed: String,
    pub(crate) bytes_in: String,
    pub(crate) bytes_out: String,
    pub(crate) errors: Vec<(String, String)>,
}

impl From<&ChartColumns> for ChartTotals {
    fn from(columns: &ChartColumns) -> Self {
        let sum = |column: &Vec<u64>| column.iter().sum::<u64>();
        let requests = sum(&columns.requests);
        let failed = sum(&columns.by_class[3]);
        Self {
            requests: format::count(requests),
            failed: if requests == 0 {
                "–".to_owned()
            } else {
                format!("{:.2} %", failed as f64 * 100.0 / requests as f64)
            },
            bytes_in: format::bytes(sum(&columns.bytes_in)),
            bytes_out: format::bytes(sum(&columns.bytes_out)),
            errors: columns
                .errors
                .iter()
                .map(|(code, column)| (code.clone(), format::count(sum(column))))
                .collect(),
        }
    }
}

#[derive(Template)]
#[template(path = "traffic.html")]
struct TrafficPage {
    chrome: Chrome,
    /// `{account}--{service}` of all services.
    services: Vec<String>,
    service: String,
    /// Whether no service of this name exists any more.
    is_gone: bool,
    range: Range,
    totals: ChartTotals,
    /// Which counts are missing.
    missing: Option<String>,
}

pub(crate) async fn show(
    State(admin): State<Admin>,
    visit: Visit,
    Query(query): Query<TrafficQuery>,
) -> Result<Response, ErrorPage> {
    let list = |control: &Control| -> Vec<String> {
        let label = |ServicePath(account, service): &ServicePath| format!("{account}--{service}");
        control.look_at(|records| records.services.keys().map(label).collect())
    };
    let services = admin.look(move |control| Ok(list(control))).await?;
    let (columns, missing) = columns(&admin, query.clone()).await?;
    let missing = format::missing("Requests", &missing);
    let TrafficQuery { service, range } = query;
    let chrome = visit.chrome(Section::Traffic, "Traffic");
    let is_gone = !service.is_empty() && !services.contains(&service);
    render(&TrafficPage {
        chrome,
        services,
        service,
        is_gone,
        range,
        totals: ChartTotals::from(&columns),
        missing,
    })
}

pub(crate) async fn series(
    State(admin): State<Admin>,
    Query(query): Query<TrafficQuery>,
) -> Result<Json<ChartColumns>, ErrorPage> {
    Ok(Json(columns(&admin, query).await?.0))
}

/// Counts of all nodes that answer, and the slots of the others.
async fn columns(
    admin: &Admin,
    query: TrafficQuery,
) -> Result<(ChartColumns, Vec<u16>), ErrorPage> {
    let span = ChartSpan::new(query.range, timeseries::recorded_until(clock::now()));
    let ChartSpan {
        since,
        until,
        step_seconds,
        ..
    } = span;
    let selection = if query.service.is_empty() {
        Selection::All
    } else {
        Selection::Service(query.service)
    };
    let plan = SeriesPlan::new(
        selection,
        since,
        until,
        step_seconds.into(),
        Timestamp::now(),
    );
    let (counts, missing) = admin.counts(&plan, true).await?;
    Ok((ChartColumns::new(&plan.points(counts), span), missing))
}

/// The time span of the charts, in whole steps. The last step may still be running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ChartSpan {
    since: i64,
    until: i64,
    step_seconds: u32,
    last_seconds: u32,
}

impl ChartSpan {
    fn new(range: Range, recorded_until: Timestamp) -> Self {
        let (length, step_seconds) = range.seconds();
        let step = i64::from(step_seconds);
        let over = recorded_until.0.rem_euclid(step) as u32;
        let last_seconds = if over == 0 { step_seconds } else { over };
        let until = recorded_until.0 - i64::from(last_seconds) + step;
        Self {
            since: until - i64::from(length),
            until,
            step_seconds,
            last_seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn missing_steps_are_zero_and_points_out_of_range_are_omitted() {
        let point = |at, requests| Point {
            at: Timestamp(at),
            requests,
            classes: [0, requests - 1, 0, 0, 1, 0],
            errors: BTreeMap::from([("AGENT_UNAVAILABLE".to_owned(), 1)]),
            bytes_out: 2048,
            quantiles_ms: Some([1.0, 2.0, 3.0]),
            ..Point::default()
        };
        let span = ChartSpan {
            since: 100,
            until: 130,
            step_seconds: 10,
            last_seconds: 10,
        };
        let columns = ChartColumns::new(&[point(90, 9), point(110, 4), point(130, 1)], span);
        assert_eq!(
            (columns.at.as_slice(), columns.requests.as_slice()),
            ([100, 110, 120].as_slice(), [0, 4, 0].as_slice())
        );
        assert_eq!(
            (columns.by_class[3].as_slice(), columns.p90[1]),
            ([0, 1, 0].as_slice(), Some(2.0))
        );
        assert_eq!(
            columns.errors,
            [("AGENT_UNAVAILABLE".to_owned(), vec![0, 1, 0])]
        );
        let totals = ChartTotals::from(&columns);
        assert_eq!(
            (
                totals.requests.as_str(),
                totals.failed.as_str(),
                totals.bytes_out.as_str()
            ),
            ("4", "25.00 %", "2.0 KiB")
        );
        assert_eq!(ChartTotals::from(&ChartColumns::default()).failed, "–");
    }

    #[test]
    fn the_last_step_covers_only_recorded_time() {
        let span = |recorded_until| ChartSpan::new(Range::SixHours, Timestamp(recorded_until));
        let whole = ChartSpan {
            since: 120,
            until: 120 + 6 * 3600,
            step_seconds: 120,
            last_seconds: 120,
        };
        assert_eq!(span(120 + 6 * 3600), whole);
        let begun = ChartSpan {
            since: 240,
            until: 240 + 6 * 3600,
            step_seconds: 120,
            last_seconds: 10,
        };
        assert_eq!(span(130 + 6 * 3600), begun);
        assert_eq!(
            span(230 + 6 * 3600),
            ChartSpan {
                last_seconds: 110,
                ..begun
            }
        );
    }
}
