//! Records of ended requests, as workers send them to the log.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use gw_shared::http::Fields;
use gw_shared::id::{AgentId, RequestId};
use gw_shared::telemetry::mask::Masker;
use http::Method;
use serde::{Deserialize, Serialize, Serializer};
use utoipa::ToSchema;

use super::timing::Timing;
pub use crate::auth::Principal as CallerId;
use crate::http_message::Outcome;

/// Longest request target kept, in bytes. Equal to the limit of a request's target, so that none is cut.
pub const TARGET_MAX: usize = 8 * 1024;
/// Longest method kept, in bytes. Methods are ASCII.
pub const METHOD_MAX: usize = 64;
/// Most failed attempts kept.
pub const ATTEMPTS_MAX: usize = 3;
/// Longest part of a body kept, in bytes.
pub const CAPTURE_MAX: usize = 1024 * 1024;

/// Record of an ended request. Its service is in the batch.
#[derive(Debug, Clone)]
pub struct RequestRecord {
    /// UUIDv7, whose timestamp is the time at which the request's head had been read, in milliseconds.
    pub id: RequestId,
    pub method: Method,
    /// Path and query as received.
    pub target: Box<str>,
    pub caller: IpAddr,
    pub protocol: Protocol,
    /// Authenticated caller; `None` if there was none.
    pub by: Option<CallerId>,
    /// Status of the final response; `None` if there was none.
    pub status: Option<u16>,
    /// Code of the gateway's error.
    pub code: Option<&'static str>,
    pub ended: Ended,
    /// Bytes of the request body.
    pub bytes_in: u64,
    /// Bytes of the request body that the connection to the backend took, as the agent reports it.
    pub bytes_taken: Option<u64>,
    /// Bytes of the response body.
    pub bytes_out: u64,
    pub timing: Timing,
    pub agent: Option<AgentId>,
    /// Attempts that failed, in order; the log keeps [`ATTEMPTS_MAX`].
    pub attempts: Box<[RecordedAttempt]>,
    pub replayed_from: Option<RequestId>,
    /// W3C trace id, if the request is part of a trace.
    pub trace_id: Option<[u8; 16]>,
    pub capture: Option<Box<Capture>>,
}

impl RequestRecord {
    /// At most the first [`METHOD_MAX`] bytes of the method.
    pub(super) fn shown_method(&self) -> &str {
        &self.method.as_str()[..self.method.as_str().len().min(METHOD_MAX)]
    }

    /// The target without the secrets that `masker` finds, at most [`TARGET_MAX`] bytes. Masked before it is cut: a part
    /// of a secret would not be recognised.
    pub(super) fn masked_target(&self, masker: &Masker) -> Cow<'_, str> {
        match masker.mask(self.target.as_bytes()) {
            None => Cow::Borrowed(&self.target[..self.target.floor_char_boundary(TARGET_MAX)]),
            Some(masked) => {
                let mut masked = String::from_utf8_lossy(&masked).into_owned();
                masked.truncate(masked.floor_char_boundary(TARGET_MAX));
                Cow::Owned(masked)
            }
        }
    }
}

/// An attempt that failed, with the names that the API and the access log use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecordedAttempt {
    /// `None`, shown as an empty text, if the node with the tunnel was lost before it had named the agent.
    #[serde(serialize_with = "or_empty")]
    pub agent_id: Option<AgentId>,
    pub reason: &'static str,
    pub duration_us: u32,
}

impl RecordedAttempt {
    pub(super) fn shown_agent(&self) -> &str {
        self.agent_id.as_ref().map_or("", AgentId::as_str)
    }
}

fn or_empty<S: Serializer>(agent: &Option<AgentId>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(agent.as_ref().map_or("", AgentId::as_str))
}

/// Protocol of the caller. Kept by position: append only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    Http10,
    Http11,
    Http2,
    /// A replay, which has no caller.
    Replay,
}

impl Protocol {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Http10 => "HTTP/1.0",
            Self::Http11 => "HTTP/1.1",
            Self::Http2 => "HTTP/2",
            Self::Replay => "replay",
        }
    }
}

/// How a request ended. Kept by position: append only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// The response was sent completely.
    Complete,
    /// The response was cut off after it had begun.
    Cut,
    /// The caller left before the response was sent.
    CallerGone,
}

impl Ended {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Cut => "cut",
            Self::CallerGone => "caller_gone",
        }
    }
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

/// Captured messages of a relayed request.
#[derive(Debug, Clone, Default)]
pub struct Capture {
    pub request: Option<MessageCapture>,
    pub response: Option<MessageCapture>,
}

impl Capture {
    /// Captured bytes of both bodies.
    pub fn bytes(&self) -> usize {
        let bytes = |message: &Option<MessageCapture>| {
            message
                .as_ref()
                .map_or(0, |message| message.body.bytes.len())
        };
        bytes(&self.request) + bytes(&self.response)
    }
}

/// Captured message: fields without credentials, and the beginning of the body.
#[derive(Debug, Clone, Default)]
pub struct MessageCapture {
    pub headers: Fields,
    pub body: BodyCapture,
}

#[derive(Debug, Clone, Default)]
pub struct BodyCapture {
    /// The first bytes, at most [`CAPTURE_MAX`].
    pub bytes: Bytes,
    /// The body was longer, or it was interrupted.
    pub truncated: bool,
    /// Reason, if it is known.
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

/// Records of one worker by service.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Label of the service (`{account}--{service}`), and its records in the order in which they ended.
    pub services: Vec<(Arc<str>, Vec<RequestRecord>)>,
}

#[cfg(test)]
impl RequestRecord {
    /// Record of a plain request with status 200.
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
            bytes_taken: None,
            bytes_out: 0,
            timing: Timing::default(),
            agent: None,
            attempts: Box::default(),
            replayed_from: None,
            trace_id: None,
            capture: None,
        }
    }
}
