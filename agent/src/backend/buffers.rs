//! Kernel memory of connections to backends: the more connections there are, the less each may hold unread.
//!
//! A response that its caller does not take is not read from the backend either: it fills the receive buffer of that
//! connection, which the kernel lets grow to megabytes (`tcp_rmem`).

use std::cell::Cell;

use gw_shared::net::Socket;

/// Connections for which the kernel sizes the buffers itself.
const UNLIMITED: usize = 16;
/// Bytes that the receive buffers of all others may add up to, while their number doubles once.
const BUDGET: usize = 64 * 1024 * 1024;
const LEAST: usize = 16 * 1024;
const MOST: usize = 512 * 1024;
/// Bytes of a request that may wait in the kernel to be sent to a backend.
const UNSENT: u32 = 128 * 1024;

thread_local! {
    /// Connections to backends of this thread.
    static CONNECTIONS: Cell<usize> = const { Cell::new(0) };
}

/// Size of the receive buffer of one more connection, in bytes as the kernel counts; `None`: as the kernel likes.
pub(super) fn receive_limit_of_next() -> Option<usize> {
    receive_limit(CONNECTIONS.get() + 1)
}

/// A power of two, so that it changes seldom.
fn receive_limit(connections: usize) -> Option<usize> {
    let even = 1 << (BUDGET / connections.max(1)).max(1).ilog2();
    (connections > UNLIMITED).then_some(even.clamp(LEAST, MOST))
}

/// Counts a connection while it is open.
pub(super) struct Bounded {
    receive_limit: Cell<Option<usize>>,
}

impl Bounded {
    /// Counts `socket`, whose receive buffer was sized when it connected.
    pub(super) fn new(socket: &Socket) -> Self {
        CONNECTIONS.set(CONNECTIONS.get() + 1);
        if let Err(error) = socket.limit_unsent(UNSENT) {
            // Unix sockets have no such limit, and none of the kernel's that grows.
            tracing::trace!(%error, "unsent bytes are not bounded");
        }
        Self { receive_limit: Cell::new(receive_limit(CONNECTIONS.get())) }
    }

    /// To be called before a kept connection serves another request: there may be more connections than there were.
    pub(super) fn fit(&self, socket: &Socket) {
        let Some(now) = receive_limit(CONNECTIONS.get()) else { return };
        if self.receive_limit.get().is_none_or(|before| now < before) {
            self.receive_limit.set(Some(now));
            if let Err(error) = socket.buffers().limit_receive_buffer(now) {
                tracing::debug!(%error, "a backend connection's receive buffer is not bounded");
            }
        }
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        CONNECTIONS.set(CONNECTIONS.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_connections_have_smaller_buffers() {
        const KIB: usize = 1024;
        assert_eq!((receive_limit(0), receive_limit(16)), (None, None));
        assert_eq!((receive_limit(17), receive_limit(128)), (Some(512 * KIB), Some(512 * KIB)));
        assert_eq!((receive_limit(129), receive_limit(1024)), (Some(256 * KIB), Some(64 * KIB)));
        assert_eq!(receive_limit(100_000), Some(16 * KIB));
        // All stall, each with what it was allowed when it came.
        let held: usize = (1..=9000).filter_map(receive_limit).sum();
        assert!(held <= 320 * 1024 * KIB, "{} MiB", held / 1024 / KIB);
    }
}
