//! TCP sockets in memory, and pairs of Unix sockets.
//!
//! Each end has a bounded send buffer and a bounded receive buffer. Bytes move from one to the
//! other in segments, as far as the receiver's window allows. Close, shutdown and reset do what
//! tcp(7) and RFC 9293 say, as far as the product can see it.

mod connect;
mod effort;
mod ending;
mod options;
mod readiness;
mod transfer;
mod watch;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::Waker;

use libc::c_int;
use slab::Slab;

use crate::clock::{self, Nanos};
use crate::scheduler::Host;

pub use self::connect::{accept, connect, duplicate, pair};
pub use self::effort::{Effort, most_at_once};
pub(crate) use self::ending::close_all_of;
pub use self::ending::{close, shutdown};
pub(crate) use self::options::{Setting, set_option};
pub use self::readiness::{addresses, measure, poll_readable, poll_writable, take_error};
pub(crate) use self::readiness::{is_nonblocking, is_unix, poll_events, set_nonblocking};
pub use self::transfer::{receive, send};

/// An error number of errno(3).
pub type Errno = c_int;
pub type Result<T> = std::result::Result<T, Errno>;

/// Result of [`connect`] for a connection that is being opened.
pub const IN_PROGRESS: Errno = libc::EINPROGRESS;

/// Lowest descriptor of a simulated socket. The real kernel gives lower ones.
const FIRST_FD: c_int = 1 << 24;
/// First port of connecting sockets.
const FIRST_PORT: u16 = 32_768;

/// Limits of the buffers of a new socket, in bytes.
const SEND_BUFFER: usize = 256 * 1024;
const RECEIVE_BUFFER: usize = 256 * 1024;
/// Smallest buffers that a socket option can set.
const BUFFER_LEAST: usize = 4 * 1024;
/// Connections that wait for an accept.
const BACKLOG: usize = 1024;
/// Time after which a connecting socket gives up, and one whose bytes are not acknowledged, unless
/// an option says less (tcp_syn_retries, tcp_retries2).
const CONNECT_TIMEOUT: Nanos = 130_000_000_000;
const SEND_TIMEOUT: Nanos = 900_000_000_000;

/// Key of a socket. Keys are not used twice, so an event for a socket that is gone finds none.
type SocketId = u64;

/// What an option or a measurement sees of a connected socket.
#[derive(Debug, Clone, Copy, Default)]
pub struct Measure {
    pub unsent: usize,
    pub in_flight: usize,
    pub unread: usize,
    pub send_limit: usize,
    pub receive_limit: usize,
    pub acknowledged: u64,
    pub received: u64,
    pub round_trip: Option<Nanos>,
}

#[derive(Default)]
struct Options {
    unsent_limit: usize,
    user_timeout: Nanos,
    keep_alive: bool,
    /// Probes are scheduled.
    is_probed: bool,
    keep_idle: Nanos,
    keep_interval: Nanos,
    keep_count: u64,
    resets_on_close: bool,
}

enum Kind {
    /// Not connected.
    New,
    Listening {
        backlog: VecDeque<SocketId>,
        is_shut: bool,
    },
    Connecting,
    Connected,
}

struct Socket {
    kind: Kind,
    host: Host,
    local: SocketAddr,
    remote: SocketAddr,
    /// The other end, from the moment when it exists.
    peer: Option<SocketId>,
    /// Descriptors that refer to it; 0 after the last close.
    descriptors: usize,
    is_nonblocking: bool,
    /// Has no options of TCP.
    is_unix: bool,
    options: Options,

    unsent: VecDeque<u8>,
    in_flight: usize,
    unread: VecDeque<u8>,
    send_limit: usize,
    receive_limit: usize,
    /// No more bytes are accepted for sending; the end of the stream follows the unsent bytes.
    has_ended: bool,
    end_is_sent: bool,
    stopped_reading: bool,
    /// The peer's end of the stream has arrived.
    peer_has_ended: bool,
    /// The last descriptor was closed.
    is_closed: bool,
    /// Not reported yet.
    error: Option<Errno>,
    /// Reset, or timed out.
    is_broken: bool,

