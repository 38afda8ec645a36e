//! Changes, which are answered when all nodes use them.

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use crate::admin::Admin;
use crate::members::nodes_behind;

/// Slots of nodes that may serve without a change.
const X_GW_PENDING_NODES: HeaderName = HeaderName::from_static("x-gw-pending-nodes");

/// Delays the response to a change until all nodes of the region use it. Names nodes that do not say so in time, and
/// dead ones that may still serve: they use it once they reach PostgreSQL.
pub(in crate::admin) async fn await_other_nodes(State(admin): State<Admin>, request: Request, next: Next) -> Response {
    let is_change = !request.method().is_safe() && !request.uri().path().ends_with("/replay");
    let (is_api, before) = (request.uri().path().starts_with("/api/"), admin.control.position());
    let mut response = next.run(request).await;
    let is_made = response.status().is_success() || response.status().is_redirection();
    let Some(region) = admin.region.clone().filter(|_| is_change && is_made) else { return response };
    let position = admin.control.position();
    // A request of the API was authenticated, and may repeat a change that is not in use everywhere yet. The console also
    // redirects requests that change nothing, such as those without a session.
    if !is_api && position == before {
        return response;
    }
    let others = tokio::task::spawn_blocking(move || region.others()).await.ok().flatten().unwrap_or_default();
    let behind = nodes_behind(admin.control.node_client(), &others.alive, &position).await;
    if !behind.is_empty() {
        tracing::warn!(revision = position.revision.0, nodes = ?behind, "a change is not in use at all nodes yet");
    }
    let Some(pending) = others.pending(&behind) else { return response };
    if let Ok(value) = HeaderValue::try_from(pending) {
        response.headers_mut().insert(X_GW_PENDING_NODES, value);
    }
    response
}
