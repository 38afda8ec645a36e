//! The client: calls the control planes of other nodes.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::limits;
use axum::body::{Body, to_bytes};
use bytes::Bytes;
use gw_base::tls::pki::NodeIdentity;
use gw_region::{Member, NodeSlot};
use http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::runtime::{self, Handle};
use tokio::time::timeout;

use super::{LocalNode, transport};

/// Calls the control planes of other nodes. Cheap to clone; clones share their idle connections.
///
/// Works on any tokio runtime: an idle connection is used again on the runtime that opened it only.
#[derive(Clone)]
pub struct NodeClient(Arc<Inner>);

struct Inner {
    node: Arc<LocalNode>,
    idle: Mutex<HashMap<ProcessClient, Vec<Idle>>>,
}

/// One process, as one runtime connects to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ProcessClient {
    runtime: runtime::Id,
    slot: NodeSlot,
    session: u128,
    address: SocketAddr,
    /// Which of the certificates of this process the connection shows: the other end refuses that
    /// of an earlier session.
    certificate: u64,
}

/// A connection without a request.
struct Idle {
    sender: SendRequest<Body>,
    since: Instant,
}

/// Why a call of another node's control plane has no response.
#[derive(Debug, thiserror::Error)]
pub enum NodeCallError {
    /// This node has no certificate to show.
    #[error("this node has no certificate yet")]
    NoCertificate,
    /// No process listens at the address.
    #[error("connection refused")]
    Refused,
    /// The certificate there has another slot or session.
    #[error("another process than the member answers there")]
    OtherProcess(Option<NodeIdentity>),
    /// The response did not arrive in time.
    #[error("no answer in time")]
    TimedOut,
    /// Error of the connection or of its TLS handshake.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// Error of HTTP on the connection.
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    /// It ended early, or is too long.
    #[error("response body: {0}")]
    ResponseBody(#[source] axum::Error),
}

/// A request that got no response.
struct NoResponse {
    error: NodeCallError,
    /// The request did not reach the node, or does no harm if it is served twice (RFC 9110 §9.2.2).
    may_repeat: bool,
}

impl NodeClient {
    /// Creates a client that shows the certificate of `node` to other nodes.
    pub fn new(node: Arc<LocalNode>) -> Self {
        Self(Arc::new(Inner {
            node,
            idle: Mutex::default(),
        }))
    }

    /// This process as a node of the region.
    pub fn local_node(&self) -> &Arc<LocalNode> {
        &self.0.node
    }

    /// Sends a request to the control plane of a member, and returns the whole response. The target
    /// of the request is a path. No other process than the one with the slot and session of `to`
    /// gets the request.
    pub async fn send(
        &self,
        to: &Member,
        mut request: Request<Bytes>,
        within: Duration,
    ) -> Result<Response<Bytes>, NodeCallError> {
        name_host(to, &mut request);
        timeout(within, self.exchange(to, request))
            .await
            .unwrap_or(Err(NodeCallError::TimedOut))
    }

    /// As [`Self::send`], on a connection that is opened for this request and not kept: a kept one
    /// to a lost machine looks open for long.
    pub(crate) async fn send_on_new_connection(
        &self,
        to: &Member,
        mut request: Request<Bytes>,
        within: Duration,
    ) -> Result<Response<Bytes>, NodeCallError> {
        name_host(to, &mut request);
        let exchanged = async {
            let mut sender = self.connect(to).await?;
            exchange_once(&mut sender, request)
                .await
                .map_err(|failed| failed.error)
        };
        timeout(within, exchanged)
            .await
            .unwrap_or(Err(NodeCallError::TimedOut))
    }

