//! Events that the caller passes to the state machine, and actions that it asks of the caller.

use std::sync::Arc;

use crate::engine::{Call, CallResult, Roster};
use crate::owners::placement::NodeSlot;
use crate::owners::view::View;

/// Input of the state machine.
#[derive(Debug, Clone)]
pub enum MembershipEvent {
    /// Result of a [`Call`]. A late one extends no lease.
    Result {
        /// Id of the call.
        call: u64,
        /// Its result.
        result: CallResult,
    },
    /// A connection to the engine broke, with or without an outstanding call.
    Disconnected,
    /// Message of another node.
    Message(NodeMessage),
    /// The link to a node that announced no end broke, and the node refused the next connection.
    /// Not for time-outs.
    Refused {
        /// Slot of that node.
        slot: NodeSlot,
        /// Session that the link was for.
        session: u128,
    },
    /// Another source names an epoch: the feed of changes, or another node that is not the owner.
    Hint {
        /// The epoch that it knows.
        epoch: u64,
    },
    /// All workers use the view of this epoch, and the bucket levels of services that moved away
    /// wait to be sent.
    Applied {
        /// Epoch of the view.
        epoch: u64,
    },
    /// All workers use the records of this revision.
    Revision(u64),
    /// The directory is loaded and other nodes are connected: the node can own services.
    Ready,
    /// The services of a draining node have tunnels at their next owners, or time is up.
    HandedOver,
}

/// Message of one node to another, sent at every change and every [`BEAT`](crate::timing::BEAT).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeMessage {
    /// Slot of the sender.
    pub slot: NodeSlot,
    /// Session of the sender. The receiver of the link has checked slot and session by the
    /// certificate of the sender.
    pub session: u128,
    /// Last epoch that all workers of the sender use. Levels of services that moved to the receiver
    /// precede it.
    pub acknowledged: u64,
    /// The rows that the sender knows.
    pub roster: Arc<Roster>,
}

/// Action that the caller has to take.
#[derive(Debug, Clone)]
pub enum MembershipAction {
    /// Run a statement and report its result. At most one is outstanding, for
    /// [`CALL_TIMEOUT`](crate::timing::CALL_TIMEOUT) at most.
    Call(Call),
    /// Give the view to all workers, then report [`MembershipEvent::Applied`].
    Publish(Arc<View>),
    /// Send to all other nodes. Bucket levels of services that moved go first.
    Tell(NodeMessage),
    /// The node has ended its membership: exit after the last messages were sent.
    Stop(StopReason),
}

/// Why a node ended its membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The node drained.
    Left,
    /// Another process took the slot.
    TakenOver,
}
