//! Parts of unit tests of several modules.

use std::net::{SocketAddr, TcpListener, TcpStream};

use gw_shared::net::Socket;
use gw_shared::runtime::Driver;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketType};

/// Runs a future to its end.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    Driver::choose().unwrap().block_on(future).unwrap()
}

/// The two ends of a connection: of the agent, of its peer.
pub(crate) async fn connect() -> (Socket, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let socket = Socket::connect(address, None).await.unwrap();
    (socket, listener.accept().unwrap().0)
}

/// A port that is reserved and refuses connections: bound, but not listening.
pub(crate) struct ClosedPort {
    pub(crate) socket: OwnedFd,
    pub(crate) address: SocketAddr,
}

impl ClosedPort {
    pub(crate) fn new() -> Self {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
        Self { socket, address }
    }
}
