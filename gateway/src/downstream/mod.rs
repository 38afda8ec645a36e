//! Callers: whatever HTTP version they speak, the relay sees a request head, a [`RequestBody`] and a [`ResponseSink`].

pub(crate) mod h1;
pub(crate) mod h2;
mod upload_window;

use std::net::IpAddr;
use std::time::Instant;

use bytes::Bytes;
use gw_shared::http::{InvalidBody, Part};
use http::{HeaderMap, Response};

use crate::limit::Bucket;
use crate::limits;
use crate::upstream::ResponseHead;
use crate::worker::Core;

/// Refusals to somebody unknown that one connection still gets. Each costs little, and nothing else bounds them.
///
/// Of trusted proxies' connections there is no count: they bring everybody's.
struct Refusals(Option<Bucket>);

impl Refusals {
    fn new(core: &Core, peer: IpAddr) -> Self {
        let is_proxy = core.policy.trusted_proxies.contains(peer);
        Self((!is_proxy).then(|| Bucket::new(limits::REFUSALS, Instant::now())))
    }

    /// Counts one; whether the connection may go on.
    fn count(&mut self) -> bool {
        self.0.as_mut().is_none_or(|left| left.take(Instant::now()).is_ok())
    }
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
