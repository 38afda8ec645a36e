//! Bytes from one end to the other.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::net::SocketAddr;

use libc::c_int;

use super::effort::moved;
use super::ending::forget_if_done;
use super::watch::watch_acknowledgement;
use super::{Kind, Result, SocketId, with};
use crate::{clock, network, trace};

/// Reads bytes that have arrived. Leaves them if `peek`.
pub fn receive(fd: c_int, buffer: &mut [MaybeUninit<u8>], peek: bool) -> Result<usize> {
    let (read, id) = with(|sockets, _| {
        let id = sockets.id(fd)?;
        let socket = sockets.of(fd)?;
        match socket.kind {
            Kind::Connected => {}
            Kind::Connecting => return Err(libc::EAGAIN),
            Kind::New | Kind::Listening { .. } => return Err(libc::ENOTCONN),
        }
        if socket.unread.is_empty() {
            if let Some(error) = socket.take_error() {
                return Err(error);
            }
            let has_ended = socket.peer_has_ended || socket.stopped_reading || socket.is_broken;
            return if has_ended {
                Ok((0, id))
            } else {
                Err(libc::EAGAIN)
            };
        }
        let read = buffer.len().min(socket.unread.len());
        let (front, back) = socket.unread.as_slices();
        let of_front = read.min(front.len());
        buffer[..of_front].write_copy_of_slice(&front[..of_front]);
        buffer[of_front..read].write_copy_of_slice(&back[..read - of_front]);
        if !peek {
            socket.unread.drain(..read);
        }
        Ok((read, id))
    })?;
    if read > 0 && !peek {
        trace::mix(id << 32 | read as u64);
        moved(read);
        open_window(id);
    }
    Ok(read)
}

/// Tells the peer of `id` that there is room again.
fn open_window(id: SocketId) {
    let waiting = with(|sockets, _| {
        let socket = sockets.sockets.get(&id)?;
        let peer = sockets.sockets.get(&socket.peer?)?;
        let waits = !peer.unsent.is_empty() || (peer.has_ended && !peer.end_is_sent);
        waits.then_some((socket.local, socket.remote, socket.peer?))
    });
    if let Some((local, remote, peer)) = waiting {
        network::carry(local, remote, 0, move || push(peer));
    }
}

/// Accepts bytes for sending, as many as there is room for.
pub fn send(fd: c_int, pieces: &[&[u8]]) -> Result<usize> {
    let (id, sent) = with(|sockets, _| {
        let id = sockets.id(fd)?;
        let socket = sockets.of(fd)?;
        match socket.kind {
            Kind::Connected => {}
            Kind::Connecting => return Err(libc::EAGAIN),
            Kind::New | Kind::Listening { .. } => return Err(libc::ENOTCONN),
        }
        if socket.is_broken {
            return Err(socket.take_error().unwrap_or(libc::EPIPE));
        }
        if socket.has_ended {
            return Err(libc::EPIPE);
        }
        let room = socket.room();
        let mut sent = 0;
        for piece in pieces {
            let taken = piece.len().min(room - sent);
            socket.unsent.extend(&piece[..taken]);
            sent += taken;
        }
        if sent == 0 && pieces.iter().any(|piece| !piece.is_empty()) {
            return Err(libc::EAGAIN);
        }
        Ok((id, sent))
    })?;
    trace::mix(id << 32 | 1 << 31 | sent as u64);
    moved(sent);
    push(id);
    Ok(sent)
}

/// Sends as many unsent bytes as the window of the peer allows, and the end of the stream behind
/// them.
pub(super) fn push(id: SocketId) {
    loop {
        let segment = with(|sockets, _| {
            let socket = sockets.sockets.get(&id)?;
            if !matches!(socket.kind, Kind::Connected) || socket.is_broken {
                return None;
            }
            let peer = socket.peer?;
            let window = match sockets.sockets.get(&peer) {
                Some(peer) => peer
                    .receive_limit
                    .saturating_sub(peer.unread.len() + socket.in_flight),
                // Answered with a reset.
                None => usize::MAX,
            };
            let socket = sockets.sockets.get_mut(&id)?;
            let most = socket.unsent.len().min(window);
            let ends = socket.unsent.is_empty() && socket.has_ended && !socket.end_is_sent;
            if most == 0 && !ends {
                return None;
            }
            let length = match most {
                0 => 0,
                most => network::segment(socket.local, socket.remote, most),
            };
            let bytes = take(&mut socket.unsent, length);
            socket.in_flight += length;
            let ends = socket.unsent.is_empty() && socket.has_ended && !socket.end_is_sent;
            socket.end_is_sent |= ends;
            Some((
                bytes,
                ends,
                peer,
                socket.local,
                socket.remote,
                socket.arrival,
            ))
        });
        let Some((bytes, ends, peer, local, remote, earliest)) = segment else {
            break;
        };
        let length = bytes.len();
        let arrival = network::carry(local, remote, earliest, move || {
            deliver(id, peer, &bytes, ends, (local, remote));
        });
        with(|sockets, _| {
            if let Some(socket) = sockets.sockets.get_mut(&id) {
                socket.arrival = arrival;
            }
        });
        if length > 0 {
            watch_acknowledgement(id);
        }
    }
    forget_if_done(id);
}

/// Takes the first `length` bytes.
fn take(queue: &mut VecDeque<u8>, length: usize) -> Vec<u8> {
    let (front, back) = queue.as_slices();
    let of_front = length.min(front.len());
    let bytes = [&front[..of_front], &back[..length - of_front]].concat();
    queue.drain(..length);
    bytes
}

/// A segment has arrived at `to`.
fn deliver(from: SocketId, to: SocketId, bytes: &[u8], ends: bool, path: (SocketAddr, SocketAddr)) {
    let answer = with(|sockets, wakes| {
        let Some(socket) = sockets.sockets.get_mut(&to) else {
            return Answer::Reset;
        };
        if socket.is_broken {
            return Answer::Reset;
        }
        socket.last_heard = clock::elapsed();
        // These bytes cannot be read any more (RFC 9293 §3.6.1).
        let is_unwanted = socket.is_closed || socket.stopped_reading && socket.has_ended;
        if is_unwanted && !bytes.is_empty() {
            socket.breaks(libc::EPIPE, wakes);
            return Answer::Reset;
        }
        socket.unread.extend(bytes);
        socket.received += bytes.len() as u64;
        socket.peer_has_ended |= ends;
        socket.wake_ready(wakes);
        Answer::Acknowledge
    });
    trace::mix(to << 32 | 1 << 30 | bytes.len() as u64);
    let length = bytes.len();
    let (local, remote) = path;
    network::carry(remote, local, 0, move || match answer {
        Answer::Reset => reset(from),
        Answer::Acknowledge => acknowledge(from, length),
    });
    forget_if_done(to);
}

enum Answer {
    Reset,
    Acknowledge,
}

/// The peer has received `length` bytes.
fn acknowledge(id: SocketId, length: usize) {
    with(|sockets, wakes| {
        if let Some(socket) = sockets.sockets.get_mut(&id) {
            socket.in_flight = socket.in_flight.saturating_sub(length);
            socket.acknowledged += length as u64;
            socket.last_heard = clock::elapsed();
            socket.wake_ready(wakes);
        }
    });
    push(id);
}

/// A reset has arrived.
pub(super) fn reset(id: SocketId) {
    with(|sockets, wakes| {
        if let Some(socket) = sockets.sockets.get_mut(&id) {
            socket.breaks(libc::ECONNRESET, wakes);
        }
    });
    trace::mix(id << 32 | 1 << 29);
    forget_if_done(id);
}
