//! Servers that tests of ACME start: the authority Pebble, and the DNS server BIND.

pub(crate) mod named;
pub(crate) mod pebble;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Child;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

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

    /// Waits until the server accepts connections at each of `addresses`. `None` if it ends: another process may have taken an address
    /// since it was free.
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

/// A loopback address whose port is free for TCP and UDP, by the choice of the kernel. No other call returns it.
pub(crate) fn free_address() -> SocketAddr {
    static RETURNED: Mutex<BTreeSet<SocketAddr>> = Mutex::new(BTreeSet::new());
    loop {
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = tcp.local_addr().unwrap();
        if UdpSocket::bind(address).is_ok() && RETURNED.lock().unwrap().insert(address) {
            return address;
        }
    }
}
