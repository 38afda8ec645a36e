//! A connected stream socket: readiness comes from the ring, the bytes from `recv(2)` and `sendmsg(2)` that do not block.
//!
//! Waiting for readiness holds no buffer (an idle connection costs none), loses nothing when it is cancelled, and lets
//! `sendmsg` take the pieces of a message where they lie. kernel-notes/readiness-or-completion.md has the figures.

use std::cell::{Cell, OnceCell, RefCell};
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use monoio::net::TcpStream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType,
};

use super::buffers::Buffers;
use super::raw_fd::{self, TcpInfo};
use crate::runtime;

/// Reads in a row that may succeed without going back to the ring: bounds what one fast peer takes of a turn.
const READS_PER_TURN: u8 = 16;

/// Room for one receive into a growing buffer, in bytes: for a message, and for a stream that has filled that.
const RECEIVE_SMALL: usize = 8 * 1024;
const RECEIVE_LARGE: usize = 64 * 1024;

/// How soon a Unix socket whose queue of connections was full is tried again.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(10);

/// Longest time between two looks at what a peer has acknowledged.
const ACKNOWLEDGED_PAUSE_MAX: Duration = Duration::from_millis(50);

/// A connected stream and its byte counts.
pub(super) struct Connected {
    pub(super) stream: TcpStream,
    /// Bytes that the kernel has taken for sending.
    pub(super) sent: Cell<u64>,
    /// Bytes that were read.
    pub(super) received: Cell<u64>,
    /// Most bytes that the kernel is given at once.
    pub(super) send_at_once: Cell<usize>,
}

impl AsFd for Connected {
    fn as_fd(&self) -> BorrowedFd<'_> {
        raw_fd::borrow(&self.stream)
    }
}

/// A connected, non-blocking stream socket of this thread's reactor.
pub struct Socket {
    connected: Rc<Connected>,
    read: RefCell<Wait>,
    write: RefCell<Wait>,
    /// The last read took all there was: the next one waits for readiness before it tries.
    drained: Cell<bool>,
    reads_in_a_row: Cell<u8>,
    /// Room that [`Self::poll_recv_buf`] takes next.
    room: Cell<usize>,
    /// There once somebody asked for it: most sockets are spared reading the clock.
    last_received: OnceCell<Rc<Cell<Instant>>>,
}

/// A readiness wait that may be in flight.
#[derive(Default)]
struct Wait(Option<Pin<Box<dyn Future<Output = io::Result<()>>>>>);

impl Wait {
    fn poll<F>(&mut self, cx: &mut Context<'_>, start: impl FnOnce() -> F) -> Poll<io::Result<()>>
    where
        F: Future<Output = io::Result<()>> + 'static,
    {
        let wait = self.0.get_or_insert_with(|| Box::pin(start()));
        let result = ready!(wait.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(result)
    }
}

impl Socket {
    /// Takes over a connected stream: sets `TCP_NODELAY` and close-on-exec, neither of which monoio does.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        rustix::io::fcntl_setfd(raw_fd::borrow(&stream), rustix::io::FdFlags::CLOEXEC)?;
        Ok(Self::wrap(stream))
    }

    fn wrap(stream: TcpStream) -> Self {
        Self {
            connected: Rc::new(Connected {
                stream,
                sent: Cell::new(0),
                received: Cell::new(0),
                send_at_once: Cell::new(usize::MAX),
            }),
            read: RefCell::default(),
            write: RefCell::default(),
            drained: Cell::new(true),
            reads_in_a_row: Cell::new(0),
            room: Cell::new(RECEIVE_SMALL),
            last_received: OnceCell::new(),
        }
    }

    /// Takes over a socket that another thread accepted.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        Self::new(TcpStream::from_std(std::net::TcpStream::from(fd))?)
    }

    /// Gives the socket up, to hand it to another thread; `None` while a [`Closer`] or a wait still refers to it.
    pub fn into_fd(self) -> Option<OwnedFd> {
        if self.read.borrow().0.is_some() || self.write.borrow().0.is_some() {
            return None;
        }
        Rc::try_unwrap(self.connected).ok().map(|connected| raw_fd::own(connected.stream))
    }

