//! A connected stream socket: the ring reports readiness, non-blocking `recv(2)` and `sendmsg(2)`
//! carry the bytes.
//!
//! Waiting for readiness needs no buffer, so an idle connection has none. A cancelled wait loses no
//! bytes. `sendmsg` takes the pieces of a message without a copy.
//! kernel-notes/readiness-or-completion.md has measurements.

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
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType,
};

use super::acknowledger::Acknowledger;
use super::buffers::Buffers;
use super::raw_fd::{self, TcpInfo};
use crate::runtime;

/// Reads in a row without a wait for readiness: bounds the share of a turn that one fast peer
/// takes.
const READS_PER_TURN: u8 = 16;

/// Room for one receive into a growing buffer, in bytes: at first, and after the peer has filled
/// it.
const RECEIVE_SMALL: usize = 8 * 1024;
const RECEIVE_LARGE: usize = 64 * 1024;

/// Pause before connecting again to a Unix socket whose queue of connections is full.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(10);

/// Bytes that are discarded between two turns of other tasks.
const DISCARDED_PER_TURN: usize = 64 * 1024;
/// Longest pause between two checks of the acknowledged bytes.
const ACKNOWLEDGED_PAUSE_MAX: Duration = Duration::from_millis(50);

/// A connected stream and its byte counts.
pub(super) struct Connected {
    pub(super) stream: TcpStream,
    /// Bytes that the kernel has accepted for sending.
    pub(super) sent: Cell<u64>,
    /// Bytes that have been read.
    pub(super) received: Cell<u64>,
    /// Most bytes of one system call.
    pub(super) send_at_once: Cell<usize>,
    /// See [`Closer::time_out`].
    has_timed_out: Cell<bool>,
}

impl Connected {
    /// The error of an operation that the kernel has failed with `error`.
    fn failed(&self, error: rustix::io::Errno) -> io::Error {
        if self.has_timed_out.get() {
            io::ErrorKind::TimedOut.into()
        } else {
            error.into()
        }
    }
}

impl AsFd for Connected {
    fn as_fd(&self) -> BorrowedFd<'_> {
        raw_fd::borrow(&self.stream)
    }
}

