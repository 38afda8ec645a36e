//! Messages between the control planes of nodes, as JSON. Fields are only added, with a default. A
//! message whose rows of nodes have no tags is refused, as of an earlier version.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use gw_interface::rate_limit::Level;
use gw_region::{CarriedMembership, NodeMessage, NodeRow, NodeSlot, NodeState, Roster};
use serde::{Deserialize, Serialize};

/// What a node tells another about the members, with the levels of services that have moved there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateMessage {
    /// The sender, and the members that it knows.
    pub state: NodeMessage,
    /// Levels of the buckets of services that have moved to the receiver.
    pub levels: Vec<Level>,
    /// Time without contact after which the sender refuses requests; `None` if it serves without a
    /// limit.
    pub(crate) max_staleness: Option<Duration>,
}

#[derive(Serialize, Deserialize)]
struct Wire {
    slot: u16,
    session: SessionHex,
    acknowledged: u64,
    epoch: u64,
    nodes: Vec<WireNode>,
    levels: Vec<Level>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_staleness_ms: Option<u64>,
}

/// A [`CarriedMembership`] in a file, or in a message between two processes of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedNode {
    slot: u16,
    session: SessionHex,
    beats: u64,
    epoch: u64,
    nodes: Vec<WireNode>,
    has_lease: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct WireNode {
    slot: u16,
    session: SessionHex,
    state: String,
    beat: u64,
    acknowledged: u64,
    peer_address: SocketAddr,
    version: Arc<str>,
    applied_revision: u64,
    #[serde(default)]
    tag: [u8; 16],
}

/// 32 hexadecimal digits: JSON has no integers of 128 bits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct SessionHex(u128);

impl TryFrom<String> for SessionHex {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        u128::from_str_radix(&text, 16).map(Self)
    }
}

impl From<SessionHex> for String {
    fn from(SessionHex(session): SessionHex) -> Self {
        format!("{session:032x}")
    }
}

/// Why a message is refused.
#[derive(Debug, thiserror::Error)]
pub enum InvalidNodeMessage {
    /// Invalid JSON, or a missing member.
    #[error("not a message between nodes: {0}")]
    Json(#[from] serde_json::Error),
    /// A number that is not a slot.
    #[error("{0} is not the slot of a node")]
    Slot(u16),
    /// An unknown state of a node.
    #[error("{0:?} is not the state of a node")]
    State(String),
    /// A number above the range of the database, 2^63 - 1.
    #[error("a number is larger than any in the database")]
    Number,
    /// Nodes that are not in the order of their slots.
    #[error("the nodes are not in the order of their slots")]
    Order,
}

impl StateMessage {
    /// Encodes the message as JSON.
    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        let NodeMessage {
            slot,
            session,
            acknowledged,
            roster,
        } = &self.state;
        serde_json::to_vec(&Wire {
            slot: slot.get(),
            session: SessionHex(*session),
            acknowledged: *acknowledged,
            epoch: roster.epoch,
            nodes: roster.rows.iter().map(wire_node).collect(),
            levels: self.levels.clone(),
            max_staleness_ms: self
                .max_staleness
                .map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        })
    }

    /// Decodes a message from JSON and checks it.
    pub fn parse(json: &[u8]) -> Result<Self, InvalidNodeMessage> {
        let Wire {
            slot,
            session,
            acknowledged,
            epoch,
            nodes,
            levels,
            max_staleness_ms,
        } = serde_json::from_slice(json)?;
        let roster = Arc::new(roster(epoch, nodes)?);
        let state = NodeMessage {
            slot: parse_slot(slot)?,
            session: session.0,
            acknowledged,
            roster,
        };
        Ok(Self {
            state,
            levels,
            max_staleness: max_staleness_ms.map(Duration::from_millis),
        })
    }
}

impl From<CarriedMembership> for CarriedNode {
    fn from(carried: CarriedMembership) -> Self {
        let CarriedMembership {
            slot,
            session,
            beats,
            roster,
            has_lease,
        } = carried;
        let nodes = roster.rows.iter().map(wire_node).collect();
        Self {
            slot: slot.get(),
            session: SessionHex(session),
            beats,
            epoch: roster.epoch,
            nodes,
            has_lease,
        }
    }
}

impl TryFrom<CarriedNode> for CarriedMembership {
    type Error = InvalidNodeMessage;

    fn try_from(carried: CarriedNode) -> Result<Self, InvalidNodeMessage> {
        let CarriedNode {
            slot,
            session,
            beats,
            epoch,
            nodes,
            has_lease,
        } = carried;
        let roster = roster(epoch, nodes)?;
        Ok(Self {
            slot: parse_slot(slot)?,
            session: session.0,
            beats,
            roster,
            has_lease,
        })
    }
}

