//! The functions of libc that the product calls, on simulated sockets and the virtual clock.
//!
//! The linker takes these definitions in place of those of the C library, for the whole program.
//! Each of them acts on simulated sockets only, or on threads that run a simulation; otherwise it
//! makes the system call.
#![allow(
    unsafe_code,
    reason = "the definitions of C functions get pointers, whose validity the caller guarantees as \
              for the C library"
)]

use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use libc::{
    c_char, c_int, c_long, c_uint, c_void, iovec, msghdr, nfds_t, pollfd, sockaddr, socklen_t,
    ssize_t, timespec,
};

use crate::sockets::{self, Errno, Setting, is_simulated};
use crate::{clock, random};

const NANOS: u64 = 1_000_000_000;
const MILLIS: u64 = 1_000_000;
/// Option of linux/tcp.h. The network keeps lost segments until a path is mended.
const TCP_RTO_MAX_MS: c_int = 44;

fn fail(error: Errno) -> c_int {
    // SAFETY: the C library gives a valid pointer to the error number of this thread.
    unsafe { *libc::__errno_location() = error };
    -1
}

fn done(result: sockets::Result<()>) -> c_int {
    result.map_or_else(fail, |()| 0)
}

fn count(result: sockets::Result<usize>) -> ssize_t {
    match result {
        Ok(count) => ssize_t::try_from(count).unwrap_or(ssize_t::MAX),
        Err(error) => fail(error) as ssize_t,
    }
}

fn descriptor(result: sockets::Result<c_int>) -> c_int {
    result.unwrap_or_else(fail)
}

/// Result of a system call, as functions that return `int` give it.
fn int(result: c_long) -> c_int {
    c_int::try_from(result).unwrap_or(-1)
}

/// # Safety
///
/// As clock_gettime(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(id: libc::clockid_t, time: *mut timespec) -> c_int {
    let Some(nanos) = clock::read(id) else {
        // SAFETY: the caller's pointers.
        return int(unsafe { libc::syscall(libc::SYS_clock_gettime, id, time) });
    };
    let value = timespec {
        tv_sec: i64::try_from(nanos / NANOS).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(nanos % NANOS).unwrap_or(0),
    };
    // SAFETY: the caller's pointer is valid for a write.
    unsafe { time.write(value) };
    0
}

/// # Safety
///
/// As getrandom(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut c_void, length: usize, flags: c_uint) -> ssize_t {
    if clock::now().is_none() {
        // SAFETY: the caller's pointers.
        return unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) } as ssize_t;
    }
    // SAFETY: the caller's buffer is valid for `length` bytes. It may be uninitialised, so it is
    // cleared first.
    let buffer = unsafe {
        buffer.cast::<u8>().write_bytes(0, length);
        std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length)
    };
    random::fill(buffer);
    count(Ok(length))
}

/// # Safety
///
/// As socket(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let is_stream = kind & 0xF == libc::SOCK_STREAM;
    if clock::now().is_none() || !is_stream || domain == libc::AF_UNIX {
        // SAFETY: no pointers.
        return int(unsafe { libc::syscall(libc::SYS_socket, domain, kind, protocol) });
    }
    descriptor(sockets::socket(kind & libc::SOCK_NONBLOCK != 0))
}

/// # Safety
///
/// As close(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if is_simulated(fd) {
        return done(sockets::close(fd));
    }
    // SAFETY: the caller owns the descriptor.
    int(unsafe { libc::syscall(libc::SYS_close, fd) })
}

/// # Safety
///
/// As bind(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    if is_simulated(fd) {
        // SAFETY: the caller's pointer.
        let address = unsafe { read_address(address, length) };
        return done(address.and_then(|address| sockets::bind(fd, address)));
    }
    // SAFETY: the caller's pointers.
    int(unsafe { libc::syscall(libc::SYS_bind, fd, address, length) })
}

/// # Safety
///
/// As listen(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if is_simulated(fd) {
        return done(sockets::start_listening(fd));
    }
    // SAFETY: no pointers.
    int(unsafe { libc::syscall(libc::SYS_listen, fd, backlog) })
}

/// # Safety
///
/// As connect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    if is_simulated(fd) {
        // SAFETY: the caller's pointer.
        let address = unsafe { read_address(address, length) };
        return done(address.and_then(|address| sockets::connect(fd, address)));
    }
    // SAFETY: the caller's pointers.
    int(unsafe { libc::syscall(libc::SYS_connect, fd, address, length) })
}