    /// Connects to `address`. No time limit: the caller sets one by dropping the future.
    ///
    /// `receive_buffer` bounds the kernel's receive buffer, in bytes as the kernel counts, from the first segment on: the
    /// window that a peer was once told cannot be taken back. `None` leaves it to autotuning.
    pub async fn connect(address: SocketAddr, receive_buffer: Option<usize>) -> io::Result<Self> {
        let Some(receive_buffer) = receive_buffer else {
            return Self::new(TcpStream::connect_addr(address).await?);
        };
        let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        // The kernel doubles the value, for its bookkeeping (socket(7)).
        socket.set_recv_buffer_size(receive_buffer / 2)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let stream = TcpStream::from_std(std::net::TcpStream::from(socket))?;
        stream.writable(false).await?;
        match socket2::SockRef::from(&raw_fd::borrow(&stream)).take_error()? {
            Some(error) => Err(error),
            None => Self::new(stream),
        }
    }

    /// Connects to the Unix socket at `path`. What is of TCP alone fails on it or, like
    /// [`Self::was_acknowledged_beyond`], answers with caution.
    pub async fn connect_unix(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        loop {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // Does not wait, unlike with TCP: it succeeds or fails at once.
            match rustix::net::connect(&fd, &address) {
                // monoio has a type for Unix sockets too; this one does all that is needed, whatever the family.
                Ok(()) => return Ok(Self::wrap(TcpStream::from_std(std::net::TcpStream::from(fd))?)),
                Err(rustix::io::Errno::AGAIN) => runtime::sleep(QUEUE_FULL_PAUSE).await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A handle that can end this connection from elsewhere on the same thread.
    pub fn closer(&self) -> Closer {
        Closer(Rc::clone(&self.connected))
    }

    /// When bytes last arrived; shared, so that a watchdog can look without the socket.
    pub fn last_received(&self) -> Rc<Cell<Instant>> {
        Rc::clone(self.last_received.get_or_init(|| Rc::new(Cell::new(Instant::now()))))
    }

    /// What the kernel says about this connection, to ask from elsewhere on the same thread.
    pub fn gauge(&self) -> Gauge {
        Gauge(Rc::clone(&self.connected))
    }

    /// What the kernel holds for this connection, to ask and to bound from elsewhere on the same thread.
    pub fn buffers(&self) -> Buffers {
        Buffers::new(Rc::clone(&self.connected))
    }

    /// Takes no more for sending while `bytes` that the network has not taken yet wait in the kernel: what is written
    /// next is decided as late as that.
    pub fn limit_unsent(&self, bytes: u32) -> io::Result<()> {
        socket2::SockRef::from(self).set_tcp_notsent_lowat(bytes)
    }

    /// Lets the kernel find a dead peer: keep-alive probes while idle, `TCP_USER_TIMEOUT` while data is unacknowledged
    /// (RFC 5482).
    pub fn detect_dead_peer(&self, after: Duration) -> io::Result<()> {
        let socket = socket2::SockRef::from(self);
        let probes = socket2::TcpKeepalive::new().with_time(after / 2).with_interval(after / 4).with_retries(2);
        socket.set_tcp_keepalive(&probes)?;
        socket.set_tcp_user_timeout(Some(after))
    }

    /// Has the kernel probe an idle peer (RFC 9293 §3.8.4), so that one that vanished is noticed. Data that a living
    /// peer is slow to take has no time limit.
    pub fn keep_alive(&self, after: Duration) -> io::Result<()> {
        let probes = socket2::TcpKeepalive::new().with_time(after).with_interval(after / 4).with_retries(4);
        socket2::SockRef::from(self).set_tcp_keepalive(&probes)
    }

    /// Makes the end of this socket a reset: the peer learns of it at once, also where it does not read what was sent.
    pub fn reset_when_dropped(&self) {
        // Fails only when the connection is gone already.
        let _ = socket2::SockRef::from(self).set_linger(Some(Duration::ZERO));
    }

    /// Waits until a read would not block: there are bytes, the end of the stream, or an error.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let connected = &self.connected;
        self.read.borrow_mut().poll(cx, || {
            let connected = Rc::clone(connected);
            async move { connected.stream.readable(false).await }
        })
    }

    /// Reads what is there into `buffer`; `Ok(0)` is the end of the stream.
    pub fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            if self.drained.get() {
                ready!(self.poll_readable(cx))?;
                self.drained.set(false);
                self.reads_in_a_row.set(0);
            }
            match rustix::net::recv(self.as_fd(), &mut *buffer, RecvFlags::DONTWAIT) {
                Ok((_, received)) => {
                    let in_a_row = self.reads_in_a_row.get() + 1;
                    self.reads_in_a_row.set(in_a_row);
                    self.connected.received.set(self.connected.received.get() + received as u64);
                    self.drained.set(received < buffer.len() || in_a_row >= READS_PER_TURN);
                    if let Some(last_received) = self.last_received.get() {
                        last_received.set(Instant::now());
                    }
                    return Poll::Ready(Ok(received));
                }
                Err(rustix::io::Errno::AGAIN) => self.drained.set(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// Has the next read wait for readiness, even if there is more: others come first.
    pub fn end_turn(&self) {
        self.drained.set(true);
    }

    /// Appends what is there to `buffer`; `Ok(0)` is the end of the stream. Takes room in `buffer` only once there is
    /// something to put into it: little at first, more while the peer keeps filling it.
    pub fn poll_recv_buf(&self, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<usize>> {
        if self.drained.get() {
            ready!(self.poll_readable(cx))?;
            self.drained.set(false);
            self.reads_in_a_row.set(0);
        }
        let (filled, room) = (buffer.len(), self.room.get());
        buffer.resize(filled + room, 0);
        let result = self.poll_recv(cx, &mut buffer[filled..]);
        let received = if let Poll::Ready(Ok(received)) = result { received } else { 0 };
        buffer.truncate(filled + received);
        self.room.set(if received == room { RECEIVE_LARGE } else { RECEIVE_SMALL });
        result
    }

    /// Whether nothing has arrived, not even the end: an idle connection that can be used again.
    pub fn is_quiet(&self) -> bool {
        let peeked = rustix::net::recv(self.as_fd(), &mut [0u8; 1][..], RecvFlags::DONTWAIT | RecvFlags::PEEK);
        peeked.is_err_and(|error| error == rustix::io::Errno::AGAIN)
    }

    /// Sends as much of `pieces` as the kernel takes now, without waiting. `WouldBlock` when it takes nothing.
    pub fn try_send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let (pieces, most) = within(pieces, self.connected.send_at_once.get());
        loop {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = match pieces {
                // Spares the kernel reading the message's header and the list of pieces.
                [piece] => rustix::net::send(self.as_fd(), &piece[..piece.len().min(most)], flags),
                _ => rustix::net::sendmsg(self.as_fd(), pieces, &mut SendAncillaryBuffer::default(), flags),
            };
            match sent {
                Err(rustix::io::Errno::INTR) => {}
                Ok(sent) => {
                    self.connected.sent.set(self.connected.sent.get() + sent as u64);
                    return Ok(sent);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Bytes that the kernel has taken for sending so far.
    pub fn sent(&self) -> u64 {
        self.connected.sent.get()
    }

    /// Waits until the kernel takes bytes again (or the connection failed).
    pub fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let connected = &self.connected;
        self.write.borrow_mut().poll(cx, || {
            let connected = Rc::clone(connected);
            async move { connected.stream.writable(false).await }
        })
    }

    /// Sends all of `pieces`, in order.
    pub async fn send_all(&self, pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut rest = pieces;
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            match self.try_send(rest) {
                Ok(sent) => IoSlice::advance_slices(&mut rest, sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::future::poll_fn(|cx| self.poll_writable(cx)).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Whether the peer's kernel has acknowledged more than the first `sent` bytes of what was sent on this connection.
    /// If it cannot be told, it may have.
    pub fn was_acknowledged_beyond(&self, sent: u64) -> bool {
        const SYN: u64 = 1;
        raw_fd::tcp_info(self.as_fd()).ok().is_none_or(|info| info.acknowledged > sent + SYN)
    }

    /// Resolves when the peer's kernel has acknowledged all that was sent, or the connection is gone. The kernel reports
    /// that to no waiter: it is asked at growing intervals.
    pub async fn acknowledged(&self) {
        let mut pause = Duration::from_millis(1);
        while raw_fd::tcp_info(self.as_fd()).is_ok_and(|info| !info.all_acknowledged) {
            runtime::sleep(pause).await;
            pause = (pause * 2).min(ACKNOWLEDGED_PAUSE_MAX);
        }
    }

    /// Ends the sending direction: the peer reads the end of the stream after what was sent.
    pub fn shutdown_write(&self) {
        self.closer().shutdown(Shutdown::Write);
    }
}

/// The pieces that are at most `most` bytes together, and at least one: of a first one that is larger, `most` bytes are
/// to be taken.
fn within<'a, 'b>(pieces: &'a [IoSlice<'b>], most: usize) -> (&'a [IoSlice<'b>], usize) {
    let mut total = 0;
    let count = pieces.iter().take_while(|piece| {
        total += piece.len();
        total <= most
    });
    (&pieces[..count.count().max(1).min(pieces.len())], most)
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connected.as_fd()
    }
}

/// Measures a connection that another task is reading from or writing to.
pub struct Gauge(Rc<Connected>);

impl Gauge {
    pub fn read(&self) -> io::Result<TcpInfo> {
        raw_fd::tcp_info(raw_fd::borrow(&self.0.stream))
    }
}

/// Ends a connection that another task is reading from or writing to.
#[derive(Clone)]
pub struct Closer(Rc<Connected>);

impl Closer {
    /// The owner reads the end of the stream, and can still write what it has to say.
    pub fn stop_reading(&self) {
        self.shutdown(Shutdown::Read);
    }

    /// Both directions fail at once.
    pub fn abort(&self) {
        self.shutdown(Shutdown::Both);
    }

    /// Ends our direction, then reads on and throws away until the peer has ended its own, or `most` bytes: with bytes
    /// unread, closing is a reset (RFC 1122 §4.2.2.13), and the peer may never see what was sent to it last. For when
    /// nobody else reads any more.
    pub async fn linger(&self, most: usize) {
        self.shutdown(Shutdown::Write);
        let mut discarded = 0;
        while discarded < most {
            match self.discard() {
                Ok(0) => return,
                Ok(received) => discarded += received,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) if self.0.stream.readable(false).await.is_ok() => {}
                Err(_) => return,
            }
        }
    }

    /// Reads what is there and throws it away. Not part of a future, which would have room for the buffer.
    fn discard(&self) -> rustix::io::Result<usize> {
        let (_, received) =
            rustix::net::recv(raw_fd::borrow(&self.0.stream), &mut [0u8; 16 * 1024][..], RecvFlags::DONTWAIT)?;
        Ok(received)
    }

    /// Round trip of late, as the kernel has measured it (RFC 6298); `None` before the first.
    pub fn round_trip(&self) -> Option<Duration> {
        raw_fd::tcp_info(raw_fd::borrow(&self.0.stream)).ok()?.smoothed_rtt
    }

    /// Whether bytes have arrived that the owner has not read yet.
    pub fn has_unread(&self) -> bool {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        rustix::net::recv(raw_fd::borrow(&self.0.stream), &mut [0u8; 1][..], flags)
            .is_ok_and(|(_, received)| received > 0)
    }

    /// Whether the peer has ended its direction or lost the connection, seen past bytes that nobody has read.
    pub fn is_hung_up(&self) -> bool {
        self.polls(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    /// Whether both directions are ended, or the connection is lost.
    pub fn is_broken(&self) -> bool {
        self.polls(PollFlags::HUP | PollFlags::ERR)
    }

    fn polls(&self, ended: PollFlags) -> bool {
        let mut watched = [PollFd::from_borrowed_fd(raw_fd::borrow(&self.0.stream), PollFlags::RDHUP)];
        let no_time = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut watched, Some(&no_time)).is_ok_and(|_| watched[0].revents().intersects(ended))
    }

    fn shutdown(&self, direction: Shutdown) {
        // Fails only when the peer is gone already, which is what was wanted.
        let _ = rustix::net::shutdown(raw_fd::borrow(&self.0.stream), direction);
    }
}