fn roster(epoch: u64, nodes: Vec<WireNode>) -> Result<Roster, InvalidNodeMessage> {
    let rows = nodes.into_iter().map(row).collect::<Result<_, _>>()?;
    let roster = Roster { epoch, rows };
    if i64::try_from(epoch).is_err() {
        return Err(InvalidNodeMessage::Number);
    }
    if roster.is_valid() {
        Ok(roster)
    } else {
        Err(InvalidNodeMessage::Order)
    }
}

fn wire_node(row: &NodeRow) -> WireNode {
    let NodeRow {
        slot,
        session,
        state,
        beat,
        acknowledged,
        peer_address,
        ref version,
        applied_revision,
        tag,
    } = *row;
    WireNode {
        slot: slot.get(),
        session: SessionHex(session),
        state: state.as_str().to_owned(),
        beat,
        acknowledged,
        peer_address,
        version: Arc::clone(version),
        applied_revision,
        tag,
    }
}

fn row(node: WireNode) -> Result<NodeRow, InvalidNodeMessage> {
    let WireNode {
        slot,
        session,
        state,
        beat,
        acknowledged,
        peer_address,
        version,
        applied_revision,
        tag,
    } = node;
    if i64::try_from(beat.max(acknowledged).max(applied_revision)).is_err() {
        return Err(InvalidNodeMessage::Number);
    }
    Ok(NodeRow {
        slot: parse_slot(slot)?,
        session: session.0,
        state: NodeState::parse(&state).ok_or(InvalidNodeMessage::State(state))?,
        beat,
        acknowledged,
        peer_address,
        version,
        applied_revision,
        tag,
    })
}

fn parse_slot(slot: u16) -> Result<NodeSlot, InvalidNodeMessage> {
    NodeSlot::new(slot).ok_or(InvalidNodeMessage::Slot(slot))
}

#[cfg(test)]
mod tests {
    use gw_base::service::rate::Rate;

    use super::*;
    use crate::later_member::pass;

    fn message(slots: &[u16]) -> StateMessage {
        let row = |slot: &u16| NodeRow {
            slot: NodeSlot::new(*slot).unwrap(),
            session: u128::MAX - u128::from(*slot),
            state: NodeState::Draining,
            beat: 7,
            acknowledged: 8,
            peer_address: "[::1]:9".parse().unwrap(),
            version: "1.2.3".into(),
            applied_revision: 10,
            tag: [14; 16],
        };
        let roster = Arc::new(Roster {
            epoch: 11,
            rows: slots.iter().map(row).collect(),
        });
        let state = NodeMessage {
            slot: NodeSlot::new(5).unwrap(),
            session: 12,
            acknowledged: 10,
            roster,
        };
        let rate = Rate::new(10, 60).unwrap();
        let levels = vec![Level {
            service: "a--b".into(),
            rate,
            until_full_ms: 13,
        }];
        StateMessage {
            state,
            levels,
            max_staleness: Some(Duration::from_secs(60)),
        }
    }

    #[test]
    fn messages_pass_unchanged() {
        let message = message(&[0, 5, 1023]);
        assert_eq!(
            StateMessage::parse(&message.to_json().unwrap()).unwrap(),
            message
        );
    }

    #[test]
    fn messages_take_a_member_of_a_later_version() {
        let wire: Wire = serde_json::from_slice(&message(&[0, 5]).to_json().unwrap()).unwrap();
        let none: [String; 0] = [];
        assert_eq!(pass(&wire, &[]), none);
    }

    #[test]
    fn a_node_of_the_previous_version_does_not_say_that_it_refuses() {
        let serves = StateMessage {
            max_staleness: None,
            ..message(&[0])
        };
        let json = String::from_utf8(serves.to_json().unwrap()).unwrap();
        assert!(!json.contains("staleness"), "{json}");
        assert_eq!(StateMessage::parse(json.as_bytes()).unwrap(), serves);
    }

    #[test]
    fn invalid_messages_are_refused() {
        let refused = |json: &str| {
            StateMessage::parse(json.as_bytes())
                .unwrap_err()
                .to_string()
        };
        let json = |slots: &[u16]| String::from_utf8(message(slots).to_json().unwrap()).unwrap();
        assert!(refused("{}").contains("slot"));
        assert_eq!(
            refused(&json(&[5, 0])),
            "the nodes are not in the order of their slots"
        );
        assert_eq!(
            refused(&json(&[1]).replace("draining", "gone")),
            "\"gone\" is not the state of a node"
        );
        assert_eq!(
            refused(&json(&[]).replace("\"slot\":5", "\"slot\":1024")),
            "1024 is not the slot of a node"
        );
        assert!(
            refused(&json(&[]).replace("\"session\":\"", "\"session\":\"x"))
                .contains("invalid digit")
        );
        for member in ["\"epoch\":11", "\"beat\":7"] {
            let name = member.split(':').next().unwrap();
            let large = json(&[1]).replace(member, &format!("{name}:{}", u64::MAX));
            assert_eq!(
                refused(&large),
                "a number is larger than any in the database"
            );
        }
    }
}