/// A connected, non-blocking stream socket on this thread's reactor.
pub struct Socket {
    connected: Rc<Connected>,
    read: RefCell<Wait>,
    write: RefCell<Wait>,
    /// The last read emptied the receive buffer: the next one waits for readiness first.
    drained: Cell<bool>,
    reads_in_a_row: Cell<u8>,
    /// Room of the next [`Self::poll_recv_buf`].
    room: Cell<usize>,
    /// Set on first use, so that most sockets need not read the clock.
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
    /// Wraps a connected stream. Sets `TCP_NODELAY` and close-on-exec, which monoio does not.
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
                has_timed_out: Cell::new(false),
            }),
            read: RefCell::default(),
            write: RefCell::default(),
            drained: Cell::new(true),
            reads_in_a_row: Cell::new(0),
            room: Cell::new(RECEIVE_SMALL),
            last_received: OnceCell::new(),
        }
    }

    /// Wraps a socket that another thread accepted.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        Self::new(TcpStream::from_std(std::net::TcpStream::from(fd))?)
    }

    /// Wraps a connected Unix socket. Methods that need TCP fail on it.
    pub fn from_unix(fd: OwnedFd) -> io::Result<Self> {
        // monoio's TCP type does all that is needed for a Unix socket too.
        let stream = std::net::TcpStream::from(fd);
        stream.set_nonblocking(true)?;
        Ok(Self::wrap(TcpStream::from_std(stream)?))
    }

    /// Converts the socket into a descriptor for another thread; `None` while a [`Closer`] or a
    /// wait refers to it.
    pub fn into_fd(self) -> Option<OwnedFd> {
        if self.read.borrow().0.is_some() || self.write.borrow().0.is_some() {
            return None;
        }
        Rc::try_unwrap(self.connected)
            .ok()
            .map(|connected| raw_fd::own(connected.stream))
    }

    /// Connects to `address`. Has no time limit: drop the future to cancel.
    ///
    /// `receive_buffer` bounds the kernel's receive buffer, in bytes as the kernel counts, from the
    /// first segment on, since an advertised window cannot shrink. `None` leaves it to autotuning.
    pub async fn connect(address: SocketAddr, receive_buffer: Option<usize>) -> io::Result<Self> {
        let Some(receive_buffer) = receive_buffer else {
            return Self::new(TcpStream::connect_addr(address).await?);
        };
        let socket = socket2::Socket::new(
            socket2::Domain::for_address(address),
            socket2::Type::STREAM,
            None,
        )?;
        socket.set_nonblocking(true)?;
        // The kernel doubles the value, for its overhead (socket(7)).
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

    /// Connects to the Unix socket at `path`: see [`Self::from_unix`].
    pub async fn connect_unix(path: &Path) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        loop {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let fd =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // Unlike TCP, this succeeds or fails at once.
            match rustix::net::connect(&fd, &address) {
                Ok(()) => return Self::from_unix(fd),
                Err(rustix::io::Errno::AGAIN) => runtime::sleep(QUEUE_FULL_PAUSE).await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Handle that ends this connection from another task of the thread.
    pub fn closer(&self) -> Closer {
        Closer(Rc::clone(&self.connected))
    }

    /// Time when bytes last arrived, shared with a task that watches the connection.
    pub fn last_received(&self) -> Rc<Cell<Instant>> {
        Rc::clone(
            self.last_received
                .get_or_init(|| Rc::new(Cell::new(Instant::now()))),
        )
    }

    /// Handle that reads the connection's state in the kernel from another task of the thread.
    pub fn gauge(&self) -> Gauge {
        Gauge(Rc::clone(&self.connected))
    }

    /// Handle that reads and bounds the connection's kernel buffers from another task of the
    /// thread.
    pub fn buffers(&self) -> Buffers {
        Buffers::new(Rc::clone(&self.connected))
    }

    /// Handle that makes the kernel acknowledge received bytes at once.
    pub fn acknowledger(&self) -> Acknowledger {
        Acknowledger::new(Rc::clone(&self.connected))
    }

    /// Bounds unsent bytes in the kernel, so that the choice of what to write next is made late
    /// (`TCP_NOTSENT_LOWAT`).
    pub fn limit_unsent(&self, bytes: u32) -> io::Result<()> {
        socket2::SockRef::from(self).set_tcp_notsent_lowat(bytes)
    }

    /// Makes the kernel detect a dead peer, with keep-alive probes while idle and
    /// `TCP_USER_TIMEOUT` while sent bytes are not acknowledged (RFC 5482).
    pub fn detect_dead_peer(&self, after: Duration) -> io::Result<()> {
        let socket = socket2::SockRef::from(self);
        let probes = socket2::TcpKeepalive::new()
            .with_time(after / 2)
            .with_interval(after / 4)
            .with_retries(2);
        socket.set_tcp_keepalive(&probes)?;
        socket.set_tcp_user_timeout(Some(after))
    }

    /// Makes the kernel probe an idle peer (RFC 9293 §3.8.4), to detect one that is gone: `probes`
    /// times at this interval, of whole seconds. Sets no time limit for bytes that a live peer is
    /// slow to take.
    pub fn keep_alive(&self, after: Duration, interval: Duration, probes: u32) -> io::Result<()> {
        let probes = socket2::TcpKeepalive::new()
            .with_time(after)
            .with_interval(interval)
            .with_retries(probes);
        socket2::SockRef::from(self).set_tcp_keepalive(&probes)
    }

    /// Makes dropping the socket send a reset: the peer notices at once, even if it does not read
    /// what was sent.
    pub fn reset_when_dropped(&self) {
        // Fails only if the connection has ended.
        let _ = socket2::SockRef::from(self).set_linger(Some(Duration::ZERO));
    }

    /// Waits until a read does not block: on bytes, the end of the stream or an error.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let connected = &self.connected;
        self.read.borrow_mut().poll(cx, || {
            let connected = Rc::clone(connected);
            async move { connected.stream.readable(false).await }
        })
    }

    /// Reads arrived bytes into `buffer`; `Ok(0)` is the end of the stream.
    pub fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        self.poll_recv_with(cx, buffer.len(), |socket| {
            rustix::net::recv(socket, &mut *buffer, RecvFlags::DONTWAIT)
                .map(|(_, received)| received)
        })
    }

    /// Reads with `recv`, which has room for `room` bytes, once bytes have arrived.
    fn poll_recv_with(
        &self,
        cx: &mut Context<'_>,
        room: usize,
        mut recv: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            if self.drained.get() {
                ready!(self.poll_readable(cx))?;
                self.drained.set(false);
                self.reads_in_a_row.set(0);
            }
            match recv(self.as_fd()) {
                Ok(0) if self.connected.has_timed_out.get() => {
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                Ok(received) => {
                    let in_a_row = self.reads_in_a_row.get() + 1;
                    self.reads_in_a_row.set(in_a_row);
                    self.connected
                        .received
                        .set(self.connected.received.get() + received as u64);
                    self.drained
                        .set(received < room || in_a_row >= READS_PER_TURN);
                    if let Some(last_received) = self.last_received.get() {
                        last_received.set(Instant::now());
                    }
                    return Poll::Ready(Ok(received));
                }
                Err(rustix::io::Errno::AGAIN) => self.drained.set(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(self.connected.failed(error))),
            }
        }
    }

    /// Makes the next read wait for readiness even if bytes have arrived, so that other tasks run
    /// first.
    pub fn end_turn(&self) {
        self.drained.set(true);
    }

    /// Appends arrived bytes to `buffer`; `Ok(0)` is the end of the stream. Reserves room in
    /// `buffer` only when bytes have arrived: little at first, more while the peer fills it.
    pub fn poll_recv_buf(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut BytesMut,
    ) -> Poll<io::Result<usize>> {
        let room = self.room.get();
        let received = ready!(self.poll_recv_with(cx, room, |socket| {
            raw_fd::recv_buf(socket, buffer, room)
        }))?;
        self.room.set(if received == room {
            RECEIVE_LARGE
        } else {
            RECEIVE_SMALL
        });
        Poll::Ready(Ok(received))
    }

    /// Whether neither bytes nor the end of the stream have arrived: an idle connection can be
    /// reused.
    pub fn is_quiet(&self) -> bool {
        let peeked = rustix::net::recv(
            self.as_fd(),
            &mut [0u8; 1][..],
            RecvFlags::DONTWAIT | RecvFlags::PEEK,
        );
        peeked.is_err_and(|error| error == rustix::io::Errno::AGAIN)
    }

    /// Sends as much of `pieces` as the kernel accepts now, without waiting; `WouldBlock` if it
    /// accepts nothing.
    pub fn try_send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let (pieces, most) = within(pieces, self.connected.send_at_once.get());
        loop {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = match pieces {
                // Cheaper than `sendmsg`, which reads a header and a list of pieces.
                [piece] => rustix::net::send(self.as_fd(), &piece[..piece.len().min(most)], flags),
                _ => rustix::net::sendmsg(
                    self.as_fd(),
                    pieces,
                    &mut SendAncillaryBuffer::default(),
                    flags,
                ),
            };
            match sent {
                Err(rustix::io::Errno::INTR) => {}
                Ok(sent) => {
                    self.connected
                        .sent
                        .set(self.connected.sent.get() + sent as u64);
                    return Ok(sent);
                }
                Err(error) => return Err(self.connected.failed(error)),
            }
        }
    }

    /// Bytes that the kernel has accepted for sending so far.
    pub fn sent(&self) -> u64 {
        self.connected.sent.get()
    }

    /// Waits until the kernel accepts bytes again or the connection fails.
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

    /// Waits until the peer's kernel has acknowledged all sent bytes or the connection has ended.
    /// Polls at growing intervals, since the kernel does not report acknowledgements.
    pub async fn acknowledged(&self) {
        let mut pause = Duration::from_millis(1);
        while raw_fd::tcp_info(self.as_fd()).is_ok_and(|info| !info.all_acknowledged) {
            runtime::sleep(pause).await;
            pause = (pause * 2).min(ACKNOWLEDGED_PAUSE_MAX);
        }
    }

    /// Ends the sending direction: the peer reads the end of the stream after the sent bytes.
    pub fn shutdown_write(&self) {
        self.closer().shutdown(Shutdown::Write);
    }
}

