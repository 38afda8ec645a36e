//! Kernel buffers of a socket: their use and their limits.
//!
//! A peer that stops reading or sending leaves bytes in the kernel, which lets each connection keep
//! megabytes (`tcp_wmem`, `tcp_rmem`). All sockets of a machine share one limit (`tcp_mem`); near
//! it every connection is slow.

use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use rustix::net::Shutdown;

use super::raw_fd;
use super::socket::Connected;

/// Use and limits of a socket's buffers in bytes, with the kernel's overhead (`SO_MEMINFO`, Linux
/// 4.12).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BufferUse {
    /// Bytes that wait to be sent, or are sent and not acknowledged.
    pub to_send: usize,
    /// Bytes that are received and not read.
    pub to_read: usize,
    /// Bytes that the socket has reserved and does not use now.
    pub reserved: usize,
    /// Limit of the receive buffer, which autotuning may raise.
    pub receive_limit: usize,
    /// Limit of the send buffer.
    pub send_limit: usize,
}

impl BufferUse {
    /// All bytes that the kernel counts for this socket.
    pub fn total(&self) -> usize {
        self.to_send + self.to_read + self.reserved
    }
}

/// Handle to the kernel buffers of a connection that another task reads from or writes to.
#[derive(Clone)]
pub struct Buffers(Rc<Connected>);

impl Buffers {
    pub(super) fn new(connected: Rc<Connected>) -> Self {
        Self(connected)
    }

    /// Bytes sent and received so far.
    pub fn carried(&self) -> u64 {
        self.0.sent.get() + self.0.received.get()
    }

    /// Bytes that the kernel has accepted for sending so far.
    pub fn sent(&self) -> u64 {
        self.0.sent.get()
    }

    /// Reads the use of the buffers, with one system call.
    pub fn measure(&self) -> io::Result<BufferUse> {
        raw_fd::memory_info(raw_fd::borrow(&self.0.stream))
    }

    /// Bounds the bytes that wait to be sent: the kernel accepts no more while `bytes` wait
    /// (`TCP_NOTSENT_LOWAT`), and at most `bytes` at once. Does not bound bytes that are sent and
    /// not acknowledged, which depend on the path.
    pub fn limit_unsent(&self, bytes: u32) -> io::Result<()> {
        self.0.send_at_once.set(bytes as usize);
        socket2::SockRef::from(&self.0.as_fd()).set_tcp_notsent_lowat(bytes)
    }

    /// Bounds the send buffer and ends its autotuning. The kernel's own limit (`net.core.wmem_max`)
    /// may make it smaller.
    pub fn limit_send_buffer(&self, bytes: usize) -> io::Result<()> {
        // The kernel doubles the value, for its overhead (socket(7)).
        socket2::SockRef::from(&self.0.as_fd()).set_send_buffer_size(bytes / 2)
    }

    /// Bounds the receive buffer and ends its autotuning. Bytes already received stay. The kernel's
    /// own limit (`net.core.rmem_max`) may make it smaller.
    pub fn limit_receive_buffer(&self, bytes: usize) -> io::Result<()> {
        socket2::SockRef::from(&self.0.as_fd()).set_recv_buffer_size(bytes / 2)
    }

    /// Makes the kernel end the connection if sent bytes are not acknowledged within `within`, also
    /// after it was closed (`TCP_USER_TIMEOUT`, RFC 5482).
    pub fn give_up_within(&self, within: Duration) {
        // Fails only if the connection has ended.
        let _ = socket2::SockRef::from(&self.0.as_fd()).set_tcp_user_timeout(Some(within));
    }

    /// Ends the connection: it fails for its owner at once, and the drop by its owner sends a reset
    /// and frees the buffers.
    pub fn reset(&self) {
        // Fails only if the connection has ended.
        let _ = socket2::SockRef::from(&self.0.as_fd()).set_linger(Some(Duration::ZERO));
        let _ = rustix::net::shutdown(raw_fd::borrow(&self.0.stream), Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read};
    use std::net::TcpStream;

    use crate::net::Socket;
    use crate::testing::{block_on, connect};

    /// Runs `test` with a connected socket and its peer.
    fn with_pair<F: Future<Output = ()>>(test: impl FnOnce(Socket, TcpStream) -> F) {
        block_on(async {
            let (socket, peer) = connect().await;
            test(socket, peer).await;
        });
    }

    /// Sends until the kernel accepts no more; returns the number of bytes.
    fn fill(socket: &Socket) -> usize {
        let data = vec![7; 128 * 1024];
        let mut taken = 0;
        while let Ok(sent) = socket.try_send(&[IoSlice::new(&data[..1000]), IoSlice::new(&data)]) {
            taken += sent;
        }
        taken
    }

    #[test]
    fn unsent_bytes_are_bounded_and_counted() {
        with_pair(|socket, mut peer| async move {
            // With a small receive buffer at the peer, bytes wait on this side.
            let of_peer = socket2::SockRef::from(&peer);
            of_peer.set_recv_buffer_size(16 * 1024).unwrap();
            let buffers = socket.buffers();
            buffers.limit_unsent(16 * 1024).unwrap();
            let taken = fill(&socket);
            let usage = buffers.measure().unwrap();
            assert_eq!(buffers.sent(), taken as u64);
            // At most the limit, one send beyond it, and the kernel's overhead.
            assert!((16 * 1024..64 * 1024).contains(&usage.to_send), "{usage:?}");
            let mut received = vec![0; taken];
            peer.read_exact(&mut received).unwrap();
            assert!(received.iter().all(|byte| *byte == 7));
        });
    }

    #[test]
    fn unread_bytes_are_bounded_and_counted() {
        with_pair(|socket, peer| async move {
            let buffers = socket.buffers();
            buffers.limit_receive_buffer(64 * 1024).unwrap();
            peer.set_nonblocking(true).unwrap();
            let mut sent = 0;
            while let Ok(more) = std::io::Write::write(&mut &peer, &[1; 64 * 1024]) {
                sent += more;
            }
            let usage = buffers.measure().unwrap();
            assert!(sent > 0 && usage.to_read > 0, "{usage:?}");
            assert_eq!(usage.receive_limit, 64 * 1024);
        });
    }

    #[test]
    fn a_reset_ends_the_connection_for_peer_and_owner() {
        with_pair(|socket, mut peer| async move {
            fill(&socket);
            socket.buffers().reset();
            assert!(socket.try_send(&[IoSlice::new(b"x")]).is_err());
            drop(socket);
            // The reactor closes the descriptor on its next turn.
            crate::runtime::yield_now().await;
            let error = std::io::copy(&mut peer, &mut std::io::sink()).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        });
    }
}
