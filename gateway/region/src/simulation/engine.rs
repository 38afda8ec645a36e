//! The engine: rows in memory, with the conditions of each statement checked in one step.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::engine::{Join, NodeRow, NodeState, Roster, Statement};
use crate::owners::placement::NodeSlot;

/// What the engine does with statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EngineMode {
    Up,
    Down,
    /// Synchronous commits wait for a lost standby.
    SyncHung,
}

/// Why a session ended other than by leaving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndKind {
    /// Declared dead after its silence.
    Silence,
    /// Declared dead because it refused connections.
    Refusal,
    /// Replaced by another process in its slot.
    Replacement,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct SessionEnd {
    pub(super) at: Duration,
    pub(super) kind: EndKind,
}

#[derive(Debug, Clone)]
pub(super) struct FakeEngine {
    pub(super) mode: EngineMode,
    /// Grows when connections break: statements sent before are lost.
    pub(super) generation: u64,
    epoch: u64,
    /// No answer of this server has an epoch before this one.
    first_epoch: u64,
    rows: BTreeMap<NodeSlot, NodeRow>,
    /// Last beat of each session, and when it was applied.
    beaten: BTreeMap<u128, (u64, Duration)>,
    /// The same at the last synchronous commit.
    durable: BTreeMap<u128, (u64, Duration)>,
    /// Slots and sessions of the members at each epoch, from epoch 0.
    pub(super) members: Vec<Vec<(NodeSlot, u128)>>,
    pub(super) ended: BTreeMap<u128, SessionEnd>,
    outage_start: Option<Duration>,
    /// End of the last outage that each running observer must have noticed.
    pub(super) long_outage_end: Option<Duration>,
}

