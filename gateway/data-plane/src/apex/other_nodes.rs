//! What the apex asks the other nodes of a region. A task beside the workers sends the questions.
//!
//! Limits per client address and agent: each bucket has an owner among the nodes, found by
//! rendezvous hashing. A node takes a request out of a bucket of its own first, and then asks the
//! owner to take it out of the owner's bucket. So one client cannot make a node ask more often than
//! the limit allows. Without an answer of the owner the node's own bucket alone decides.
//!
//! Enrollments: the next request of an agent may arrive at another node, so a change is answered
//! when all nodes use it.

use std::rc::Rc;
use std::time::Duration;

use crate::limits;
use gw_interface::rate_limit::Exhausted;
use gw_region::{Member, Peering};
use gw_store::Position;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use super::limits::ApexBucket;

/// The way to the task that asks the other nodes. Cheap to clone.
#[derive(Clone)]
pub struct NodeQuestions(mpsc::Sender<NodeQuestion>);

/// The other nodes, as the apex of one worker knows them.
pub(crate) struct ApexNodes {
    peering: Rc<Peering>,
    questions: NodeQuestions,
}

/// A question, with the way of its answer.
pub enum NodeQuestion {
    /// Whether a request can be taken out of the bucket of another node.
    Charge {
        /// Node that owns the bucket.
        owner: Member,
        /// Path of the request to the control plane of that node. It names the bucket.
        path: String,
        /// `None` if the owner does not answer.
        reply: oneshot::Sender<Option<ChargeVerdict>>,
    },
    /// Whether the nodes keep the change that made a position; answered when they do, or after a
    /// second.
    Keep {
        /// Nodes to ask.
        nodes: Vec<Member>,
        /// Position of the change.
        position: Position,
        /// Receives a message once the nodes keep the change, or after a second.
        reply: oneshot::Sender<()>,
    },
}

/// Whether a request was taken out of the owner's bucket.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ChargeVerdict {
    /// Milliseconds until one more request is admitted, and until the bucket is full; absent if the
    /// request was taken.
    pub exhausted_for_ms: Option<(u64, u64)>,
}

/// A way to the task that asks, and the questions that it gets.
pub fn node_questions() -> (NodeQuestions, mpsc::Receiver<NodeQuestion>) {
    let (questions, asked) = mpsc::channel(limits::NODE_CHARGES);
    (NodeQuestions(questions), asked)
}

impl ApexNodes {
    pub(crate) fn new(peering: Rc<Peering>, questions: NodeQuestions) -> Self {
        Self { peering, questions }
    }

    /// Takes a request out of the owner's bucket. `Ok` if this node is the owner, or the owner does
    /// not answer.
    pub(super) async fn take(&self, bucket: &ApexBucket) -> Result<(), Exhausted> {
        let Some(owner) = self.owner(bucket) else {
            return Ok(());
        };
        let (kind, client) = bucket.names();
        let path = format!("/v1/apex-limits/{kind}/{client}");
        let (reply, answer) = oneshot::channel();
        if self
            .questions
            .0
            .try_send(NodeQuestion::Charge { owner, path, reply })
            .is_err()
        {
            return Ok(());
        }
        match answer
            .await
            .ok()
            .flatten()
            .and_then(|verdict| verdict.exhausted_for_ms)
        {
            Some((until_one, until_full)) => Err(Exhausted {
                until_one: Duration::from_millis(until_one),
                until_full: Duration::from_millis(until_full),
            }),
            None => Ok(()),
        }
    }

    /// Waits until the other nodes keep the change that made `position`, for a second at most.
    pub(super) async fn keep(&self, position: Position) {
        let Some(view) = self.peering.view() else {
            return;
        };
        let nodes = view.placement().others().cloned().collect();
        let (reply, answer) = oneshot::channel();
        let revision = position.revision.0;
        if self
            .questions
            .0
            .try_send(NodeQuestion::Keep {
                nodes,
                position,
                reply,
            })
            .is_err()
        {
            return tracing::warn!(revision, "an enrollment may not be known at all nodes yet");
        }
        // The sender is dropped when the process ends.
        let _ = answer.await;
    }

    /// The other node that owns the bucket; `None` if it is this node.
    fn owner(&self, bucket: &ApexBucket) -> Option<Member> {
        let view = self.peering.view()?;
        let placement = view.placement();
        let members = placement.members();
        let index = bucket.owner_node(members.iter().map(|member| u64::from(member.slot.get())))?;
        members
            .get(index)
            .filter(|member| member.slot != placement.here())
            .cloned()
    }
}
