//! Requests of operators that wait for the engine.

use super::engine::{NodeState, Roster, Statement};
use super::placement::NodeSlot;

/// Most requests that wait.
const REQUESTS_MAX: usize = 16;

/// Why a request of an operator was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OperatorError {
    #[error("no node uses slot {}", .0.get())]
    UnknownSlot(NodeSlot),
    #[error("the node in slot {} is not live, so it cannot be drained", .0.get())]
    NotLive(NodeSlot),
    #[error("the node in slot {} has neither left nor been declared dead: drain it first", .0.get())]
    NotOver(NodeSlot),
    #[error("too many requests wait for the database")]
    Busy,
}

/// Requests in the order of arrival. Each is tried until the row shows its effect or has changed otherwise.
#[derive(Debug, Default)]
pub(super) struct Requests {
    waiting: Vec<Request>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    slot: NodeSlot,
    session: u128,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Drain,
    Remove,
}

impl Requests {
    pub(super) fn drain(&mut self, slot: NodeSlot, roster: &Roster) -> Result<(), OperatorError> {
        let row = roster.slot(slot).ok_or(OperatorError::UnknownSlot(slot))?;
        match row.state {
            NodeState::Live => self.push(Request {
                slot,
                session: row.session,
                kind: Kind::Drain,
            }),
            NodeState::Draining | NodeState::Leaving => Ok(()),
            NodeState::Joining | NodeState::Left | NodeState::Dead => {
                Err(OperatorError::NotLive(slot))
            }
        }
    }

    pub(super) fn remove(&mut self, slot: NodeSlot, roster: &Roster) -> Result<(), OperatorError> {
        let row = roster.slot(slot).ok_or(OperatorError::UnknownSlot(slot))?;
        if !row.state.is_over() {
            return Err(OperatorError::NotOver(slot));
        }
        self.push(Request {
            slot,
            session: row.session,
            kind: Kind::Remove,
        })
    }

    fn push(&mut self, request: Request) -> Result<(), OperatorError> {
        if self.waiting.contains(&request) {
            return Ok(());
        }
        if self.waiting.len() >= REQUESTS_MAX {
            return Err(OperatorError::Busy);
        }
        self.waiting.push(request);
        Ok(())
    }

    /// Forgets requests whose row has changed.
    pub(super) fn settle(&mut self, roster: &Roster) {
        self.waiting.retain(|request| {
            let row = roster
                .slot(request.slot)
                .filter(|row| row.session == request.session);
            row.is_some_and(|row| match request.kind {
                Kind::Drain => row.state == NodeState::Live,
                Kind::Remove => row.state.is_over(),
            })
        });
    }

    pub(super) fn next(&self) -> Option<Statement> {
        let Request {
            slot,
            session,
            kind,
        } = *self.waiting.first()?;
        Some(match kind {
            Kind::Drain => Statement::Drain { slot, session },
            Kind::Remove => Statement::Remove { slot, session },
        })
    }
}