/// Returns the first pieces that have at most `most` bytes together, and at least one piece; the
/// caller cuts a single larger piece to `most` bytes.
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

/// Reads the state of a connection that another task reads from or writes to.
pub struct Gauge(Rc<Connected>);

impl Gauge {
    pub fn read(&self) -> io::Result<TcpInfo> {
        raw_fd::tcp_info(raw_fd::borrow(&self.0.stream))
    }
}

/// Ends a connection that another task reads from or writes to.
#[derive(Clone)]
pub struct Closer(Rc<Connected>);

impl Closer {
    /// Ends the reading direction: the owner reads the end of the stream and can still write.
    pub fn stop_reading(&self) {
        self.shutdown(Shutdown::Read);
    }

    /// Ends both directions: they fail for the owner at once.
    pub fn abort(&self) {
        self.shutdown(Shutdown::Both);
    }

    /// Ends both directions of a connection whose peer does not answer: they fail for the owner
    /// with [`io::ErrorKind::TimedOut`], as if the kernel had given up, once bytes that have
    /// arrived are read.
    pub fn time_out(&self) {
        self.0.has_timed_out.set(true);
        self.shutdown(Shutdown::Both);
    }

    /// Ends the sending direction, then discards received bytes until the peer ends its own
    /// direction, or sends nothing for `pause`. Closing with unread bytes would send a reset (RFC
    /// 1122 §4.2.2.13), and the peer might not receive the last sent bytes. Call this only after
    /// the owner has stopped reading, and limit the time: a peer can send for ever.
    pub async fn linger(&self, pause: Duration) {
        self.shutdown(Shutdown::Write);
        let mut discarded = 0;
        loop {
            match self.discard() {
                Ok(0) => return,
                Ok(received) => discarded += received,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if !matches!(
                        runtime::timeout(pause, self.0.stream.readable(false)).await,
                        Ok(Ok(()))
                    ) {
                        return;
                    }
                }
                Err(_) => return,
            }
            if discarded >= DISCARDED_PER_TURN {
                discarded = 0;
                runtime::yield_now().await;
            }
        }
    }

    /// Reads and discards arrived bytes. Not async: a future would contain the buffer.
    fn discard(&self) -> rustix::io::Result<usize> {
        let (_, received) = rustix::net::recv(
            raw_fd::borrow(&self.0.stream),
            &mut [0u8; 16 * 1024][..],
            RecvFlags::DONTWAIT,
        )?;
        Ok(received)
    }

    /// Smoothed round-trip time (RFC 6298); `None` before the first measurement.
    pub fn round_trip(&self) -> Option<Duration> {
        raw_fd::tcp_info(raw_fd::borrow(&self.0.stream))
            .ok()?
            .smoothed_rtt
    }

    /// Whether bytes have arrived that the owner has not read.
    pub fn has_unread(&self) -> bool {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        rustix::net::recv(raw_fd::borrow(&self.0.stream), &mut [0u8; 1][..], flags)
            .is_ok_and(|(_, received)| received > 0)
    }

    /// Whether the peer has ended its direction or the connection is lost, even if bytes before the
    /// end are unread.
    pub fn is_hung_up(&self) -> bool {
        self.polls(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    /// Whether both directions have ended or the connection is lost.
    pub fn is_broken(&self) -> bool {
        self.polls(PollFlags::HUP | PollFlags::ERR)
    }

    fn polls(&self, ended: PollFlags) -> bool {
        let mut watched = [PollFd::from_borrowed_fd(
            raw_fd::borrow(&self.0.stream),
            PollFlags::RDHUP,
        )];
        let no_time = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut watched, Some(&no_time)).is_ok_and(|_| watched[0].revents().intersects(ended))
    }

    fn shutdown(&self, direction: Shutdown) {
        // Fails only if the connection has ended.
        let _ = rustix::net::shutdown(raw_fd::borrow(&self.0.stream), direction);
    }
}
