//! Console sessions, which are valid at every node. A node tells the others of each session that it
//! opens or ends, and asks them about a session that it does not know. Nodes know sessions by the
//! hashes of their ids.
//!
//! What a node says of a session is proved with the admin token, which the certificate of a node
//! does not give.

use std::future::ready;
use std::pin::pin;
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;
use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::{Method, StatusCode};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use gw_base::clock::Timestamp;
use gw_region::Member;
use gw_shared::identity::secret::Secret;
use http::Request;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::ask::target;
use crate::admin::Admin;
use crate::admin::console::{LIFETIME, SessionKey};

/// Time limit of an answer. A person waits for it.
const WITHIN: Duration = Duration::from_secs(2);

/// Purpose of the proofs.
const PURPOSE: &str = "gw console session 1";

/// An open session, as a node tells of it to another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct OpenSession {
    expires_at: Timestamp,
    /// HMAC-SHA-256 of the session and its expiry, with the admin token as key; base64url.
    proof: String,
}

impl Admin {
    /// Whether the session is open, as this or another node knows.
    pub(in crate::admin) async fn is_session_open(&self, id: &str) -> bool {
        let Some(key) = SessionKey::of(id) else {
            return false;
        };
        let sessions = self.console.sessions();
        if let Some(is_open) = sessions.is_open(key, Instant::now()) {
            return is_open;
        }
        let nodes = self.other_nodes();
        // Anyone can ask about ids: only a few questions are on their way at any time.
        let permit = timeout(WITHIN, self.console.session_questions().acquire()).await;
        let Ok(Ok(_permit)) = permit else {
            return false;
        };
        let path = path_of(key);
        let token = self.control.admin_token();
        let answers = nodes
            .iter()
            .map(|node| self.ask_node::<Option<OpenSession>>(node, &path, WITHIN));
        let proved = |session: OpenSession| session.remaining(key, token, Timestamp::now());
        let known = answers
            .collect::<FuturesUnordered<_>>()
            .filter_map(|answer| ready(answer.ok().flatten().and_then(proved)));
        let Some(remaining) = pin!(known).next().await else {
            return false;
        };
        sessions.learn(key, Instant::now(), remaining);
        // Not open if it was ended here meanwhile.
        sessions.is_open(key, Instant::now()) == Some(true)
    }

    /// Tells the other nodes of a new session.
    pub(in crate::admin) async fn share_session(&self, id: &str) {
        let Some(key) = SessionKey::of(id) else {
            return;
        };
        let session = OpenSession::new(
            key,
            self.control.admin_token(),
            Timestamp::now().after(LIFETIME),
        );
        let path = target(&path_of(key), &session);
        // A node that does not hear of it asks when it needs to know.
        self.tell_nodes(&Method::PUT, &path).await;
    }

    /// Ends a session at all nodes.
    pub(in crate::admin) async fn end_session(&self, id: &str) {
        let Some(key) = SessionKey::of(id) else {
            return;
        };
        self.console.sessions().close(key, Instant::now());
        for node in self.tell_nodes(&Method::DELETE, &path_of(key)).await {
            tracing::warn!(
                node,
                "console: signed out, but the session is still open at this node, for 12 hours at \
                 most"
            );
        }
    }

    /// Sends a request without a body to all other nodes. Returns the slots of those that do not
    /// confirm it.
    async fn tell_nodes(&self, method: &Method, target: &str) -> Vec<u16> {
        let nodes = self.other_nodes();
        let told = join_all(nodes.iter().map(|node| self.is_told(node, method, target))).await;
        nodes
            .iter()
            .zip(told)
            .filter(|(_, told)| !told)
            .map(|(node, _)| node.slot.get())
            .collect()
    }

    async fn is_told(&self, node: &Member, method: &Method, target: &str) -> bool {
        let Ok(request) = Request::builder()
            .method(method)
            .uri(target)
            .body(Bytes::new())
        else {
            return false;
        };
        let response = self.control.node_client().send(node, request, WITHIN).await;
        response.is_ok_and(|response| response.status() == StatusCode::NO_CONTENT)
    }
}

