//! Connections of callers. Every HTTP version is turned into a request head, a [`RequestBody`] and a [`ResponseSink`].
//!
//! [`RequestBody`]: crate::http_message::RequestBody
//! [`ResponseSink`]: crate::http_message::ResponseSink

pub(crate) mod h1;
pub(crate) mod h2;
mod upload_window;

use std::net::IpAddr;
use std::time::Instant;

use crate::limit::Bucket;
use crate::limits;
use crate::route::Router;

/// Bounds the refusals of unauthenticated requests on one connection.
///
/// Not applied to trusted proxies, which multiplex many clients.
struct Refusals(Option<Bucket>);

impl Refusals {
    fn new(router: &Router, peer: IpAddr) -> Self {
        let is_proxy = router.trusted_proxies.contains(peer);
        Self((!is_proxy).then(|| Bucket::new(limits::REFUSALS, Instant::now())))
    }

    /// Counts one; returns whether the connection may stay open.
    fn count(&mut self) -> bool {
        self.0.as_mut().is_none_or(|left| left.take(Instant::now()).is_ok())
    }
}
