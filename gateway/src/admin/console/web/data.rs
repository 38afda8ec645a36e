//! Reads of the request log for the pages.

use crate::control::ControlError;
use crate::page::Page;
use crate::telemetry::request_log::{BodyView, RequestLog, RequestView, SearchQuery, Side};

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
