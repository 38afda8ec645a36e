//! Conversion of raw file descriptors into borrowed and owned ones, the socket options that no safe
//! crate knows, and receives into memory that is not initialized.
#![allow(
    unsafe_code,
    reason = "monoio's sockets implement AsRawFd/IntoRawFd but neither AsFd nor Into<OwnedFd>; \
              TCP_INFO, SO_MEMINFO and TCP_RTO_MAX_MS need libc; BytesMut has no safe way to \
              receive into memory that is not initialized"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{BufMut, BytesMut};
use monoio::net::TcpStream;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::RecvFlags;

use super::buffers::BufferUse;

/// Borrows the descriptor of `stream`.
pub(crate) fn borrow(stream: &TcpStream) -> BorrowedFd<'_> {
    // SAFETY: the stream owns the descriptor and stays borrowed for the lifetime of the result.
    unsafe { BorrowedFd::borrow_raw(stream.as_raw_fd()) }
}

/// Takes the descriptor out of `stream`, for another thread.
///
/// monoio panics if an operation is in flight on the stream: call this only after every wait on it
/// has ended.
pub fn own(stream: TcpStream) -> OwnedFd {
    // SAFETY: into_raw_fd gives up ownership, which passes to the OwnedFd.
    unsafe { OwnedFd::from_raw_fd(stream.into_raw_fd()) }
}

/// Whether the descriptors that were passed to this process have an owner.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Takes the sockets that the service manager passed to this process, with their names
/// (sd_listen_fds(3)). Returns none if inherited sockets were taken before.
pub fn service_manager_sockets() -> io::Result<Vec<(OwnedFd, String)>> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let sockets = sd_notify::listen_fds_with_names()?;
    // SAFETY: the service manager passed the descriptors open and for this process to own, and
    // `TAKEN` lets only one call take them.
    Ok(sockets
        .map(|(fd, name)| (unsafe { OwnedFd::from_raw_fd(fd) }, name))
        .collect())
}

/// Takes the sockets that the parent process left open for this one, with their names. `list` has
/// `NAME=NUMBER` for each, separated by colons. Returns none if inherited sockets were taken
/// before.
pub fn inherited_sockets(list: &str) -> io::Result<Vec<(OwnedFd, String)>> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    list.split(':').map(inherited).collect()
}

/// Takes the descriptor of `NAME=NUMBER`. Call this once for each number.
fn inherited(entry: &str) -> io::Result<(OwnedFd, String)> {
    let invalid = || {
        let message = format!("no inherited descriptor: {entry:?}");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    let (name, number) = entry.split_once('=').ok_or_else(invalid)?;
    let number = number.parse().ok().filter(|number: &RawFd| *number > 2);
    let number = number.ok_or_else(invalid)?;
    // SAFETY: the number is not -1; fcntl(2) fails for one that is not open.
    let passed = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl_setfd(passed, FdFlags::CLOEXEC).map_err(|_| invalid())?;
    // SAFETY: the descriptor is open. The parent process left it open for this process to own, and
    // only one call takes it.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    Ok((fd, name.to_owned()))
}

/// Appends arrived bytes to `buffer`, at most `room`, without a wait. Does not initialize the room
/// first: most messages are much shorter.
pub(super) fn recv_buf(
    socket: BorrowedFd<'_>,
    buffer: &mut BytesMut,
    room: usize,
) -> rustix::io::Result<usize> {
    buffer.reserve(room);
    let spare = &mut buffer.spare_capacity_mut()[..room];
    let (_, received) = rustix::net::recv(socket, spare, RecvFlags::DONTWAIT)?;
    // SAFETY: the kernel has written `received` bytes behind those of `buffer`, at most `room`.
    unsafe { buffer.advance_mut(received) };
    Ok(received)
}

/// State of a TCP connection in the kernel.
#[derive(Debug, Clone, Copy)]
pub struct TcpInfo {
    /// Sent bytes that the peer's kernel has acknowledged (Linux 4.2). The SYN of a connecting
    /// socket counts as one.
    pub acknowledged: u64,
    /// Whether all sent bytes are acknowledged (Linux 4.6).
    pub all_acknowledged: bool,
    /// The peer's kernel owes an acknowledgement: of sent bytes, or of a probe of an idle
    /// connection or of a closed window.
    pub awaits_acknowledgement: bool,
    /// Time since the last acknowledgement, in whole milliseconds. Every segment of the peer is
    /// one.
    pub since_acknowledgement: Duration,
    /// Bytes that have arrived in order, read or not (Linux 4.2).
    pub received: u64,
    /// Shortest round-trip time of the last minutes (Linux 4.6); `None` before the first
    /// measurement.
    pub shortest_rtt: Option<Duration>,
    /// Smoothed round-trip time (RFC 6298); `None` before the first measurement.
    pub smoothed_rtt: Option<Duration>,
}

/// Reads `TCP_INFO` of `socket`.
pub(crate) fn tcp_info(socket: BorrowedFd<'_>) -> io::Result<TcpInfo> {
    // SAFETY: all-zero is a valid value of this struct of integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).unwrap_or(0);
    // SAFETY: `info` is writable for `length` bytes, which getsockopt does not exceed; the
    // descriptor is open while it is borrowed.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(TcpInfo {
        acknowledged: info.tcpi_bytes_acked,
        all_acknowledged: info.tcpi_unacked == 0 && info.tcpi_notsent_bytes == 0,
        awaits_acknowledgement: info.tcpi_unacked > 0 || info.tcpi_probes > 0,
        since_acknowledgement: Duration::from_millis(info.tcpi_last_ack_recv.into()),
        received: info.tcpi_bytes_received,
        // All bits are set before the first measurement.
        shortest_rtt: Some(info.tcpi_min_rtt)
            .filter(|rtt| (1..u32::MAX).contains(rtt))
            .map(|rtt| Duration::from_micros(rtt.into())),
        smoothed_rtt: Some(info.tcpi_rtt)
            .filter(|rtt| *rtt > 0)
            .map(|rtt| Duration::from_micros(rtt.into())),
    })
}

