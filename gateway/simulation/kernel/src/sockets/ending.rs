//! Shutdown, close and reset.

use libc::c_int;

use super::transfer::{push, reset};
use super::{FIRST_FD, Kind, Result, SocketId, with};
use crate::network;
use crate::scheduler::Host;

/// Ends directions of a connection, or a listening socket, as shutdown(2).
pub fn shutdown(fd: c_int, read: bool, write: bool) -> Result<()> {
    let (id, refused) = with(|sockets, wakes| {
        let id = sockets.id(fd)?;
        let socket = sockets.of(fd)?;
        let mut refused = Vec::new();
        match &mut socket.kind {
            Kind::Listening { backlog, is_shut } => {
                *is_shut = true;
                refused.extend(backlog.drain(..));
            }
            Kind::Connected => {
                socket.stopped_reading |= read;
                socket.has_ended |= write;
                if socket.is_broken {
                    return Err(libc::ENOTCONN);
                }
            }
            Kind::New | Kind::Connecting => return Err(libc::ENOTCONN),
        }
        socket.wake_all(wakes);
        Ok((id, refused))
    })?;
    refused.into_iter().for_each(abort);
    push(id);
    Ok(())
}

/// Closes a descriptor. The connection ends with the last one.
pub fn close(fd: c_int) -> Result<()> {
    let last = with(|sockets, _| {
        let id = sockets.id(fd)?;
        let index = usize::try_from(fd - FIRST_FD).map_err(|_| libc::EBADF)?;
        sockets.descriptors.remove(index);
        let Some(socket) = sockets.sockets.get_mut(&id) else {
            return Result::Ok(None);
        };
        socket.descriptors -= 1;
        Ok((socket.descriptors == 0).then_some(id))
    })?;
    if let Some(id) = last {
        release(id);
    }
    Ok(())
}

/// The last descriptor of a socket is closed.
fn release(id: SocketId) {
    let end = with(|sockets, wakes| {
        let socket = sockets.sockets.get_mut(&id)?;
        match &mut socket.kind {
            Kind::New | Kind::Connecting => {
                sockets.sockets.remove(&id);
                None
            }
            Kind::Listening { backlog, .. } => {
                let refused: Vec<SocketId> = backlog.drain(..).collect();
                sockets.sockets.remove(&id);
                Some(End::Refuse(refused))
            }
            Kind::Connected => {
                let resets = socket.options.resets_on_close || !socket.unread.is_empty();
                socket.is_closed = true;
                socket.stopped_reading = true;
                socket.has_ended = true;
                socket.wake_all(wakes);
                Some(if resets { End::Reset } else { End::Flush })
            }
        }
    });
    match end {
        None => {}
        Some(End::Refuse(refused)) => refused.into_iter().for_each(abort),
        Some(End::Reset) => abort(id),
        Some(End::Flush) => push(id),
    }
}

enum End {
    Refuse(Vec<SocketId>),
    Reset,
    Flush,
}

/// Ends a connection at once: the peer gets a reset.
pub(super) fn abort(id: SocketId) {
    let peer = with(|sockets, wakes| {
        let mut socket = sockets.sockets.remove(&id)?;
        socket.wake_all(wakes);
        let is_open = !socket.is_broken;
        is_open.then_some((socket.local, socket.remote, socket.peer?, socket.arrival))
    });
    if let Some((local, remote, peer, _)) = peer {
        network::carry(local, remote, 0, move || reset(peer));
    }
}

/// Forgets a closed connection once all its bytes have arrived and the peer has ended, too, or once
/// it is broken.
pub(super) fn forget_if_done(id: SocketId) {
    with(|sockets, _| {
        let Some(socket) = sockets.sockets.get(&id) else {
            return;
        };
        let is_sent = socket.end_is_sent && socket.in_flight == 0 && socket.unsent.is_empty();
        if socket.is_closed && (socket.is_broken || (is_sent && socket.peer_has_ended)) {
            sockets.sockets.remove(&id);
        }
    });
}

/// Closes all sockets of a host, as the end of its process does.
pub(crate) fn close_all_of(host: Host) {
    let of_host = with(|sockets, _| {
        let all = sockets.sockets.iter();
        let of_host: Vec<SocketId> = all
            .filter(|(_, socket)| socket.host == host && socket.descriptors > 0)
            .map(|(id, _)| *id)
            .collect();
        sockets.descriptors.retain(|_, id| !of_host.contains(id));
        for id in &of_host {
            if let Some(socket) = sockets.sockets.get_mut(id) {
                socket.descriptors = 0;
            }
        }
        of_host
    });
    of_host.into_iter().for_each(release);
}
