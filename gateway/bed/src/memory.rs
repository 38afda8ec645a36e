//! Connections in memory between a caller and the gateway's code.

use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http2::{Granted, Received};

/// A connection. The gateway reads and writes it; the caller uses the methods.
#[derive(Clone)]
pub struct Connection(Rc<RefCell<State>>);

struct State {
    to_gateway: BytesMut,
    from_gateway: BytesMut,
    /// Most bytes that the gateway reads at once.
    piece: usize,
    /// Bytes that the caller still takes.
    room: usize,
    end: End,
    reader: Option<Waker>,
    writer: Option<Waker>,
    caller: Option<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    /// The caller has ended its direction.
    Sent,
    /// The connection is lost.
    Reset,
}

impl Default for Connection {
    fn default() -> Self {
        Self(Rc::new(RefCell::new(State {
            to_gateway: BytesMut::new(),
            from_gateway: BytesMut::new(),
            piece: usize::MAX,
            room: usize::MAX,
            end: End::Open,
            reader: None,
            writer: None,
            caller: None,
        })))
    }
}

impl Connection {
    /// Sends bytes to the gateway. Returns whether the caller's direction was open.
    pub fn send(&self, bytes: &[u8]) -> bool {
        self.act(|state| {
            let is_open = state.end == End::Open;
            if is_open {
                state.to_gateway.extend_from_slice(bytes);
            }
            is_open
        })
    }

    /// Lets the gateway read no more than this at once.
    pub fn read_in_pieces_of(&self, bytes: usize) {
        self.act(|state| state.piece = bytes.max(1));
    }

    /// Takes this many further bytes from the gateway, and then no more; all of them with `None`.
    pub fn take(&self, bytes: Option<usize>) {
        self.act(|state| state.room = bytes.unwrap_or(usize::MAX));
    }

    /// Ends the caller's direction.
    pub fn end(&self) {
        self.act(|state| {
            if state.end == End::Open {
                state.end = End::Sent;
            }
        });
    }

    /// Loses the connection.
    pub fn reset(&self) {
        self.act(|state| state.end = End::Reset);
    }

    /// Appends what the gateway has sent to `received`, and waits if that is nothing.
    pub fn poll_receive(&self, cx: &mut Context<'_>, received: &mut BytesMut) -> Poll<()> {
        let mut state = self.0.borrow_mut();
        if state.from_gateway.is_empty() {
            state.caller = Some(cx.waker().clone());
            return Poll::Pending;
        }
        received.extend_from_slice(&state.from_gateway);
        state.from_gateway.clear();
        Poll::Ready(())
    }

    fn act<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.0.borrow_mut();
        let result = act(&mut state);
        let tasks = [state.reader.take(), state.writer.take()];
        drop(state);
        tasks.into_iter().flatten().for_each(Waker::wake);
        result
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.0.borrow_mut();
        if state.end == End::Reset {
            return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
        }
        if state.to_gateway.is_empty() && state.end == End::Open {
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let length = state.to_gateway.len().min(state.piece);
        let length = length.min(buffer.remaining());
        buffer.put_slice(&state.to_gateway[..length]);
        state.to_gateway.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.0.borrow_mut();
        if state.end == End::Reset {
            return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
        }
        let length = bytes.len().min(state.room);
        if length == 0 && !bytes.is_empty() {
            state.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if state.room != usize::MAX {
            state.room -= length;
        }
        state.from_gateway.extend_from_slice(&bytes[..length]);
        let caller = state.caller.take();
        drop(state);
        caller.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(length))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A caller of HTTP/2 that asserts that the gateway's frames are valid, and granted by what it has
/// sent.
#[derive(Default)]
pub struct CheckedCaller {
    /// The connection, for all but sending.
    pub connection: Connection,
    granted: Granted,
    received: Received,
}

impl CheckedCaller {
    /// Sends bytes to the gateway.
    pub fn send(&mut self, bytes: &[u8]) {
        if self.connection.send(bytes) {
            self.granted.note(bytes);
        }
    }

    /// Checks what the gateway has sent since the last call. Asserts that it was bounded: by a
    /// multiple of the caller's frames and of the bytes that the agent has sent.
    pub fn check(&mut self, agent_sent: usize) {
        const PER_FRAME: usize = 2048;
        const AT_FIRST: usize = 16 * 1024;
        let mut bytes = BytesMut::new();
        let cx = &mut Context::from_waker(Waker::noop());
        if self.connection.poll_receive(cx, &mut bytes).is_ready() {
            self.received.take(&bytes, &self.granted);
        }
        let frames = self.granted.frames() + 1;
        let most = AT_FIRST + PER_FRAME * frames + 2 * agent_sent;
        let bytes = self.received.bytes();
        assert!(bytes <= most, "{bytes} bytes for {frames} frames");
    }
}
