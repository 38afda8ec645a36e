//! What the apex asks the other nodes of a region. A task of the control plane sends the questions.
//!
//! Limits per client address and agent: each bucket has an owner among the nodes, found by rendezvous hashing. A node takes a
//! request out of a bucket of its own first, and then asks the owner to take it out of the owner's bucket. So one client
//! cannot make a node ask more often than the limit allows. Without an answer of the owner the node's own bucket alone
//! decides.
//!
//! Enrollments: the next request of an agent may arrive at another node, so a change is answered when all nodes use it.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use http::{Request, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::limits::{ApexBucket, ApexCharge};
use crate::background::Tasks;
use crate::cluster::NodeClient;
use crate::limits;
use crate::mailbox::Post;
use crate::members::nodes_behind;
use crate::rate_limit::Exhausted;
use crate::region::{Member, NodeSlot, Peering};
use crate::store::Position;

/// Time limit of an answer. A caller waits for it.
const WITHIN: Duration = Duration::from_millis(500);

/// Name of the task of a question.
const NAME: &str = "a question of the apex";

/// The way to the task that asks the other nodes. Cheap to clone.
#[derive(Clone)]
pub(crate) struct NodeQuestions(mpsc::Sender<NodeQuestion>);

/// The other nodes, as the apex of one worker knows them.
pub(crate) struct ApexNodes {
    peering: Rc<Peering>,
    questions: NodeQuestions,
}

enum NodeQuestion {
    Charge {
        owner: Member,
        path: String,
        /// `None` if the owner does not answer.
        reply: oneshot::Sender<Option<ChargeVerdict>>,
    },
    /// Whether the nodes keep the change that made a position; answered when they do, or after a second.
    Keep {
        nodes: Vec<Member>,
        position: Position,
        reply: oneshot::Sender<()>,
    },
}

/// Whether a request was taken out of the owner's bucket.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct ChargeVerdict {
    /// Milliseconds until one more request is admitted, and until the bucket is full; absent if the request was taken.
    exhausted_for_ms: Option<(u64, u64)>,
}

impl NodeQuestions {
    /// Starts the task. It ends when all clones are dropped.
    pub(crate) fn start(tasks: &Tasks, client: NodeClient) -> Self {
        let (questions, mut asked) = mpsc::channel::<NodeQuestion>(limits::NODE_CHARGES);
        let asking = tasks.clone();
        let ask = async move {
            let mut owners = HashMap::new();
            while let Some(question) = asked.recv().await {
                question.ask(&asking, &client, &mut owners);
            }
        };
        tasks.spawn_until_stopped("the questions of the apex", ask);
        Self(questions)
    }
}

impl ApexNodes {
    pub(crate) fn new(peering: Rc<Peering>, questions: NodeQuestions) -> Self {
        Self { peering, questions }
    }

    /// Takes a request out of the owner's bucket. `Ok` if this node is the owner, or the owner does not answer.
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

/// What may be sent to each owner at the same time.
type Permits = HashMap<(NodeSlot, u128), Arc<Semaphore>>;

impl NodeQuestion {
    /// Sends the question from a task of its own. Replies fail when the caller has left.
    fn ask(self, tasks: &Tasks, client: &NodeClient, permits: &mut Permits) {
        let client = client.clone();
        match self {
            Self::Charge { owner, path, reply } => {
                let key = (owner.slot, owner.session);
                if !permits.contains_key(&key) {
                    // Forgets processes that have ended.
                    permits.retain(|_, permits| permits.available_permits() < limits::CLUSTER_KEPT);
                }
                let permits = permits
                    .entry(key)
                    .or_insert_with(|| Arc::new(Semaphore::new(limits::CLUSTER_KEPT)));
                // A flood from many clients opens no further connections: it is limited by each node alone.
                let Ok(permit) = Arc::clone(permits).try_acquire_owned() else {
                    let _ = reply.send(None);
                    return;
                };
                tasks.spawn(NAME, async move {
                    let _ = reply.send(charge_at(&client, &owner, path).await);
                    drop(permit);
                });
            }
            Self::Keep {
                nodes,
                position,
                reply,
            } => {
                tasks.spawn(NAME, async move {
                    let behind = nodes_behind(&client, &nodes, &position).await;
                    if !behind.is_empty() {
                        tracing::warn!(revision = position.revision.0, nodes = ?behind, "an enrollment is not known at all nodes yet");
                    }
                    let _ = reply.send(());
                });
            }
        }
    }
}

async fn charge_at(client: &NodeClient, owner: &Member, path: String) -> Option<ChargeVerdict> {
    let request = Request::post(path).body(Bytes::new()).ok()?;
    match client.send(owner, request, WITHIN).await {
        Ok(response) if response.status() == StatusCode::OK => {
            serde_json::from_slice(response.body()).ok()
        }
        Ok(response) => {
            tracing::debug!(node = owner.slot.get(), status = %response.status(), "no charge of a request");
            None
        }
        Err(error) => {
            tracing::debug!(node = owner.slot.get(), %error, "no charge of a request");
            None
        }
    }
}

/// The workers that own buckets at this node.
#[derive(Clone)]
struct Owners {
    mailboxes: Arc<dyn Post<Box<ApexCharge>>>,
    workers: usize,
}

/// Route for other nodes.
pub(crate) fn routes(mailboxes: Arc<dyn Post<Box<ApexCharge>>>, workers: usize) -> Router {
    let owners = Owners { mailboxes, workers };
    Router::new()
        .route("/v1/apex-limits/{kind}/{client}", post(charge))
        .with_state(owners)
}

async fn charge(
    State(owners): State<Owners>,
    Path((kind, client)): Path<(String, String)>,
) -> Result<Json<ChargeVerdict>, StatusCode> {
    let bucket = ApexBucket::parse(&kind, &client).ok_or(StatusCode::BAD_REQUEST)?;
    let (reply, answer) = oneshot::channel();
    let owner = bucket.owner(owners.workers);
    owners
        .mailboxes
        .post(owner, Box::new(ApexCharge { bucket, reply }))
        .map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let taken = answer.await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let exhausted_for_ms = taken.err().map(
        |Exhausted {
             until_one,
             until_full,
         }| (ms(until_one), ms(until_full)),
    );
    Ok(Json(ChargeVerdict { exhausted_for_ms }))
}

fn ms(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}
