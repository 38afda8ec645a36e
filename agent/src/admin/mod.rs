//! Admin endpoints `/metrics`, `/readyz` and `/healthz` on a listener of their own, off unless
//! configured. Served on the agent's reactor: one request per connection, few connections at a
//! time, each with a time limit.

mod page;

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::future::join_all;
use gw_shared::http::{ConnectionField, Fields, Framing, HeadLimits, head};
use gw_shared::net::{Listener, Socket};
use gw_shared::runtime;
use gw_shared::telemetry::metrics::exposition;
use http::header::{self, HeaderValue};
use http::{Method, StatusCode};

use crate::tunnel::AgentContext;

const TEXT: &str = "text/plain; charset=utf-8";
const HEAD_LIMITS: HeadLimits = HeadLimits {
    head: 8 * 1024,
    fields: 64,
    target: 1024,
};
/// Concurrent connections; others wait in the kernel's accept queue.
const CONNECTIONS: usize = 16;
/// Time limit for a request and its response.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// Interval of attempts to bind an address that is in use.
const BIND_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a failed accept, and while all connections are in use.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Listener of the admin endpoints.
pub(crate) struct AdminListener {
    address: SocketAddr,
    /// `None` while the address cannot be bound.
    listener: Option<TcpListener>,
}

impl AdminListener {
    /// Binds `address`. A failure is logged and does not keep the agent from serving.
    pub(crate) fn bind(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address);
        if let Err(error) = &listener {
            tracing::error!(%address, %error,
                "metrics_listen: cannot bind the address; trying again every {BIND_INTERVAL:?}");
        }
        Self {
            address,
            listener: listener.ok(),
        }
    }

    /// The bound address, with the port that the kernel chose for port 0.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.listener.as_ref()?.local_addr().ok()
    }
}

/// Serves the admin endpoints. Never returns.
pub(crate) async fn serve(agent: Rc<AgentContext>, listener: AdminListener) {
    let AdminListener {
        address,
        mut listener,
    } = listener;
    let listener = loop {
        let bound = listener
            .take()
            .map_or_else(|| TcpListener::bind(address), Ok);
        match bound.and_then(|bound| Ok((bound.local_addr()?, Listener::new(bound)?))) {
            Ok((address, listener)) => {
                tracing::info!(%address, "serving metrics");
                break listener;
            }
            Err(error) => {
                tracing::debug!(%address, %error, "cannot bind the address of the metrics");
                runtime::sleep(BIND_INTERVAL).await;
            }
        }
    };
    let connections = Rc::new(Cell::new(0));
    loop {
        if connections.get() >= CONNECTIONS {
            runtime::sleep(ACCEPT_PAUSE).await;
            continue;
        }
        let socket = match listener
            .accept()
            .await
            .and_then(|(fd, _)| Socket::from_fd(fd))
        {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the metrics listener");
                runtime::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let agent = Rc::clone(&agent);
        let counted = CountedConnection::new(&connections);
        runtime::spawn(async move {
            // Errors and the time limit are visible to the client.
            let _ = runtime::timeout(TIME_LIMIT, answer(&agent, &socket)).await;
            drop(counted);
        });
    }
}

/// Counts an open connection until dropped.
struct CountedConnection(Rc<Cell<usize>>);

impl CountedConnection {
    fn new(connections: &Rc<Cell<usize>>) -> Self {
        connections.set(connections.get() + 1);
        Self(Rc::clone(connections))
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Looks whether every service can be served, with a new attempt at backends that are down.
async fn ready(agent: &AgentContext) -> Result<(), String> {
    let services = agent.registry.services();
    join_all(services.values().map(|service| service.pool.recheck())).await;
    page::readiness(agent, agent.clock.now())
}

async fn answer(agent: &AgentContext, socket: &Socket) -> io::Result<()> {
    let mut buffer = BytesMut::new();
    // An error of the connection is an end, too.
    let head = head::read_head(&mut buffer, HEAD_LIMITS, |cx, buffer| {
        socket
            .poll_recv_buf(cx, buffer)
            .map(|received| Ok(received.unwrap_or(0)))
    });
    let request = match head.await {
        Ok(Some(head)) => head::parse_request(&head, HEAD_LIMITS),
        Ok(None) => return Ok(()),
        Err(invalid) => Err(invalid),
    };
    let (status, content_type, body) = match &request {
        Err(error) => (StatusCode::BAD_REQUEST, TEXT, format!("{error}\n")),
        Ok(request) if ![Method::GET, Method::HEAD].contains(&request.method) => (
            StatusCode::METHOD_NOT_ALLOWED,
            TEXT,
            "GET only\n".to_owned(),
        ),
        Ok(request) => match request.target.path() {
            "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
            "/readyz" => match ready(agent).await {
                Ok(()) => (StatusCode::OK, TEXT, "ready\n".to_owned()),
                Err(missing) => (
                    StatusCode::SERVICE_UNAVAILABLE,
                    TEXT,
                    format!("{missing}\n"),
                ),
            },
            "/metrics" => (
                StatusCode::OK,
                exposition::CONTENT_TYPE,
                page::metrics(agent),
            ),
            _ => (
                StatusCode::NOT_FOUND,
                TEXT,
                "not found; available: /metrics, /readyz, /healthz\n".to_owned(),
            ),
        },
    };
    let headers = Fields::from_iter([
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ]);
    let mut out = Vec::with_capacity(256 + body.len());
    head::write_response(
        &mut out,
        status,
        &headers,
        Framing::Length(body.len() as u64),
        ConnectionField::Close,
    );
    if !request.is_ok_and(|request| request.method == Method::HEAD) {
        out.extend_from_slice(body.as_bytes());
    }
    socket.send_all(&mut [IoSlice::new(&out)]).await?;
    socket.shutdown_write();
    Ok(())
}

#[cfg(test)]
mod tests;
