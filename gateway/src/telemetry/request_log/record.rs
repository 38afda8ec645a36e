//! One request as it ended, as workers hand it over.

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use gw_shared::id::{AgentId, RequestId};
use http::{HeaderMap, Method};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::timing::Timing;
pub use crate::auth::Principal as CallerId;
use crate::relay::Outcome;

/// Longest request target that is kept, in bytes: all that pass (8 KiB).
pub const TARGET_MAX: usize = 8 * 1024;
/// Longest method that is kept, in bytes: they are ASCII.
pub const METHOD_MAX: usize = 64;
/// Most of a body that is kept, in bytes.
pub const CAPTURE_MAX: usize = 1024 * 1024;

/// One request as it ended. Its service is the batch's.
#[derive(Debug, Clone)]
pub struct Record {
    /// UUIDv7: says when the request's head had been read, to the millisecond.
    pub id: RequestId,
    pub method: Method,
    /// Path and query as received.
    pub target: Box<str>,
    pub caller: IpAddr,
    pub protocol: Protocol,
    /// Who was authenticated; `None` if nobody was.
    pub by: Option<CallerId>,
    /// Of the final response; `None` if there was none.
    pub status: Option<u16>,
    /// Of a gateway error.
    pub code: Option<&'static str>,
    pub ended: Ended,
    /// Of the request body.
    pub bytes_in: u64,
    /// Of the response body.
    pub bytes_out: u64,
    pub timing: Timing,
    pub agent: Option<AgentId>,
    pub replayed_from: Option<RequestId>,
    /// W3C trace id, if the request is part of a trace.
    pub trace_id: Option<[u8; 16]>,
    pub capture: Option<Box<Capture>>,
}

/// What the caller spoke. Kept by position: append only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    Http10,
    Http11,
    Http2,
    /// Nobody called: a replay.
    Replay,
}

/// How a request ended. Kept by position: append only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// The response went out whole.
    Complete,
    /// The response began and broke off.
    Cut,
    /// The caller went away.
    CallerGone,
}

impl From<Outcome> for Ended {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Complete | Outcome::Refused => Self::Complete,
            Outcome::Cut => Self::Cut,
            Outcome::CallerGone => Self::CallerGone,
        }
    }
}

/// What was kept of a request that was relayed.
#[derive(Debug, Clone, Default)]
pub struct Capture {
    pub request: Option<CapturedMessage>,
    pub response: Option<CapturedMessage>,
}

impl Capture {
    /// Of both bodies.
    pub fn bytes(&self) -> usize {
        let bytes = |message: &Option<CapturedMessage>| message.as_ref().map_or(0, |message| message.body.bytes.len());
        bytes(&self.request) + bytes(&self.response)
    }
}

/// Fields without those that carry credentials, and as much of the body as there is room for.
#[derive(Debug, Clone, Default)]
pub struct CapturedMessage {
    pub headers: HeaderMap,
    pub body: CapturedBody,
}

#[derive(Debug, Clone, Default)]
pub struct CapturedBody {
    /// The first bytes, at most [`CAPTURE_MAX`].
    pub bytes: Bytes,
    /// There was more, or it broke off.
    pub truncated: bool,
    /// Why, if it is known.
    pub truncated_by: Option<Truncation>,
}

/// Why less of a body was kept than there was. Kept by position: append only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// It was longer than 1 MiB.
    Size,
    /// The memory for captures under way was used up.
    Memory,
    /// The message broke off before its end.
    Interrupted,
}

impl Truncation {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Size => "size",
            Self::Memory => "memory",
            Self::Interrupted => "interrupted",
        }
    }

    /// Text that completes "cut off: …".
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Size => "longer than 1 MiB",
            Self::Memory => "no memory for more captures at that time",
            Self::Interrupted => "the message broke off",
        }
    }
}

/// Records of one worker, by service.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Label of the service (`{account}--{service}`), and its records in the order in which they ended.
    pub services: Vec<(Arc<str>, Vec<Record>)>,
}

#[cfg(test)]
impl Record {
    /// Of a request that was answered, with nothing special about it.
    pub(super) fn example(id: RequestId) -> Self {
        Self {
            id,
            method: Method::GET,
            target: "/a/b".into(),
            caller: [203, 0, 113, 7].into(),
            protocol: Protocol::Http2,
            by: None,
            status: Some(200),
            code: None,
            ended: Ended::Complete,
            bytes_in: 0,
            bytes_out: 0,
            timing: Timing::default(),
            agent: None,
            replayed_from: None,
            trace_id: None,
            capture: None,
        }
    }
}
