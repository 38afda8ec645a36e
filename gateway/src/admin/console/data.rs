//! Reads of the request log for the console's pages.

use crate::control::{ControlError, Page};
use crate::telemetry::request_log::{BodyView, RequestLog, RequestView, SearchQuery, Side};

/// The request of an id that somebody wrote, if it is kept.
pub(super) fn request(log: &RequestLog, id: &str) -> Result<Option<RequestView>, ControlError> {
    // What is no id is the id of no request.
    let Ok(id) = id.parse() else { return Ok(None) };
    Ok(log.show(id)?)
}

/// The newest first. A page may be short, or empty, and have a next one all the same.
pub(super) fn search(log: &RequestLog, query: &SearchQuery) -> Result<Page<RequestView>, ControlError> {
    Ok(log.search(query)?)
}

/// A captured body, to be compared with and not shown.
pub(super) fn recorded_body(log: &RequestLog, id: &str, side: Side) -> Result<Option<BodyView>, ControlError> {
    let Ok(id) = id.parse() else { return Ok(None) };
    Ok(log.body(id, side)?)
}
