//! Records of ended requests, as workers send them to the log, and the columns that are shown of
//! them.

use std::borrow::Cow;
use std::convert::identity;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use gw_shared::http::Fields;
use gw_shared::id::{AgentId, RequestId};
use gw_shared::telemetry::mask::Masker;
use http::Method;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::block::time_text;
use super::timing::Timing;
use super::view::{AttemptView, CapturedView};
use crate::outcome::Outcome;
pub use gw_base::principal::Principal as CallerId;

/// Longest request target kept, in bytes. Equal to the limit of a request's target, so that none is
/// cut.
pub const TARGET_MAX: usize = 8 * 1024;
/// Longest target kept of a request that did not authenticate, in bytes. Its record, which has
/// neither attempts nor captured messages, takes 1 KiB at most.
pub const UNAUTHENTICATED_TARGET_MAX: usize = 512;
/// End of a target that was cut.
const CUT: &str = "\u{2026}";
/// Longest method kept, in bytes. Methods are ASCII.
pub const METHOD_MAX: usize = 64;
/// Most failed attempts kept.
pub const ATTEMPTS_MAX: usize = 3;
/// Longest part of a body kept, in bytes.
pub const CAPTURE_MAX: usize = 1024 * 1024;

/// Record of an ended request. Its service is in the batch.
#[derive(Debug, Clone)]
pub struct RequestRecord {
    /// UUIDv7, whose timestamp is the time at which the request's head had been read, in
    /// milliseconds.
    pub id: RequestId,
    /// Method of the request.
    pub method: Method,
    /// Path and query as received.
    pub target: Box<str>,
    /// Address of the caller.
    pub caller: IpAddr,
    /// Protocol of the caller.
    pub protocol: Protocol,
    /// Authenticated caller; `None` if there was none.
    pub by: Option<CallerId>,
    /// The request authenticated at the apex, which names no caller. Not stored.
    pub at_apex: bool,
    /// Status of the final response; `None` if there was none.
    pub status: Option<u16>,
    /// Code of the gateway's error.
    pub code: Option<&'static str>,
    /// How the request ended.
    pub ended: Ended,
    /// Bytes of the request body.
    pub bytes_in: u64,
    /// Bytes of the request body that the connection to the backend took, as the agent reports it.
    pub bytes_taken: Option<u64>,
    /// Bytes of the response body.
    pub bytes_out: u64,
    /// Durations of its stages.
    pub timing: Timing,
    /// Agent of the last stream that was opened for the request; `None` if no stream was opened.
    pub agent: Option<AgentId>,
    /// Attempts that failed, in order; the log keeps [`ATTEMPTS_MAX`].
    pub attempts: Box<[RecordedAttempt]>,
    /// The request that this one replays; `None` if it is not a replay.
    pub replayed_from: Option<RequestId>,
    /// W3C trace id, if the request is part of a trace.
    pub trace_id: Option<[u8; 16]>,
    /// Captured messages; `None` if none were captured.
    pub capture: Option<Box<Capture>>,
}

