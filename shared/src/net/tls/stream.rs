//! TLS connections.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::session::{self, TlsSession};
use crate::net::socket::{Closer, Socket};

/// Most ciphertext received in one system call, in bytes.
const SCRATCH: usize = 64 * 1024;
/// Most ciphertext received in one system call from a peer whose records are mostly overhead.
const SCRATCH_SMALL: usize = 2 * 1024;
/// Most ciphertext in a row without plaintext: a handshake with its certificates has this much.
const CONTENTLESS_MAX: usize = 128 * 1024;

thread_local! {
    pub(super) static SCRATCH_BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; SCRATCH]);
}

/// A TLS connection, client or server. All methods take `&self`, so one task can read and write at
/// the same time.
pub struct TlsStream {
    socket: Socket,
    /// Boxed, since it is large and every future that the stream moves through would contain it.
    session: Box<RefCell<TlsSession>>,
    /// Plaintext of the last receive that its reader had no room for; at most `SCRATCH` bytes,
    /// empty while idle.
    surplus: RefCell<BytesMut>,
    /// The peer's records are mostly overhead: it gets one small receive per turn.
    receives_small: Cell<bool>,
    /// Bytes of ciphertext since the last plaintext.
    contentless: Cell<usize>,
}

impl TlsStream {
    /// Creates a stream; call [`Self::handshake`] before any other method.
    pub fn new(socket: Socket, session: impl Into<TlsSession>) -> Self {
        Self {
            socket,
            session: Box::new(RefCell::new(session.into())),
            surplus: RefCell::default(),
            receives_small: Cell::new(false),
            contentless: Cell::new(0),
        }
    }

    /// Starts the handshake with bytes that have already been received. On failure, sends an alert
    /// as [`Self::handshake`] does.
    pub(super) fn start(&self, received: &mut [u8]) -> io::Result<()> {
        let result = self.decrypt(received, &mut |chunk| {
            self.surplus.borrow_mut().extend_from_slice(chunk);
        });
        if result.is_err() {
            self.send_at_once();
        }
        result
    }