impl FakeEngine {
    pub(super) fn new() -> Self {
        Self {
            mode: EngineMode::Up,
            generation: 0,
            epoch: 0,
            first_epoch: 0,
            rows: BTreeMap::new(),
            beaten: BTreeMap::new(),
            durable: BTreeMap::new(),
            members: vec![Vec::new()],
            ended: BTreeMap::new(),
            outage_start: None,
            long_outage_end: None,
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn roster(&self) -> Roster {
        Roster {
            epoch: self.epoch,
            rows: self.rows.values().cloned().collect(),
        }
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &NodeRow> {
        self.rows.values()
    }

    pub(super) fn set_mode(&mut self, now: Duration, mode: EngineMode) {
        if mode == EngineMode::Down {
            self.generation += 1;
        }
        match (self.mode, mode) {
            (EngineMode::Up, EngineMode::Down | EngineMode::SyncHung) => {
                self.outage_start = Some(now);
            }
            (EngineMode::Down | EngineMode::SyncHung, EngineMode::Up) => {
                let start = self.outage_start.take().unwrap_or(now);
                if now - start >= Duration::from_secs(3) {
                    self.long_outage_end = Some(now);
                }
            }
            _ => {}
        }
        self.mode = mode;
    }

    /// A standby takes over, while this server goes on.
    pub(super) fn promote(&mut self, now: Duration, first_epoch: u64) {
        self.set_mode(now, EngineMode::Down);
        self.set_mode(now, EngineMode::Up);
        self.first_epoch = first_epoch;
    }

    /// Begins the epochs of this server, with the members so far.
    fn raise_epoch(&mut self) {
        while self.epoch < self.first_epoch {
            self.epoch += 1;
            self.members
                .push(self.members.last().cloned().unwrap_or_default());
        }
    }

    /// Loses the beats since the last synchronous commit.
    pub(super) fn lose_beats(&mut self) {
        self.beaten.clone_from(&self.durable);
        for row in self.rows.values_mut() {
            row.beat = self.beaten.get(&row.session).map_or(0, |(beat, _)| *beat);
        }
    }

    /// Runs a statement. Returns whether it was applied.
    pub(super) fn execute(&mut self, now: Duration, statement: &Statement) -> bool {
        let is_applied = self.apply(now, statement);
        self.raise_epoch();
        if statement.is_synchronous() && self.mode == EngineMode::Up {
            self.durable.clone_from(&self.beaten);
        }
        is_applied
    }

    fn apply(&mut self, now: Duration, statement: &Statement) -> bool {
        match *statement {
            Statement::Read => false,
            Statement::Tick => true,
            Statement::Beat {
                slot,
                session,
                beat,
                acknowledged,
                applied_revision,
            } => {
                let Some(row) = self.row(slot, session).filter(|row| !row.state.is_over()) else {
                    return false;
                };
                row.acknowledged = row.acknowledged.max(acknowledged);
                row.applied_revision = row.applied_revision.max(applied_revision);
                if beat > row.beat {
                    row.beat = beat;
                    self.beaten.insert(session, (beat, now));
                }
                true
            }
            Statement::Join(ref join) => self.join(now, join),
            Statement::GoLive {
                slot,
                session,
                epoch,
            } => self.change(
                slot,
                session,
                NodeState::Joining,
                NodeState::Live,
                Some(epoch),
            ),
            Statement::Drain { slot, session } => {
                self.change(slot, session, NodeState::Live, NodeState::Draining, None)
            }
            Statement::Leave {
                slot,
                session,
                epoch,
            } => self.change(
                slot,
                session,
                NodeState::Draining,
                NodeState::Leaving,
                Some(epoch),
            ),
            Statement::End { slot, session } => {
                self.change(slot, session, NodeState::Leaving, NodeState::Left, None)
                    || self.change(slot, session, NodeState::Joining, NodeState::Left, None)
            }
            Statement::DeclareDead {
                slot,
                session,
                beat,
                state,
                epoch,
            } => {
                let has_beat = self.row(slot, session).is_some_and(|row| row.beat == beat);
                has_beat && self.declare_dead(now, slot, session, state, epoch)
            }
            Statement::Remove { slot, session } => {
                let is_over = self
                    .row(slot, session)
                    .is_some_and(|row| row.state.is_over());
                is_over && self.rows.remove(&slot).is_some()
            }
        }
    }

    fn row(&mut self, slot: NodeSlot, session: u128) -> Option<&mut NodeRow> {
        self.rows
            .get_mut(&slot)
            .filter(|row| row.session == session)
    }

    fn declare_dead(
        &mut self,
        now: Duration,
        slot: NodeSlot,
        session: u128,
        state: NodeState,
        epoch: u64,
    ) -> bool {
        let is_changed = self.change(slot, session, state, NodeState::Dead, Some(epoch));
        if is_changed {
            let silence = now
                - self
                    .beaten
                    .get(&session)
                    .map_or(Duration::ZERO, |(_, at)| *at);
            // Clocks of observers are up to 3 % fast.
            let kind = if silence < Duration::from_millis(4_800) {
                EndKind::Refusal
            } else {
                EndKind::Silence
            };
            self.ended.insert(session, SessionEnd { at: now, kind });
        }
        is_changed
    }

    fn join(&mut self, now: Duration, join: &Join) -> bool {
        let is_met = match (self.rows.get(&join.slot), join.replaces) {
            (None, None) => true,
            (Some(row), Some(replaced)) => {
                (row.session, row.state, self.epoch)
                    == (replaced.session, replaced.state, replaced.epoch)
            }
            _ => false,
        };
        if !is_met {
            return false;
        }
        if let Some(old) = self.rows.get(&join.slot)
            && !old.state.is_over()
        {
            self.ended.insert(
                old.session,
                SessionEnd {
                    at: now,
                    kind: EndKind::Replacement,
                },
            );
        }
        let row = NodeRow {
            slot: join.slot,
            session: join.session,
            state: NodeState::Joining,
            beat: 0,
            acknowledged: 0,
            peer_address: join.peer_address,
            version: join.version.clone(),
            applied_revision: 0,
            tag: Default::default(),
        };
        self.rows.insert(join.slot, row);
        self.beaten.insert(join.session, (0, now));
        if join.replaces.is_some() {
            self.bump();
        }
        true
    }

    /// Changes the state of a row; with `epoch`, increments the epoch if it has this value.
    fn change(
        &mut self,
        slot: NodeSlot,
        session: u128,
        from: NodeState,
        to: NodeState,
        epoch: Option<u64>,
    ) -> bool {
        if epoch.is_some_and(|epoch| epoch != self.epoch) {
            return false;
        }
        let Some(row) = self.row(slot, session).filter(|row| row.state == from) else {
            return false;
        };
        row.state = to;
        if epoch.is_some() {
            self.bump();
        }
        true
    }

    fn bump(&mut self) {
        self.epoch += 1;
        let members = self
            .rows
            .values()
            .filter(|row| row.state.owns())
            .map(|row| (row.slot, row.session));
        self.members.push(members.collect());
    }
}