    acknowledged: u64,
    received: u64,
    last_heard: Nanos,
    probes_unanswered: u64,
    round_trip: Option<Nanos>,
    /// When the last segment to the peer arrives.
    arrival: Nanos,

    readers: Vec<Waker>,
    writers: Vec<Waker>,
}

#[derive(Default)]
struct Sockets {
    descriptors: Slab<SocketId>,
    /// Ordered, so that a walk over it has one order.
    sockets: BTreeMap<SocketId, Socket>,
    next_id: SocketId,
    next_port: u16,
}

thread_local! {
    static SOCKETS: RefCell<Sockets> = RefCell::default();
}

/// Wakers to wake once the sockets are not borrowed.
#[derive(Default)]
struct Wakes(Vec<Waker>);

impl Drop for Wakes {
    fn drop(&mut self) {
        for waker in self.0.drain(..) {
            waker.wake();
        }
    }
}

fn with<R>(call: impl FnOnce(&mut Sockets, &mut Wakes) -> R) -> R {
    let mut wakes = Wakes::default();
    SOCKETS.with_borrow_mut(|sockets| call(sockets, &mut wakes))
}

/// Whether `fd` is the descriptor of a simulated socket.
pub fn is_simulated(fd: c_int) -> bool {
    fd >= FIRST_FD
}

impl Sockets {
    fn id(&self, fd: c_int) -> Result<SocketId> {
        let index = usize::try_from(fd - FIRST_FD).map_err(|_| libc::EBADF)?;
        self.descriptors.get(index).copied().ok_or(libc::EBADF)
    }

    fn of(&mut self, fd: c_int) -> Result<&mut Socket> {
        let id = self.id(fd)?;
        self.sockets.get_mut(&id).ok_or(libc::EBADF)
    }

    fn insert(&mut self, socket: Socket) -> SocketId {
        self.next_id += 1;
        self.sockets.insert(self.next_id, socket);
        self.next_id
    }

    fn open(&mut self, id: SocketId) -> Result<c_int> {
        let socket = self.sockets.get_mut(&id).ok_or(libc::EBADF)?;
        socket.descriptors += 1;
        let index = self.descriptors.insert(id);
        c_int::try_from(index)
            .map(|index| FIRST_FD + index)
            .map_err(|_| libc::EMFILE)
    }

    fn free_port(&mut self) -> u16 {
        self.next_port = self.next_port.wrapping_add(1).max(FIRST_PORT);
        self.next_port
    }

    /// Listening sockets at `address`. Connections are spread over them (`SO_REUSEPORT`).
    fn listeners(&self, address: SocketAddr) -> Vec<SocketId> {
        let is_listener = |socket: &Socket| {
            matches!(
                &socket.kind,
                Kind::Listening { is_shut: false, backlog } if backlog.len() < BACKLOG
            ) && socket.local == address
                && socket.descriptors > 0
        };
        let all = self.sockets.iter();
        all.filter(|(_, socket)| is_listener(socket))
            .map(|(id, _)| *id)
            .collect()
    }
}

fn new_socket(host: Host) -> Socket {
    let nowhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
    Socket {
        kind: Kind::New,
        host,
        local: nowhere,
        remote: nowhere,
        peer: None,
        descriptors: 0,
        is_nonblocking: false,
        is_unix: false,
        options: Options::default(),
        unsent: VecDeque::new(),
        in_flight: 0,
        unread: VecDeque::new(),
        send_limit: SEND_BUFFER,
        receive_limit: RECEIVE_BUFFER,
        has_ended: false,
        end_is_sent: false,
        stopped_reading: false,
        peer_has_ended: false,
        is_closed: false,
        error: None,
        is_broken: false,
        acknowledged: 0,
        received: 0,
        last_heard: clock::elapsed(),
        probes_unanswered: 0,
        round_trip: None,
        arrival: 0,
        readers: Vec::new(),
        writers: Vec::new(),
    }
}

