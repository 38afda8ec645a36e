//! A backend in memory, for benchmarks: answers every request with the same response.

use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use gw_shared::net::Socket;

/// Most bytes of one receive, as of a socket that has much to receive.
const RECEIVE: usize = 64 * 1024;

/// A connection to the backend.
pub(crate) struct Canned {
    /// Answers questions about the connection. Carries no bytes.
    socket: Socket,
    response: Bytes,
    /// Bytes of the body of each request. The body has a `Content-Length`.
    body_length: usize,
    /// Bytes of the current request's body that were not sent yet; `None` before its head.
    missing: Cell<Option<usize>>,
    /// Part of the current response that was not received yet.
    unread: RefCell<Bytes>,
    reader: Cell<Option<Waker>>,
}

impl Canned {
    pub(crate) fn new(socket: Socket, response: Bytes, body_length: usize) -> Self {
        let missing = Cell::default();
        let unread = RefCell::default();
        let reader = Cell::default();
        Self {
            socket,
            response,
            body_length,
            missing,
            unread,
            reader,
        }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.socket
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.unread.borrow().is_empty()
    }

    /// Takes a piece of a request. The head is the first piece.
    pub(super) fn send(&self, pieces: &[IoSlice<'_>]) {
        let sent: usize = pieces.iter().map(|piece| piece.len()).sum();
        let missing = self
            .missing
            .take()
            .map_or(self.body_length, |missing| missing.saturating_sub(sent));
        if missing > 0 {
            self.missing.set(Some(missing));
            return;
        }
        self.unread.replace(self.response.clone());
        self.reader.take().into_iter().for_each(Waker::wake);
    }

    /// Appends bytes of the response to `buffer`.
    pub(super) fn poll_recv_buf(
        &self,
        cx: &Context<'_>,
        buffer: &mut BytesMut,
    ) -> Poll<std::io::Result<usize>> {
        let mut unread = self.unread.borrow_mut();
        if unread.is_empty() {
            self.reader.set(Some(cx.waker().clone()));
            return Poll::Pending;
        }
        let length = unread.len().min(RECEIVE);
        buffer.extend_from_slice(&unread.split_to(length));
        Poll::Ready(Ok(length))
    }
}