/// # Safety
///
/// As accept4(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    if is_simulated(fd) {
        return match sockets::accept(fd) {
            Ok((accepted, peer)) => {
                // SAFETY: the caller's pointers.
                unsafe { write_address(peer, address, length) };
                accepted
            }
            Err(error) => fail(error),
        };
    }
    // SAFETY: the caller's pointers.
    int(unsafe { libc::syscall(libc::SYS_accept4, fd, address, length, flags) })
}

/// # Safety
///
/// As accept(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: as of this function.
    unsafe { accept4(fd, address, length, 0) }
}

/// # Safety
///
/// As shutdown(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    if is_simulated(fd) {
        let read = how == libc::SHUT_RD || how == libc::SHUT_RDWR;
        let write = how == libc::SHUT_WR || how == libc::SHUT_RDWR;
        return done(sockets::shutdown(fd, read, write));
    }
    // SAFETY: no pointers.
    int(unsafe { libc::syscall(libc::SYS_shutdown, fd, how) })
}

/// # Safety
///
/// As recv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(
    fd: c_int,
    buffer: *mut c_void,
    length: usize,
    flags: c_int,
) -> ssize_t {
    if is_simulated(fd) {
        // SAFETY: the caller's buffer is valid for `length` bytes, which may be uninitialised.
        let buffer =
            unsafe { std::slice::from_raw_parts_mut(buffer.cast::<MaybeUninit<u8>>(), length) };
        return count(sockets::receive(fd, buffer, flags & libc::MSG_PEEK != 0));
    }
    let none: *const c_void = std::ptr::null();
    // SAFETY: the caller's pointers.
    unsafe { libc::syscall(libc::SYS_recvfrom, fd, buffer, length, flags, none, none) as ssize_t }
}

/// # Safety
///
/// As send(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(
    fd: c_int,
    buffer: *const c_void,
    length: usize,
    flags: c_int,
) -> ssize_t {
    if is_simulated(fd) {
        // SAFETY: the caller's buffer is valid for `length` bytes.
        let piece = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) };
        return count(sockets::send(fd, &[piece]));
    }
    let none: *const c_void = std::ptr::null();
    // SAFETY: the caller's pointers.
    unsafe { libc::syscall(libc::SYS_sendto, fd, buffer, length, flags, none, 0) as ssize_t }
}

/// # Safety
///
/// As sendmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    if is_simulated(fd) {
        // SAFETY: the caller's message has `msg_iovlen` pieces.
        let pieces: &[iovec] = unsafe {
            let message = &*message;
            std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen)
        };
        let pieces: Vec<&[u8]> = pieces
            .iter()
            .filter(|piece| piece.iov_len > 0)
            // SAFETY: each piece of the caller is valid for its length.
            .map(|piece| unsafe {
                std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len)
            })
            .collect();
        return count(sockets::send(fd, &pieces));
    }
    // SAFETY: the caller's pointers.
    unsafe { libc::syscall(libc::SYS_sendmsg, fd, message, flags) as ssize_t }
}

/// # Safety
///
/// As poll(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(polled: *mut pollfd, number: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller's list has `number` entries.
    let list =
        unsafe { std::slice::from_raw_parts_mut(polled, usize::try_from(number).unwrap_or(0)) };
    if list.iter().any(|entry| is_simulated(entry.fd)) {
        return poll_simulated(list);
    }
    // SAFETY: the caller's pointers.
    int(unsafe { libc::syscall(libc::SYS_poll, polled, number, timeout) })
}

/// # Safety
///
/// As ppoll(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    polled: *mut pollfd,
    number: nfds_t,
    timeout: *const timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: the caller's list has `number` entries.
    let list =
        unsafe { std::slice::from_raw_parts_mut(polled, usize::try_from(number).unwrap_or(0)) };
    if list.iter().any(|entry| is_simulated(entry.fd)) {
        return poll_simulated(list);
    }
    let mask_size = 8;
    // SAFETY: the caller's pointers.
    int(unsafe { libc::syscall(libc::SYS_ppoll, polled, number, timeout, mask, mask_size) })
}

/// The product polls simulated sockets without waiting.
fn poll_simulated(list: &mut [pollfd]) -> c_int {
    let mut ready = 0;
    for entry in list {
        let always = libc::POLLERR | libc::POLLHUP;
        entry.revents = match sockets::poll_events(entry.fd) {
            Ok(events) => events & (entry.events | always),
            Err(_) => libc::POLLNVAL,
        };
        ready += c_int::from(entry.revents != 0);
    }
    ready
}

