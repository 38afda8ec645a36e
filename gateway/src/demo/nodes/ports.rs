//! The ports of the nodes of a demo.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::NodesError;

/// Longest wait for a port in use: the sockets of a killed gateway may close a little later.
const WITHIN: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Ports for callers and for administration, one of each for each node.
pub(super) struct Ports {
    pub(super) callers: Vec<u16>,
    pub(super) admin: Vec<u16>,
    /// These sockets are bound, but do not listen: only programs that know the port can have it, as a node that starts.
    _held: Vec<Socket>,
}

impl Ports {
    /// Takes `count` ports from each of the two on; free ports in place of 0.
    pub(super) fn hold(count: usize, port: u16, admin_port: u16) -> Result<Self, NodesError> {
        let mut callers = Vec::new();
        let mut admin = Vec::new();
        let mut held = Vec::new();
        for (ports, option, first) in [
            (&mut callers, "--port", port),
            (&mut admin, "--admin-port", admin_port),
        ] {
            for number in 0..count {
                // The options were checked: there are as many ports.
                let wanted = if first == 0 {
                    0
                } else {
                    first.saturating_add(u16::try_from(number).unwrap_or(u16::MAX))
                };
                let (found, socket) = bind(wanted).map_err(|error| {
                    let node = number + 1;
                    let port = wanted;
                    NodesError::Port {
                        option,
                        first,
                        node,
                        port,
                        error,
                    }
                })?;
                ports.push(found);
                held.push(socket);
            }
        }
        Ok(Self {
            callers,
            admin,
            _held: held,
        })
    }
}

fn bind(port: u16) -> io::Result<(u16, Socket)> {
    let try_once = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        // As the listeners of a gateway.
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into())?;
        let bound = socket
            .local_addr()?
            .as_socket()
            .map_or(port, |address| address.port());
        io::Result::Ok((bound, socket))
    };
    let deadline = Instant::now() + WITHIN;
    loop {
        match try_once() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn free_ports_differ_and_a_port_in_use_is_named() {
        let ports = Ports::hold(9, 0, 0).unwrap();
        let mut all = [ports.callers.clone(), ports.admin.clone()].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 18);
        // A gateway can listen there all the same; std sets SO_REUSEADDR, too.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports.callers[0])).unwrap();
        let port = listener.local_addr().unwrap().port();
        let error = Ports::hold(2, 0, port).err().unwrap().to_string();
        let expected = format!("--admin-port {port}: node 1 cannot listen on 127.0.0.1:{port}: ");
        assert!(error.starts_with(&expected), "{error}");
    }
}
