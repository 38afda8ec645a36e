//! Waits until the other nodes use a change.
//!
//! The node that commits a change asks every other node whether it has the revision. The question makes a node look at
//! once, so that it does not depend on the notification of PostgreSQL.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::routing::get;
use futures_util::future::join_all;
use http::{Request, StatusCode};
use tokio::time::timeout;

use crate::cluster::NodeClient;
use crate::control::Control;
use crate::region::{Member, NodeSlot};
use crate::store::Revision;

/// Longest wait of a change for the other nodes.
const WITHIN: Duration = Duration::from_secs(1);
/// Longest wait of a node that was asked, so that its answer arrives in time.
const ANSWER_WITHIN: Duration = Duration::from_millis(900);

/// Asks `others` until they use the records of `revision`. Returns those that do not say so in time.
pub(crate) async fn nodes_behind(client: &NodeClient, others: &[Member], revision: Revision) -> Vec<NodeSlot> {
    let ask = |member: &Member| {
        let (client, member) = (client.clone(), member.clone());
        async move {
            let path = format!("/v1/revisions/{}", revision.0);
            let request = Request::get(path).body(Bytes::new()).ok()?;
            let response = client.send(&member, request, WITHIN).await.ok()?;
            (response.status() == StatusCode::NO_CONTENT).then_some(())
        }
    };
    let answers = join_all(others.iter().map(ask)).await;
    let behind = others.iter().zip(answers).filter(|(_, answer)| answer.is_none());
    behind.map(|(member, _)| member.slot).collect()
}

/// The route of the question: 204 once this node uses the revision, 503 if it does not in time.
pub(super) fn routes(control: Arc<Control>) -> Router {
    Router::new().route("/v1/revisions/{revision}", get(is_used)).with_state(control)
}

async fn is_used(State(control): State<Arc<Control>>, Path(revision): Path<i64>) -> StatusCode {
    control.look_for_changes();
    let mut applied = control.applied_revision();
    let used = timeout(ANSWER_WITHIN, applied.wait_for(|applied| applied.0 >= revision)).await;
    if matches!(used, Ok(Ok(_))) { StatusCode::NO_CONTENT } else { StatusCode::SERVICE_UNAVAILABLE }
}