/// # Safety
///
/// As getsockname(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    if is_simulated(fd) {
        // SAFETY: the caller's pointers.
        return done(
            sockets::addresses(fd)
                .map(|(local, _)| unsafe { write_address(local, address, length) }),
        );
    }
    // SAFETY: the caller's pointers.
    int(unsafe { libc::syscall(libc::SYS_getsockname, fd, address, length) })
}

/// # Safety
///
/// As getpeername(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(
    fd: c_int,
    address: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    if is_simulated(fd) {
        // SAFETY: the caller's pointers.
        return done(
            sockets::addresses(fd)
                .map(|(_, remote)| unsafe { write_address(remote, address, length) }),
        );
    }
    // SAFETY: the caller's pointers.
    int(unsafe { libc::syscall(libc::SYS_getpeername, fd, address, length) })
}

/// # Safety
///
/// As fcntl(2). The third argument is an integer or a pointer, which variadic functions get in the
/// same register.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    if !is_simulated(fd) {
        // SAFETY: the caller's argument.
        return int(unsafe { libc::syscall(libc::SYS_fcntl, fd, command, argument) });
    }
    match command {
        libc::F_GETFD | libc::F_SETFD => 0,
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => descriptor(sockets::duplicate(fd)),
        libc::F_GETFL => match sockets::is_nonblocking(fd) {
            Ok(true) => libc::O_RDWR | libc::O_NONBLOCK,
            Ok(false) => libc::O_RDWR,
            Err(error) => fail(error),
        },
        libc::F_SETFL => {
            let is_nonblocking = argument & c_long::from(libc::O_NONBLOCK) != 0;
            done(sockets::set_nonblocking(fd, is_nonblocking))
        }
        _ => unsupported("fcntl", command, 0),
    }
}

/// # Safety
///
/// As ioctl(2), see [`fcntl`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: libc::c_ulong, argument: *mut c_int) -> c_int {
    if !is_simulated(fd) {
        // SAFETY: the caller's argument.
        return int(unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) });
    }
    if request == libc::FIONBIO {
        // SAFETY: the argument of FIONBIO points to an integer.
        return done(sockets::set_nonblocking(fd, unsafe { *argument } != 0));
    }
    unsupported("ioctl", c_int::try_from(request).unwrap_or(-1), 0)
}

/// # Safety
///
/// As setsockopt(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    if !is_simulated(fd) {
        // SAFETY: the caller's pointers.
        return int(unsafe { libc::syscall(libc::SYS_setsockopt, fd, level, name, value, length) });
    }
    if length < 4 {
        return fail(libc::EINVAL);
    }
    // SAFETY: the value has at least 4 bytes.
    let number = unsafe { value.cast::<c_int>().read_unaligned() };
    let size = usize::try_from(number).unwrap_or(0);
    let nanos = u64::try_from(number).unwrap_or(0);
    let setting = match (level, name) {
        (libc::IPPROTO_TCP, _) if sockets::is_unix(fd) => return fail(libc::EOPNOTSUPP),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => Setting::KeepAlive(number != 0),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => Setting::SendBuffer(size),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => Setting::ReceiveBuffer(size),
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            // SAFETY: the value of SO_LINGER is this structure.
            let linger = unsafe { value.cast::<libc::linger>().read_unaligned() };
            let seconds = u64::try_from(linger.l_linger).unwrap_or(0);
            Setting::Linger((linger.l_onoff != 0).then_some(seconds * NANOS))
        }
        (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT) => Setting::UnsentLimit(size),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => Setting::UserTimeout(nanos * MILLIS),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => Setting::KeepIdle(nanos * NANOS),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => Setting::KeepInterval(nanos * NANOS),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => Setting::KeepCount(nanos),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY | libc::TCP_QUICKACK | TCP_RTO_MAX_MS)
        | (libc::SOL_SOCKET, libc::SO_REUSEADDR | libc::SO_REUSEPORT) => Setting::Other,
        _ => return unsupported("setsockopt", level, name),
    };
    done(sockets::set_option(fd, setting))
}

/// # Safety
///
/// As getsockopt(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    if !is_simulated(fd) {
        // SAFETY: the caller's pointers.
        return int(unsafe { libc::syscall(libc::SYS_getsockopt, fd, level, name, value, length) });
    }
    let result = match (level, name) {
        (libc::IPPROTO_TCP, _) if sockets::is_unix(fd) => return fail(libc::EOPNOTSUPP),
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            // SAFETY: the caller's pointers.
            sockets::take_error(fd).map(|error| unsafe { write_value(&error, value, length) })
        }
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            // SAFETY: the caller's pointers.
            tcp_info(fd).map(|info| unsafe { write_value(&info, value, length) })
        }
        (libc::SOL_SOCKET, libc::SO_MEMINFO) => {
            // SAFETY: the caller's pointers.
            memory_info(fd).map(|info| unsafe { write_value(&info, value, length) })
        }
        _ => return unsupported("getsockopt", level, name),
    };
    done(result)
}

