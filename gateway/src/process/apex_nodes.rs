//! The questions of the apex to the other nodes of the region: the task that sends them, and the
//! route that answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::limits;
use axum::extract::{Path, State};
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use gw_base::mailbox::Post;
use gw_base::process::background::Tasks;
use gw_control_plane::cluster::NodeClient;
use gw_control_plane::members::nodes_behind;
use gw_data_plane::apex::{
    ApexBucket, ApexCharge, ChargeVerdict, NodeQuestion, NodeQuestions, node_questions,
};
use gw_interface::rate_limit::Exhausted;
use gw_region::{Member, NodeSlot};
use http::{Request, StatusCode};
use tokio::sync::{Semaphore, oneshot};

/// Time limit of an answer. A caller waits for it.
const WITHIN: Duration = Duration::from_millis(500);

/// Name of the task of a question.
const NAME: &str = "a question of the apex";

/// Starts the task. It ends when all clones of the result are dropped.
pub(crate) fn start(tasks: &Tasks, client: NodeClient) -> NodeQuestions {
    let (questions, mut asked) = node_questions();
    let asking = tasks.clone();
    let asks = async move {
        let mut owners = HashMap::new();
        while let Some(question) = asked.recv().await {
            ask(question, &asking, &client, &mut owners);
        }
    };
    tasks.spawn_until_stopped("the questions of the apex", asks);
    questions
}

/// What may be sent to each owner at the same time.
type Permits = HashMap<(NodeSlot, u128), Arc<Semaphore>>;

/// Sends the question from a task of its own. Replies fail when the caller has left.
fn ask(question: NodeQuestion, tasks: &Tasks, client: &NodeClient, permits: &mut Permits) {
    let client = client.clone();
    match question {
        NodeQuestion::Charge { owner, path, reply } => {
            let key = (owner.slot, owner.session);
            if !permits.contains_key(&key) {
                // Forgets processes that have ended.
                permits.retain(|_, permits| permits.available_permits() < limits::CLUSTER_KEPT);
            }
            let permits = permits
                .entry(key)
                .or_insert_with(|| Arc::new(Semaphore::new(limits::CLUSTER_KEPT)));
            // A flood from many clients opens no further connections: it is limited by each node
            // alone.
            let Ok(permit) = Arc::clone(permits).try_acquire_owned() else {
                let _ = reply.send(None);
                return;
            };
            tasks.spawn(NAME, async move {
                let _ = reply.send(charge_at(&client, &owner, path).await);
                drop(permit);
            });
        }
        NodeQuestion::Keep {
            nodes,
            position,
            reply,
        } => {
            tasks.spawn(NAME, async move {
                let behind = nodes_behind(&client, &nodes, &position).await;
                if !behind.is_empty() {
                    tracing::warn!(revision = position.revision.0, nodes = ?behind,
                        "an enrollment is not known at all nodes yet");
                }
                let _ = reply.send(());
            });
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
            tracing::debug!(node = owner.slot.get(), status = %response.status(),
                "no charge of a request");
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