/// Declares the columns that are shown of a request, with their values in [`Columns`] and in
/// [`RequestView`]. Those with a label are shown as they are where facts about a request are
/// listed; others have a place of their own there.
macro_rules! columns {
    ($($(#[$attribute:meta])* $name:ident: $value:ty => $shown:ty $(, $label:literal)?;)*) => {
        /// Columns of one request as a line of the access log has them.
        #[derive(Serialize)]
        pub(super) struct Columns<'a> {
            $(pub(super) $name: $value,)*
        }

        impl Columns<'_> {
            /// Returns the request as the API shows it, without captured messages.
            pub(super) fn view(self) -> RequestView {
                RequestView {
                    $($name: self.$name.shown(),)*
                    captured_request: None,
                    captured_response: None,
                }
            }
        }

        /// One request.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        #[schema(as = Request)]
        pub struct RequestView {
            $($(#[$attribute])* pub $name: $shown,)*
            /// The captured request, without its bytes; null if it was not captured.
            pub captured_request: Option<CapturedView>,
            /// The captured response, without its bytes; null if it was not captured.
            pub captured_response: Option<CapturedView>,
        }

        impl RequestView {
            /// Labels and values of the columns that are shown as they are.
            pub fn facts_as_they_are(&self) -> Vec<(&'static str, Option<String>)> {
                vec![$($(($label, text(&self.$name)),)?)*]
            }
        }
    };
}

columns! {
    /// UUIDv7. Its timestamp is the time at which the request's head had been read, in
    /// milliseconds.
    id: RequestId => String;
    /// When its head had been read: RFC 3339, milliseconds.
    #[schema(format = DateTime)]
    time: String => String;
    /// Empty, as `service` is, of requests to the regional apex.
    account: &'a str => String;
    /// Id of the service in its account.
    service: &'a str => String;
    /// `-` if it could not be read.
    method: &'a str => String;
    /// Path as received, with secrets masked.
    path: &'a str => String;
    /// Without `?`; null if there was none.
    query: Option<&'a str> => Option<String>;
    /// IP address of the caller.
    caller_address: IpAddr => String;
    /// `HTTP/1.0`, `HTTP/1.1`, `HTTP/2` or `replay`
    protocol: &'static str => String;
    /// `jwt`, `service_key` or `admin`; null if the request was not authenticated.
    auth_mode: Option<&'static str> => Option<String>;
    /// Client id or key id.
    caller_id: Option<&'a str> => Option<String>;
    /// Status of the final response; null if the caller left before it.
    status: Option<u16> => Option<u16>;
    /// Code of the gateway's error, or of the token endpoint's.
    code: Option<&'a str> => Option<String>;
    /// `complete`, `cut` or `caller_gone`
    ended: &'static str => String;
    /// Bytes of the request body.
    bytes_in: u64 => u64;
    /// Bytes of the request body that the connection to the backend took. Null if the request was
    /// not relayed, has no body or was broken off.
    bytes_taken: Option<u64> => Option<u64>;
    /// Bytes of the response body.
    bytes_out: u64 => u64;
    /// Durations of the stages, in microseconds.
    durations_us: Timing => Timing;
    /// Agent that the request was last sent to; null if it was sent to none.
    agent_id: Option<&'a str> => Option<String>;
    /// Attempts that failed, in order, at most 3. After an error of an agent, the last of them is
    /// the one that the error comes from. Empty if the first agent answered, and for a service with
    /// one tunnel.
    #[serde(default)]
    attempts: Vec<AttemptView> => Vec<AttemptView>;
    /// Id of the request that this one replays; null if it is not a replay.
    replayed_from: Option<RequestId> => Option<String>;
    /// W3C trace id, hexadecimal.
    trace_id: Option<String> => Option<String>, "trace";
}

/// Value of a column.
trait ColumnValue {
    type Shown;

    /// Returns the value as [`RequestView`] has it.
    fn shown(self) -> Self::Shown;
}

macro_rules! values {
    ($($type:ty => $shown:ty, $convert:expr;)*) => {
        $(impl ColumnValue for $type {
            type Shown = $shown;

            fn shown(self) -> $shown {
                $convert(self)
            }
        })*
    };
}

values! {
    u16 => u16, identity;
    u64 => u64, identity;
    Timing => Timing, identity;
    String => String, identity;
    Vec<AttemptView> => Vec<AttemptView>, identity;
    &str => String, str::to_owned;
    IpAddr => String, |address: IpAddr| address.to_string();
    RequestId => String, |id: RequestId| id.to_string();
}

impl<T: ColumnValue> ColumnValue for Option<T> {
    type Shown = Option<T::Shown>;

    fn shown(self) -> Option<T::Shown> {
        self.map(T::shown)
    }
}

fn text(value: &impl Serialize) -> Option<String> {
    match serde_json::to_value(value).ok()? {
        serde_json::Value::Null => None,
        serde_json::Value::String(text) => Some(text),
        other => Some(other.to_string()),
    }
}

/// Splits the label of a service into account and service. Both are empty for the apex.
pub(super) fn account_and_service(label: &str) -> (&str, &str) {
    label.split_once("--").unwrap_or((label, ""))
}

/// Splits a request target.
pub(super) fn path_and_query(target: &str) -> (&str, Option<&str>) {
    match target.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (target, None),
    }
}

pub(super) fn trace_text(id: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(id))
}

