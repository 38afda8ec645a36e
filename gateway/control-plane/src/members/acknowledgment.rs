//! Waits until the other nodes use a change.
//!
//! The node that commits a change asks every other node whether it has the change. The question
//! makes a node look at once, so that it does not depend on the notification of PostgreSQL. It
//! names the change by its id and region: a node whose history is another one, for example after a
//! failover that has lost changes, can be at the same or at a later revision.
//!
//! A node says yes when its workers use the change, and the change is in its data folder, for a
//! start without PostgreSQL.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::routing::get;
use futures_util::future::join_all;
use gw_region::{Member, NodeSlot};
use gw_store::{Position, Revision};
use http::{Request, StatusCode};
use tokio::time::timeout;

use crate::cluster::NodeClient;
use crate::control::Control;

/// Longest wait of a change for all nodes.
pub const WITHIN: Duration = Duration::from_secs(1);
/// Longest wait of a node that was asked, so that its answer arrives in time.
const ANSWER_WITHIN: Duration = Duration::from_millis(900);

/// Stands for a position that no change has made, as after an import.
const NO_CHANGE: &str = "-";

/// Asks `others` until they keep the change that made `position`. Returns those that do not say so
/// in time.
pub async fn nodes_behind(
    client: &NodeClient,
    others: &[Member],
    position: &Position,
) -> Vec<NodeSlot> {
    let ask = |member: &Member| {
        let client = client.clone();
        let member = member.clone();
        async move {
            let Position {
                origin,
                revision,
                change,
            } = position;
            let change = if change.is_empty() { NO_CHANGE } else { change };
            let path = format!("/v1/changes/{origin}/{}/{change}", revision.0);
            let request = Request::get(path).body(Bytes::new()).ok()?;
            let response = client.send(&member, request, WITHIN).await.ok()?;
            (response.status() == StatusCode::NO_CONTENT).then_some(())
        }
    };
    let answers = join_all(others.iter().map(ask)).await;
    let behind = others
        .iter()
        .zip(answers)
        .filter(|(_, answer)| answer.is_none());
    behind.map(|(member, _)| member.slot).collect()
}

/// The route of the question: 204 once this node keeps the change, 503 if it does not in time.
pub(crate) fn routes(control: Arc<Control>) -> Router {
    Router::new()
        .route("/v1/changes/{origin}/{revision}/{change}", get(is_kept))
        .with_state(control)
}

async fn is_kept(
    State(control): State<Arc<Control>>,
    Path((origin, revision, mut change)): Path<(String, i64, String)>,
) -> StatusCode {
    if change == NO_CHANGE {
        change.clear();
    }
    let asked = Position {
        origin,
        revision: Revision(revision),
        change,
    };
    control.look_for_changes();
    let kept = timeout(ANSWER_WITHIN, control.keeps(&asked)).await;
    if kept.is_ok() {
        StatusCode::NO_CONTENT
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}
