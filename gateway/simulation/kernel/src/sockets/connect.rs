//! Connecting, accepting, and further descriptors.

use std::net::SocketAddr;

use libc::c_int;

use super::transfer::push;
use super::{CONNECT_TIMEOUT, Kind, Result, Socket, SocketId, new_socket, with};
use crate::clock::{self, Nanos};
use crate::scheduler::Host;
use crate::{events, network, random, trace};

/// Begins to connect to `address`; `EINPROGRESS`.
pub fn connect(fd: c_int, address: SocketAddr) -> Result<()> {
    let (id, local) = with(|sockets, _| {
        let port = sockets.free_port();
        let id = sockets.id(fd)?;
        let socket = sockets.of(fd)?;
        if !matches!(socket.kind, Kind::New) {
            return Err(libc::EISCONN);
        }
        socket.kind = Kind::Connecting;
        socket.remote = address;
        if socket.local.port() == 0 {
            socket.local = SocketAddr::new(Host::current().address(), port);
        }
        Ok((id, socket.local))
    })?;
    trace::line(|line| line.push_str(&format!("connects {local} -> {address}")));
    let began = clock::elapsed();
    network::carry(local, address, 0, move || {
        synchronize(id, local, address, began);
    });
    events::after(CONNECT_TIMEOUT, move || {
        with(|sockets, wakes| {
            if let Some(socket) = sockets.sockets.get_mut(&id)
                && matches!(socket.kind, Kind::Connecting)
            {
                socket.kind = Kind::Connected;
                socket.breaks(libc::ETIMEDOUT, wakes);
            }
        });
    });
    Err(libc::EINPROGRESS)
}

/// A SYN has arrived at the machine of `address`.
fn synchronize(id: SocketId, from: SocketAddr, address: SocketAddr, began: Nanos) {
    let accepted = with(|sockets, wakes| {
        let client = sockets.sockets.get(&id)?;
        if !matches!(client.kind, Kind::Connecting) {
            return None;
        }
        let listeners = sockets.listeners(address);
        if listeners.is_empty() {
            return Some(None);
        }
        let listener = listeners[random::below(listeners.len())];
        let listening = sockets.sockets.get(&listener)?;
        let host = listening.host;
        // Accepted sockets inherit the limits.
        let (send_limit, receive_limit) = (listening.send_limit, listening.receive_limit);
        let server = sockets.insert(Socket {
            kind: Kind::Connected,
            local: address,
            remote: from,
            peer: Some(id),
            is_nonblocking: true,
            send_limit,
            receive_limit,
            ..new_socket(host)
        });
        let socket = sockets.sockets.get_mut(&listener)?;
        if let Kind::Listening { backlog, .. } = &mut socket.kind {
            backlog.push_back(server);
        }
        socket.wake_ready(wakes);
        Some(Some(server))
    });
    let Some(accepted) = accepted else { return };
    network::carry(address, from, 0, move || {
        with(|sockets, wakes| {
            let Some(client) = sockets.sockets.get_mut(&id) else {
                return;
            };
            if !matches!(client.kind, Kind::Connecting) {
                return;
            }
            client.kind = Kind::Connected;
            client.last_heard = clock::elapsed();
            let round_trip = clock::elapsed() - began;
            client.round_trip = Some(round_trip);
            match accepted {
                Some(server) => {
                    client.peer = Some(server);
                    client.wake_ready(wakes);
                    if let Some(server) = sockets.sockets.get_mut(&server) {
                        server.round_trip = Some(round_trip);
                    }
                }
                None => client.breaks(libc::ECONNREFUSED, wakes),
            }
        });
        // It may have been closed while it connected.
        push(id);
    });
}

/// Accepts a connection.
pub fn accept(fd: c_int) -> Result<(c_int, SocketAddr)> {
    with(|sockets, _| {
        let listener = sockets.of(fd)?;
        let Kind::Listening { backlog, is_shut } = &mut listener.kind else {
            return Err(libc::EINVAL);
        };
        let Some(id) = backlog.pop_front() else {
            return Err(if *is_shut { libc::EINVAL } else { libc::EAGAIN });
        };
        let remote = sockets.sockets.get(&id).ok_or(libc::ECONNABORTED)?.remote;
        let fd = sockets.open(id)?;
        if let Some(socket) = sockets.sockets.get_mut(&id) {
            socket.host = Host::current();
        }
        Ok((fd, remote))
    })
}

/// A pair of connected Unix sockets, one of each host, as socketpair(2) and an inherited descriptor
/// give them.
pub fn pair(hosts: [Host; 2]) -> Result<[c_int; 2]> {
    with(|sockets, _| {
        let addresses = hosts.map(|host| SocketAddr::new(host.address(), sockets.free_port()));
        let [one, other] = [(0, 1), (1, 0)].map(|(own, peer)| {
            sockets.insert(Socket {
                kind: Kind::Connected,
                is_unix: true,
                local: addresses[own],
                remote: addresses[peer],
                ..new_socket(hosts[own])
            })
        });
        for (own, peer) in [(one, other), (other, one)] {
            if let Some(socket) = sockets.sockets.get_mut(&own) {
                socket.peer = Some(peer);
            }
        }
        Ok([sockets.open(one)?, sockets.open(other)?])
    })
}

/// Another descriptor of the socket.
pub fn duplicate(fd: c_int) -> Result<c_int> {
    with(|sockets, _| {
        let id = sockets.id(fd)?;
        sockets.open(id)
    })
}
