//! What pages take from elsewhere than the records: the request log, its statistics. The one place that knows
//! where it comes from.

use std::collections::BTreeMap;

use crate::clock::Timestamp;
use crate::control::ControlError;
use crate::page::Page;
use crate::telemetry::request_log::{BodyView, RequestLog, RequestView, SearchQuery, Side};
use crate::telemetry::timeseries::{self, Selection, Series};

/// What became of the requests of one step of time.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Point {
    /// When the step begins.
    pub(crate) at: Timestamp,
    pub(crate) requests: u64,
    /// By class of their status: 2xx, 3xx, 4xx, 5xx.
    pub(crate) by_class: [u64; 4],
    /// By code of the gateway's errors.
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    /// Total duration at the median, the 90th and the 99th percentile, in milliseconds; `None` without requests.
    pub(crate) quantiles_ms: Option<[f64; 3]>,
}

/// Which requests, over what time.
#[derive(Debug, Clone)]
pub(crate) struct PointsQuery {
    /// `{account}--{service}`; all if there is none.
    pub(crate) service: Option<String>,
    pub(crate) since: Timestamp,
    pub(crate) until: Timestamp,
    pub(crate) step_seconds: u32,
}

/// The request of an id that somebody wrote, if it is kept.
pub(crate) fn request(log: &RequestLog, id: &str) -> Result<Option<RequestView>, ControlError> {
    // What is no id is the id of no request.
    let Ok(id) = id.parse() else { return Ok(None) };
    Ok(log.show(id)?)
}

/// The newest first. A page may be short, or empty, and have a next one all the same.
pub(crate) fn search(log: &RequestLog, query: &SearchQuery) -> Result<Page<RequestView>, ControlError> {
    Ok(log.search(query)?)
}

/// A captured body, to be compared with and not shown.
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
