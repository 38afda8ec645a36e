//! Inputs of the membership from other tasks and threads.

use std::time::Duration;

use crossbeam_channel::{Sender, bounded};
use gw_region::{CarriedMembership, Member, MembershipEvent, RegionStatus, Roster};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::messages::StateMessage;
use super::outbox::Delivery;
use super::pending::OtherNodes;
use super::probes::ProbeVerdict;
use crate::control::Control;

/// Longest wait for the number of services of each node, after the members have changed.
const COUNTED_WITHIN: Duration = Duration::from_millis(200);
/// Longest wait for an answer of the loop.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// An input of the membership loop.
pub(super) enum RegionInput {
    Event(MembershipEvent),
    /// A message of a node whose slot and session were checked. The sender is dropped when the
    /// levels are in use.
    Message(StateMessage, oneshot::Sender<()>),
    Delivered {
        to: Member,
        delivery: Delivery,
    },
    /// A probe of this session has ended.
    Probed(u128, Option<ProbeVerdict>),
    Status(Sender<RegionStatus>),
    Others(Option<Roster>, Sender<OtherNodes>),
    Leave,
    /// End, and leave the membership to another process.
    HandOver(Sender<Option<CarriedMembership>>),
}

/// Where other threads tell the loop what happened. Cheap to clone; never blocks.
#[derive(Clone)]
pub struct RegionInputs(pub(super) UnboundedSender<RegionInput>);

impl RegionInputs {
    /// Passes on the message of a node whose slot and session were checked. The returned channel
    /// ends when the message was used.
    pub fn message(&self, message: StateMessage) -> oneshot::Receiver<()> {
        let (used, until_used) = oneshot::channel();
        self.send(RegionInput::Message(message, used));
        until_used
    }

    pub(crate) fn delivered(&self, to: Member, delivery: Delivery) {
        self.send(RegionInput::Delivered { to, delivery });
    }

    pub(super) fn probed(&self, session: u128, verdict: Option<ProbeVerdict>) {
        self.send(RegionInput::Probed(session, verdict));
    }

    /// The region as this node sees it, without the services of each node; `None` if the loop does
    /// not answer.
    pub fn status(&self) -> Option<RegionStatus> {
        let (reply, answer) = bounded(1);
        self.send(RegionInput::Status(reply));
        answer.recv_timeout(ANSWER_WITHIN).ok()
    }

    /// As [`Self::status`], with the number of services of each node.
    pub(crate) fn status_with_services(&self, control: &Control) -> Option<RegionStatus> {
        let mut status = self.status()?;
        let services = control.services_by_node(COUNTED_WITHIN);
        for node in &mut status.nodes {
            node.services = services
                .as_ref()
                .map(|services| services.get(&node.slot).copied().unwrap_or(0));
        }
        Some(status)
    }

    /// The other nodes, as far as this node knows, and those that only `newer` has. `None` if the
    /// loop does not answer.
    pub fn others(&self, newer: Option<Roster>) -> Option<OtherNodes> {
        let (reply, answer) = bounded(1);
        self.send(RegionInput::Others(newer, reply));
        answer.recv_timeout(ANSWER_WITHIN).ok()
    }

    pub(super) fn send(&self, input: RegionInput) {
        // Fails when the loop has ended. Unbounded: each sender waits for its answer before it
        // sends again, or has one input at most under way for each node.
        let _ = self.0.send(input);
    }
}
