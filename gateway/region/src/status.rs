//! What `region status` shows, as one node sees it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::{NodeRow, NodeState};
use super::membership::{Membership, StopReason};
use super::owners::placement::{Member, NodeSlot};
#[cfg(doc)]
use super::timing::SUSPECT_AFTER;

/// The region as one node sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionStatus {
    /// Epoch that the node knows.
    pub epoch: u64,
    /// The node that answers; `None` before it has a slot.
    pub here: Option<NodeSlot>,
    /// Whether the node may admit requests.
    pub standing: Standing,
    /// Time since the start of the last contact with the engine; `None` before the first.
    pub engine_silence: Option<Duration>,
    /// The engine answered with an older epoch than this node knows: it was restored, or is not the
    /// primary any more. The node goes on as if the engine did not answer. After a restore all
    /// nodes must be restarted.
    pub engine_went_back: bool,
    /// Joins or drains are under way, or services wait for their earlier owner.
    pub is_moving: bool,
    /// All other owners refuse the messages of this node, which accepts those of at least one of
    /// them.
    pub is_shut_out: bool,
    /// In ascending order of slots.
    pub nodes: Vec<NodeStatus>,
}

/// Whether a node may admit requests for its services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Not a member: joining, leaving, or declared dead and about to rejoin.
    Outside,
    /// A member in contact with the engine.
    Member,
    /// A member whose calls fail, and which admits by what it last knew.
    Isolated,
    /// A member that does not admit: it was paused, or is isolated for too long.
    Suspended,
    /// The membership has ended.
    Stopped(StopReason),
}

/// A row of the roster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// Slot of the node.
    pub slot: NodeSlot,
    /// State in its row.
    pub state: NodeState,
    /// Version of its program.
    pub version: Arc<str>,
    /// Services that the node owns by the placement; `None` while they are being counted.
    pub services: Option<usize>,
    /// Epochs that the node is behind; 0 once it has left or is dead.
    pub epoch_lag: u64,
    /// Revisions of the records that the node is behind; 0 once it has left or is dead.
    pub revision_lag: u64,
    /// Time since this node saw the beat change; `None` before the first read.
    pub silence: Option<Duration>,
    /// The node refuses the messages of the one that answers.
    pub refusal: Option<StateRefusal>,
}

/// A node refuses the messages of another one: it does not learn of the members that this one
/// knows, nor of the levels of services that have moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateRefusal {
    /// Reason that the other node gives.
    pub reason: Arc<str>,
    /// Time since the first refusal.
    pub lasts: Duration,
}

impl Membership {
    /// Other nodes that have given no sign of life for [`SUSPECT_AFTER`], and are not declared
    /// dead.
    pub fn suspects(&self, now: Instant) -> Vec<Member> {
        self.observer
            .suspects(now, self.roster(), self.session)
            .map(NodeRow::member)
            .collect()
    }

    /// The status, with the number of `hostnames` that each node owns, and without refusals of
    /// messages. `revision` is the last known revision of the records.
    pub fn status<'a>(
        &self,
        now: Instant,
        revision: u64,
        hostnames: impl Iterator<Item = &'a str>,
    ) -> RegionStatus {
        let roster = self.roster();
        let mut services = vec![0; roster.rows.len()];
        for hostname in hostnames {
            let owner = self
                .view()
                .and_then(|view| view.placement().owning_member(hostname));
            let index =
                owner.and_then(|member| roster.rows.iter().position(|row| row.slot == member.slot));
            index.into_iter().for_each(|index| services[index] += 1);
        }
        let nodes = roster
            .rows
            .iter()
            .zip(services)
            .map(|(row, services)| NodeStatus {
                slot: row.slot,
                state: row.state,
                version: Arc::clone(&row.version),
                services: Some(services),
                epoch_lag: if row.state.is_over() {
                    0
                } else {
                    roster.epoch.saturating_sub(row.acknowledged)
                },
                revision_lag: if row.state.is_over() {
                    0
                } else {
                    revision.saturating_sub(row.applied_revision)
                },
                silence: self
                    .observer
                    .last_change(row)
                    .map(|at| now.saturating_duration_since(at)),
                refusal: None,
            });
        RegionStatus {
            epoch: roster.epoch,
            here: self.slot(),
            standing: self.standing(now),
            engine_silence: self.contact().map(|at| now.saturating_duration_since(at)),
            engine_went_back: self.went_back,
            is_moving: self
                .view()
                .is_some_and(|view| view.next().is_some() || view.is_moving()),
            is_shut_out: false,
            nodes: nodes.collect(),
        }
    }

    /// Whether this node refuses requests because it reached neither the engine nor all other
    /// owners for too long.
    pub fn is_stale(&self, now: Instant) -> bool {
        self.view().is_some_and(|view| view.is_member())
            && self.lease.is_stale(self.heard_all(), now)
    }

    fn standing(&self, now: Instant) -> Standing {
        if let Some(reason) = self.stopped {
            return Standing::Stopped(reason);
        }
        if !self.view().is_some_and(|view| view.is_member()) {
            return Standing::Outside;
        }
        if self.admit_until().is_none_or(|until| now > until) {
            return Standing::Suspended;
        }
        if self.is_isolated(now) {
            Standing::Isolated
        } else {
            Standing::Member
        }
    }
}
