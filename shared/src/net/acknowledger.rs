//! Acknowledges received bytes at once, for peers that write a message in pieces.
//!
//! A peer without `TCP_NODELAY` keeps its second small piece until the first one is acknowledged
//! (Nagle's algorithm, RFC 9293 §3.7.4), and the kernel delays acknowledgements by 40 ms on
//! connections that alternate between sending and receiving.
//! kernel-notes/delayed-acknowledgements.md has measurements.

use std::cell::Cell;
use std::rc::Rc;

use super::raw_fd;
use super::socket::Connected;

/// Handle that makes the kernel acknowledge what a socket has received.
pub struct Acknowledger {
    connected: Rc<Connected>,
    /// Bytes that the connection had sent and received at the last call; `None` if the kernel does
    /// not support it.
    last: Cell<Option<(u64, u64)>>,
    calls: Cell<u64>,
}

impl Acknowledger {
    pub(super) fn new(connected: Rc<Connected>) -> Self {
        Self {
            connected,
            last: Cell::new(Some((0, 0))),
            calls: Cell::default(),
        }
    }

    /// Acknowledges received bytes now, with one system call. Makes none if nothing was received or
    /// nothing was sent since the last one: the kernel acknowledges at once until the connection
    /// sends again.
    pub fn acknowledge(&self) {
        let now = (self.connected.sent.get(), self.connected.received.get());
        if self
            .last
            .get()
            .is_none_or(|last| now.0 == last.0 || now.1 == last.1)
        {
            return;
        }
        self.calls.set(self.calls.get() + 1);
        // Fails for Unix sockets, which have no acknowledgements.
        let set =
            rustix::net::sockopt::set_tcp_quickack(raw_fd::borrow(&self.connected.stream), true);
        self.last.set(set.is_ok().then_some(now));
    }

    /// Number of system calls made so far.
    pub fn calls(&self) -> u64 {
        self.calls.get()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::net::Socket;
    use crate::testing::{block_on, connect};

    async fn receive(socket: &Socket, length: usize) {
        let mut buffer = bytes::BytesMut::new();
        while buffer.len() < length {
            let received = std::future::poll_fn(|cx| socket.poll_recv_buf(cx, &mut buffer)).await;
            assert_ne!(received.unwrap(), 0);
        }
    }

    #[test]
    fn received_bytes_are_acknowledged_at_once() {
        block_on(async {
            let (socket, mut peer) = connect().await;
            let acknowledger = socket.acknowledger();
            for round in 1..=3 {
                let request = &mut [IoSlice::new(b"request")];
                socket.send_all(request).await.unwrap();
                peer.read_exact(&mut [0; 7]).unwrap();
                if round == 1 {
                    acknowledger.acknowledge();
                    assert_eq!(acknowledger.calls(), 0, "nothing was received");
                }
                // Makes the kernel delay acknowledgements, as it does on a connection that has been
                // in use for a while.
                rustix::net::sockopt::set_tcp_quickack(&socket, false).unwrap();
                peer.write_all(b"part").unwrap();
                receive(&socket, 4).await;
                acknowledger.acknowledge();
                assert!(rustix::net::sockopt::tcp_quickack(&socket).unwrap());
                assert!(raw_fd::tcp_info(peer.as_fd()).unwrap().all_acknowledged);
                peer.write_all(b"rest").unwrap();
                receive(&socket, 4).await;
                acknowledger.acknowledge();
                assert_eq!(acknowledger.calls(), round, "nothing was sent");
            }
        });
    }

    #[test]
    fn unix_socket_makes_no_second_call() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        block_on(async {
            let listener = UnixListener::bind(&path).unwrap();
            let socket = Socket::connect_unix(&path).await.unwrap();
            let acknowledger = socket.acknowledger();
            let mut peer = listener.accept().unwrap().0;
            for _ in 0..2 {
                let request = &mut [IoSlice::new(b"request")];
                socket.send_all(request).await.unwrap();
                peer.write_all(b"part").unwrap();
                receive(&socket, 4).await;
                acknowledger.acknowledge();
                assert_eq!(acknowledger.calls(), 1);
            }
        });
    }
}
