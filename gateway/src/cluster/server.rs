//! The server: HTTP/1.1 for the control planes of other nodes.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::map_request;
use axum::{BoxError, Extension, Router};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep, timeout};

use super::transport::{self, NotServed};
use super::{LocalNode, NodeConnection, WaitingConnections};
use crate::limits;

/// Limits on what other nodes can use. Connections beyond them wait in the bounded channel of the workers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServerLimits {
    pub(crate) connections: usize,
    pub(crate) handshakes: usize,
    /// Bytes of a request head.
    pub(crate) head: usize,
    /// Bytes of a request body, unless its route has another [`DefaultBodyLimit`].
    pub(crate) body: usize,
    pub(crate) handshake_within: Duration,
    /// Time from the end of a handshake or of a response to the last byte of the next request head.
    pub(crate) idle: Duration,
    pub(crate) body_within: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections: limits::CLUSTER_CONNECTIONS,
            handshakes: limits::CLUSTER_HANDSHAKES,
            head: limits::CLUSTER_HEAD,
            body: limits::CLUSTER_BODY,
            handshake_within: limits::HANDSHAKE,
            idle: limits::CLUSTER_IDLE,
            body_within: limits::CLUSTER_BODY_WITHIN,
        }
    }
}

/// What a connection is served with.
#[derive(Clone)]
struct Serving {
    node: Arc<LocalNode>,
    router: Router,
    limits: ServerLimits,
    /// Becomes `true` when connections are to end after their running request.
    closing: watch::Receiver<bool>,
}

/// Serves connections until `stopped` resolves, and then finishes running requests. Handlers find the other node in an
/// `Extension<NodeIdentity>`.
pub(crate) async fn serve(
    waiting: &mut WaitingConnections,
    node: Arc<LocalNode>,
    router: Router,
    limits: ServerLimits,
    stopped: impl Future<Output = ()>,
) {
    let within = limits.body_within;
    let bounded = move |request: Request| async move { request.map(|body| Body::new(TimedBody::new(body, within))) };
    let router = router.layer(DefaultBodyLimit::max(limits.body)).layer(map_request(bounded));
    let (close, closing) = watch::channel(false);
    let serving = Serving { node, router, limits, closing };
    let (connections, handshakes) = (semaphore(limits.connections), semaphore(limits.handshakes));
    let mut tasks = JoinSet::new();
    let mut stopped = pin!(stopped);
    loop {
        let next = async {
            let connection = Arc::clone(&connections).acquire_owned().await.ok()?;
            let handshake = Arc::clone(&handshakes).acquire_owned().await.ok()?;
            Some((waiting.next().await?, connection, handshake))
        };
        tokio::select! {
            next = next => {
                let Some((connection, permit, handshake)) = next else { break };
                tasks.spawn(serving.clone().serve(connection, permit, handshake));
            }
            Some(ended) = tasks.join_next() => check(ended),
            () = &mut stopped => break,
        }
    }
    close.send_replace(true);
    while let Some(ended) = tasks.join_next().await {
        check(ended);
    }
}

fn semaphore(permits: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(permits))
}

fn check(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection of another node's control plane panicked");
    }
}

impl Serving {
    async fn serve(
        mut self,
        connection: NodeConnection,
        _counted: OwnedSemaphorePermit,
        handshake: OwnedSemaphorePermit,
    ) {
        let from = connection.from;
        let accepted = timeout(self.limits.handshake_within, transport::accept(connection, &self.node)).await;
        drop(handshake);
        let (stream, node) = match accepted.unwrap_or(Err(NotServed::TimedOut)) {
            Ok(accepted) => accepted,
            Err(error) => return tracing::warn!(%from, %error, "connection of another control plane refused"),
        };
        let service = TowerToHyperService::new(self.router.layer(Extension(node)));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.idle)
            .max_buf_size(self.limits.head)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = pin!(connection);
        let closing = async { drop(self.closing.wait_for(|is_closing| *is_closing).await) };
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = closing => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%from, node = node.slot.get(), %error, "connection of another control plane ended");
        }
    }
}

/// A request body that must arrive within a time.
struct TimedBody {
    body: Body,
    late: Pin<Box<Sleep>>,
}

impl TimedBody {
    fn new(body: Body, within: Duration) -> Self {
        Self { body, late: Box::pin(sleep(within)) }
    }
}

impl HttpBody for TimedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.late.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the body did not arrive in time".into())));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
