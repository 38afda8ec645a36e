//! The server: HTTP/1.1 for the control planes of other nodes.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::DefaultBodyLimit;
use axum::{Extension, Router};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::transport::{self, NotServed};
use super::{LocalNode, NodeConnection, WaitingConnections};
use crate::http_server;
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
    let router = router.layer(DefaultBodyLimit::max(limits.body));
    let router = http_server::with_timed_bodies(router, limits.body_within);
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
    async fn serve(self, connection: NodeConnection, _counted: OwnedSemaphorePermit, handshake: OwnedSemaphorePermit) {
        let from = connection.from;
        let accepted = timeout(self.limits.handshake_within, transport::accept(connection, &self.node)).await;
        drop(handshake);
        let (stream, node) = match accepted.unwrap_or(Err(NotServed::TimedOut)) {
            Ok(accepted) => accepted,
            Err(error) => return tracing::warn!(%from, %error, "connection of another control plane refused"),
        };
        let router = self.router.layer(Extension(node));
        let (head, idle) = (self.limits.head, self.limits.idle);
        let ended = http_server::serve_connection(stream, router, head, idle, self.closing).await;
        if let Err(error) = ended {
            tracing::debug!(%from, node = node.slot.get(), %error, "connection of another control plane ended");
        }
    }
}
