//! The next statement of a node to the engine.

use std::sync::Arc;
use std::time::Instant;

use super::super::engine::{Join, NodeRow, NodeState, Replaced, Statement};
use super::{Membership, NodeConfig, StopReason};
use crate::owners::placement::NodeSlot;
use crate::timing::BEAT;

impl Membership {
    pub(super) fn next_statement(&mut self, now: Instant) -> Option<Statement> {
        let Some(own) = self.succession.own() else {
            return self.join(now);
        };
        let NodeRow {
            slot,
            session,
            state,
            ..
        } = *own;
        if now >= self.beat_due {
            // Due again when this call has succeeded or failed.
            self.beat_due = now + BEAT;
            let acknowledged = self.acknowledgment(now);
            let applied_revision = self.applied_revision;
            self.beats += 1;
            let beat = self.beats;
            return Some(Statement::Beat {
                slot,
                session,
                beat,
                acknowledged,
                applied_revision,
            });
        }
        if !self.is_refreshed {
            return None;
        }
        if self.is_tick_due {
            return Some(Statement::Tick);
        }
        self.next_state(now, slot, session, state)
            .or_else(|| self.declaration(now, session))
            .or_else(|| self.requests.next())
    }

    /// The step of this node out of its state, if it may be taken.
    fn next_state(
        &self,
        now: Instant,
        slot: NodeSlot,
        session: u128,
        state: NodeState,
    ) -> Option<Statement> {
        let epoch = self.succession.epoch();
        match state {
            NodeState::Joining if self.is_leaving => Some(Statement::End { slot, session }),
            NodeState::Joining if self.is_ready && self.lease.contact().is_some() => {
                Some(Statement::GoLive {
                    slot,
                    session,
                    epoch,
                })
            }
            NodeState::Live if self.is_leaving => Some(Statement::Drain { slot, session }),
            NodeState::Draining if self.is_handed_over => Some(Statement::Leave {
                slot,
                session,
                epoch,
            }),
            NodeState::Leaving if self.acknowledgment(now) >= epoch => {
                Some(Statement::End { slot, session })
            }
            _ => None,
        }
    }

    /// Declares a node dead that this node no longer hears.
    fn declaration(&self, now: Instant, own_session: u128) -> Option<Statement> {
        let dead = self
            .observer
            .dead(now, self.succession.roster(), own_session)?;
        Some(Statement::DeclareDead {
            slot: dead.slot,
            session: dead.session,
            beat: dead.beat,
            state: dead.state,
            epoch: self.succession.epoch(),
        })
    }

    fn join(&mut self, now: Instant) -> Option<Statement> {
        if now < self.beat_due {
            return None;
        }
        self.beat_due = now + BEAT;
        if !self.is_refreshed {
            return Some(Statement::Read);
        }
        if self.is_leaving {
            self.stopped = Some(StopReason::Left);
            return None;
        }
        // Workers with the view of an earlier session must not use the lease of the next one.
        if self.applied < self.fenced_at {
            return None;
        }
        let roster = self.succession.roster();
        let slot = self.slot.or_else(|| roster.free_slot())?;
        let replaces = roster.slot(slot).map(|row| Replaced {
            session: row.session,
            state: row.state,
            epoch: roster.epoch,
        });
        let NodeConfig {
            peer_address,
            ref version,
            ..
        } = self.config;
        let version = Arc::clone(version);
        Some(Statement::Join(Join {
            slot,
            session: self.session,
            peer_address,
            version,
            replaces,
        }))
    }
}
