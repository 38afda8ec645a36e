//! Body of an error response, `application/vnd.gw.error+json`.

use serde::{Deserialize, Serialize};

/// Media type of [`ErrorBody`].
pub const CONTENT_TYPE: &str = "application/vnd.gw.error+json";

/// `{"error": {"code": …, "message": …, "detail": …, "request_id": …}}`
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ErrorDetail {
    /// Text of an [`ErrorCode`](crate::error_code::ErrorCode).
    pub code: String,
    /// Text for people; its wording may change.
    pub message: String,
    /// What the message is about and what to do, for people, where that differs from request to
    /// request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Value of `X-Gw-Request-Id` of the same response.
    pub request_id: String,
}
