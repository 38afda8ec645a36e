//! The server: HTTP/1.1 for the control planes of other nodes.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::limits::{self, CLUSTER_BODIES};
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use gw_base::tls::pki::NodeIdentity;
use gw_interface::node_connections::{NodeConnection, WaitingConnections};
use gw_interface::rate_limit::{TaskPlace, TaskPlaces};
use http::header::RETRY_AFTER;
use http::{Extensions, StatusCode};
use rustls_pki_types::CertificateDer;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;

use super::LocalNode;
use super::transport::{self, NotServed};
use crate::http_server::{self, NO_ROOM, with_bounded_bodies};

/// Limits on what other nodes, and peers that claim to be nodes, can use.
#[derive(Debug, Clone, Copy)]
pub struct ServerLimits {
    /// Connections of nodes. More are closed.
    pub connections: usize,
    /// Unfinished handshakes. A further one ends the oldest.
    pub(crate) handshakes: usize,
    pub(crate) handshakes_per_address: usize,
    /// Bytes of a request head.
    pub head: usize,
    /// Bytes of a request body, unless its route has another limit.
    pub body: usize,
    pub(crate) handshake_within: Duration,
    /// Time from the end of a handshake or of a response to the last byte of the next request head.
    pub idle: Duration,
    pub(crate) body_within: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections: limits::CLUSTER_CONNECTIONS,
            handshakes: limits::CLUSTER_HANDSHAKES,
            handshakes_per_address: limits::CLUSTER_HANDSHAKES_PER_ADDRESS,
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
struct NodeServing {
    node: Arc<LocalNode>,
    router: Router,
    limits: ServerLimits,
    connections: Arc<Semaphore>,
    handshakes: TaskPlaces,
    /// Becomes `true` when connections are to end after their running request.
    closing: watch::Receiver<bool>,
}

/// Serves connections until `stopped` resolves, and then finishes running requests. Handlers find
/// the other node in an `Extension<NodeIdentity>`.
pub async fn serve(
    waiting: &mut WaitingConnections,
    node: Arc<LocalNode>,
    router: Router,
    limits: ServerLimits,
    stopped: impl Future<Output = ()>,
) {
    let within = limits.body_within;
    let no_room = || {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            [(RETRY_AFTER, "1")],
            NO_ROOM,
        )
            .into_response()
    };
    let router = with_bounded_bodies(router, limits.body, CLUSTER_BODIES, within, no_room);
    let (close, closing) = watch::channel(false);
    let connections = Arc::new(Semaphore::new(limits.connections));
    let handshakes = TaskPlaces::new(limits.handshakes, limits.handshakes_per_address);
    let serving = NodeServing {
        node,
        router,
        limits,
        connections,
        handshakes,
        closing,
    };
    let mut tasks = JoinSet::new();
    let mut stopped = pin!(stopped);
    loop {
        tokio::select! {
            connection = waiting.next() => {
                let Some(connection) = connection else { break };
                let handshake = serving.handshakes.take(connection.claimant);
                tasks.spawn(serving.clone().serve(connection, handshake));
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

/// `router`, for processes that are nodes of the region as far as `node` knows. The certificate of
/// a process that has ended is of no use there.
pub fn for_nodes(router: Router, node: Arc<LocalNode>) -> Router {
    router.route_layer(from_fn_with_state(node, only_nodes))
}

async fn only_nodes(
    State(node): State<Arc<LocalNode>>,
    Extension(caller): Extension<NodeIdentity>,
    request: Request,
    next: Next,
) -> Response {
    if node.knows(caller) {
        return next.run(request).await;
    }
    let slot = caller.slot.get();
    if node.refuses_first(caller) {
        tracing::warn!(
            node = slot,
            "request of a control plane refused: its process has ended, or the table of nodes does \
             not list it"
        );
    }
    (
        StatusCode::FORBIDDEN,
        "the process of this certificate is not known as a node\n",
    )
        .into_response()
}

fn check(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection of another node's control plane panicked");
    }
}

impl NodeServing {
    async fn serve(self, connection: NodeConnection, handshake: TaskPlace) {
        let from = connection.from;
        let (stream, node, certificate, _counted) = match self
            .shake_hands(connection, handshake)
            .await
        {
            Ok(accepted) => accepted,
            Err(error @ NotServed::GaveWay) => {
                return tracing::debug!(%from, %error, "connection of another control plane ended");
            }
            Err(error) => {
                return tracing::warn!(%from, %error, "connection of another control plane refused");
            }
        };
        let mut extensions = Extensions::new();
        extensions.insert(node);
        let head = self.limits.head;
        let idle = self.limits.idle;
        let ended = tokio::select! {
            ended = http_server::serve_connection(
                stream,
                self.router,
                extensions,
                head,
                idle,
                self.closing,
            ) => ended,
            () = self.node.distrusts(&certificate) => {
                let node = node.slot.get();
                return tracing::info!(%from, node,
                    "connection of another control plane ended: its authority is not trusted any \
                     more");
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%from, node = node.slot.get(), %error,
                "connection of another control plane ended");
        }
    }

    /// Does the handshake, unless it has to give way. Counts the connection.
    async fn shake_hands(
        &self,
        connection: NodeConnection,
        handshake: TaskPlace,
    ) -> Result<
        (
            TlsStream<TcpStream>,
            NodeIdentity,
            CertificateDer<'static>,
            OwnedSemaphorePermit,
        ),
        NotServed,
    > {
        let accepted = tokio::select! {
            biased;
            () = handshake.lost() => return Err(NotServed::GaveWay),
            accepted = timeout(
                self.limits.handshake_within,
                transport::accept(connection, &self.node),
            ) => accepted,
        };
        let (stream, node, certificate) = accepted.unwrap_or(Err(NotServed::TimedOut))?;
        let counted = Arc::clone(&self.connections)
            .try_acquire_owned()
            .map_err(|_| NotServed::TooMany)?;
        Ok((stream, node, certificate, counted))
    }
}