impl RequestRecord {
    /// Columns of this request of the service `label`. `target` is its [masked
    /// target](Self::masked_target).
    pub(super) fn columns<'a>(&'a self, label: &'a str, target: &'a str) -> Columns<'a> {
        let (account, service) = account_and_service(label);
        let (path, query) = path_and_query(target);
        let attempts = self.attempts.iter().take(ATTEMPTS_MAX);
        Columns {
            id: self.id,
            time: time_text(self.id.unix_ms()),
            account,
            service,
            method: self.shown_method(),
            path,
            query,
            caller_address: self.caller,
            protocol: self.protocol.as_str(),
            auth_mode: self.by.as_ref().map(CallerId::mode),
            caller_id: self.by.as_ref().and_then(CallerId::id),
            status: self.status,
            code: self.code,
            ended: self.ended.as_str(),
            bytes_in: self.bytes_in,
            bytes_taken: self.bytes_taken,
            bytes_out: self.bytes_out,
            durations_us: self.timing,
            agent_id: self.agent.as_ref().map(AgentId::as_str),
            attempts: attempts.map(RecordedAttempt::view).collect(),
            replayed_from: self.replayed_from,
            trace_id: self.trace_id.map(trace_text),
        }
    }

    /// At most the first [`METHOD_MAX`] bytes of the method.
    pub(super) fn shown_method(&self) -> &str {
        &self.method.as_str()[..self.method.as_str().len().min(METHOD_MAX)]
    }

    /// The target without the secrets that `masker` finds. One that is too long is cut and marked.
    /// Masked before it is cut: a part of a secret would not be recognised.
    pub(super) fn masked_target(&self, masker: &Masker) -> Cow<'_, str> {
        let unauthenticated = self.by.is_none() && !self.at_apex;
        let most = if unauthenticated {
            UNAUTHENTICATED_TARGET_MAX
        } else {
            TARGET_MAX
        };
        let target = match masker.mask(self.target.as_bytes()) {
            None => Cow::Borrowed(&*self.target),
            Some(masked) => Cow::Owned(String::from_utf8_lossy(&masked).into_owned()),
        };
        if target.len() <= most {
            return target;
        }
        let kept = target.floor_char_boundary(most - CUT.len());
        Cow::Owned(format!("{}{CUT}", &target[..kept]))
    }
}

/// An attempt that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedAttempt {
    /// `None`, shown as an empty text, if the node with the tunnel was lost before it had named the
    /// agent.
    pub agent_id: Option<AgentId>,
    /// Name of the [`AttemptFailure`](crate::outcome::AttemptFailure).
    pub reason: &'static str,
    /// Microseconds from the beginning of the attempt to its failure.
    pub duration_us: u32,
}

impl RecordedAttempt {
    pub(super) fn shown_agent(&self) -> &str {
        self.agent_id.as_ref().map_or("", AgentId::as_str)
    }

    pub(super) fn view(&self) -> AttemptView {
        AttemptView {
            agent_id: self.shown_agent().to_owned(),
            reason: self.reason.to_owned(),
            duration_us: self.duration_us,
        }
    }
}

/// Protocol of the caller. Kept by position: append only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    /// HTTP/1.0.
    Http10,
    /// HTTP/1.1.
    Http11,
    /// HTTP/2.
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
    /// The request; `None` if it was not captured.
    pub request: Option<MessageCapture>,
    /// The response; `None` if it was not captured.
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
    /// Header fields, without credentials.
    pub headers: Fields,
    /// The beginning of the body.
    pub body: BodyCapture,
}

impl MessageCapture {
    /// Mark in place of a message for which the account has no share of the disk.
    pub(super) fn without_room() -> Self {
        let mut mark = Self::default();
        mark.body.truncated = true;
        mark.body.truncated_by = Some(Truncation::Disk);
        mark
    }
}

/// Captured beginning of a body.
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
    /// The account had used its share of the disk. Fields are left out, too.
    Disk,
}

impl Truncation {
    /// Returns the name of the reason in the administration API, such as `size`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Size => "size",
            Self::Memory => "memory",
            Self::Interrupted => "interrupted",
            Self::Disk => "disk",
        }
    }

    /// Text that completes "cut off: …".
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Size => "longer than 1 MiB",
            Self::Memory => "no memory for more captures at that time",
            Self::Interrupted => "the message broke off",
            Self::Disk => "the account had used its share of the disk for that day",
        }
    }
}

/// Records of one worker by service.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Label of the service (`{account}--{service}`), and its records in the order in which they
    /// ended.
    pub services: Vec<(Arc<str>, Vec<RequestRecord>)>,
}

impl RequestRecord {
    /// Record of a plain request with status 200, for tests and measurements.
    #[doc(hidden)]
    pub fn example(id: RequestId) -> Self {
        Self {
            id,
            method: Method::GET,
            target: "/a/b".into(),
            caller: [203, 0, 113, 7].into(),
            protocol: Protocol::Http2,
            by: None,
            at_apex: false,
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
