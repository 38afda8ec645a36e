//! A captured request on its way to the worker that relays it again.

use std::net::IpAddr;

use bytes::Bytes;
use gw_shared::http::Fields;
use gw_shared::id::RequestId;
use http::Method;
use http::header::{self, HeaderName};
use http::uri::{Authority, PathAndQuery};
use tokio::sync::oneshot;

/// Fields of a replayed request that its body decides.
pub const REPLAY_FRAMING: [HeaderName; 3] = [
    header::EXPECT,
    header::TRANSFER_ENCODING,
    header::CONTENT_LENGTH,
];

/// A captured request to relay again.
pub struct Replay {
    /// Id of the captured request.
    pub original: RequestId,
    /// Label of the service.
    pub label: String,
    /// Hostname of the service, sent as `Host`.
    pub hostname: Authority,
    /// Method of the request.
    pub method: Method,
    /// Path and query.
    pub target: PathAndQuery,
    /// Fields of the head.
    pub headers: Fields,
    /// The whole body.
    pub body: Bytes,
    /// Client address of the original.
    pub caller: IpAddr,
    /// Receives the id of the new request once that has ended. Dropping the receiver cancels the
    /// request.
    pub reply: oneshot::Sender<RequestId>,
}