    async fn exchange(
        &self,
        to: &Member,
        request: Request<Bytes>,
    ) -> Result<Response<Bytes>, NodeCallError> {
        let destination = ProcessClient {
            runtime: Handle::current().id(),
            slot: to.slot,
            session: to.session,
            address: to.peer_address,
            certificate: self.0.node.certificates_used(),
        };
        if let Some(mut sender) = self.take_idle(&destination)
            && sender.ready().await.is_ok()
        {
            match self.exchange_on(sender, destination, request.clone()).await {
                // The node may have closed the connection meanwhile.
                Err(NoResponse {
                    may_repeat: true, ..
                }) => {}
                Err(NoResponse { error, .. }) => return Err(error),
                Ok(response) => return Ok(response),
            }
        }
        let sender = self.connect(to).await?;
        self.exchange_on(sender, destination, request)
            .await
            .map_err(|failed| failed.error)
    }

    async fn connect(&self, to: &Member) -> Result<SendRequest<Body>, NodeCallError> {
        let stream = transport::connect(to, &self.0.node).await?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection to another control plane ended");
            }
        });
        Ok(sender)
    }

    /// Sends a request on a connection, and keeps the connection for the next one unless the node
    /// refuses this one.
    async fn exchange_on(
        &self,
        mut sender: SendRequest<Body>,
        destination: ProcessClient,
        request: Request<Bytes>,
    ) -> Result<Response<Bytes>, NoResponse> {
        let response = exchange_once(&mut sender, request).await?;
        // The other end does not know the session of the certificate that the connection shows, and
        // will not.
        if response.status() != StatusCode::FORBIDDEN {
            self.keep(destination, sender);
        }
        Ok(response)
    }

    fn take_idle(&self, destination: &ProcessClient) -> Option<SendRequest<Body>> {
        let mut idle = self.idle();
        let kept = idle.get_mut(destination)?;
        // The last one was used most recently.
        std::iter::from_fn(|| kept.pop())
            .find(Idle::is_usable)
            .map(|idle| idle.sender)
    }

    fn keep(&self, destination: ProcessClient, sender: SendRequest<Body>) {
        let mut idle = self.idle();
        idle.retain(|_, kept| {
            kept.retain(Idle::is_usable);
            !kept.is_empty()
        });
        let kept = idle.entry(destination).or_default();
        if kept.len() < limits::CLUSTER_KEPT {
            kept.push(Idle {
                sender,
                since: Instant::now(),
            });
        }
    }

    /// Whether a connection is kept that the other end has not closed.
    #[cfg(test)]
    pub(super) fn has_idle(&self) -> bool {
        self.idle().values().flatten().any(Idle::is_usable)
    }

    fn idle(&self) -> MutexGuard<'_, HashMap<ProcessClient, Vec<Idle>>> {
        // Any connection can be missing.
        self.0.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name_host(to: &Member, request: &mut Request<Bytes>) {
    if let Ok(host) = HeaderValue::try_from(to.peer_address.to_string()) {
        request.headers_mut().insert(header::HOST, host);
    }
}

/// Sends a request on a connection and receives the whole response.
async fn exchange_once(
    sender: &mut SendRequest<Body>,
    request: Request<Bytes>,
) -> Result<Response<Bytes>, NoResponse> {
    let is_idempotent = request.method().is_idempotent();
    let response: Response<Incoming> = sender
        .try_send_request(request.map(Body::from))
        .await
        .map_err(|mut error| {
            let may_repeat = is_idempotent || error.take_message().is_some();
            NoResponse {
                error: error.into_error().into(),
                may_repeat,
            }
        })?;
    let (head, body) = response.into_parts();
    let body = to_bytes(Body::new(body), limits::CLUSTER_RESPONSE).await;
    let cut = |error| NoResponse {
        error: NodeCallError::ResponseBody(error),
        may_repeat: false,
    };
    Ok(Response::from_parts(head, body.map_err(cut)?))
}

impl Idle {
    fn is_usable(&self) -> bool {
        !self.sender.is_closed() && self.since.elapsed() < limits::CLUSTER_KEPT_FOR
    }
}