fn tcp_info(fd: c_int) -> sockets::Result<libc::tcp_info> {
    let measure = sockets::measure(fd)?;
    // SAFETY: all-zero is a valid value of this struct of integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let number = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
    let micros = |time: u64| u32::try_from(time / 1000).unwrap_or(u32::MAX).max(1);
    // The SYN counts as one byte.
    info.tcpi_bytes_acked = measure.acknowledged + 1;
    info.tcpi_unacked = number(measure.in_flight.div_ceil(1460));
    info.tcpi_notsent_bytes = number(measure.unsent);
    info.tcpi_bytes_received = measure.received;
    info.tcpi_min_rtt = measure.round_trip.map_or(u32::MAX, micros);
    info.tcpi_rtt = measure.round_trip.map_or(0, micros);
    Ok(info)
}

/// `SO_MEMINFO`, in the order of linux/sock_diag.h.
fn memory_info(fd: c_int) -> sockets::Result<[u32; 9]> {
    let measure = sockets::measure(fd)?;
    let number = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
    let queued = number(measure.unsent + measure.in_flight);
    let [unread, receive_limit] = [measure.unread, measure.receive_limit].map(number);
    let send_limit = number(measure.send_limit);
    Ok([unread, receive_limit, queued, send_limit, 0, queued, 0, 0, 0])
}

/// # Safety
///
/// `value` is valid for the write of `*length` bytes.
unsafe fn write_value<T: Copy>(from: &T, value: *mut c_void, length: *mut socklen_t) {
    // SAFETY: as of this function; no more bytes are written than both sides have.
    unsafe {
        let size = size_of::<T>().min(*length as usize);
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(from).cast::<u8>(),
            value.cast::<u8>(),
            size,
        );
        *length = socklen_t::try_from(size).unwrap_or(0);
    }
}

/// # Safety
///
/// `address` is valid for `length` bytes.
unsafe fn read_address(address: *const sockaddr, length: socklen_t) -> sockets::Result<SocketAddr> {
    let length = length as usize;
    // SAFETY: the length of each family is checked before its structure is read.
    unsafe {
        if length < size_of::<libc::sa_family_t>() {
            return Err(libc::EINVAL);
        }
        match c_int::from((*address).sa_family) {
            libc::AF_INET if length >= size_of::<libc::sockaddr_in>() => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Ok(SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 if length >= size_of::<libc::sockaddr_in6>() => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Ok(SocketAddr::new(IpAddr::V6(ip), u16::from_be(v6.sin6_port)))
            }
            _ => Err(libc::EAFNOSUPPORT),
        }
    }
}

/// # Safety
///
/// As accept4(2): both pointers may be null, else `address` is valid for `*length` bytes.
unsafe fn write_address(from: SocketAddr, address: *mut sockaddr, length: *mut socklen_t) {
    if address.is_null() || length.is_null() {
        return;
    }
    // SAFETY: as of this function. All-zero is valid for both structures.
    unsafe {
        match from {
            SocketAddr::V4(v4) => {
                let mut raw: libc::sockaddr_in = std::mem::zeroed();
                raw.sin_family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0);
                raw.sin_port = v4.port().to_be();
                raw.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
                write_value(&raw, address.cast(), length);
            }
            SocketAddr::V6(v6) => {
                let mut raw: libc::sockaddr_in6 = std::mem::zeroed();
                raw.sin6_family = libc::sa_family_t::try_from(libc::AF_INET6).unwrap_or(0);
                raw.sin6_port = v6.port().to_be();
                raw.sin6_addr.s6_addr = v6.ip().octets();
                write_value(&raw, address.cast(), length);
            }
        }
    }
}

/// The product makes a call that the simulation does not know. Fails loudly, or the simulation
/// would check less than it says.
fn unsupported(call: &str, a: c_int, b: c_int) -> c_int {
    crate::trace::line(|line| line.push_str(&format!("not simulated: {call} {a} {b}")));
    let message =
        format!("the simulated kernel does not know {call}({a}, {b}): add it to syscalls.rs\n");
    // SAFETY: the message is valid for its length. Standard error, since a panic cannot leave a C
    // function.
    unsafe {
        libc::syscall(
            libc::SYS_write,
            2,
            message.as_ptr().cast::<c_char>(),
            message.len(),
        );
        libc::abort()
    }
}
