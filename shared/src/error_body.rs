//! The error body that callers see, `application/vnd.gw.error+json`.

use serde::{Deserialize, Serialize};

/// Media type of [`ErrorBody`].
pub const CONTENT_TYPE: &str = "application/vnd.gw.error+json";

/// `{"error":{"code","message","request_id"}}`
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ErrorDetail {
    /// A constant such as `GW_RATE_LIMIT_EXCEEDED`.
    pub code: String,
    /// For people; wording may change.
    pub message: String,
    /// The value of `X-Gw-Request-Id` on the same response.
    pub request_id: String,
}
