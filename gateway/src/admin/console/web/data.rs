//! Access of the pages to the request log and its statistics.

use std::collections::BTreeMap;

use crate::clock::Timestamp;
use crate::control::ControlError;
use crate::page::Page;
use crate::telemetry::request_log::{BodyView, RequestLog, RequestView, SearchQuery, Side};
use crate::telemetry::timeseries::{self, Selection, Series};

/// Statistics of the requests of one time step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Point {
    /// Start of the step.
    pub(crate) at: Timestamp,
    pub(crate) requests: u64,
    /// Number of responses by status class: 2xx, 3xx, 4xx, 5xx.
    pub(crate) by_class: [u64; 4],
    /// Number of errors by error code of the gateway.
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    /// Median, 90th and 99th percentile of the total duration, in milliseconds; `None` without requests.
    pub(crate) quantiles_ms: Option<[f64; 3]>,
}

/// Selects requests and a time span.
#[derive(Debug, Clone)]
pub(crate) struct PointsQuery {
    /// `{account}--{service}`; `None` selects all.
    pub(crate) service: Option<String>,
    pub(crate) since: Timestamp,
    pub(crate) until: Timestamp,
    pub(crate) step_seconds: u32,
}

/// The request with this id, if the log has it.
pub(crate) fn request(log: &RequestLog, id: &str) -> Result<Option<RequestView>, ControlError> {
    // A malformed id is treated as an unknown request.
    let Ok(id) = id.parse() else { return Ok(None) };
    Ok(log.show(id)?)
}

/// Searches the log, the newest request first. A page may be short or empty and still have a next page.
pub(crate) fn search(log: &RequestLog, query: &SearchQuery) -> Result<Page<RequestView>, ControlError> {
    Ok(log.search(query)?)
}

/// A captured body for comparison, without an entry in the audit log because it is not shown.
pub(crate) fn recorded_body(log: &RequestLog, id: &str, side: Side) -> Result<Option<BodyView>, ControlError> {
    let Ok(id) = id.parse() else { return Ok(None) };
    Ok(log.body(id, side)?)
}

/// Steps without requests may be missing.
pub(crate) fn series(series: &Series, query: &PointsQuery) -> Result<Vec<Point>, ControlError> {
    let selection = query.service.clone().map_or(Selection::All, Selection::Service);
    let points = series.read(&selection, query.since, query.until, query.step_seconds, Timestamp::now())?;
    let point = |point: timeseries::Point| {
        let [_, successes, redirections, callers, ours, _] = point.classes;
        Point {
            at: point.at,
            requests: point.requests,
            by_class: [successes, redirections, callers, ours],
            errors: point.errors,
            bytes_in: point.bytes_in,
            bytes_out: point.bytes_out,
            quantiles_ms: point.quantiles_ms,
        }
    };
    Ok(points.into_iter().map(point).collect())
}
