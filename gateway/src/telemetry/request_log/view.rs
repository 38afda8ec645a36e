//! Records as the administration API and the console show them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::record::Truncation;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Request)]
pub struct RequestView {
    pub id: String,
    /// When its head had been read: RFC 3339, milliseconds.
    #[schema(format = DateTime)]
    pub time: String,
    /// Empty, as `service` is, of requests to the regional apex.
    pub account: String,
    pub service: String,
    /// `-` if it could not be read.
    pub method: String,
    pub path: String,
    /// Without `?`; null if there was none.
    pub query: Option<String>,
    pub caller_address: String,
    /// `HTTP/1.0`, `HTTP/1.1`, `HTTP/2` or `replay`
    pub protocol: String,
    /// `jwt`, `service_key` or `admin`; null if nobody was authenticated.
    pub auth_mode: Option<String>,
    /// Client id or key id.
    pub caller_id: Option<String>,
    /// Of the final response; null if the caller left before.
    pub status: Option<u16>,
    /// Code of the gateway's error, or of the token endpoint's.
    pub code: Option<String>,
    /// `complete`, `cut` or `caller_gone`
    pub ended: String,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub durations_us: DurationsView,
    pub agent_id: Option<String>,
    pub replayed_from: Option<String>,
    /// W3C trace id, hexadecimal.
    pub trace_id: Option<String>,
    /// What was kept of the request, without its bytes; null if nothing was.
    pub captured_request: Option<CapturedView>,
    pub captured_response: Option<CapturedView>,
}

/// Where the time went, in microseconds; null of stages that were not reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Durations)]
pub struct DurationsView {
    pub authenticate: u32,
    /// From there until its stream on the tunnel was open.
    pub wait: Option<u32>,
    /// In the agent, until a connection to the backend was had.
    pub agent: Option<u32>,
    /// From there until the backend's response began.
    pub backend_first_byte: Option<u32>,
    /// From the beginning until the response head was at the gateway.
    pub response_head: Option<u32>,
    pub total: u64,
}

/// One stage of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    pub name: &'static str,
    /// From the beginning of the request.
    pub start_us: u64,
    pub length_us: u64,
}

impl DurationsView {
    /// The stages that were reached, in order. What is between the tunnel's stream and the response head and not the
    /// agent's or the backend's is the tunnel's: the way there and back.
    pub fn waterfall(&self) -> Vec<Stage> {
        let mut stages = Vec::new();
        let mut start_us = 0;
        let mut stage = |name, length: u64| {
            let length_us = length.min(self.total.saturating_sub(start_us));
            stages.push(Stage { name, start_us, length_us });
            start_us += length_us;
        };
        let of = |length: Option<u32>| u64::from(length.unwrap_or(0));
        stage("authenticate", u64::from(self.authenticate));
        if self.wait.is_some() {
            stage("owner and tunnel", of(self.wait));
        }
        if let Some(head) = self.response_head {
            let known = u64::from(self.authenticate) + of(self.wait) + of(self.agent) + of(self.backend_first_byte);
            stage("tunnel", u64::from(head).saturating_sub(known));
        }
        if self.agent.is_some() {
            stage("agent", of(self.agent));
        }
        if self.backend_first_byte.is_some() {
            stage("backend first byte", of(self.backend_first_byte));
        }
        let rest = self.total.saturating_sub(stages.last().map_or(0, |last| last.start_us + last.length_us));
        let name = if self.response_head.is_some() { "response" } else { "rest" };
        stages.push(Stage { name, start_us: self.total - rest, length_us: rest });
        stages
    }
}

/// What was kept of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Captured)]
pub struct CapturedView {
    /// Names and values in order; credentials are left out.
    pub headers: Vec<(String, String)>,
    /// Bytes of the body that were kept.
    pub bytes: u64,
    pub truncated: bool,
    /// Why: longer than 1 MiB (`size`), the memory for captures was used up (`memory`), or the message broke off
    /// (`interrupted`). Null if it is whole, or was kept by a version that did not tell.
    #[serde(default)]
    pub truncated_by: Option<Truncation>,
}

/// A kept body, as it went over the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BodyView {
    pub content_type: Option<String>,
    pub content_encoding: Option<String>,
    pub truncated: bool,
    pub truncated_by: Option<Truncation>,
    pub bytes: Vec<u8>,
}

/// Which half of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Request,
    Response,
}

/// Which requests, the newest first.
#[derive(Debug, Clone, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SearchQuery {
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
    #[param(pattern = "^(/|\\*$)")]
    pub path_prefix: Option<String>,
    /// Client id or key id.
    #[param(pattern = "^(gw_ci_[A-Za-z0-9]{20}|[A-Za-z0-9]{16})$")]
    pub caller_id: Option<String>,
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stages_of_a_waterfall_add_up_to_the_whole() {
        let whole = DurationsView {
            authenticate: 10,
            wait: Some(5),
            agent: Some(100),
            backend_first_byte: Some(1000),
            response_head: Some(1315),
            total: 2000,
        };
        let stages = |durations: &DurationsView| {
            durations.waterfall().iter().map(|stage| (stage.name, stage.start_us, stage.length_us)).collect::<Vec<_>>()
        };
        let expected = [
            ("authenticate", 0, 10),
            ("owner and tunnel", 10, 5),
            ("tunnel", 15, 200),
            ("agent", 215, 100),
            ("backend first byte", 315, 1000),
            ("response", 1315, 685),
        ];
        assert_eq!(stages(&whole), expected);
        let refused = DurationsView { authenticate: 30, total: 50, wait: None, agent: None, ..whole };
        let refused = DurationsView { backend_first_byte: None, response_head: None, ..refused };
        assert_eq!(stages(&refused), [("authenticate", 0, 30), ("rest", 30, 20)]);
        // Clocks of two machines need not agree.
        let odd = DurationsView { agent: Some(5000), ..whole };
        assert_eq!(stages(&odd).last().map(|(_, start, length)| start + length), Some(2000));
    }
}
