//! The listening sockets of a process: opened by itself, by the service manager, or by its
//! predecessor.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::limits;
use gw_interface::config::Config;
use gw_shared::net::service_manager_sockets;
use socket2::{Domain, Protocol, Socket, Type};

use super::listen_advice::advice;

/// Longest wait for an address in use. The kernel tears down the io_uring of a killed process after
/// the process has ended, and only then closes the sockets with pending operations.
const ADDRESS_WAIT: Duration = Duration::from_secs(1);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Name of the admin listener of the service manager (`FileDescriptorName=` in systemd.socket(5)).
/// Its sockets of other names are for callers.
const ADMIN: &str = "admin";
/// Name of a socket for callers of the service manager at a takeover.
const CALLERS: &str = "callers";
/// Names of the sockets that a gateway has opened, at a takeover.
const OWN_CALLERS: &str = "gw-callers";
const OWN_ADMIN: &str = "gw-admin";
const OWN_PEERS: &str = "gw-peers";
const OWN_PLAIN: &str = "gw-http";

/// The listening sockets of this process. Workers use duplicates; these are handed over to a
/// successor.
pub(crate) struct Listeners {
    /// At least one.
    pub(crate) callers: Vec<TcpListener>,
    pub(crate) admin: TcpListener,
    /// For other nodes of the region; empty without `peer_listen`.
    pub(crate) peers: Vec<TcpListener>,
    /// For plain HTTP; empty without `listen_http`.
    pub(crate) plain: Vec<TcpListener>,
    /// The sockets for callers are not those of the service manager.
    pub(crate) are_ours: bool,
    /// The admin listener is not that of the service manager.
    pub(crate) admin_is_ours: bool,
}

/// Where the process listens.
pub(crate) struct Addresses {
    pub(crate) callers: SocketAddr,
    pub(crate) admin: SocketAddr,
    /// `None` without a listener for other nodes.
    pub(crate) nodes: Option<SocketAddr>,
    /// `None` without a listener for plain HTTP.
    pub(crate) plain: Option<SocketAddr>,
}

/// Listening sockets from the service manager or from the predecessor.
#[derive(Default)]
pub(crate) struct Inherited {
    pub(crate) callers: Vec<TcpListener>,
    pub(crate) admin: Option<TcpListener>,
    pub(crate) peers: Vec<TcpListener>,
    pub(crate) plain: Vec<TcpListener>,
    /// The service manager has opened `callers`.
    pub(crate) from_service_manager: bool,
    /// The service manager has opened `admin`.
    pub(crate) admin_from_service_manager: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("{key}: cannot listen on {address}: {error}; {advice}")]
    Listen {
        key: &'static str,
        address: SocketAddr,
        error: io::Error,
        advice: String,
    },
    #[error("cannot use the inherited sockets: {0}")]
    Inherited(io::Error),
    #[error("cannot use a listening socket: {0}")]
    Io(#[from] io::Error),
}

impl Inherited {
    /// The sockets of the service manager (sd_listen_fds(3)), if it has opened any.
    pub(crate) fn from_service_manager() -> Result<Self, ListenError> {
        Self::by_name(service_manager_sockets().map_err(ListenError::Inherited)?)
    }

    /// Sorts the sockets of the service manager or of the predecessor by their names.
    pub(crate) fn by_name(sockets: Vec<(OwnedFd, String)>) -> Result<Self, ListenError> {
        let mut found = Self::default();
        for (fd, name) in sockets {
            let listener = listener(fd).map_err(ListenError::Inherited)?;
            match name.as_str() {
                OWN_CALLERS => found.callers.push(listener),
                OWN_ADMIN => found.admin = Some(listener),
                OWN_PEERS => found.peers.push(listener),
                OWN_PLAIN => found.plain.push(listener),
                ADMIN => {
                    found.admin = Some(listener);
                    found.admin_from_service_manager = true;
                }
                _ => {
                    found.callers.push(listener);
                    found.from_service_manager = true;
                }
            }
        }
        Ok(found)
    }

