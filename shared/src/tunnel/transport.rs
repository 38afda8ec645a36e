//! The byte stream below a tunnel.

use std::io::{self, IoSlice};
use std::task::{Context, Poll, ready};

use crate::net::{Socket, TlsStream};

/// Bytes that are received at a time from a stream without TLS.
const RECEIVE: usize = 16 * 1024;

/// Reliable byte stream that carries a tunnel: a TLS connection, a socket between two processes of
/// this machine, or memory in benchmarks.
pub trait Transport {
    /// Receives until there are bytes, which it passes to `sink`, or the end. Returns the number of
    /// bytes; 0 is the end.
    fn poll_plaintext(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>>;

    /// Takes as many bytes as there is room for, to be sent by [`Self::poll_send`]. Returns their
    /// number.
    fn poll_write(&self, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>>;

    /// Sends the taken bytes; pending while the connection takes no more.
    fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
}

impl Transport for TlsStream {
    fn poll_plaintext(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>> {
        self.poll_plaintext(cx, sink)
    }

    fn poll_write(&self, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.poll_write(cx, pieces)
    }

    fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_send(cx)
    }
}

/// Without TLS: for a pair of Unix sockets, to which no other process has access.
impl Transport for Socket {
    fn poll_plaintext(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>> {
        let mut buffer = [0; RECEIVE];
        let received = ready!(self.poll_recv(cx, &mut buffer))?;
        sink(&buffer[..received]);
        Poll::Ready(Ok(received))
    }

    fn poll_write(&self, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        loop {
            match self.try_send(pieces) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.poll_writable(cx))?;
                }
                sent => return Poll::Ready(sent),
            }
        }
    }

    /// Nothing is kept here.
    fn poll_send(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
