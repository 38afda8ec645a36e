//! One request and its response between a connection of any HTTP version and the code that answers it.

use std::cell::RefCell;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use gw_shared::http::{InvalidBody, Part, UpgradeProtocol};
use http::header::{self, HeaderMap, HeaderValue};
use http::{Response, StatusCode};

/// How a request ended, for the connection that carried it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The response went out whole.
    Complete,
    /// The response went out whole and refused a caller that had not authenticated.
    Refused,
    /// The response began and could not be completed: it must not look complete.
    Cut,
    /// The caller went away.
    CallerGone,
}

/// Head of a relayed response, fields cleaned for the next hop.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// Data or trailers follow. Known before they arrive.
    pub(crate) has_body: bool,
    /// The backend has switched to this protocol: its half of that follows.
    pub(crate) upgrade: Option<UpgradeProtocol>,
}

/// The caller closed the connection, or cannot be written to any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallerGone;

/// Why a request body ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyError {
    Gone,
    Malformed(InvalidBody),
}

/// The body of a request as it arrives.
pub(crate) trait RequestBody {
    /// The next part; [`Part::End`] again and again once it is complete.
    async fn part(&mut self) -> Result<Part, BodyError>;
    /// Nothing more will come: the part just returned was the last.
    fn is_done(&self) -> bool;
    /// Resolves when the caller is gone, and not before. Can be dropped and called again.
    async fn gone(&mut self) -> CallerGone;
    /// The caller has taken the request back already, as far as can be seen at no cost.
    fn was_taken_back(&mut self) -> bool {
        false
    }
    /// What follows is the caller's half of another protocol, until it ends that.
    fn switch_protocols(&mut self);
}

/// Where the response to one request is written.
pub(crate) trait ResponseSink {
    /// Sends an interim response (1xx) at once, to a caller that understands such.
    async fn interim(&mut self, head: ResponseHead) -> Result<(), CallerGone>;
    /// Writes the final head. With [`ResponseHead::upgrade`], data is our half of another protocol from here on.
    async fn head(&mut self, head: ResponseHead) -> Result<(), CallerGone>;
    /// Writes a piece of the body; `last` says that neither another one nor trailers follow.
    async fn data(&mut self, data: Bytes, last: bool) -> Result<(), CallerGone>;
    /// Completes the response and sends what is left of it.
    async fn end(&mut self, trailers: Option<HeaderMap>) -> Result<(), CallerGone>;
    /// Sends what was written so far.
    async fn flush(&mut self) -> Result<(), CallerGone>;
    /// A final head has been written: it is too late for another response.
    fn has_begun(&self) -> bool;
    /// An error of ours comes next: a caller that does not take it is not waited for. Where the rest of the request
    /// cannot be told from what follows, nothing may follow.
    fn begin_refusal(&mut self, request_is_readable: bool);

    /// Writes a whole response of ours.
    async fn whole(&mut self, response: Response<Vec<u8>>) -> Result<(), CallerGone> {
        let (parts, body) = response.into_parts();
        let head =
            ResponseHead { status: parts.status, headers: parts.headers, has_body: !body.is_empty(), upgrade: None };
        self.head(head).await?;
        self.data(body.into(), true).await?;
        self.end(None).await
    }
}

thread_local! {
    /// Seconds since the Unix epoch, and that time as a value of `Date`.
    static DATE: RefCell<(u64, HeaderValue)> = const { RefCell::new((0, HeaderValue::from_static(""))) };
}

/// Adds `Date` to a response that has none (RFC 9110 §6.6.1).
pub(crate) fn set_date(headers: &mut HeaderMap) {
    if headers.contains_key(header::DATE) {
        return;
    }
    let now = SystemTime::now();
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let value = DATE.with_borrow_mut(|date| {
        if date.0 != seconds
            && let Ok(value) = HeaderValue::try_from(httpdate::fmt_http_date(now))
        {
            *date = (seconds, value);
        }
        date.1.clone()
    });
    headers.insert(header::DATE, value);
}

/// Adds `Date` to a response of the gateway.
pub(crate) fn dated(mut response: Response<Vec<u8>>) -> Response<Vec<u8>> {
    set_date(response.headers_mut());
    response
}
