//! Connections to one backend that wait for their next request.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use gw_shared::net::{Socket, resolve};

use super::{Backend, Connection};

/// Shorter than the keep-alive of common servers (nginx 75 s, Apache 5 s, Node 5 s): the backend seldom closes first.
const IDLE_FOR: Duration = Duration::from_secs(4);

/// Keep-alive connections of one backend, last used first out.
pub(crate) struct Pool {
    backend: Backend,
    /// Most connections kept: as many as requests can run at a time, or each peak would end in new handshakes.
    idle_max: usize,
    idle: RefCell<Vec<(Instant, Connection)>>,
}

impl Pool {
    pub(crate) fn new(backend: Backend, idle_max: u32) -> Self {
        Self { backend, idle_max: usize::try_from(idle_max).unwrap_or(usize::MAX), idle: RefCell::default() }
    }

    /// A waiting connection that the backend has not closed, as far as can be seen.
    pub(crate) fn take(&self) -> Option<Connection> {
        let mut idle = self.idle.borrow_mut();
        while let Some((since, connection)) = idle.pop() {
            if since.elapsed() < IDLE_FOR && connection.is_quiet() {
                return Some(connection);
            }
        }
        None
    }

    /// A new connection; no time limit, as for everything a backend does.
    pub(crate) async fn connect(&self) -> io::Result<Connection> {
        let socket = match self.backend.literal_address() {
            Some(address) => Socket::connect(SocketAddr::new(address, self.backend.port)).await?,
            None => {
                let addresses = resolve::resolve(&self.backend.host, self.backend.port).await?;
                resolve::connect_any(&addresses).await?
            }
        };
        Ok(Connection::new(socket))
    }

    /// Keeps a connection whose last response was read to its end.
    pub(crate) fn give_back(&self, connection: Connection) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < self.idle_max {
            idle.push((Instant::now(), connection));
        }
    }

    /// Closes what has waited too long.
    pub(crate) fn prune(&self) {
        self.idle.borrow_mut().retain(|(since, _)| since.elapsed() < IDLE_FOR);
    }

    pub(crate) fn idle(&self) -> usize {
        self.idle.borrow().len()
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }
}
