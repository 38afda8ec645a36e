//! The regional apex host: the platform's own endpoints.

use gw_shared::http::RequestHead;

use crate::error::Error;

/// Answers a request to the apex. Tunnels come in by ALPN, not here; nothing else is served yet.
pub(crate) fn answer(_request: &RequestHead) -> Error {
    Error::PathNotFound
}
