//! Tunnels that a process splices to the nodes that own their services. When it drains, it does not
//! see into them, so it asks the owners to let the agents connect again.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::routing::post;
use axum::{Extension, Router};
use bytes::Bytes;
use futures_util::future::join_all;
use gw_base::tls::pki::NodeIdentity;
use gw_data_plane::worker::{WorkerHandles, WorkerMessage};
use gw_region::Member;
use http::{Request, StatusCode};

use super::gateway::Gateway;

const PATH: &str = "/v1/spliced-tunnels/move";
/// Time limit of an answer.
const WITHIN: Duration = Duration::from_secs(2);

impl Gateway {
    /// Asks the other nodes to move the tunnels that come through this node. Agents that connect
    /// again reach the successor or another node.
    pub(super) fn move_spliced_tunnels(&self) {
        let Some(placement) = self.control.local_node().placement() else {
            return;
        };
        let asked = placement.others().map(|owner| self.ask_to_move(owner));
        self.background.block_on(join_all(asked));
    }

    async fn ask_to_move(&self, owner: &Member) {
        let Ok(request) = Request::post(PATH).body(Bytes::new()) else {
            return;
        };
        let problem = match self
            .control
            .node_client()
            .send(owner, request, WITHIN)
            .await
        {
            Ok(response) if response.status() == StatusCode::NO_CONTENT => return,
            Ok(response) => format!("status {}", response.status()),
            Err(error) => error.to_string(),
        };
        let node = owner.slot.get();
        tracing::warn!(
            node,
            problem,
            "the tunnels that this process splices to a node end with its drain"
        );
    }
}

/// Route for other nodes.
pub(super) fn routes(workers: Arc<WorkerHandles>) -> Router {
    Router::new()
        .route(PATH, post(move_tunnels))
        .with_state(workers)
}

/// A node splices tunnels to this one, and its process drains.
async fn move_tunnels(
    State(workers): State<Arc<WorkerHandles>>,
    Extension(node): Extension<NodeIdentity>,
) -> StatusCode {
    let told = tokio::task::spawn_blocking(move || {
        workers.tell_all(|| WorkerMessage::MoveTunnels { via: node.slot });
    });
    if told.await.is_ok() {
        StatusCode::NO_CONTENT
    } else {
        StatusCode::INTERNAL_SERVER_ERROR
    }
}