/// Bounds the time until the kernel sends unacknowledged bytes of a socket again, which otherwise
/// doubles with each try: a connection goes on soon after a cut (`TCP_RTO_MAX_MS`, Linux 6.15).
pub fn retransmit_within(socket: &impl AsFd, most: Duration) -> io::Result<()> {
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    let millis = u32::try_from(most.as_millis()).unwrap_or(u32::MAX);
    // SAFETY: `millis` is readable for four bytes; the descriptor is open while it is borrowed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            TCP_RTO_MAX_MS,
            (&raw const millis).cast(),
            4,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Indexes into the numbers of `SO_MEMINFO` (linux/sock_diag.h): bytes received, limits of the
/// receive buffer and of the send buffer, bytes reserved, bytes queued for sending, bytes received
/// while the socket was in use.
const RECEIVED: usize = 0;
const RECEIVE_LIMIT: usize = 1;
const SEND_LIMIT: usize = 3;
const RESERVED: usize = 4;
const QUEUED: usize = 5;
const BACKLOG: usize = 7;
const NUMBERS: usize = 9;

/// Reads `SO_MEMINFO` of `socket`.
pub(crate) fn memory_info(socket: BorrowedFd<'_>) -> io::Result<BufferUse> {
    let mut numbers = [0u32; NUMBERS];
    let mut length = libc::socklen_t::try_from(size_of_val(&numbers)).unwrap_or(0);
    // SAFETY: `numbers` is writable for `length` bytes, which getsockopt does not exceed; the
    // descriptor is open while it is borrowed.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            numbers.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let number = |at: usize| numbers[at] as usize;
    Ok(BufferUse {
        to_send: number(QUEUED),
        to_read: number(RECEIVED) + number(BACKLOG),
        reserved: number(RESERVED),
        receive_limit: number(RECEIVE_LIMIT),
        send_limit: number(SEND_LIMIT),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::block_on;
    use std::io::{Read, Write};

    #[test]
    fn an_owned_descriptor_stays_connected() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let fd = block_on(async {
            let stream = TcpStream::connect_addr(address).await.unwrap();
            assert_eq!(borrow(&stream).as_raw_fd(), stream.as_raw_fd());
            own(stream)
        });
        std::net::TcpStream::from(fd).write_all(b"x").unwrap();
        let mut byte = [0];
        listener.accept().unwrap().0.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn inherited_descriptors_have_names_and_are_closed_on_exec() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        fcntl_setfd(&socket, FdFlags::empty()).unwrap();
        let number = socket.into_raw_fd();
        let (fd, name) = inherited(&format!("gw-admin={number}")).unwrap();
        assert_eq!(name, "gw-admin");
        let flags = rustix::io::fcntl_getfd(&fd).unwrap();
        assert!(flags.contains(FdFlags::CLOEXEC));
        let socket = std::net::TcpListener::from(fd);
        assert_eq!(socket.local_addr().unwrap(), address);
        for entry in [
            "",
            "gw-admin",
            "gw-admin=",
            "gw-admin=-1",
            "gw-admin=1",
            "gw-admin=99999",
        ] {
            let error = inherited(entry).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{entry}");
        }
    }

    #[test]
    fn acknowledged_bytes_include_the_syn() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(tcp_info(stream.as_fd()).unwrap().acknowledged, 1);
        stream.write_all(b"12345").unwrap();
        let mut accepted = listener.accept().unwrap().0;
        accepted.read_exact(&mut [0; 5]).unwrap();
        // The reply carries the acknowledgement.
        accepted.write_all(b"x").unwrap();
        stream.read_exact(&mut [0; 1]).unwrap();
        let info = tcp_info(stream.as_fd()).unwrap();
        assert_eq!(info.received, 1);
        assert!(info.shortest_rtt.unwrap() < Duration::from_secs(30));
        assert!(info.smoothed_rtt.unwrap() < Duration::from_secs(30));
        assert_eq!(tcp_info(stream.as_fd()).unwrap().acknowledged, 6);
        // A peer that has closed acknowledges no further bytes.
        drop(accepted);
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
        stream.write_all(b"late").unwrap();
        assert_eq!(tcp_info(stream.as_fd()).unwrap().acknowledged, 6);
    }
}
