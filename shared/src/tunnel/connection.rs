//! A tunnel on its TLS connection: moves bytes between the connection and an [`Endpoint`], and
//! hands out its streams.

use std::cell::RefCell;
use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;

use super::endpoint::{
    Closed, Endpoint, OpenError, Outgoing, OutgoingFull, ReceivedPart, StreamKey, Violation,
};
use super::frame::Kind;
use super::ledger::Share;
use super::transport::Transport;
use crate::runtime;

/// Bytes of frames that are taken out of the endpoint at a time. Later control frames wait behind
/// at most this, and behind what the TLS session and the kernel hold.
const WRITE_AT_ONCE: usize = 64 * 1024;

/// Bytes that are received before frames are sent and other tasks run. Above what a socket on
/// io_uring returns in one turn.
const RECEIVE_AT_ONCE: usize = 1024 * 1024;

/// Most pieces of one write.
const SLICES: usize = 64;

/// Most unsent bytes of a tunnel in the kernel.
pub const UNSENT: u32 = 128 * 1024;

/// Why a tunnel failed.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the peer violates the tunnel protocol: {0}")]
    Violation(#[from] Violation),
    #[error("the peer sends too many frames without content")]
    Flood,
    #[error("the peer sends nothing")]
    Silent,
}

/// One end of a tunnel, shared by the task that drives it and the tasks of its streams.
#[derive(Debug, Clone)]
pub struct Tunnel(Rc<Shared>);

#[derive(Debug)]
struct Shared {
    endpoint: RefCell<Endpoint>,
    outgoing: RefCell<Outgoing>,
    pause: YieldTurn,
}

/// Turn of other tasks that receiving waits for.
#[derive(Default)]
struct YieldTurn(RefCell<Option<Pin<Box<dyn Future<Output = ()>>>>>);

impl fmt::Debug for YieldTurn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("YieldTurn")
            .field(&self.0.borrow().is_some())
            .finish()
    }
}

impl Tunnel {
    pub fn new(endpoint: Endpoint) -> Self {
        Self(Rc::new(Shared {
            endpoint: RefCell::new(endpoint),
            outgoing: RefCell::default(),
            pause: YieldTurn::default(),
        }))
    }

    /// Calls `with` on the endpoint.
    pub fn with<T>(&self, with: impl FnOnce(&mut Endpoint) -> T) -> T {
        with(&mut self.0.endpoint.borrow_mut())
    }

