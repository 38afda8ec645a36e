//! Readiness, and the state that the product asks for.

use std::net::SocketAddr;
use std::task::{Context, Poll};

use libc::c_int;

use super::{Errno, Measure, Result, with};

/// Waits until a read does not block.
pub fn poll_readable(fd: c_int, cx: &mut Context<'_>) -> Poll<Result<()>> {
    with(|sockets, _| {
        let socket = match sockets.of(fd) {
            Ok(socket) => socket,
            Err(error) => return Poll::Ready(Err(error)),
        };
        if socket.is_readable() {
            return Poll::Ready(Ok(()));
        }
        socket.readers.retain(|waker| !waker.will_wake(cx.waker()));
        socket.readers.push(cx.waker().clone());
        Poll::Pending
    })
}

/// Waits until a write does not block, or the socket is connected.
pub fn poll_writable(fd: c_int, cx: &mut Context<'_>) -> Poll<Result<()>> {
    with(|sockets, _| {
        let socket = match sockets.of(fd) {
            Ok(socket) => socket,
            Err(error) => return Poll::Ready(Err(error)),
        };
        if socket.is_writable() {
            return Poll::Ready(Ok(()));
        }
        socket.writers.retain(|waker| !waker.will_wake(cx.waker()));
        socket.writers.push(cx.waker().clone());
        Poll::Pending
    })
}

/// Events of poll(2) that are the case now.
pub(crate) fn poll_events(fd: c_int) -> Result<i16> {
    with(|sockets, _| {
        let socket = sockets.of(fd)?;
        let mut events = 0;
        if socket.is_readable() {
            events |= libc::POLLIN;
        }
        if socket.is_writable() {
            events |= libc::POLLOUT;
        }
        let has_ended = socket.peer_has_ended || socket.stopped_reading;
        if has_ended || socket.is_broken {
            events |= libc::POLLRDHUP;
        }
        if (has_ended && socket.has_ended) || socket.is_broken {
            events |= libc::POLLHUP;
        }
        if socket.error.is_some() {
            events |= libc::POLLERR;
        }
        Ok(events)
    })
}

/// The error that getsockopt(2) gives for `SO_ERROR`; 0 for none.
pub fn take_error(fd: c_int) -> Result<Errno> {
    with(|sockets, _| Ok(sockets.of(fd)?.take_error().unwrap_or(0)))
}

/// Addresses of the socket and of its peer.
pub fn addresses(fd: c_int) -> Result<(SocketAddr, SocketAddr)> {
    with(|sockets, _| sockets.of(fd).map(|socket| (socket.local, socket.remote)))
}

pub(crate) fn is_unix(fd: c_int) -> bool {
    with(|sockets, _| sockets.of(fd).is_ok_and(|socket| socket.is_unix))
}

pub(crate) fn is_nonblocking(fd: c_int) -> Result<bool> {
    with(|sockets, _| Ok(sockets.of(fd)?.is_nonblocking))
}

pub(crate) fn set_nonblocking(fd: c_int, is_nonblocking: bool) -> Result<()> {
    with(|sockets, _| {
        sockets.of(fd)?.is_nonblocking = is_nonblocking;
        Ok(())
    })
}

/// State of a connection.
pub fn measure(fd: c_int) -> Result<Measure> {
    with(|sockets, _| {
        let socket = sockets.of(fd)?;
        Ok(Measure {
            unsent: socket.unsent.len(),
            in_flight: socket.in_flight,
            unread: socket.unread.len(),
            send_limit: socket.send_limit,
            receive_limit: socket.receive_limit,
            acknowledged: socket.acknowledged,
            received: socket.received,
            round_trip: socket.round_trip,
        })
    })
}
