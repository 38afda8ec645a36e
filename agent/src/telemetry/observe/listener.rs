//! The listener: one request a connection, few connections at a time, a short while for each.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::time::Duration;

use bytes::BytesMut;
use gw_shared::http::{Connection, Framing, HeadLimits, HeadScanner, head};
use gw_shared::net::{Listener, Socket};
use gw_shared::runtime;
use gw_shared::telemetry::metrics::exposition;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, StatusCode};

use super::page;
use crate::supervisor::Agent;

const TEXT: &str = "text/plain; charset=utf-8";
const HEAD_LIMITS: HeadLimits = HeadLimits { head: 8 * 1024, fields: 64, target: 1024 };
/// Connections at a time; others wait with the kernel.
const CONNECTIONS: usize = 16;
/// For a request and its answer.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// How soon an address is tried again that another program has, and how soon a full or failing listener.
const TRY_AGAIN: Duration = Duration::from_secs(10);
const FULL_PAUSE: Duration = Duration::from_millis(50);

/// Where observers are listened for.
pub(crate) struct Observers {
    address: SocketAddr,
    /// `None` while another program has the address.
    listener: Option<TcpListener>,
}

impl Observers {
    /// Listens at `address`. Who cannot be observed serves all the same, and says so.
    pub(crate) fn listen(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address);
        if let Err(error) = &listener {
            tracing::error!(%address, %error, "metrics_listen: no metrics are served; trying again every {TRY_AGAIN:?}");
        }
        Self { address, listener: listener.ok() }
    }

    /// Where that is; the kernel may have chosen the port.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.listener.as_ref()?.local_addr().ok()
    }
}

/// Answers observers for as long as it is polled.
pub(crate) async fn serve(agent: Rc<Agent>, observers: Observers) {
    let Observers { address, mut listener } = observers;
    let listener = loop {
        match listener.take().map_or_else(|| TcpListener::bind(address), Ok).and_then(Listener::new) {
            Ok(listener) => break listener,
            Err(error) => {
                tracing::debug!(%address, %error, "no metrics are served");
                runtime::sleep(TRY_AGAIN).await;
            }
        }
    };
    tracing::info!(%address, "metrics are served");
    let connections = Rc::new(Cell::new(0));
    loop {
        if connections.get() >= CONNECTIONS {
            runtime::sleep(FULL_PAUSE).await;
            continue;
        }
        let socket = match listener.accept().await.and_then(|(fd, _)| Socket::from_fd(fd)) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(%error, "an observer's connection cannot be accepted");
                runtime::sleep(FULL_PAUSE).await;
                continue;
            }
        };
        let (agent, counted) = (Rc::clone(&agent), Counted::new(&connections));
        runtime::spawn(async move {
            // Whatever went wrong, the observer sees it.
            let _ = runtime::timeout(TIME_LIMIT, answer(&agent, &socket)).await;
            drop(counted);
        });
    }
}

/// Counts down however its task ends.
struct Counted(Rc<Cell<usize>>);

impl Counted {
    fn new(connections: &Rc<Cell<usize>>) -> Self {
        connections.set(connections.get() + 1);
        Self(Rc::clone(connections))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

async fn answer(agent: &Agent, socket: &Socket) -> io::Result<()> {
    let (mut buffer, mut scanner) = (BytesMut::new(), HeadScanner::default());
    let request = loop {
        match scanner.find_end(&mut buffer, HEAD_LIMITS) {
            Ok(Some(end)) => break head::parse_request(&buffer.split_to(end).freeze(), HEAD_LIMITS),
            Ok(None) => {
                if std::future::poll_fn(|cx| socket.poll_recv_buf(cx, &mut buffer)).await? == 0 {
                    return Ok(());
                }
            }
            Err(error) => break Err(error),
        }
    };
    let (status, content_type, body) = match &request {
        Err(error) => (StatusCode::BAD_REQUEST, TEXT, format!("{error}\n")),
        Ok(request) if ![Method::GET, Method::HEAD].contains(&request.method) => {
            (StatusCode::METHOD_NOT_ALLOWED, TEXT, "GET only\n".to_owned())
        }
        Ok(request) => match request.target.path() {
            "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
            "/readyz" => match page::readiness(agent, agent.clock.now()) {
                Ok(()) => (StatusCode::OK, TEXT, "ready\n".to_owned()),
                Err(missing) => (StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{missing}\n")),
            },
            "/metrics" => (StatusCode::OK, exposition::CONTENT_TYPE, page::metrics(agent)),
            _ => (StatusCode::NOT_FOUND, TEXT, "here are /metrics, /readyz and /healthz\n".to_owned()),
        },
    };
    let headers = HeaderMap::from_iter([
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ]);
    let mut out = Vec::with_capacity(256 + body.len());
    head::write_response(&mut out, status, &headers, Framing::Length(body.len() as u64), Connection::Close);
    if !request.is_ok_and(|request| request.method == Method::HEAD) {
        out.extend_from_slice(body.as_bytes());
    }
    socket.send_all(&mut [IoSlice::new(&out)]).await?;
    socket.shutdown_write();
    Ok(())
}