    /// Opens a stream: see [`Endpoint::open`].
    pub fn open(
        &self,
        credit: usize,
        end: bool,
        write_head: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(StreamSender, StreamReceiver), OpenError> {
        let key = self.with(|endpoint| endpoint.open(credit, end, write_head))?;
        Ok(self.halves(key))
    }

    /// Opens a stream whose memory is charged to `share`: see [`Endpoint::open_for`].
    pub fn open_for(
        &self,
        share: Rc<Share>,
        credit: usize,
        end: bool,
        write_head: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(StreamSender, StreamReceiver), OpenError> {
        let key = self.with(|endpoint| endpoint.open_for(share, credit, end, write_head))?;
        Ok(self.halves(key))
    }

    /// The next stream that the gateway has opened; `None` once the tunnel has ended.
    pub fn poll_accept(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<(StreamSender, StreamReceiver)>> {
        self.with(|endpoint| endpoint.poll_accept(cx))
            .map(|key| key.map(|key| self.halves(key)))
    }

    /// Streams that the agent serves at once, from its HELLO; `None` once the tunnel has ended.
    pub async fn hello(&self) -> Option<usize> {
        std::future::poll_fn(|cx| self.with(|endpoint| endpoint.poll_hello(cx))).await
    }

    /// The next control message; `None` once the tunnel has ended.
    pub async fn message(&self) -> Option<Bytes> {
        std::future::poll_fn(|cx| self.with(|endpoint| endpoint.poll_message(cx))).await
    }

    /// Queues a control message: see [`Endpoint::send_message`].
    pub fn send_message(&self, message: Bytes, queue_max: usize) -> Result<(), OutgoingFull> {
        self.with(|endpoint| endpoint.send_message(message, queue_max))
    }

    fn halves(&self, key: StreamKey) -> (StreamSender, StreamReceiver) {
        (
            StreamSender {
                tunnel: self.clone(),
                key,
            },
            StreamReceiver {
                tunnel: self.clone(),
                key,
            },
        )
    }

    /// Moves bytes in both directions until nothing more can be moved. Ready when the connection
    /// has ended; the streams of the tunnel are closed then. `after_receive` runs after received
    /// bytes were handled.
    pub fn poll_drive(
        &self,
        cx: &mut Context<'_>,
        stream: &impl Transport,
        after_receive: &mut dyn FnMut(&mut Endpoint) -> Result<(), TunnelError>,
    ) -> Poll<Result<(), TunnelError>> {
        let ended = loop {
            if let Poll::Ready(ended) = self.poll_receive(cx, stream, after_receive) {
                break ended;
            }
            let was_congested = self.with(|endpoint| endpoint.is_congested());
            match self.poll_flush(cx, stream) {
                Poll::Ready(Err(error)) => break Err(error.into()),
                // Nothing waits any more, so receiving goes on.
                Poll::Ready(Ok(())) if was_congested => {}
                Poll::Ready(Ok(())) | Poll::Pending => return Poll::Pending,
            }
        };
        self.with(Endpoint::lose);
        Poll::Ready(ended)
    }

    /// Receives until no bytes have arrived or the endpoint must send first; ready at the end of
    /// the connection.
    fn poll_receive(
        &self,
        cx: &mut Context<'_>,
        stream: &impl Transport,
        after_receive: &mut dyn FnMut(&mut Endpoint) -> Result<(), TunnelError>,
    ) -> Poll<Result<(), TunnelError>> {
        ready!(self.poll_pause(cx));
        let mut bytes_received = 0;
        loop {
            let mut endpoint = self.0.endpoint.borrow_mut();
            if endpoint.is_congested() {
                return Poll::Pending;
            }
            if bytes_received >= RECEIVE_AT_ONCE {
                drop(endpoint);
                bytes_received = 0;
                self.0.pause.0.replace(Some(Box::pin(runtime::yield_now())));
                ready!(self.poll_pause(cx));
                continue;
            }
            let mut handled = Ok(());
            let received = ready!(stream.poll_plaintext(cx, &mut |bytes| {
                if handled.is_ok() {
                    handled = endpoint.receive(bytes);
                }
            }))?;
            handled?;
            if received == 0 {
                return Poll::Ready(Ok(()));
            }
            bytes_received += received;
            after_receive(&mut endpoint)?;
        }
    }

    /// Pending while other tasks have their turn.
    fn poll_pause(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut pause = self.0.pause.0.borrow_mut();
        if let Some(turn) = &mut *pause {
            ready!(turn.as_mut().poll(cx));
            *pause = None;
        }
        Poll::Ready(())
    }

    /// Sends until no frame waits; pending while the connection takes no more.
    pub fn poll_flush(
        &self,
        cx: &mut Context<'_>,
        stream: &impl Transport,
    ) -> Poll<io::Result<()>> {
        let mut outgoing = self.0.outgoing.borrow_mut();
        loop {
            while !outgoing.is_empty() {
                let mut slices = [IoSlice::new(&[]); SLICES];
                let used = outgoing.slices(&mut slices);
                let written = ready!(stream.poll_write(cx, &slices[..used]))?;
                outgoing.advance(written);
            }
            let mut endpoint = self.0.endpoint.borrow_mut();
            endpoint.transmit(&mut outgoing, WRITE_AT_ONCE);
            if outgoing.is_empty() {
                endpoint.register_driver(cx);
                drop(endpoint);
                return stream.poll_send(cx);
            }
        }
    }
}

/// Sending half of a stream. Dropping it resets the stream unless its direction has ended.
#[derive(Debug)]
pub struct StreamSender {
    tunnel: Tunnel,
    key: StreamKey,
}

impl StreamSender {
    /// Sends all of `data` as the peer's credit and the send buffer allow; with `end`, no more
    /// follows.
    pub async fn send(&self, mut data: Bytes, end: bool) -> Result<(), Closed> {
        std::future::poll_fn(|cx| self.poll_send(cx, &mut data, end)).await
    }

    /// Sends as much of `data` as possible and removes it from `data`; ready when `data` is empty.
    pub fn poll_send(
        &self,
        cx: &mut Context<'_>,
        data: &mut Bytes,
        end: bool,
    ) -> Poll<Result<(), Closed>> {
        let mut endpoint = self.tunnel.0.endpoint.borrow_mut();
        if data.is_empty() && end {
            return Poll::Ready(endpoint.send_data(self.key, Bytes::new(), true));
        }
        while !data.is_empty() {
            let capacity = ready!(endpoint.poll_capacity(self.key, cx))?;
            let piece = data.split_to(capacity.min(data.len()));
            endpoint.send_data(self.key, piece, end && data.is_empty())?;
        }
        Poll::Ready(Ok(()))
    }

    /// Ends this direction.
    pub fn finish(&self) -> Result<(), Closed> {
        self.tunnel
            .with(|endpoint| endpoint.send_data(self.key, Bytes::new(), true))
    }

    /// Ends this direction with trailers, given as field lines.
    pub fn finish_with_trailers(&self, lines: Bytes) -> Result<(), Closed> {
        self.tunnel
            .with(|endpoint| endpoint.send_trailers(self.key, lines))
    }

    /// Sends a head of a response: see [`Endpoint::send_head`].
    pub fn send_head(
        &self,
        kind: Kind,
        end: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Closed> {
        self.tunnel
            .with(|endpoint| endpoint.send_head(self.key, kind, end, write))
    }

    /// Sum of the grants of the peer: see [`Endpoint::granted`].
    pub fn granted(&self) -> u64 {
        self.tunnel.with(|endpoint| endpoint.granted(self.key))
    }

    /// Reports how much of the request body the backend took: see [`Endpoint::report_upload`].
    pub fn report_upload(&self, bytes: Option<u64>) {
        self.tunnel
            .with(|endpoint| endpoint.report_upload(self.key, bytes));
    }

    /// Breaks the body off behind the data that was sent, with the code of the error.
    pub fn break_off(&self, code: &'static str) -> Result<(), Closed> {
        self.tunnel
            .with(|endpoint| endpoint.break_off(self.key, code))
    }

    /// Charges the memory of the stream to `share` from now on. Changes nothing and returns false
    /// if that has no room.
    #[must_use]
    pub fn charge_to(&self, share: &Rc<Share>) -> bool {
        self.tunnel
            .with(|endpoint| endpoint.charge_to(self.key, share))
    }

    /// Ends both directions at once and discards what waits in them.
    pub fn reset(&self) {
        self.tunnel.with(|endpoint| endpoint.reset(self.key, ""));
    }

    /// Resolves once the peer has reset the stream or the tunnel has ended.
    pub fn poll_reset(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.tunnel
            .with(|endpoint| endpoint.poll_reset(self.key, cx))
    }

    /// Whether the peer has reset the stream or the tunnel has ended.
    pub fn is_reset(&self) -> bool {
        self.tunnel.with(|endpoint| endpoint.is_reset(self.key))
    }
}

impl Drop for StreamSender {
    fn drop(&mut self) {
        self.tunnel.with(|endpoint| endpoint.drop_sender(self.key));
    }
}

/// Receiving half of a stream. Dropping it discards the rest of the peer's direction.
#[derive(Debug)]
pub struct StreamReceiver {
    tunnel: Tunnel,
    key: StreamKey,
}

impl StreamReceiver {
    /// The next part. A body that was cut off is an error after all data before it.
    pub fn poll_receive(&self, cx: &mut Context<'_>) -> Poll<Result<ReceivedPart, Closed>> {
        self.tunnel
            .with(|endpoint| endpoint.poll_receive(self.key, cx))
    }

    pub async fn receive(&self) -> Result<ReceivedPart, Closed> {
        std::future::poll_fn(|cx| self.poll_receive(cx)).await
    }

    /// The agent's report of the request body: see [`Endpoint::poll_uploaded`].
    pub fn poll_uploaded(&self, cx: &mut Context<'_>) -> Poll<Result<Option<u64>, Closed>> {
        self.tunnel
            .with(|endpoint| endpoint.poll_uploaded(self.key, cx))
    }

    /// Whether the peer's direction is complete and everything was received.
    pub fn is_done(&self) -> bool {
        self.tunnel.with(|endpoint| endpoint.is_received(self.key))
    }

    /// Whether the head of a request had END.
    pub fn ended_with_head(&self) -> bool {
        self.tunnel
            .with(|endpoint| endpoint.ended_with_head(self.key))
    }

    /// The share to which the memory of the stream is charged.
    pub fn share(&self) -> Rc<Share> {
        self.tunnel.with(|endpoint| endpoint.share_of(self.key))
    }

    /// Gives the peer credit for `bytes` that were relayed.
    pub fn release(&self, bytes: usize) {
        self.tunnel
            .with(|endpoint| endpoint.release(self.key, bytes));
    }
}

impl Drop for StreamReceiver {
    fn drop(&mut self) {
        self.tunnel
            .with(|endpoint| endpoint.drop_receiver(self.key));
    }
}
