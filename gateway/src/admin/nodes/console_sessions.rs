//! Console sessions, which are valid at every node. A node tells the others of each session that it opens or ends, and asks
//! them about a session that it does not know. Nodes know sessions by the hashes of their ids.

use std::pin::pin;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::{Method, StatusCode};
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use http::Request;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::ask::target;
use crate::admin::Admin;
use crate::admin::console::{LIFETIME, SessionKey};
use crate::region::Member;

/// Time limit of an answer. A person waits for it.
const WITHIN: Duration = Duration::from_secs(2);

/// Remaining time of an open session.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Remaining {
    seconds: u64,
}

impl Admin {
    /// Whether the session is open, as this or another node knows.
    pub(in crate::admin) async fn is_session_open(&self, id: &str) -> bool {
        let Some(key) = SessionKey::of(id) else { return false };
        let sessions = self.console.sessions();
        if let Some(is_open) = sessions.is_open(key, Instant::now()) {
            return is_open;
        }
        let nodes = self.other_nodes();
        // Anyone can ask about ids: only a few questions are on their way at any time.
        let permit = timeout(WITHIN, self.console.session_questions().acquire()).await;
        let Ok(Ok(_permit)) = permit else { return false };
        let path = path_of(key);
        let answers = nodes.iter().map(|node| self.ask_node::<Option<Remaining>>(node, &path, WITHIN));
        let known = answers.collect::<FuturesUnordered<_>>().filter_map(async |answer| answer.ok().flatten());
        let Some(remaining) = pin!(known).next().await else { return false };
        sessions.learn(key, Instant::now(), remaining.lifetime());
        // Not open if it was ended here meanwhile.
        sessions.is_open(key, Instant::now()) == Some(true)
    }

    /// Tells the other nodes of a new session.
    pub(in crate::admin) async fn share_session(&self, id: &str) {
        let Some(key) = SessionKey::of(id) else { return };
        let path = target(&path_of(key), &Remaining { seconds: LIFETIME.as_secs() });
        // A node that does not hear of it asks when it needs to know.
        self.tell_nodes(&Method::PUT, &path).await;
    }

    /// Ends a session at all nodes.
    pub(in crate::admin) async fn end_session(&self, id: &str) {
        let Some(key) = SessionKey::of(id) else { return };
        self.console.sessions().close(key, Instant::now());
        for node in self.tell_nodes(&Method::DELETE, &path_of(key)).await {
            tracing::warn!(
                node,
                "console: signed out, but the session is still open at this node, for 12 hours at most"
            );
        }
    }

    /// Sends a request without a body to all other nodes. Returns the slots of those that do not confirm it.
    async fn tell_nodes(&self, method: &Method, target: &str) -> Vec<u16> {
        let nodes = self.other_nodes();
        let told = join_all(nodes.iter().map(|node| self.is_told(node, method, target))).await;
        nodes.iter().zip(told).filter(|(_, told)| !told).map(|(node, _)| node.slot.get()).collect()
    }

    async fn is_told(&self, node: &Member, method: &Method, target: &str) -> bool {
        let Ok(request) = Request::builder().method(method).uri(target).body(Bytes::new()) else { return false };
        let response = self.control.node_client().send(node, request, WITHIN).await;
        response.is_ok_and(|response| response.status() == StatusCode::NO_CONTENT)
    }
}

impl Remaining {
    fn lifetime(self) -> Duration {
        Duration::from_secs(self.seconds).min(LIFETIME)
    }
}

fn path_of(key: SessionKey) -> String {
    format!("/v1/console-sessions/{key}")
}

/// Answers another node that does not know a session; `null` if this node does not know it either.
pub(super) async fn show(State(admin): State<Admin>, Path(key): Path<SessionKey>) -> Json<Option<Remaining>> {
    let remaining = admin.console.sessions().remaining(key, Instant::now());
    Json(remaining.map(|remaining| Remaining { seconds: remaining.as_secs() }))
}

/// Another node opened a session.
pub(super) async fn open(
    State(admin): State<Admin>,
    Path(key): Path<SessionKey>,
    Query(remaining): Query<Remaining>,
) -> StatusCode {
    admin.console.sessions().learn(key, Instant::now(), remaining.lifetime());
    StatusCode::NO_CONTENT
}

/// Another node ended a session.
pub(super) async fn end(State(admin): State<Admin>, Path(key): Path<SessionKey>) -> StatusCode {
    admin.console.sessions().close(key, Instant::now());
    StatusCode::NO_CONTENT
}