    /// Drops sockets whose address differs from the configuration. Keeps those of the service
    /// manager, which chooses their addresses; it opens none for other nodes and for plain HTTP.
    fn retain_wanted(&mut self, config: &Config) {
        for (listeners, wanted) in [
            (&mut self.peers, config.peer_listen),
            (&mut self.plain, config.listen_http),
        ] {
            listeners.retain(|listener| wanted.is_some_and(|wanted| is_at(listener, wanted)));
        }
        if !self.from_service_manager {
            self.callers
                .retain(|listener| is_at(listener, config.listen));
        }
        if !self.admin_from_service_manager {
            self.admin
                .take_if(|listener| !is_at(listener, config.admin_listen));
        }
    }
}

/// Converts `fd`. Fails if it is not a listening TCP socket.
fn listener(fd: OwnedFd) -> io::Result<TcpListener> {
    let socket = Socket::from(fd);
    if socket.is_listener()?
        && socket.r#type()? == Type::STREAM
        && socket.local_addr()?.as_socket().is_some()
    {
        Ok(socket.into())
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a descriptor is not a listening TCP socket",
        ))
    }
}

/// Whether `listener` has the address `wanted`. Port 0 matches any port.
fn is_at(listener: &TcpListener, wanted: SocketAddr) -> bool {
    listener
        .local_addr()
        .is_ok_and(|found| found.ip() == wanted.ip() && [found.port(), 0].contains(&wanted.port()))
}

impl Listeners {
    /// Opens the sockets of the configuration. Uses those of `inherited` with the same address.
    pub(crate) fn open(config: &Config, mut inherited: Inherited) -> Result<Self, ListenError> {
        inherited.retain_wanted(config);
        let Inherited {
            mut callers,
            admin,
            mut peers,
            mut plain,
            from_service_manager,
            admin_from_service_manager,
        } = inherited;
        let admin = admin.map_or_else(|| bind("admin_listen", config.admin_listen, false), Ok)?;
        let queues = if from_service_manager {
            callers.len()
        } else {
            config.workers
        };
        bind_queues("listen", &mut callers, config.listen, queues)?;
        if let Some(address) = config.peer_listen {
            bind_queues("peer_listen", &mut peers, address, config.workers)?;
        }
        if let Some(address) = config.listen_http {
            bind_queues("listen_http", &mut plain, address, config.workers)?;
        }
        let are_ours = !from_service_manager;
        let admin_is_ours = !admin_from_service_manager;
        Ok(Self {
            callers,
            admin,
            peers,
            plain,
            are_ours,
            admin_is_ours,
        })
    }

    /// The sockets with the names by which [`Inherited::by_name`] sorts them in the successor.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &TcpListener)> {
        let callers = if self.are_ours { OWN_CALLERS } else { CALLERS };
        let admin = if self.admin_is_ours { OWN_ADMIN } else { ADMIN };
        let callers = self.callers.iter().map(move |listener| (callers, listener));
        let peers = self.peers.iter().map(|listener| (OWN_PEERS, listener));
        let plain = self.plain.iter().map(|listener| (OWN_PLAIN, listener));
        callers
            .chain([(admin, &self.admin)])
            .chain(peers)
            .chain(plain)
    }

    pub(crate) fn addresses(&self) -> io::Result<Addresses> {
        let first =
            |listeners: &[TcpListener]| listeners.first().map(TcpListener::local_addr).transpose();
        Ok(Addresses {
            callers: self.callers[0].local_addr()?,
            admin: self.admin.local_addr()?,
            nodes: first(&self.peers)?,
            plain: first(&self.plain)?,
        })
    }

    /// The listeners for callers of each of `workers` workers. Includes every listener: the kernel
    /// spreads connections over all queues.
    pub(crate) fn shares(&self, workers: usize) -> io::Result<Vec<Vec<TcpListener>>> {
        let mut shares: Vec<Vec<TcpListener>> = (0..workers).map(|_| Vec::new()).collect();
        for (number, listener) in self.callers.iter().enumerate() {
            if self.are_ours {
                shares[number % workers].push(listener.try_clone()?);
            } else {
                // The service manager opens few sockets, without SO_REUSEPORT: every worker accepts
                // from all of them.
                for share in &mut shares {
                    share.push(listener.try_clone()?);
                }
            }
        }
        Ok(shares)
    }
}

