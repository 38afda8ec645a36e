//! Queries, pages and messages as the administration API and the console show them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::record::{RequestView, Truncation};

/// A failed attempt to send the request to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Attempt)]
pub struct AttemptView {
    /// Empty if the node with the tunnel was lost before it had named the agent.
    pub agent_id: String,
    /// `no_slot`, `not_opened`, `backend_unreachable`, `backend_tls`, `backend_reset`,
    /// `backend_invalid_response`, `tunnel_lost`, `silent`, `protocol` or `node_lost`
    pub reason: String,
    /// Time from the beginning of the attempt to its failure, in microseconds.
    pub duration_us: u32,
}

/// A captured message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Captured)]
pub struct CapturedView {
    /// Names and values in order; credentials are left out.
    pub headers: Vec<(String, String)>,
    /// Bytes of the body that were kept.
    pub bytes: u64,
    /// Whether less than the whole body was kept.
    pub truncated: bool,
    /// Why: longer than 1 MiB (`size`), the memory for captures was used up (`memory`), the message
    /// broke off (`interrupted`), or the account had used its share of the disk for that day
    /// (`disk`: the fields are left out, too). Null if it is whole, or was kept by a version that
    /// did not tell.
    #[serde(default)]
    pub truncated_by: Option<Truncation>,
}

/// Captured body, with the content coding of the message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyView {
    /// Field `Content-Type` of the message.
    pub content_type: Option<String>,
    /// Field `Content-Encoding` of the message.
    pub content_encoding: Option<String>,
    /// Whether less than the whole body was kept.
    pub truncated: bool,
    /// Reason why it is truncated, if it is known.
    pub truncated_by: Option<Truncation>,
    /// Captured bytes, in the content coding of the message.
    pub bytes: Vec<u8>,
}

/// Message of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The request.
    Request,
    /// The response.
    Response,
}

/// Requests of all nodes of the region, and where the rest begins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestPage {
    /// Requests, the newest first.
    pub items: Vec<RequestView>,
    /// Ask with it for the items that follow; null on the last page.
    pub next_cursor: Option<String>,
    /// With `partial=true`: slots of nodes that do not answer, whose requests are missing. Left out
    /// if all answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_nodes: Vec<u16>,
    /// With `partial=true`: the archive cannot be read, so that requests of lost nodes are missing.
    /// Left out otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub missing_archive: bool,
}

impl Side {
    /// Returns `request` or `response`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Response => "response",
        }
    }
}

/// Query of requests, which are returned newest first.
#[derive(Debug, Clone, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SearchQuery {
    /// Requests of this account; without it, of all accounts and to the regional apex.
    #[param(pattern = "^[a-z0-9]{3,15}$")]
    pub account: Option<String>,
    /// Service id; needs `account`.
    #[param(pattern = "^[a-z0-9]([a-z0-9-]{0,56}[a-z0-9])?$")]
    pub service: Option<String>,
    /// `502`, or a class like `5xx`; `none` for no response at all.
    #[param(pattern = "^([1-5][0-9]{2}|[1-5]xx|none)$")]
    pub status: Option<String>,
    /// Code of the gateway's error, or of the token endpoint's.
    #[param(pattern = "^[A-Za-z0-9_]+$")]
    pub code: Option<String>,
    /// Requests to the regional apex only (`true`, without `account`), or without them (`false`).
    pub apex: Option<bool>,
    /// Requests whose path begins with this text.
    #[param(pattern = "^(/|\\*$)")]
    pub path_prefix: Option<String>,
    /// Client id or key id.
    #[param(pattern = "^(gw_ci_[A-Za-z0-9]{20}|[A-Za-z0-9]{16})$")]
    pub caller_id: Option<String>,
    /// Requests with failed attempts only (`true`), or without any (`false`).
    pub retried: Option<bool>,
    /// RFC 3339, inclusive.
    #[param(format = DateTime)]
    pub since: Option<String>,
    /// RFC 3339, exclusive.
    #[param(format = DateTime)]
    pub until: Option<String>,
    /// Total duration of at least so many milliseconds.
    #[param(value_type = Option<u64>, minimum = 0, maximum = 4_294_967_295_u64)]
    pub min_ms: Option<u32>,
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    pub limit: Option<usize>,
    /// `next_cursor` of the page before.
    pub cursor: Option<String>,
    /// In a region of several nodes: whether to answer without the requests of nodes that do not
    /// answer. Otherwise such a search is refused (503).
    pub partial: Option<bool>,
}
