//! The caller's end of the connection: bytes in memory, in pieces and with limits that the input
//! sets.

use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::frames::{Granted, Received};
use crate::http2::frame_meter::CallerStream;

/// The caller, and its end of the connection.
#[derive(Clone)]
pub(super) struct Caller(Rc<RefCell<State>>);

struct State {
    /// Bytes that the gateway has not read.
    unread: BytesMut,
    /// Most bytes that the gateway reads at once.
    piece: usize,
    /// Bytes that the caller still takes; `None` without a limit.
    room: Option<usize>,
    /// What the bytes for the gateway allow it to send.
    granted: Granted,
    received: Received,
    /// Bytes for the gateway.
    fed: usize,
    end: End,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    /// The caller has ended its direction.
    Sent,
    /// The connection is lost.
    Reset,
}

impl Caller {
    pub(super) fn new() -> Self {
        Self(Rc::new(RefCell::new(State {
            unread: BytesMut::new(),
            piece: usize::MAX,
            room: None,
            granted: Granted::default(),
            received: Received::default(),
            fed: 0,
            end: End::Open,
            reader: None,
            writer: None,
        })))
    }

    /// Sends bytes to the gateway.
    pub(super) fn send(&self, bytes: &[u8]) {
        self.act(|state| {
            if state.end == End::Open {
                state.unread.extend_from_slice(bytes);
                state.granted.note(bytes);
                state.fed += bytes.len();
            }
        });
    }

    pub(super) fn read_in_pieces_of(&self, bytes: usize) {
        self.act(|state| state.piece = bytes.max(1));
    }

    /// Takes this many further bytes from the gateway, and then no more; all of them with `None`.
    pub(super) fn take(&self, bytes: Option<usize>) {
        self.act(|state| state.room = bytes);
    }

    /// Ends the caller's direction.
    pub(super) fn end(&self) {
        self.act(|state| {
            if state.end == End::Open {
                state.end = End::Sent;
            }
        });
    }

    /// Loses the connection.
    pub(super) fn reset(&self) {
        self.act(|state| state.end = End::Reset);
    }

    /// Asserts that no more was sent than these steps allow: a multiple of the received frames and
    /// of the agent's data.
    pub(super) fn assert_bounded(&self, agent_sent: usize) {
        const PER_FRAME: usize = 2048;
        const AT_FIRST: usize = 16 * 1024;
        let state = self.0.borrow();
        let frames = state.granted.frames() + 1;
        let most = AT_FIRST + PER_FRAME * frames + 2 * agent_sent;
        let bytes = state.received.bytes();
        assert!(bytes <= most, "{bytes} bytes for {frames} frames");
    }

    fn act(&self, act: impl FnOnce(&mut State)) {
        let mut state = self.0.borrow_mut();
        act(&mut state);
        let tasks = [state.reader.take(), state.writer.take()];
        drop(state);
        tasks.into_iter().flatten().for_each(Waker::wake);
    }
}

impl CallerStream for Caller {
    fn unread(&self, bytes: &[u8]) {
        let mut state = self.0.borrow_mut();
        let later = std::mem::replace(&mut state.unread, BytesMut::from(bytes));
        state.unread.unsplit(later);
    }
}

impl AsyncRead for Caller {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.0.borrow_mut();
        if state.end == End::Reset {
            return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
        }
        if state.unread.is_empty() && state.end == End::Open {
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let length = state.unread.len().min(state.piece).min(buffer.remaining());
        buffer.put_slice(&state.unread[..length]);
        state.unread.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Caller {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.0.borrow_mut();
        if state.end == End::Reset {
            return Poll::Ready(Err(ErrorKind::ConnectionReset.into()));
        }
        let length = bytes.len().min(state.room.unwrap_or(usize::MAX));
        if length == 0 && !bytes.is_empty() {
            state.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if let Some(room) = &mut state.room {
            *room -= length;
        }
        let State {
            received, granted, ..
        } = &mut *state;
        received.take(&bytes[..length], granted);
        Poll::Ready(Ok(length))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
