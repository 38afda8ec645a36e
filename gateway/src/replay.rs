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
pub(crate) const REPLAY_FRAMING: [HeaderName; 3] = [
    header::EXPECT,
    header::TRANSFER_ENCODING,
    header::CONTENT_LENGTH,
];

/// A captured request to relay again.
pub(crate) struct Replay {
    pub(crate) original: RequestId,
    /// Label of the service.
    pub(crate) label: String,
    pub(crate) hostname: Authority,
    pub(crate) method: Method,
    pub(crate) target: PathAndQuery,
    pub(crate) headers: Fields,
    pub(crate) body: Bytes,
    /// Client address of the original.
    pub(crate) caller: IpAddr,
    /// Receives the id of the new request once that has ended. Dropping the receiver cancels the request.
    pub(crate) reply: oneshot::Sender<RequestId>,
}
