//! The stream of an HTTP/2 connection, of which everything that the backend has sent is read.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::BackendStream;
use crate::backend::h2::ConnectionState;

/// A stream that is read to its end although a write to it has failed. Before it closes, a backend
/// may have sent responses, and a GOAWAY with the last stream that it has processed. Later writes
/// are discarded.
pub(in crate::backend) struct ReadToEnd {
    stream: BackendStream,
    write_failed: bool,
    /// Retired when a write fails.
    connection: Rc<ConnectionState>,
}

impl ReadToEnd {
    pub(in crate::backend) fn new(stream: BackendStream, connection: Rc<ConnectionState>) -> Self {
        Self {
            stream,
            write_failed: false,
            connection,
        }
    }

    /// Result of a write, or of `discarded` once a write has failed.
    fn written<T>(&mut self, result: io::Result<T>, discarded: T) -> io::Result<T> {
        result.or_else(|error| {
            tracing::debug!(%error, "cannot write to a backend connection");
            self.write_failed = true;
            self.connection.retire();
            Ok(discarded)
        })
    }
}

impl AsyncRead for ReadToEnd {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for ReadToEnd {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let all = || pieces.iter().map(|piece| piece.len()).sum();
        if self.write_failed {
            return Poll::Ready(Ok(all()));
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, pieces));
        Poll::Ready(self.written(written, all()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.write_failed {
            return Poll::Ready(Ok(()));
        }
        let flushed = ready!(Pin::new(&mut self.stream).poll_flush(cx));
        Poll::Ready(self.written(flushed, ()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.write_failed {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use bytes::Bytes;
    use http::Method;
    use http::uri::Authority;

    use super::*;
    use crate::backend::ResponseError;
    use crate::backend::h2::Http2Connection;
    use crate::backend::life::Lifetime;
    use crate::testing::{block_on, connect};

    /// Answers the PING of the start of a connection, without reading it: closing then sends a
    /// reset.
    fn answer_ping(backend: &mut TcpStream) {
        const PING: u8 = 6;
        backend.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).unwrap();
        backend.read_exact(&mut [0; 24]).unwrap();
        let mut frame = [0; 17];
        let mut peeked = |backend: &TcpStream, length: usize| {
            while !matches!(backend.peek(&mut frame[..length]), Ok(read) if read == length) {}
            frame
        };
        loop {
            let head = peeked(backend, 9);
            let length = usize::from(u16::from_be_bytes([head[1], head[2]]));
            if head[3] == PING {
                let mut ping = peeked(backend, 17);
                ping[4] = 1;
                return backend.write_all(&ping).unwrap();
            }
            backend.read_exact(&mut vec![0; 9 + length]).unwrap();
        }
    }

    #[test]
    fn what_a_backend_sent_before_it_closed_is_read_although_a_write_fails() {
        block_on(async {
            let (socket, mut backend) = connect().await;
            // A reset discards what the kernel has not sent.
            backend.set_nodelay(true).unwrap();
            let answering = std::thread::spawn(move || {
                answer_ping(&mut backend);
                backend
            });
            let socket = BackendStream::Plain(socket);
            let connection = Http2Connection::start(socket, Lifetime::default()).await;
            let connection = connection.unwrap();
            let mut backend = answering.join().unwrap();

            let request = Bytes::from_static(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n");
            let request = gw_shared::tunnel::head::parse_request(&request, true).unwrap();
            let authority = Authority::from_static("localhost");
            let begun = connection.request(&request, &authority, None, false);
            let mut response = begun.unwrap().1;
            // The request is written after the backend has closed. GOAWAY with the last stream 0.
            let goaway = [&[0, 0, 8, 7, 0, 0, 0, 0, 0][..], &[0; 8]].concat();
            backend.write_all(&goaway).unwrap();
            drop(backend);
            let error = response.head(&Method::GET).await.err();
            assert!(
                matches!(error, Some(ResponseError::Unprocessed { .. })),
                "{error:?}"
            );
            assert!(!connection.has_room());
        });
    }
}
