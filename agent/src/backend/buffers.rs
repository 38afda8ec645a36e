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
    /// Counts `socket` and fits its limit at once, because other connections may have opened since the dial. `sized` is
    /// the limit that the dial set.
    pub(super) fn new(socket: &Socket, sized: Option<usize>) -> Self {
        CONNECTIONS.set(CONNECTIONS.get() + 1);
        if let Err(error) = socket.limit_unsent(UNSENT) {
            // Unix sockets have no such limit, and none of the kernel's that grows.
            tracing::trace!(%error, "unsent bytes are not bounded");
        }
        let bounded = Self { receive_limit: Cell::new(sized) };
        bounded.fit(socket);
        bounded
    }

    /// Shrinks the receive buffer if there are more connections now. To be called before a kept connection serves
    /// another request.
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
    use std::net::TcpListener;

    use gw_shared::runtime::Driver;

    use super::*;

    #[test]
    fn connections_that_dial_at_once_get_the_limit_of_their_number() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let test = async move {
            let limit_of = |socket: &Socket| socket.buffers().measure().unwrap().receive_limit;
            let alone = Socket::connect(address, None).await.unwrap();
            // The kernel may allow less.
            alone.buffers().limit_receive_buffer(receive_limit(UNLIMITED + 1).unwrap()).unwrap();
            let mut open = Vec::new();
            for _ in 0..=UNLIMITED {
                // As when all have dialled before the first of them is counted.
                let socket = Socket::connect(address, None).await.unwrap();
                open.push((Bounded::new(&socket, None), socket));
            }
            let (first, last) = (&open[0], &open[UNLIMITED]);
            assert_eq!(limit_of(&last.1), limit_of(&alone));
            assert_ne!(limit_of(&first.1), limit_of(&alone));
            first.0.fit(&first.1);
            assert_eq!(limit_of(&first.1), limit_of(&alone));
        };
        Driver::choose().unwrap().block_on(test).unwrap();
    }

    #[test]
    fn more_connections_have_smaller_buffers() {
        const KIB: usize = 1024;
        assert_eq!((receive_limit(0), receive_limit(16)), (None, None));
        assert_eq!((receive_limit(17), receive_limit(128)), (Some(512 * KIB), Some(512 * KIB)));
        assert_eq!((receive_limit(129), receive_limit(1024)), (Some(256 * KIB), Some(64 * KIB)));
        assert_eq!(receive_limit(100_000), Some(16 * KIB));
        // All connections stall, each with the limit set when it connected.
        let held: usize = (1..=9000).filter_map(receive_limit).sum();
        assert!(held <= 320 * 1024 * KIB, "{} MiB", held / 1024 / KIB);
    }
}
