//! Servers that tests of ACME start: the authority Pebble, and the DNS server BIND.

pub(crate) mod named;
pub(crate) mod pebble;

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Child;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

/// Longest start of a server. Ends a failing test only.
const START_WITHIN: Duration = Duration::from_secs(20);

/// A process that ends with its owner.
pub(crate) struct Server(Child);

impl Server {
    /// Ends the process.
    pub(crate) fn stop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }

    /// Waits until the server accepts connections at each of `addresses`. `None` if it ends:
    /// another process may have taken an address since it was free.
    fn accepting(mut child: Child, addresses: &[SocketAddr]) -> Option<Self> {
        let began = Instant::now();
        for address in addresses {
            while TcpStream::connect(address).is_err() {
                if child.try_wait().unwrap().is_some() {
                    return None;
                }
                assert!(began.elapsed() < START_WITHIN, "{address} does not answer");
                thread::sleep(Duration::from_millis(10));
            }
        }
        Some(Self(child))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A loopback address whose port is free for TCP and UDP, by the choice of the kernel. A socket
/// that does not listen keeps its TCP port from other programs to which the kernel gives ports,
/// until this process ends. Servers set `SO_REUSEADDR`, and can listen.
pub(crate) fn free_address() -> SocketAddr {
    static HELD: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
    loop {
        let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
        let socket = net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        sockopt::set_socket_reuseaddr(&socket, true).unwrap();
        net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = SocketAddr::try_from(net::getsockname(&socket).unwrap()).unwrap();
        if UdpSocket::bind(address).is_ok() {
            HELD.lock().unwrap().push(socket);
            return address;
        }
    }
}
