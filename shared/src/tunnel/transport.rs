//! The byte stream below a tunnel.

use std::io::{self, IoSlice};
use std::task::{Context, Poll};

use crate::net::TlsStream;

/// Reliable byte stream that carries a tunnel: a TLS connection, or memory in benchmarks.
pub trait Transport {
    /// Receives until there are bytes, which it passes to `sink`, or the end. Returns the number of bytes; 0 is the end.
    fn poll_plaintext(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>>;

    /// Takes as many bytes as there is room for, to be sent by [`Self::poll_send`]. Returns their number.
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
