//! Backends with scripted behaviour.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};

use gw_bed::threads::listen;

use super::http1_peer::Peer;
use crate::support::SOON;

/// Starts a backend that gives every connection to `serve`, each on its own thread. Returns its
/// URL.
pub(crate) fn start(serve: impl Fn(Peer<TcpStream>) + Send + Sync + 'static) -> String {
    start_at(Ipv4Addr::LOCALHOST.into(), serve)
}

/// As [`start`], at this address. Nothing listens at the port of the other address of `localhost`.
pub(crate) fn start_at(
    address: IpAddr,
    serve: impl Fn(Peer<TcpStream>) + Send + Sync + 'static,
) -> String {
    let (listener, other) = listener_at(address);
    let url = format!("http://{}", listener.local_addr().unwrap());
    listen(listener, move |connection| {
        let _ = &other;
        connection.set_nodelay(true).unwrap();
        connection.set_read_timeout(Some(SOON)).unwrap();
        serve(Peer::new(connection));
    });
    url
}

/// A listener on a free port of a loopback address, and a socket that keeps the port of the other
/// one without listening: the kernel gives a port of `::1` although `127.0.0.1` uses it.
fn listener_at(address: IpAddr) -> (TcpListener, Option<socket2::Socket>) {
    let other: IpAddr = match address {
        IpAddr::V4(_) => Ipv6Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv4Addr::LOCALHOST.into(),
    };
    loop {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let other = SocketAddr::from((other, port));
        let Ok(socket) = socket2::Socket::new(
            socket2::Domain::for_address(other),
            socket2::Type::STREAM,
            None,
        ) else {
            // A machine without IPv6.
            return (listener, None);
        };
        match socket.bind(&other.into()) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(_) => return (listener, None),
            Ok(()) => return (listener, Some(socket)),
        }
    }
}

/// An address that refuses connections while the socket lives. The socket is bound but does not
/// listen, so no other program gets the port.
pub(crate) fn refusing() -> (socket2::Socket, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
        .unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

/// Starts a backend that answers every request with the same bytes.
pub(crate) fn answering(response: &'static str) -> String {
    start(move |mut peer| {
        while peer.request().is_ok() {
            peer.send(response);
        }
    })
}
