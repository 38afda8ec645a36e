//! The messages of the membership over HTTP between control planes.

use std::sync::Arc;
use std::time::Duration;

use crate::limits;
use axum::body::Bytes;
use axum::extract::State;
use axum::middleware::map_request;
use axum::routing::put;
use axum::{Extension, Router};
use gw_base::process::background::Tasks;
use gw_base::tls::pki::NodeIdentity;
use gw_region::{DerivedKeys, Member, RegionKeys};
use gw_shared::text::printable;
use gw_store::{Authenticator, Primary};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};

use super::acknowledgment;
use super::inputs::RegionInputs;
use super::messages::StateMessage;
use super::outbox::Delivery;
use crate::cluster::NodeCallError;
use crate::control::Control;
use crate::http_server::limit_body;

const PATH: &str = "/v1/state";
/// The field of an answer with its tag.
const TAG: HeaderName = HeaderName::from_static("gw-tag");
/// Longest exchange.
const WITHIN: Duration = Duration::from_secs(2);
/// Longest text of another node that is shown.
const REASON_MAX: usize = 200;
/// Longest message: all rows, and all levels.
const BYTES: usize = 1024 * 1024 + limits::LEVELS * limits::LEVEL_BYTES;
const _: () = assert!(BYTES <= limits::CLUSTER_BODIES);

/// Sends a message and reports the outcome to `inputs`.
pub(super) fn send(
    tasks: &Tasks,
    control: &Arc<Control>,
    to: &Member,
    message: StateMessage,
    inputs: &RegionInputs,
) {
    let control = Arc::clone(control);
    let to = to.clone();
    let inputs = inputs.clone();
    tasks.spawn_until_stopped("a message to another node", async move {
        let delivery = deliver(&control, &to, &message).await;
        inputs.delivered(to, delivery);
    });
}

async fn deliver(control: &Control, to: &Member, message: &StateMessage) -> Delivery {
    let Ok(json) = message.to_json() else {
        return Delivery::Failed;
    };
    let json = Bytes::from(json);
    let Ok(request) = Request::put(PATH).body(json.clone()) else {
        return Delivery::Failed;
    };
    match control.node_client().send(to, request, WITHIN).await {
        Ok(response) if response.status().is_success() => {
            if let Some(source) = control.postgres_source() {
                source.settings.told(told(&source.keys, &json, &response));
            }
            Delivery::Delivered
        }
        Ok(response) => Delivery::Denied(reason(&response)),
        Err(NodeCallError::Refused) => Delivery::Refused,
        Err(error) => {
            tracing::debug!(node = to.slot.get(), %error,
                "cannot tell another node the state of this one");
            Delivery::Failed
        }
    }
}

/// The primaries in the answer to a message. None without a valid tag: the certificate of a node
/// does not suffice to end all changes.
fn told(keys: &RegionKeys, message: &[u8], answer: &Response<Bytes>) -> Vec<Primary> {
    let tag = answer.headers().get(TAG).map(HeaderValue::as_bytes);
    let tag = tag.unwrap_or_default();
    let has_answered = |key| Authenticator::new(key).has_answered(message, answer.body(), tag);
    if !keys.accepted().iter().any(has_answered) {
        return Vec::new();
    }
    serde_json::from_slice(answer.body()).unwrap_or_default()
}

/// Why a node has refused a message.
fn reason(response: &Response<Bytes>) -> Arc<str> {
    let text = printable(response.body().trim_ascii_end(), REASON_MAX);
    format!("{}: {text}", response.status()).into()
}

/// Routes for other nodes. A handler finds the sender in an `Extension<NodeIdentity>`.
pub fn routes(inputs: RegionInputs, control: Arc<Control>) -> Router {
    // A gateway without a region has no other nodes.
    let authenticators = control
        .postgres_source()
        .map(|source| Arc::new(source.keys.derive(Authenticator::new)));
    let receiver = MessageIntake {
        inputs,
        control: Arc::clone(&control),
        authenticators,
    };
    let state = Router::new()
        .route(PATH, put(receive))
        .layer(map_request(limit_body::<BYTES>))
        .with_state(receiver);
    state.merge(acknowledgment::routes(control))
}

/// Checks messages and passes them to the membership.
#[derive(Clone)]
struct MessageIntake {
    inputs: RegionInputs,
    control: Arc<Control>,
    /// One for each region key that this node accepts.
    authenticators: Option<Arc<DerivedKeys<Authenticator>>>,
}

/// Answers with the primaries that this node knows, also to a process that another primary's table
/// of nodes lists.
async fn receive(
    State(MessageIntake {
        inputs,
        control,
        authenticators,
    }): State<MessageIntake>,
    Extension(sender): Extension<NodeIdentity>,
    body: Bytes,
) -> Result<([(HeaderName, String); 1], Vec<u8>), (StatusCode, String)> {
    let message = StateMessage::parse(&body)
        .map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))?;
    if (message.state.slot, message.state.session) != (sender.slot, sender.session) {
        return Err((
            StatusCode::FORBIDDEN,
            "the message is not that of the node of the certificate\n".to_owned(),
        ));
    }
    // The certificate of a node does not suffice to add members, or to send requests to other
    // addresses.
    let accepted = authenticators.as_ref().map_or(&[][..], |keys| keys.all());
    if !message
        .state
        .roster
        .rows
        .iter()
        .all(|row| accepted.iter().any(|key| key.has_written(row)))
    {
        return Err((
            StatusCode::FORBIDDEN,
            "a member in the message has no valid tag\n".to_owned(),
        ));
    }
    // Ends when the message was used, or the membership has ended.
    let _ = inputs.message(message).await;
    let source = control.postgres_source();
    let primaries = source.map(|source| source.settings.known_primaries());
    let answer = serde_json::to_vec(&primaries.unwrap_or_default()).unwrap_or_default();
    let tag = authenticators.map(|keys| keys.in_use().tag_of_answer(&body, &answer));
    Ok(([(TAG, tag.unwrap_or_default())], answer))
}

#[cfg(test)]
mod tests {
    use gw_region::RegionKey;

    use super::*;

    #[test]
    fn primaries_are_believed_with_the_region_key_only() {
        let keys = RegionKeys::from(RegionKey::new([1; 32]));
        let other = Authenticator::new(&RegionKey::new([2; 32]));
        let body = r#"[{"host":"db:5432","timeline":4294967295,"system":7}]"#;
        let with = |tag: &str| {
            let answer = Response::builder().header(TAG, tag);
            let answer = answer.body(Bytes::from_static(body.as_bytes())).unwrap();
            told(&keys, b"message", &answer)
        };
        let ours = Authenticator::new(&keys.accepted()[0]);
        let tag = ours.tag_of_answer(b"message", body.as_bytes());
        assert_eq!(with(&tag).len(), 1);
        let earlier = ours.tag_of_answer(b"another message", body.as_bytes());
        let forged = other.tag_of_answer(b"message", body.as_bytes());
        for tag in ["", &earlier, &forged] {
            assert!(with(tag).is_empty(), "{tag}");
        }
        let untagged = Response::new(Bytes::from_static(body.as_bytes()));
        assert!(told(&keys, b"message", &untagged).is_empty());
    }
}
