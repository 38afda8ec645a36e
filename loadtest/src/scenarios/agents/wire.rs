//! A wire between agent and gateway that can be cut.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

/// Passes TCP connections on, until this process ends.
pub(super) struct Wire {
    pub(super) port: u16,
    connections: Arc<Mutex<Vec<TcpStream>>>,
}

impl Wire {
    /// Starts a wire to a port of loopback.
    pub(super) fn start(to: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let connections = Arc::<Mutex<Vec<TcpStream>>>::default();
        let kept = Arc::clone(&connections);
        std::thread::Builder::new()
            .name("wire".into())
            .spawn(move || {
                for near in listener.incoming().flatten() {
                    // A connection that fails is closed: the agent connects again.
                    let _ = join(near, to, &kept);
                }
            })?;
        Ok(Self { port, connections })
    }

    /// Ends all connections that are open now.
    pub(super) fn cut(&self) {
        for connection in self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .drain(..)
        {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

fn join(near: TcpStream, to: u16, kept: &Mutex<Vec<TcpStream>>) -> io::Result<()> {
    let far = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, to)))?;
    for socket in [&near, &far] {
        socket.set_nodelay(true)?;
    }
    kept.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .extend([near.try_clone()?, far.try_clone()?]);
    for (mut from, mut to) in [(near.try_clone()?, far.try_clone()?), (far, near)] {
        std::thread::Builder::new()
            .name("wire".into())
            .spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            })?;
    }
    Ok(())
}
