//! A listening socket: readiness comes from the ring, the connections from `accept4(2)` that does not block.
//!
//! Waiting for readiness can be given up without losing a connection, and so can the socket: another process may go on
//! listening on it.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use monoio::net::TcpStream;
use rustix::net::{Shutdown, SocketFlags};

use super::raw_fd;
use crate::runtime;

/// Accepts in a row that may succeed before others get their turn.
const ACCEPTS_PER_TURN: u8 = 4;

/// A listening socket on this thread's reactor. Dropping it closes this process's hold on it, no other's.
pub struct Listener {
    /// Not a stream; but monoio lets one wait for readiness only on those, and asks nothing else of the descriptor.
    socket: TcpStream,
    accepts_in_a_row: Cell<u8>,
}

impl Listener {
    pub fn new(listener: std::net::TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let socket = TcpStream::from_std(std::net::TcpStream::from(OwnedFd::from(listener)))?;
        Ok(Self { socket, accepts_in_a_row: Cell::new(0) })
    }

    /// The next connection and its other end. Can be dropped and called again.
    pub async fn accept(&self) -> io::Result<(OwnedFd, SocketAddr)> {
        if self.accepts_in_a_row.get() >= ACCEPTS_PER_TURN {
            self.accepts_in_a_row.set(0);
            runtime::yield_now().await;
        }
        loop {
            if let Some(accepted) = self.try_accept()? {
                self.accepts_in_a_row.set(self.accepts_in_a_row.get() + 1);
                return Ok(accepted);
            }
            self.accepts_in_a_row.set(0);
            self.socket.readable(false).await?;
        }
    }

    /// A connection that is there already, if any.
    pub fn try_accept(&self) -> io::Result<Option<(OwnedFd, SocketAddr)>> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::acceptfrom_with(raw_fd::borrow(&self.socket), flags) {
                Ok((fd, peer)) => {
                    let peer = peer.map(SocketAddr::try_from).transpose()?;
                    return Ok(Some((fd, peer.ok_or(io::ErrorKind::AddrNotAvailable)?)));
                }
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Has the kernel refuse connections from now on, for every process that has the socket.
    pub fn shut(&self) {
        // Fails only if that was done before.
        let _ = rustix::net::shutdown(raw_fd::borrow(&self.socket), Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::pin::pin;
    use std::time::Duration;

    use super::*;
    use crate::runtime::Driver;

    /// Runs `test` on each driver, with a listener and another hold on the same socket.
    fn with_listener<F: Future<Output = ()>>(test: impl Fn(Listener, TcpListener) -> F) {
        for driver in [Driver::choose().unwrap(), Driver::Epoll { reason: "test".into() }] {
            let kept = TcpListener::bind("127.0.0.1:0").unwrap();
            let shared = kept.try_clone().unwrap();
            driver.block_on(async { test(Listener::new(shared).unwrap(), kept).await }).unwrap();
        }
    }

    #[test]
    fn connections_are_accepted_before_and_after_the_wait_for_them_was_given_up() {
        with_listener(|listener, kept| async move {
            let address = kept.local_addr().unwrap();
            for _ in 0..3 {
                assert!(runtime::timeout(Duration::from_millis(5), listener.accept()).await.is_err());
                let callers: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
                for caller in &callers {
                    let (_, peer) = listener.accept().await.unwrap();
                    assert_eq!(peer, caller.local_addr().unwrap());
                }
                assert!(listener.try_accept().unwrap().is_none());
            }
        });
    }

    #[test]
    fn a_connection_wakes_who_waits_for_it() {
        with_listener(|listener, kept| async move {
            let mut accept = pin!(listener.accept());
            assert!(futures_util::poll!(accept.as_mut()).is_pending());
            let _caller = TcpStream::connect(kept.local_addr().unwrap()).unwrap();
            accept.await.unwrap();
        });
    }

    #[test]
    fn who_leaves_takes_the_socket_from_nobody_else() {
        with_listener(|listener, kept| async move {
            assert!(runtime::timeout(Duration::from_millis(5), listener.accept()).await.is_err());
            drop(listener);
            runtime::sleep(Duration::from_millis(5)).await;
            let _caller = TcpStream::connect(kept.local_addr().unwrap()).unwrap();
            let other = Listener::new(kept).unwrap();
            other.accept().await.unwrap();
        });
    }

    #[test]
    fn a_socket_that_was_shut_ends_the_wait_and_refuses() {
        with_listener(|listener, kept| async move {
            let mut accept = pin!(listener.accept());
            assert!(futures_util::poll!(accept.as_mut()).is_pending());
            listener.shut();
            assert!(accept.await.is_err());
            assert!(TcpStream::connect(kept.local_addr().unwrap()).is_err());
        });
    }
}
