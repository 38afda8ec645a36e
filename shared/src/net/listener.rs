//! A listening socket: the ring reports readiness, and a non-blocking `accept4(2)` takes the
//! connections.
//!
//! Cancelling the wait loses no connection, nor does closing the socket if another process also
//! listens on it.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use monoio::net::TcpStream;
use rustix::net::{Shutdown, SocketFlags};

use super::raw_fd;
use crate::runtime;

/// Accepts in a row before other tasks get their turn.
const ACCEPTS_PER_TURN: u8 = 4;

/// A listening socket on this thread's reactor. Dropping it closes only its own descriptor of the
/// socket.
pub struct Listener {
    /// Not a stream, but monoio reports readiness only for streams.
    socket: TcpStream,
    accepts_in_a_row: Cell<u8>,
}

impl Listener {
    pub fn new(listener: std::net::TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let socket = TcpStream::from_std(std::net::TcpStream::from(OwnedFd::from(listener)))?;
        Ok(Self {
            socket,
            accepts_in_a_row: Cell::new(0),
        })
    }

    /// Accepts a connection and returns it with its peer's address. Cancellation loses no
    /// connection.
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

    /// Accepts a connection that is waiting, if any.
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

    /// Makes the kernel refuse connections from now on, for every process that has the socket.
    pub fn shut(&self) {
        // Fails only if the socket is already shut down.
        let _ = rustix::net::shutdown(raw_fd::borrow(&self.socket), Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::pin::pin;
    use std::time::Duration;

    use super::*;
    use crate::testing::drivers;

    /// Runs `test` on each driver with a listener and a second descriptor of its socket.
    fn with_listener<F: Future<Output = ()>>(test: impl Fn(Listener, TcpListener) -> F) {
        for driver in drivers() {
            let kept = TcpListener::bind("127.0.0.1:0").unwrap();
            let shared = kept.try_clone().unwrap();
            let run = async { test(Listener::new(shared).unwrap(), kept).await };
            driver.block_on(run).unwrap();
        }
    }

    /// Begins to accept a connection, and cancels it.
    async fn wait_in_vain(listener: &Listener) {
        let accepted = runtime::timeout(Duration::from_millis(5), listener.accept()).await;
        assert!(accepted.is_err());
    }

    #[test]
    fn connections_are_accepted_after_a_wait_was_cancelled() {
        with_listener(|listener, kept| async move {
            let address = kept.local_addr().unwrap();
            for _ in 0..3 {
                wait_in_vain(&listener).await;
                let clients = [(); 40].map(|()| TcpStream::connect(address).unwrap());
                for client in &clients {
                    let (_, peer) = listener.accept().await.unwrap();
                    assert_eq!(peer, client.local_addr().unwrap());
                }
                assert!(listener.try_accept().unwrap().is_none());
            }
        });
    }

    #[test]
    fn a_connection_wakes_a_pending_accept() {
        with_listener(|listener, kept| async move {
            let mut accept = pin!(listener.accept());
            assert!(futures_util::poll!(accept.as_mut()).is_pending());
            let _client = TcpStream::connect(kept.local_addr().unwrap()).unwrap();
            accept.await.unwrap();
        });
    }

    #[test]
    fn dropping_a_listener_leaves_the_socket_to_other_listeners() {
        with_listener(|listener, kept| async move {
            wait_in_vain(&listener).await;
            drop(listener);
            runtime::sleep(Duration::from_millis(5)).await;
            let _client = TcpStream::connect(kept.local_addr().unwrap()).unwrap();
            let other = Listener::new(kept).unwrap();
            other.accept().await.unwrap();
        });
    }

    #[test]
    fn shutting_a_socket_ends_pending_accepts_and_refuses_connections() {
        with_listener(|listener, kept| async move {
            let mut accept = pin!(listener.accept());
            assert!(futures_util::poll!(accept.as_mut()).is_pending());
            listener.shut();
            assert!(accept.await.is_err());
            assert!(TcpStream::connect(kept.local_addr().unwrap()).is_err());
        });
    }
}
