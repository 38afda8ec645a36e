//! Flow control of uploads: the initial window of the tunnel's streams (RFC 9113 §6.9.2).

use std::cell::Cell;

use bytes::Bytes;
use gw_shared::net::TlsStream;
use gw_shared::tunnel::unread::UnreadBodies;
use gw_shared::tunnel::window::{self, Demand};

/// The upload window. Its size is requested by the gateway, and smaller while backends leave too many bytes unread.
pub(super) struct UploadWindow {
    current: Cell<u32>,
    /// Size requested by the gateway and not applied yet.
    requested: Cell<Option<u32>>,
    pub(super) unread: UnreadBodies,
}

impl Default for UploadWindow {
    fn default() -> Self {
        Self { current: Cell::new(window::FIRST), requested: Cell::default(), unread: UnreadBodies::default() }
    }
}

impl UploadWindow {
    /// Sets the size that the next [`apply`](Self::apply) announces.
    pub(super) fn request(&self, bytes: u32) {
        self.requested.set(Some(bytes));
    }

    /// Announces the requested size. Called before the connection is polled.
    pub(super) fn apply(&self, connection: &mut h2::server::Connection<TlsStream, Bytes>) {
        let Some(requested) = self.requested.get() else { return };
        let unread = self.unread.bytes();
        let size = Demand { streams: self.unread.streams(), unread: &unread }.fit(requested, window::TUNNEL_BUDGET);
        // Fails while earlier SETTINGS are not acknowledged; the next call tries again.
        if size == self.current.get() || connection.set_initial_window_size(size).is_ok() {
            self.current.set(size);
            self.requested.set(None);
        }
    }
}
