//! Entry point of benches/: the agent's end of a tunnel, with a backend in memory. Not a public
//! interface.

use std::cell::Cell;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::rc::Rc;

use bytes::Bytes;
use gw_shared::id::AgentId;
use gw_shared::net::Socket;
use gw_shared::runtime;
use gw_shared::tunnel::connection::Tunnel;
use gw_shared::tunnel::endpoint::Endpoint;
use gw_shared::tunnel::transport::Transport;
use tokio::sync::watch;

use crate::backend::canned::Canned;
use crate::backend::{BackendStream, Backends, Pool};
use crate::config::Config;
use crate::forward::slots::Slots;
use crate::tunnel::AgentContext;
use crate::tunnel::session::{self, Phase, Session};

/// A backend in memory.
pub struct CannedBackend {
    /// The response to each request, from its status line.
    pub response: Bytes,
    /// Bytes of the body of each request. The body has a `Content-Length`.
    pub body_length: usize,
    /// Requests at once. Each has an open connection.
    pub connections: u32,
}

/// Serves a tunnel with this backend, on the reactor of the calling thread. Without control
/// messages and heartbeats, which depend on the time.
pub fn serve(transport: impl Transport + 'static, backend: &CannedBackend) -> io::Result<()> {
    let hostname = "acme--api.eu1.example.com";
    let mut mistakes = Vec::new();
    let backends =
        Backends::from_urls("backend", &["http://127.0.0.1:9".to_owned()], &mut mistakes)
            .ok_or_else(|| io::Error::other(mistakes.concat()))?;
    let pool = Rc::new(Pool::new("bench", &backends, backend.connections));
    for _ in 0..backend.connections {
        pool.add_idle(BackendStream::Canned(Canned::new(
            idle_socket()?,
            backend.response.clone(),
            backend.body_length,
        )));
    }
    let config = Config::in_memory(AgentId::random(), hostname, backend.connections);
    // Only a drain, which does not take place, looks at these channels.
    let (_, stop) = watch::channel(false);
    let session = Rc::new(Session {
        agent: Rc::new(AgentContext::alone(config)),
        pool,
        slots: Slots::new(backend.connections),
        counts: Rc::default(),
        phase: watch::Sender::new(Phase::Ready),
        stop,
        no_more_requests: watch::Sender::new(false),
        displaced: Cell::default(),
    });
    let tunnel = Tunnel::new(Endpoint::agent(backend.connections as usize));
    runtime::spawn(async move {
        let ended =
            std::future::poll_fn(|cx| session::poll_serve(cx, &session, &tunnel, &transport)).await;
        tracing::info!(?ended, "tunnel ended");
    });
    Ok(())
}

/// Connected socket. Its other end is closed.
fn idle_socket() -> io::Result<Socket> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let stream = TcpStream::connect(listener.local_addr()?)?;
    Socket::from_fd(stream.into())
}