impl Socket {
    fn is_readable(&self) -> bool {
        match &self.kind {
            Kind::New => true,
            Kind::Connecting => false,
            Kind::Listening { backlog, is_shut } => !backlog.is_empty() || *is_shut,
            Kind::Connected => {
                !self.unread.is_empty()
                    || self.peer_has_ended
                    || self.stopped_reading
                    || self.is_broken
            }
        }
    }

    fn is_writable(&self) -> bool {
        match &self.kind {
            Kind::New => true,
            Kind::Connecting | Kind::Listening { .. } => false,
            // As `sk_stream_is_writeable`: a third of the buffer is free.
            Kind::Connected => {
                self.has_ended
                    || self.is_broken
                    || (self.room() >= (self.unsent.len() + self.in_flight) / 2 && self.room() > 0)
            }
        }
    }

    /// Bytes that the kernel accepts for sending now.
    fn room(&self) -> usize {
        if self.options.unsent_limit > 0 && self.unsent.len() >= self.options.unsent_limit {
            return 0;
        }
        self.send_limit
            .saturating_sub(self.unsent.len() + self.in_flight)
    }

    fn wake_all(&mut self, wakes: &mut Wakes) {
        wakes.0.append(&mut self.readers);
        wakes.0.append(&mut self.writers);
    }

    fn wake_ready(&mut self, wakes: &mut Wakes) {
        if self.is_readable() {
            wakes.0.append(&mut self.readers);
        }
        if self.is_writable() {
            wakes.0.append(&mut self.writers);
        }
    }

    fn breaks(&mut self, error: Errno, wakes: &mut Wakes) {
        if self.is_broken {
            return;
        }
        self.is_broken = true;
        self.error = Some(error);
        self.unsent.clear();
        self.in_flight = 0;
        self.wake_all(wakes);
    }

    fn take_error(&mut self) -> Option<Errno> {
        self.error.take()
    }
}

/// Opens a socket that is not connected.
pub fn socket(is_nonblocking: bool) -> Result<c_int> {
    with(|sockets, _| {
        let id = sockets.insert(Socket {
            is_nonblocking,
            ..new_socket(Host::current())
        });
        sockets.open(id)
    })
}

/// Opens a listening socket at `address`. Several can listen at one address.
pub fn listen(address: SocketAddr) -> Result<c_int> {
    with(|sockets, _| {
        let id = sockets.insert(Socket {
            kind: Kind::Listening {
                backlog: VecDeque::new(),
                is_shut: false,
            },
            local: address,
            is_nonblocking: true,
            ..new_socket(Host::current())
        });
        sockets.open(id)
    })
}

/// Sets the address of a socket before it connects. Port 0 is a free port.
pub fn bind(fd: c_int, address: SocketAddr) -> Result<()> {
    with(|sockets, _| {
        let port = match address.port() {
            0 => sockets.free_port(),
            port => port,
        };
        sockets.of(fd)?.local = SocketAddr::new(address.ip(), port);
        Ok(())
    })
}

/// Makes a bound socket a listening one.
pub fn start_listening(fd: c_int) -> Result<()> {
    with(|sockets, _| {
        sockets.of(fd)?.kind = Kind::Listening {
            backlog: VecDeque::new(),
            is_shut: false,
        };
        Ok(())
    })
}

/// Number of connections of a host that are open. Descriptors of a pair stay until the process
/// ends; it counts until it is shut down.
pub fn open_connections(host: Host) -> usize {
    with(|sockets, _| {
        let all = sockets.sockets.values();
        all.filter(|socket| {
            let is_shut = socket.is_unix && socket.has_ended && socket.stopped_reading;
            let is_connection = matches!(socket.kind, Kind::Connected) && !is_shut;
            socket.host == host && socket.descriptors > 0 && is_connection
        })
        .count()
    })
}

pub(crate) fn clear() {
    drop(SOCKETS.take());
    effort::clear();
}