    /// Completes the handshake. On failure, sends an alert if the socket accepts it at once.
    pub async fn handshake(&self) -> io::Result<()> {
        while self.session.borrow().is_handshaking() {
            std::future::poll_fn(|cx| self.poll_send(cx)).await?;
            if !self.session.borrow().is_handshaking() {
                break;
            }
            // Keep plaintext that arrives with the last flight for the first read.
            let keep = &mut |chunk: &[u8]| self.surplus.borrow_mut().extend_from_slice(chunk);
            if std::future::poll_fn(|cx| self.poll_receive(cx, keep)).await? == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the peer closed the connection during the handshake",
                ));
            }
        }
        std::future::poll_fn(|cx| self.poll_send(cx)).await
    }

    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Handle that ends this connection from another task of the thread.
    pub fn closer(&self) -> Closer {
        self.socket.closer()
    }

    /// The peer's verified certificate, if it sent one.
    pub fn peer_certificate(&self) -> Option<CertificateDer<'static>> {
        let session = self.session.borrow();
        session.common().peer_certificates()?.first().cloned()
    }

    /// Whether the handshake selected `protocol` (ALPN, RFC 7301).
    pub fn speaks(&self, protocol: &[u8]) -> bool {
        self.session.borrow().common().alpn_protocol() == Some(protocol)
    }

    /// Whether there is nothing to read, not even the end of the stream.
    pub fn is_quiet(&self) -> bool {
        self.surplus.borrow().is_empty() && self.socket.is_quiet()
    }

    /// Reads plaintext into `target`; `Ok(0)` is an authenticated end (`close_notify`). An end
    /// without it is an `UnexpectedEof` error.
    pub fn poll_read(&self, cx: &mut Context<'_>, target: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut surplus = self.surplus.borrow_mut();
        if !surplus.is_empty() {
            let taken = surplus.len().min(target.len());
            surplus.copy_to_slice(&mut target[..taken]);
            if surplus.is_empty() {
                *surplus = BytesMut::new();
            }
            return Poll::Ready(Ok(taken));
        }
        let mut filled = 0;
        self.poll_decrypted(cx, &mut |chunk| {
            let (now, later) = chunk.split_at(chunk.len().min(target.len() - filled));
            target[filled..filled + now.len()].copy_from_slice(now);
            filled += now.len();
            surplus.extend_from_slice(later);
        })
        .map_ok(|_| filled)
    }

    /// Appends plaintext to `buffer`, at most 64 KiB at a time; returns as [`Self::poll_read`].
    pub fn poll_read_buf(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
    ) -> Poll<io::Result<usize>> {
        let surplus = self.surplus.take();
        if !surplus.is_empty() {
            buffer.unsplit(surplus);
            return Poll::Ready(Ok(buffer.len()));
        }
        self.poll_plaintext(cx, &mut |chunk| buffer.extend_from_slice(chunk))
    }

    /// Receives until there is plaintext, which it passes to `sink`, or the end. Returns the bytes
    /// of plaintext.
    pub fn poll_plaintext(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>> {
        let surplus = self.surplus.take();
        if !surplus.is_empty() {
            sink(&surplus);
            return Poll::Ready(Ok(surplus.len()));
        }
        self.poll_decrypted(cx, sink)
    }

    fn poll_decrypted(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>> {
        let mut decrypted = 0;
        loop {
            if self.session.borrow().is_closed_by_peer() {
                return Poll::Ready(Ok(0));
            }
            let received = ready!(self.poll_receive(cx, &mut |chunk| {
                decrypted += chunk.len();
                sink(chunk);
            }))?;
            if decrypted > 0 {
                return Poll::Ready(Ok(decrypted));
            }
            if received == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    /// Puts plaintext back; the next read returns it first.
    pub fn unread(&self, plaintext: &[u8]) {
        let mut surplus = self.surplus.borrow_mut();
        let mut front = BytesMut::with_capacity(plaintext.len() + surplus.len());
        front.extend_from_slice(plaintext);
        front.extend_from_slice(&surplus);
        *surplus = front;
    }

    /// Encrypts as much of `pieces` as the session has room for. If it has none, sends until there
    /// is.
    pub fn poll_write(
        &self,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if pieces.iter().all(|piece| piece.is_empty()) {
            return Poll::Ready(Ok(0));
        }
        loop {
            let taken = self.session.borrow_mut().write(pieces)?;
            if taken > 0 {
                return Poll::Ready(Ok(taken));
            }
            if let Poll::Ready(result) = self.poll_send_some(cx) {
                result?;
            } else {
                return Poll::Pending;
            }
        }
    }

    /// Encrypted bytes that the socket has not taken.
    pub fn unsent(&self) -> usize {
        self.session.borrow().unsent()
    }

    /// Sends all encrypted bytes.
    pub fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.session.borrow().has_unsent() {
            ready!(self.poll_send_some(cx))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Sends `close_notify` after all written bytes, then ends the sending direction.
    pub fn poll_close(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.session.borrow_mut().close();
        ready!(self.poll_send(cx))?;
        self.socket.shutdown_write();
        Poll::Ready(Ok(()))
    }

    /// Sends `close_notify`, as far as the socket takes it at once. For a connection that is
    /// dropped afterwards.
    pub fn close_now(&self) {
        let mut session = self.session.borrow_mut();
        session.close();
        // Without it, the peer finds an unauthenticated end.
        let _ = session.send_with(|pieces| self.socket.try_send(pieces));
    }

    /// Encrypts all of `pieces`, and sends when the session is full. Does not flush.
    pub async fn write_all(&self, pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut rest = pieces;
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let taken = std::future::poll_fn(|cx| self.poll_write(cx, rest)).await?;
            IoSlice::advance_slices(&mut rest, taken);
        }
        Ok(())
    }

    pub async fn flush(&self) -> io::Result<()> {
        std::future::poll_fn(|cx| self.poll_send(cx)).await
    }

    pub async fn close(&self) -> io::Result<()> {
        std::future::poll_fn(|cx| self.poll_close(cx)).await
    }

    fn poll_send_some(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let sent = self
                .session
                .borrow_mut()
                .send_with(|pieces| self.socket.try_send(pieces));
            match sent {
                Ok(()) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.socket.poll_writable(cx))?;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Receives once, decrypts everything and passes the plaintext to `sink`, piece by piece.
    /// Returns the bytes of ciphertext; 0 is the end of the connection.
    fn poll_receive(
        &self,
        cx: &mut Context<'_>,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Poll<io::Result<usize>> {
        SCRATCH_BUFFER.with_borrow_mut(|scratch| {
            let small = self.receives_small.get();
            let room = if small { SCRATCH_SMALL } else { SCRATCH };
            let received = ready!(self.socket.poll_recv(cx, &mut scratch[..room]))?;
            let mut plaintext = 0;
            let decrypted = self.decrypt(&mut scratch[..received], &mut |chunk| {
                plaintext += chunk.len();
                sink(chunk);
            });
            // Tiny and empty records (RFC 8446 §5.1) cost as much as full ones.
            self.contentless.set(if plaintext > 0 {
                0
            } else {
                self.contentless.get() + received
            });
            if self.contentless.get() > CONTENTLESS_MAX {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "too many records without content",
                )));
            }
            let mostly_overhead = plaintext < received / 2;
            if small || mostly_overhead {
                self.socket.end_turn();
            }
            if received == room {
                self.receives_small.set(mostly_overhead);
            }
            self.send_at_once();
            Poll::Ready(decrypted.map(|()| received))
        })
    }

    /// Sends an alert, a key update or a session ticket. The next flush sends what the socket does
    /// not accept now.
    fn send_at_once(&self) {
        let mut session = self.session.borrow_mut();
        if session.has_unsent() {
            drop(session.send_with(|pieces| self.socket.try_send(pieces)));
        }
    }

    fn decrypt(&self, ciphertext: &mut [u8], sink: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        self.session
            .borrow_mut()
            .receive(ciphertext, sink)
            .map_err(session::invalid)
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = ready!(Self::poll_read(&self, cx, buffer.initialize_unfilled()))?;
        buffer.advance(read);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Self::poll_write(&self, cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Self::poll_write(&self, cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_send(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_close(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;
    use std::sync::Arc;
    use std::task::Waker;

    use rustls::SupportedProtocolVersion;
    use rustls::client::UnbufferedClientConnection;
    use rustls_pki_types::PrivateKeyDer;

    use super::*;
    use crate::net::tls::Greeting;
    use crate::runtime;
    use crate::testing::{connect, drivers};

    /// Both ends of a connection on one reactor, after the handshake.
    async fn pair(version: &'static SupportedProtocolVersion) -> (TlsStream, TlsStream) {
        let certified = rcgen::generate_simple_self_signed(["h".to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
        let certificate = certified.cert.der().clone();
        let server = gw_bed::tls::server((certificate.clone(), key), &[]);
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let client = gw_bed::tls::client_with(provider, &[version], [certificate], None, &[]);
        let name = "h".try_into().unwrap();
        let session = UnbufferedClientConnection::new(Arc::new(client), name).unwrap();

        let (socket, accepted) = connect().await;
        let accepted = Socket::from_fd(accepted.into()).unwrap();
        let client = TlsStream::new(socket, session);
        let accept = async {
            let greeting = Greeting::read(accepted, BytesMut::new(), Vec::new).await;
            let greeting = greeting.unwrap();
            assert_eq!(greeting.hello.server_name.as_deref(), Some("h"));
            greeting.accept(Arc::new(server)).await.unwrap()
        };
        let (server, handshake) = futures_util::join!(accept, client.handshake());
        handshake.unwrap();
        (client, server)
    }

    fn on_each_driver_and_version<F: Future<Output = ()>>(
        test: impl Fn(&'static SupportedProtocolVersion) -> F,
    ) {
        for driver in drivers() {
            for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
                driver.block_on(test(version)).unwrap();
            }
        }
    }

    async fn read(stream: &TlsStream) -> io::Result<BytesMut> {
        let mut buffer = BytesMut::new();
        std::future::poll_fn(|cx| stream.poll_read_buf(cx, &mut buffer)).await?;
        Ok(buffer)
    }

    #[test]
    fn every_byte_arrives_once_when_reads_and_writes_are_cancelled() {
        on_each_driver_and_version(|version| async move {
            let (client, server) = pair(version).await;
            let sent: Rc<Vec<u8>> =
                Rc::new((0..3_000_000u32).map(|at| (at * 31 % 251) as u8).collect());
            let bytes = Rc::clone(&sent);
            runtime::spawn(async move {
                let mut at = 0;
                while at < bytes.len() {
                    // Polled once and dropped, like the losing arm of a select.
                    let mut cx = Context::from_waker(Waker::noop());
                    let piece = &bytes[at..(at + 70_000).min(bytes.len())];
                    match client.poll_write(&mut cx, &[IoSlice::new(piece)]) {
                        Poll::Ready(written) => at += written.unwrap(),
                        Poll::Pending => drop(client.flush().await),
                    }
                }
                client.close().await.unwrap();
                // Closing with unread session tickets would reset the connection: wait for the peer
                // to close.
                drop(read(&client).await);
            });
            let mut received = Vec::new();
            let mut small = [0; 1000];
            loop {
                let mut cx = Context::from_waker(Waker::noop());
                // A cancelled read, then a completed one.
                if let Poll::Ready(read) = server.poll_read(&mut cx, &mut small) {
                    received.extend_from_slice(&small[..read.unwrap()]);
                }
                let chunk = read(&server).await.unwrap();
                received.extend_from_slice(&chunk);
                if chunk.is_empty() {
                    break;
                }
            }
            assert_eq!(received.len(), sent.len());
            assert!(received == *sent);
        });
    }

    #[test]
    fn a_writer_waits_for_a_peer_that_does_not_read() {
        on_each_driver_and_version(|version| async move {
            let (client, server) = pair(version).await;
            let mut cx = Context::from_waker(Waker::noop());
            let piece = vec![7; 16 * 1024];
            let mut written = 0;
            while let Poll::Ready(taken) = client.poll_write(&mut cx, &[IoSlice::new(&piece)]) {
                written += taken.unwrap();
                // The kernel's socket buffers grow to a few megabytes.
                assert!(written < 64 << 20, "the writer was never stopped");
            }
            let mut received = 0;
            let reading = async {
                while received < written {
                    received += read(&server).await.unwrap().len();
                }
            };
            let (flushed, ()) = futures_util::join!(client.flush(), reading);
            flushed.unwrap();
            assert_eq!(received, written);
        });
    }

    #[test]
    fn only_close_notify_is_an_authenticated_end() {
        on_each_driver_and_version(|version| async move {
            let (client, server) = pair(version).await;
            let last = &mut [IoSlice::new(b"last words")];
            client.write_all(last).await.unwrap();
            client.close().await.unwrap();
            assert_eq!(read(&server).await.unwrap(), &b"last words"[..]);
            assert!(read(&server).await.unwrap().is_empty());
            assert!(read(&server).await.unwrap().is_empty());

            let (client, server) = pair(version).await;
            drop(client);
            let cut = read(&server).await.unwrap_err();
            let expected = [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset];
            assert!(expected.contains(&cut.kind()), "{cut}");
        });
    }

    #[test]
    fn plaintext_that_was_put_back_is_read_first() {
        on_each_driver_and_version(|version| async move {
            let (client, server) = pair(version).await;
            let sent = &mut [IoSlice::new(b"world")];
            client.write_all(sent).await.unwrap();
            client.flush().await.unwrap();
            server.unread(b"hello ");
            let mut received = BytesMut::new();
            while received.len() < 11 {
                received.unsplit(read(&server).await.unwrap());
            }
            assert_eq!(received, &b"hello world"[..]);
        });
    }
}
