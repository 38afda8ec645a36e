//! Ports of nodes.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use crate::Error;

/// Longest wait for a port in use: the sockets of a killed gateway may close a little later.
const WITHIN: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Ports for callers and for administration, one of each for each node.
pub(crate) struct Ports {
    pub(crate) callers: Vec<u16>,
    pub(crate) admin: Vec<u16>,
    /// These sockets are bound, but do not listen: only programs that know the port can have it, as
    /// a node that starts.
    _held: Vec<Socket>,
}

impl Ports {
    /// Fails with the options that do not fit together.
    pub(crate) fn check(count: usize, port: u16, admin_port: u16) -> Result<(), Error> {
        for (option, first) in [("--port", port), ("--admin-port", admin_port)] {
            let last = usize::from(first) + count - 1;
            if first != 0 && last > usize::from(u16::MAX) {
                return Err(Error::Usage(format!(
                    "{option} {first} and --nodes {count}: the nodes take consecutive ports up to \
                     {last}, and the last port is 65535"
                )));
            }
        }
        if port != 0 && admin_port != 0 && usize::from(port.abs_diff(admin_port)) < count {
            return Err(Error::Usage(format!(
                "--port {port} and --admin-port {admin_port}: with --nodes {count} each of them is \
                 the first of {count} ports; keep them at least {count} apart"
            )));
        }
        Ok(())
    }

    /// Takes `count` ports from each of the two on; free ports in place of 0.
    pub(crate) fn hold(count: usize, port: u16, admin_port: u16) -> Result<Self, Error> {
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
                let (found, socket) = hold(wanted).map_err(|error| {
                    let node = number + 1;
                    let port = wanted;
                    Error::Port {
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

/// Takes a port of loopback, a free one for 0: the socket is bound, but does not listen. Returns
/// the port.
pub fn hold(port: u16) -> io::Result<(u16, Socket)> {
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
    fn ports_that_do_not_fit_together_are_refused_with_both_names() {
        assert!(Ports::check(3, 0, 0).is_ok());
        assert!(Ports::check(9, 65_527, 65_518).is_ok());
        let refused = |count, port, admin_port, parts: [&str; 2]| {
            let error = Ports::check(count, port, admin_port)
                .unwrap_err()
                .to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        };
        refused(3, 65_534, 0, ["--port 65534", "--nodes 3"]);
        refused(9, 0, 65_530, ["--admin-port 65530", "--nodes 9"]);
        refused(
            3,
            8000,
            8002,
            ["--port 8000 and --admin-port 8002", "--nodes 3"],
        );
    }

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