impl OpenSession {
    fn new(key: SessionKey, token: &Secret, expires_at: Timestamp) -> Self {
        let proof = hmac::sign(&proof_key(token), message(key, expires_at).as_bytes());
        Self {
            expires_at,
            proof: URL_SAFE_NO_PAD.encode(proof),
        }
    }

    /// Time until the session `key` expires; `None` if it has expired or is not proved.
    fn remaining(&self, key: SessionKey, token: &Secret, now: Timestamp) -> Option<Duration> {
        let proof = URL_SAFE_NO_PAD.decode(&self.proof).ok()?;
        hmac::verify(
            &proof_key(token),
            message(key, self.expires_at).as_bytes(),
            &proof,
        )
        .ok()?;
        let remaining = self.expires_at.since(now);
        (!remaining.is_zero()).then(|| remaining.min(LIFETIME))
    }
}

fn proof_key(token: &Secret) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, token.reveal().as_bytes())
}

fn message(key: SessionKey, expires_at: Timestamp) -> String {
    format!("{PURPOSE} {key} {}", expires_at.0)
}

fn path_of(key: SessionKey) -> String {
    format!("/v1/console-sessions/{key}")
}

/// Answers another node that does not know a session; `null` if this node does not know it either.
pub(crate) async fn show(
    State(admin): State<Admin>,
    Path(key): Path<SessionKey>,
) -> Json<Option<OpenSession>> {
    let remaining = admin.console.sessions().remaining(key, Instant::now());
    let session = |remaining| {
        OpenSession::new(
            key,
            admin.control.admin_token(),
            Timestamp::now().after(remaining),
        )
    };
    Json(remaining.map(session))
}

/// Another node opened a session.
pub(super) async fn open(
    State(admin): State<Admin>,
    Path(key): Path<SessionKey>,
    Query(session): Query<OpenSession>,
) -> StatusCode {
    let Some(remaining) = session.remaining(key, admin.control.admin_token(), Timestamp::now())
    else {
        return StatusCode::FORBIDDEN;
    };
    admin
        .console
        .sessions()
        .learn(key, Instant::now(), remaining);
    StatusCode::NO_CONTENT
}

/// Another node ended a session.
pub(super) async fn end(State(admin): State<Admin>, Path(key): Path<SessionKey>) -> StatusCode {
    admin.console.sessions().close(key, Instant::now());
    StatusCode::NO_CONTENT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_proved_with_the_admin_token_only() {
        let [token, other] = ["token", "other"].map(|text| Secret::new(text.to_owned()));
        let [key, second] = ["a", "b"].map(|id| SessionKey::of(&id.repeat(43)).unwrap());
        let now = Timestamp(1_000);
        let expires_at = Timestamp(1_060);
        let session = OpenSession::new(key, &token, expires_at);
        assert_eq!(
            session.remaining(key, &token, now),
            Some(Duration::from_secs(60))
        );
        assert_eq!(
            session.remaining(second, &token, now),
            None,
            "another session"
        );
        assert_eq!(
            session.remaining(key, &other, now),
            None,
            "made without the token"
        );
        assert_eq!(session.remaining(key, &token, expires_at), None, "expired");
        let later = OpenSession {
            expires_at: Timestamp(2_000),
            ..session.clone()
        };
        assert_eq!(later.remaining(key, &token, now), None, "another expiry");
        for proof in ["", "AAAA", "not base64url!"] {
            assert_eq!(
                OpenSession {
                    proof: proof.to_owned(),
                    expires_at
                }
                .remaining(key, &token, now),
                None
            );
        }
        let endless = OpenSession::new(key, &token, Timestamp(i64::MAX));
        assert_eq!(endless.remaining(key, &token, now), Some(LIFETIME));
    }
}