/// Those of `listeners` that this process has opened, for each of `workers` workers.
pub(crate) fn own_shares(
    listeners: &[TcpListener],
    workers: usize,
) -> Result<Vec<Vec<TcpListener>>, ListenError> {
    let mut shares: Vec<Vec<TcpListener>> = (0..workers).map(|_| Vec::new()).collect();
    for (number, listener) in listeners.iter().enumerate() {
        shares[number % workers].push(listener.try_clone()?);
    }
    Ok(shares)
}

/// Opens sockets at `address`, the value of `key`, until there are as many as `queues`. The kernel
/// spreads connections over them.
fn bind_queues(
    key: &'static str,
    sockets: &mut Vec<TcpListener>,
    address: SocketAddr,
    queues: usize,
) -> Result<(), ListenError> {
    if sockets.is_empty() {
        // Fails if another gateway has the port: SO_REUSEPORT would let both share it, and split
        // the connections.
        drop(bind(key, address, false)?);
        // If the port is 0, the kernel chooses it here; the other sockets share it.
        sockets.push(bind(key, address, true)?);
    }
    let address = sockets[0].local_addr()?;
    while sockets.len() < queues {
        sockets.push(bind(key, address, true)?);
    }
    Ok(())
}

fn bind(key: &'static str, address: SocketAddr, shared: bool) -> Result<TcpListener, ListenError> {
    let listen = || {
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        socket.set_reuse_address(true)?;
        // One queue for each worker. The kernel spreads connections over them.
        socket.set_reuse_port(shared)?;
        socket.bind(&address.into())?;
        socket.listen(limits::BACKLOG)?;
        io::Result::Ok(TcpListener::from(socket))
    };
    let deadline = Instant::now() + ADDRESS_WAIT;
    loop {
        match listen() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(RETRY_INTERVAL);
            }
            Err(error) => {
                let advice = advice(address, &error);
                return Err(ListenError::Listen {
                    key,
                    address,
                    error,
                    advice,
                });
            }
            Ok(listener) => return Ok(listener),
        }
    }
}

#[cfg(test)]
mod tests {
    use gw_base::service::hostname::Region;

    use super::*;

    fn config(workers: usize) -> Config {
        Config {
            listen: "127.0.0.1:0".parse().unwrap(),
            admin_listen: "127.0.0.1:0".parse().unwrap(),
            workers,
            ..Config::new(Region::new("eu1", "gw.localhost"), "unused".into())
        }
    }

    fn handed_over(listeners: &Listeners) -> Inherited {
        let sockets = listeners.named().map(|(name, listener)| {
            let copy = listener.try_clone().unwrap();
            (copy.into(), name.to_owned())
        });
        Inherited::by_name(sockets.collect()).unwrap()
    }

    #[test]
    fn each_kind_of_socket_keeps_its_opener() {
        let socket = || TcpListener::bind("127.0.0.1:0").unwrap();
        for (are_ours, admin_is_ours) in
            [(true, true), (true, false), (false, true), (false, false)]
        {
            let inherited = handed_over(&Listeners {
                callers: vec![socket(), socket()],
                admin: socket(),
                peers: vec![socket()],
                plain: vec![socket()],
                are_ours,
                admin_is_ours,
            });
            assert_eq!((inherited.callers.len(), inherited.peers.len()), (2, 1));
            assert_eq!(inherited.plain.len(), 1);
            assert!(inherited.admin.is_some());
            let found = (
                !inherited.from_service_manager,
                !inherited.admin_from_service_manager,
            );
            assert_eq!(found, (are_ours, admin_is_ours));
        }
    }

    fn counts(listeners: &Listeners, workers: usize) -> Vec<usize> {
        listeners
            .shares(workers)
            .unwrap()
            .iter()
            .map(Vec::len)
            .collect()
    }

    #[test]
    fn every_inherited_queue_has_a_worker_and_every_worker_a_queue() {
        let first = Listeners::open(&config(3), Inherited::default()).unwrap();
        let address = first.addresses().unwrap().callers;
        assert_eq!(counts(&first, 3), [1, 1, 1]);
        let fewer = Listeners::open(&config(2), handed_over(&first)).unwrap();
        assert_eq!(
            (fewer.addresses().unwrap().callers, counts(&fewer, 2)),
            (address, vec![2, 1])
        );
        assert_eq!(
            fewer.addresses().unwrap().admin,
            first.addresses().unwrap().admin
        );
        let more = Listeners::open(&config(4), handed_over(&fewer)).unwrap();
        assert_eq!(
            (more.addresses().unwrap().callers, counts(&more, 4)),
            (address, vec![1, 1, 1, 1])
        );
    }

