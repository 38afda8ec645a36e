//! Connections of callers. Every HTTP version is turned into a request head, a [`RequestBody`] and
//! a [`ResponseSink`].
//!
//! [`RequestBody`]: crate::http_message::RequestBody
//! [`ResponseSink`]: crate::http_message::ResponseSink

pub(crate) mod h1;
pub(crate) mod h2;
pub(crate) mod upload_window;

use std::net::IpAddr;
use std::time::Instant;

use crate::limits;
use gw_interface::rate_limit::Bucket;

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
        self.0
            .as_mut()
            .is_none_or(|left| left.take(Instant::now()).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use gw_shared::net::TlsStream;

    use super::*;
    use crate::connections::ConnectionGuard;
    use crate::peer::Peer;

    /// Size of the task of a connection, which an idle connection keeps.
    fn size_of_task<F: Future>(_: fn(Rc<Router>, TlsStream, Peer, ConnectionGuard) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn idle_connections_are_small() {
        let h1 = size_of_task(h1::serve);
        let h2 = size_of_task(h2::serve);
        assert!(
            h1 <= 800 && h2 <= 1800,
            "HTTP/1.1: {h1} bytes, HTTP/2: {h2} bytes"
        );
    }
}
