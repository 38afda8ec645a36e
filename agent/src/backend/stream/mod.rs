//! A byte stream to a backend, plain or TLS.

#[cfg(feature = "bench_support")]
pub(crate) mod canned;
mod read_to_end;

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::BytesMut;
use gw_shared::net::{Socket, TlsStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

#[cfg(feature = "bench_support")]
use canned::Canned;

pub(super) use read_to_end::ReadToEnd;

pub(crate) enum BackendStream {
    Plain(Socket),
    Tls(TlsStream),
    #[cfg(feature = "bench_support")]
    Canned(Canned),
}

impl BackendStream {
    pub(super) fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.socket(),
            #[cfg(feature = "bench_support")]
            Self::Canned(backend) => backend.socket(),
        }
    }

    /// Whether no unread bytes and no end of the stream have arrived.
    pub(super) fn is_quiet(&self) -> bool {
        match self {
            Self::Plain(socket) => socket.is_quiet(),
            Self::Tls(stream) => stream.is_quiet(),
            #[cfg(feature = "bench_support")]
            Self::Canned(backend) => backend.is_quiet(),
        }
    }

    pub(super) async fn send_all(&self, pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.send_all(pieces).await,
            Self::Tls(stream) => {
                stream.write_all(pieces).await?;
                stream.flush().await
            }
            #[cfg(feature = "bench_support")]
            Self::Canned(backend) => {
                backend.send(pieces);
                Ok(())
            }
        }
    }

    /// Appends received bytes to `buffer`. `Ok(0)` is the end of the stream; with TLS it requires a
    /// close_notify alert.
    pub(super) fn poll_recv_buf(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Plain(socket) => socket.poll_recv_buf(cx, buffer),
            Self::Tls(stream) => stream.poll_read_buf(cx, buffer),
            #[cfg(feature = "bench_support")]
            Self::Canned(backend) => backend.poll_recv_buf(cx, buffer),
        }
    }

    /// Ends the sending direction only.
    pub(super) async fn end_sending(&self) -> io::Result<()> {
        match self {
            Self::Plain(socket) => {
                socket.shutdown_write();
                Ok(())
            }
            Self::Tls(stream) => stream.close().await,
            #[cfg(feature = "bench_support")]
            Self::Canned(_) => Ok(()),
        }
    }

    /// Ends TLS with a closure alert (RFC 9112 §9.8). For a connection that is dropped afterwards.
    pub(super) fn close_now(&self) {
        if let Self::Tls(stream) = self {
            stream.close_now();
        }
    }
}

impl AsyncRead for BackendStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let target = buffer.initialize_unfilled();
        let read = match &*self {
            Self::Plain(socket) => ready!(socket.poll_recv(cx, target))?,
            Self::Tls(stream) => ready!(stream.poll_read(cx, target))?,
            #[cfg(feature = "bench_support")]
            Self::Canned(_) => return Poll::Ready(Err(io::ErrorKind::Unsupported.into())),
        };
        buffer.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for BackendStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &*self {
            Self::Plain(socket) => loop {
                match socket.try_send(pieces) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        ready!(socket.poll_writable(cx))?;
                    }
                    result => return Poll::Ready(result),
                }
            },
            Self::Tls(stream) => stream.poll_write(cx, pieces),
            #[cfg(feature = "bench_support")]
            Self::Canned(_) => Poll::Ready(Err(io::ErrorKind::Unsupported.into())),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &*self {
            Self::Plain(_) => Poll::Ready(Ok(())),
            Self::Tls(stream) => stream.poll_send(cx),
            #[cfg(feature = "bench_support")]
            Self::Canned(_) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &*self {
            Self::Plain(socket) => {
                socket.shutdown_write();
                Poll::Ready(Ok(()))
            }
            Self::Tls(stream) => stream.poll_close(cx),
            #[cfg(feature = "bench_support")]
            Self::Canned(_) => Poll::Ready(Ok(())),
        }
    }
}
