//! The streams of servers that are compared.

use std::io::{self, IoSlice};
use std::sync::Arc;

use gw_shared::net::{Socket, TlsStream};
use monoio::io::{AsyncReadRent, AsyncWriteRent, AsyncWriteRentExt};
use monoio::net::TcpStream;
use monoio_rustls::{ServerTlsStream, TlsAcceptor};
use rustls::ServerConfig;
use rustls::server::UnbufferedServerConnection;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// The product's stream.
    Gw,
    /// monoio-rustls as it is by default: it copies ciphertext through two buffers of 16 KiB.
    Buffered,
    /// monoio-rustls with its feature `unsafe_io`: the kernel reads and writes the session's
    /// memory, so that a future must not be dropped before it completes.
    UnsafeIo,
}

impl Style {
    pub(crate) const ALL: [Self; 3] = [Self::Gw, Self::Buffered, Self::UnsafeIo];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gw => "Gw",
            Self::Buffered => "monoio-rustls",
            Self::UnsafeIo => "monoio-rustls, unsafe_io",
        }
    }
}

/// A server's TLS stream.
pub(crate) trait Stream: Sized + 'static {
    /// Completes the handshake. A buffer of the caller, if reads need one, has `room` bytes.
    async fn accept(tcp: TcpStream, config: Arc<ServerConfig>, room: usize) -> io::Result<Self>;

    /// Reads once and writes back what was read. Returns its bytes; 0 is the end of the stream.
    async fn echo(&mut self) -> io::Result<usize>;

    /// Writes some of `bytes` and returns how many. Dropped before, it should have written nothing,
    /// as the losing arm of a select.
    async fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Sends everything, and `close_notify`.
    async fn close(&mut self) -> io::Result<()>;
}

impl Stream for TlsStream {
    async fn accept(tcp: TcpStream, config: Arc<ServerConfig>, _: usize) -> io::Result<Self> {
        let session = UnbufferedServerConnection::new(config).map_err(io::Error::other)?;
        let stream = Self::new(Socket::new(tcp)?, session);
        stream.handshake().await?;
        Ok(stream)
    }

    async fn echo(&mut self) -> io::Result<usize> {
        let mut message = Vec::new();
        std::future::poll_fn(|cx| {
            self.poll_plaintext(cx, &mut |chunk| message.extend_from_slice(chunk))
        })
        .await?;
        self.write_all(&mut [IoSlice::new(&message)]).await?;
        self.flush().await?;
        Ok(message.len())
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        std::future::poll_fn(|cx| self.poll_write(cx, &[IoSlice::new(bytes)])).await
    }

    async fn close(&mut self) -> io::Result<()> {
        Self::close(self).await
    }
}

/// A stream of monoio-rustls, with or without its `unsafe_io`.
pub(crate) struct MonoioRustls<const UNSAFE_IO: bool> {
    stream: ServerTlsStream<TcpStream>,
    /// Taken by each read, and returned after the write. A read that is dropped takes it along.
    buffer: Option<Vec<u8>>,
    room: usize,
}

impl<const UNSAFE_IO: bool> Stream for MonoioRustls<UNSAFE_IO> {
    async fn accept(tcp: TcpStream, config: Arc<ServerConfig>, room: usize) -> io::Result<Self> {
        tcp.set_nodelay(true)?;
        let acceptor = TlsAcceptor::from(config);
        #[allow(unsafe_code, reason = "the mode of monoio-rustls that is measured")]
        // SAFETY: no future of such a stream is dropped before it completes: `dropped` leaves this
        // style out, and the reactor is never dropped.
        let acceptor = unsafe { acceptor.unsafe_io(UNSAFE_IO) };
        let stream = acceptor.accept(tcp).await.map_err(io::Error::other)?;
        Ok(Self {
            stream,
            buffer: None,
            room,
        })
    }

    async fn echo(&mut self) -> io::Result<usize> {
        let buffer = self.buffer.take();
        let buffer = buffer.unwrap_or_else(|| Vec::with_capacity(self.room));
        let (read, message) = self.stream.read(buffer).await;
        let read = read?;
        let (written, message) = self.stream.write_all(message).await;
        written?;
        self.buffer = Some(message);
        Ok(read)
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes.to_vec()).await.0
    }

    async fn close(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }
}
