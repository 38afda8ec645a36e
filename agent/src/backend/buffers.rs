//! Kernel memory of backend connections: the more connections, the smaller the receive buffer of
//! each.
//!
//! The agent does not read a response that its caller does not read. The response then fills the
//! receive buffer of the connection, which the kernel would let grow to megabytes (`tcp_rmem`).

use std::cell::Cell;

use gw_shared::net::Socket;

/// Number of connections up to which the kernel sizes the buffers.
const UNLIMITED: usize = 16;
/// Budget in bytes for receive buffers beyond that number. The connections opened while their
/// number doubles share it.
const BUDGET: usize = 64 * 1024 * 1024;
const LEAST: usize = 16 * 1024;
const MOST: usize = 512 * 1024;
/// Bytes of a request that may be queued in the kernel for sending.
const UNSENT: u32 = 128 * 1024;

thread_local! {
    /// Open backend connections of this thread.
    static CONNECTIONS: Cell<usize> = const { Cell::new(0) };
}

/// Receive buffer size of the next connection, in bytes as the kernel counts them; `None` leaves it
/// to the kernel.
pub(super) fn receive_limit_of_next() -> Option<usize> {
    receive_limit(CONNECTIONS.get() + 1)
}

/// The size is a power of two, so that it changes rarely.
fn receive_limit(connections: usize) -> Option<usize> {
    let even = 1 << (BUDGET / connections.max(1)).max(1).ilog2();
    (connections > UNLIMITED).then_some(even.clamp(LEAST, MOST))
}

/// Counts an open connection and limits its buffers.
pub(super) struct BoundedBuffers {
    receive_limit: Cell<Option<usize>>,
}

impl BoundedBuffers {
    /// Counts `socket` and fits its limit, because other connections may have opened since it
    /// connected. `sized` is the limit that was set then.
    pub(super) fn new(socket: &Socket, sized: Option<usize>) -> Self {
        CONNECTIONS.set(CONNECTIONS.get() + 1);
        if let Err(error) = socket.limit_unsent(UNSENT) {
            // Unix sockets do not support the limit and do not need it: their buffers have a fixed
            // size.
            tracing::trace!(%error, "cannot limit the unsent bytes of a backend connection");
        }
        let bounded = Self {
            receive_limit: Cell::new(sized),
        };
        bounded.fit(socket);
        bounded
    }

    /// Shrinks the receive buffer if there are more connections now. Called before an idle
    /// connection serves another request.
    pub(super) fn fit(&self, socket: &Socket) {
        let Some(now) = receive_limit(CONNECTIONS.get()) else {
            return;
        };
        if self.receive_limit.get().is_none_or(|before| now < before) {
            self.receive_limit.set(Some(now));
            if let Err(error) = socket.buffers().limit_receive_buffer(now) {
                tracing::debug!(%error, "cannot limit the receive buffer of a backend connection");
            }
        }
    }
}

impl Drop for BoundedBuffers {
    fn drop(&mut self) {
        CONNECTIONS.set(CONNECTIONS.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::testing::block_on;

    #[test]
    fn concurrently_opened_connections_get_the_limit_of_their_number() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        block_on(async move {
            let limit_of = |socket: &Socket| socket.buffers().measure().unwrap().receive_limit;
            let alone = Socket::connect(address, None).await.unwrap();
            // The kernel may allow less.
            let limit = receive_limit(UNLIMITED + 1).unwrap();
            alone.buffers().limit_receive_buffer(limit).unwrap();
            let mut open = Vec::new();
            for _ in 0..=UNLIMITED {
                // Connects before any of them is counted.
                let socket = Socket::connect(address, None).await.unwrap();
                open.push((BoundedBuffers::new(&socket, None), socket));
            }
            let first = &open[0];
            let last = &open[UNLIMITED];
            assert_eq!(limit_of(&last.1), limit_of(&alone));
            assert_ne!(limit_of(&first.1), limit_of(&alone));
            first.0.fit(&first.1);
            assert_eq!(limit_of(&first.1), limit_of(&alone));
        });
    }

    #[test]
    fn limit_shrinks_with_the_number_of_connections() {
        const KIB: usize = 1024;
        for (connections, limit) in [
            (0, None),
            (16, None),
            (17, Some(512 * KIB)),
            (128, Some(512 * KIB)),
            (129, Some(256 * KIB)),
            (1024, Some(64 * KIB)),
            (100_000, Some(16 * KIB)),
        ] {
            assert_eq!(receive_limit(connections), limit, "{connections}");
        }
        // Worst case: every connection stalls with the limit set when it was opened.
        let held: usize = (1..=9000).filter_map(receive_limit).sum();
        assert!(held <= 320 * 1024 * KIB, "{} MiB", held / 1024 / KIB);
    }
}
