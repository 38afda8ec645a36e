//! Changes, which are answered when all nodes keep them.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use gw_region::{NodeSlot, Placement};
use gw_store::Position;
use tokio::time::timeout;

use crate::admin::Admin;
use crate::members::{CHANGED_WITHIN, OtherNodes, RegionInputs, nodes_behind};

/// Slots of nodes that may serve without a change, or would not know it after a crash.
const X_GW_PENDING_NODES: HeaderName = HeaderName::from_static("x-gw-pending-nodes");

/// Delays the response to a change by the API until all nodes keep it. The request was
/// authenticated, and may repeat a change that is not in use everywhere yet.
pub(in crate::admin) async fn await_api_change(
    State(admin): State<Admin>,
    request: Request,
    next: Next,
) -> Response {
    let is_change = !request.method().is_safe();
    let response = next.run(request).await;
    if !is_change || !is_made(&response) {
        return response;
    }
    let position = admin.control.position();
    admin.await_all_nodes(&position, response).await
}

/// Delays the response to a change by the console until all nodes keep it. The console also
/// redirects requests that change nothing, such as those without a session.
pub(in crate::admin) async fn await_console_change(
    State(admin): State<Admin>,
    request: Request,
    next: Next,
) -> Response {
    let is_change = !request.method().is_safe();
    let before = admin.control.position();
    let response = next.run(request).await;
    let position = admin.control.position();
    if !is_change || !is_made(&response) || position == before {
        return response;
    }
    admin.await_all_nodes(&position, response).await
}

fn is_made(response: &Response) -> bool {
    response.status().is_success() || response.status().is_redirection()
}

impl Admin {
    /// Delays `response` until all nodes of the region keep the change that made `position`. Names
    /// nodes that do not say so in time, and dead ones that may still serve: they use it once they
    /// reach PostgreSQL.
    async fn await_all_nodes(&self, position: &Position, mut response: Response) -> Response {
        let (others, behind) = self.nodes_behind(position).await;
        if !behind.is_empty() {
            tracing::warn!(revision = position.revision.0, nodes = ?behind,
                "a change is not in use at all nodes yet, or not stored");
        }
        let Some(pending) = others.pending(&behind) else {
            return response;
        };
        if let Ok(value) = HeaderValue::try_from(pending) {
            response.headers_mut().insert(X_GW_PENDING_NODES, value);
        }
        response
    }

    /// The other nodes of the region, and the nodes that do not keep the change that made
    /// `position` within a second. This node has slot 0 if it has no `peer_listen`.
    pub(crate) async fn nodes_behind(&self, position: &Position) -> (OtherNodes, Vec<NodeSlot>) {
        let placement = self.control.local_node().placement();
        let others = match self.region.clone() {
            Some(region) => self.nodes_of_table(region, placement.as_deref()).await,
            None => OtherNodes::default(),
        };
        let asked = nodes_behind(self.control.node_client(), &others.alive, position);
        let (mut behind, kept) =
            tokio::join!(asked, timeout(CHANGED_WITHIN, self.control.keeps(position)));
        if kept.is_err() {
            behind.push(
                placement
                    .as_deref()
                    .map(Placement::here)
                    .unwrap_or_default(),
            );
        }
        (others, behind)
    }

    /// The other nodes. Their rows are read after the change: a node that has joined since has read
    /// the change, or is asked.
    async fn nodes_of_table(
        &self,
        region: RegionInputs,
        placement: Option<&Placement>,
    ) -> OtherNodes {
        let control = Arc::clone(&self.control);
        let read = tokio::task::spawn_blocking(move || control.nodes_now());
        let rows = timeout(CHANGED_WITHIN, read)
            .await
            .ok()
            .and_then(Result::ok)
            .flatten();
        let newer = rows.clone();
        let known = tokio::task::spawn_blocking(move || region.others(newer))
            .await
            .ok()
            .flatten();
        // If the membership does not answer, all nodes of the table count, or else the members that
        // it knew last.
        known.unwrap_or_else(|| match (rows, placement) {
            (Some(rows), Some(placement)) => OtherNodes::of(&rows, placement.here()),
            (_, placement) => OtherNodes {
                alive: placement
                    .into_iter()
                    .flat_map(|placement| placement.others().cloned())
                    .collect(),
                dead: Vec::new(),
            },
        })
    }
}