    #[test]
    fn sockets_of_another_address_are_dropped() {
        let first = Listeners::open(&config(1), Inherited::default()).unwrap();
        let elsewhere = Config {
            listen: "127.0.0.2:0".parse().unwrap(),
            ..config(1)
        };
        let moved = Listeners::open(&elsewhere, handed_over(&first)).unwrap();
        assert_eq!(
            moved.addresses().unwrap().callers.ip(),
            elsewhere.listen.ip()
        );
        assert_eq!(
            moved.addresses().unwrap().admin,
            first.addresses().unwrap().admin
        );
    }

    #[test]
    fn the_admin_socket_of_the_service_manager_is_used_without_others() {
        let admin = TcpListener::bind("127.0.0.2:0").unwrap();
        let address = admin.local_addr().unwrap();
        let inherited = Inherited {
            admin: Some(admin),
            admin_from_service_manager: true,
            ..Inherited::default()
        };
        let listeners = Listeners::open(&config(1), inherited).unwrap();
        assert_eq!(
            (listeners.addresses().unwrap().admin, listeners.are_ours),
            (address, true)
        );
        let next = Listeners::open(&config(1), handed_over(&listeners)).unwrap();
        assert_eq!(next.addresses().unwrap().admin, address);
    }

    #[test]
    fn every_worker_accepts_from_the_sockets_of_the_service_manager() {
        let socket = || TcpListener::bind("127.0.0.1:0").unwrap();
        let callers = vec![socket(), socket()];
        let inherited = Inherited {
            callers,
            from_service_manager: true,
            ..Inherited::default()
        };
        let listeners = Listeners::open(&config(3), inherited).unwrap();
        assert_eq!(counts(&listeners, 3), [2, 2, 2]);
    }

    #[test]
    fn sockets_for_other_nodes_exist_if_configured_and_are_handed_over() {
        let first = Listeners::open(&config(2), Inherited::default()).unwrap();
        assert_eq!(
            (first.peers.len(), first.addresses().unwrap().nodes),
            (0, None)
        );
        let in_region = |workers| Config {
            peer_listen: Some("127.0.0.1:0".parse().unwrap()),
            ..config(workers)
        };
        let first = Listeners::open(&in_region(2), Inherited::default()).unwrap();
        let next = Listeners::open(&in_region(3), handed_over(&first)).unwrap();
        assert_eq!(
            next.addresses().unwrap().nodes,
            first.addresses().unwrap().nodes
        );
        let shares: Vec<usize> = own_shares(&next.peers, 3)
            .unwrap()
            .iter()
            .map(Vec::len)
            .collect();
        assert_eq!(shares, [1, 1, 1]);
        let without = Listeners::open(&config(2), handed_over(&next)).unwrap();
        assert!(without.peers.is_empty());
    }

    #[test]
    fn sockets_for_plain_http_exist_if_configured_and_are_handed_over() {
        let with_http = |workers| Config {
            listen_http: Some("127.0.0.1:0".parse().unwrap()),
            ..config(workers)
        };
        let first = Listeners::open(&with_http(2), Inherited::default()).unwrap();
        let address = first.addresses().unwrap().plain;
        let next = Listeners::open(&with_http(3), handed_over(&first)).unwrap();
        assert!(address.is_some() && next.addresses().unwrap().plain == address);
        assert_eq!((first.plain.len(), next.plain.len()), (2, 3));
        let without = Listeners::open(&config(2), handed_over(&next)).unwrap();
        assert!(without.plain.is_empty());
    }

    #[test]
    fn only_listening_tcp_sockets_are_accepted() {
        assert!(listener(TcpListener::bind("127.0.0.1:0").unwrap().into()).is_ok());
        assert!(listener(std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into()).is_err());
        assert!(listener(std::fs::File::open("/dev/null").unwrap().into()).is_err());
    }
}
