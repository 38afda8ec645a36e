//! Requests of operators that wait for the engine.

use crate::engine::{NodeState, Roster, Statement};
use crate::owners::placement::NodeSlot;

/// Most requests that wait.
const REQUESTS_MAX: usize = 16;

/// Why a request of an operator was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OperatorError {
    /// The slot has no row.
    #[error("no node uses slot {}; `gw-gateway region status` lists the nodes", .0.get())]
    UnknownSlot(NodeSlot),
    /// The node is joining, has left, or is dead.
    #[error("the node in slot {} is not live, so it cannot be drained", .0.get())]
    NotLive(NodeSlot),
    /// The node may still run.
    #[error("the node in slot {} has neither left nor been declared dead: drain it \
             first", .0.get())]
    NotOver(NodeSlot),
    /// The queue of requests is full.
    #[error("too many requests wait for the database")]
    Busy,
}

/// Requests in the order of arrival. Each is tried until the row shows its effect or has changed
/// otherwise.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    waiting: Vec<OperatorRequest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OperatorRequest {
    slot: NodeSlot,
    session: u128,
    kind: RequestKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestKind {
    Drain,
    Remove,
}

impl Requests {
    pub(crate) fn drain(&mut self, slot: NodeSlot, roster: &Roster) -> Result<(), OperatorError> {
        let row = roster.slot(slot).ok_or(OperatorError::UnknownSlot(slot))?;
        match row.state {
            NodeState::Live => self.push(OperatorRequest {
                slot,
                session: row.session,
                kind: RequestKind::Drain,
            }),
            NodeState::Draining | NodeState::Leaving => Ok(()),
            NodeState::Joining | NodeState::Left | NodeState::Dead => {
                Err(OperatorError::NotLive(slot))
            }
        }
    }

    pub(crate) fn remove(&mut self, slot: NodeSlot, roster: &Roster) -> Result<(), OperatorError> {
        let row = roster.slot(slot).ok_or(OperatorError::UnknownSlot(slot))?;
        if !row.state.is_over() {
            return Err(OperatorError::NotOver(slot));
        }
        self.push(OperatorRequest {
            slot,
            session: row.session,
            kind: RequestKind::Remove,
        })
    }

    fn push(&mut self, request: OperatorRequest) -> Result<(), OperatorError> {
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
    pub(crate) fn settle(&mut self, roster: &Roster) {
        self.waiting.retain(|request| {
            let row = roster
                .slot(request.slot)
                .filter(|row| row.session == request.session);
            row.is_some_and(|row| match request.kind {
                RequestKind::Drain => row.state == NodeState::Live,
                RequestKind::Remove => row.state.is_over(),
            })
        });
    }

    pub(crate) fn next(&self) -> Option<Statement> {
        let OperatorRequest {
            slot,
            session,
            kind,
        } = *self.waiting.first()?;
        Some(match kind {
            RequestKind::Drain => Statement::Drain { slot, session },
            RequestKind::Remove => Statement::Remove { slot, session },
        })
    }
}
