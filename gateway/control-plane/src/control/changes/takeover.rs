//! Changes of the records that pass between the processes of a takeover. The predecessor drains
//! without the store, and follows the changes that its successor makes.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::limits;
use gw_store::{History, Position, Revision, Step, StoreError};
use tokio::sync::watch;

use crate::control::Control;

/// Changes that the process that follows does not have yet, without gaps.
pub(crate) struct UnsentChanges {
    changes: VecDeque<(Position, Vec<Step>)>,
    /// Position before the first of them.
    after: Position,
    /// Number of their steps, and of the changes themselves.
    steps: usize,
    /// Changes are missing. The follower cannot go on.
    has_gap: bool,
    changed: watch::Sender<()>,
    /// Revision that the follower uses; the largest number if it acknowledges nothing.
    acknowledged: watch::Sender<Revision>,
}

/// A process cannot follow the changes of another one.
#[derive(Debug, thiserror::Error)]
#[error("changes after revision {} of the records are missing", .after.0)]
pub struct MissingChanges {
    /// Revision before the first missing change.
    pub after: Revision,
}

/// What an exchange with the process that follows needs of the control plane. Tasks may use it:
/// nothing here reaches the store, which blocks.
pub struct ForFollower(Arc<Control>);

impl ForFollower {
    /// Notices changes of the records from now on. `None` after [`Control::keep_no_changes`].
    pub fn watch_changes(&self) -> Option<watch::Receiver<()>> {
        let state = self.0.state();
        state
            .unsent
            .as_ref()
            .map(|unsent| unsent.changed.subscribe())
    }

    /// The changes after `position`, which the last call has returned last. Each change is returned
    /// once.
    pub fn changes_after(&self, position: &Position) -> History {
        let kept = self.0.kept_changes(position);
        kept.unwrap_or(History::Forgotten)
    }

    /// See [`Control::acknowledge`].
    pub fn acknowledge(&self, revision: Revision) {
        self.0.acknowledge(revision);
    }
}

impl Control {
    /// The changes after `position`, for the process that follows, and what tells it of later ones.
    /// Reads the store if it is behind the records that this process started with. Blocks.
    pub fn changes_for_follower(
        self: &Arc<Self>,
        position: &Position,
    ) -> Result<(History, ForFollower), StoreError> {
        let follower = ForFollower(Arc::clone(self));
        if let Some(kept) = self.kept_changes(position) {
            return Ok((kept, follower));
        }
        let mut store = self.store();
        let Some(store) = store.as_mut() else {
            return Ok((History::Forgotten, follower));
        };
        let history = store.changes_after(position)?;
        if let (History::Changes(changes), Some(unsent)) = (&history, &mut self.state().unsent) {
            unsent.skip_to(changes.last().map_or(position, |(newest, _)| newest));
        }
        Ok((history, follower))
    }

    fn kept_changes(&self, position: &Position) -> Option<History> {
        self.state().unsent.as_mut()?.take_after(position)
    }

    /// Notes that the process that follows uses the changes up to `revision`. From the first call
    /// on, later changes count as kept only once it uses them, too.
    pub fn acknowledge(&self, revision: Revision) {
        if let Some(unsent) = &self.state().unsent {
            unsent.acknowledged.send_replace(revision);
        }
    }

    /// Waits until the process that follows, if there is one, uses the changes up to `revision`.
    pub async fn followed_to(&self, revision: Revision) {
        let acknowledged = self
            .state()
            .unsent
            .as_ref()
            .map(|unsent| unsent.acknowledged.subscribe());
        if let Some(mut acknowledged) = acknowledged {
            // Fails once the process has ended, or accepts no more requests.
            let _ = acknowledged.wait_for(|used| *used >= revision).await;
        }
    }

    /// Closes the channel of [`ForFollower::watch_changes`]: no other process follows, or this one
    /// gets no changes any more.
    pub fn keep_no_changes(&self) {
        self.state().unsent = None;
    }

    /// Applies a change received from the process that now has the store. Skips one that was
    /// applied before.
    pub fn follow_change(
        &self,
        position: Position,
        steps: Vec<Step>,
    ) -> Result<(), MissingChanges> {
        let ours = self.position();
        if position.origin != ours.origin || position.revision.0 > ours.revision.0 + 1 {
            return Err(MissingChanges {
                after: ours.revision,
            });
        }
        self.apply(&ours, vec![(position, steps)]);
        Ok(())
    }
}

impl UnsentChanges {
    pub(crate) fn after(position: Position) -> Self {
        Self {
            changes: VecDeque::new(),
            after: position,
            steps: 0,
            has_gap: false,
            changed: watch::Sender::new(()),
            acknowledged: watch::Sender::new(Revision(i64::MAX)),
        }
    }

    pub(crate) fn push(&mut self, position: Position, steps: Vec<Step>) {
        if self.steps > limits::UNSENT_STEPS {
            return self.break_off();
        }
        if !self.has_gap && position.revision > self.after.revision {
            self.steps += 1 + steps.len();
            self.changes.push_back((position, steps));
        }
        self.changed.send_replace(());
    }

    /// Notes that the records have changed in another way than by steps.
    pub(crate) fn break_off(&mut self) {
        (self.has_gap, self.steps) = (true, 0);
        self.changes = VecDeque::new();
        self.changed.send_replace(());
    }

    /// Takes the changes after `position`; `None` if the first of them were made before this
    /// process kept any.
    pub(crate) fn take_after(&mut self, position: &Position) -> Option<History> {
        if self.has_gap {
            return Some(History::Forgotten);
        }
        if *position != self.after {
            return None;
        }
        self.steps = 0;
        if let Some((newest, _)) = self.changes.back() {
            self.after = newest.clone();
        }
        Some(History::Changes(std::mem::take(&mut self.changes).into()))
    }

    /// Drops the changes up to `position`: the follower has them from the store.
    pub(crate) fn skip_to(&mut self, position: &Position) {
        if position.revision < self.after.revision {
            return;
        }
        while let Some((_, steps)) = self
            .changes
            .pop_front_if(|(at, _)| at.revision <= position.revision)
        {
            self.steps -= 1 + steps.len();
        }
        self.after = position.clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(revision: i64) -> Position {
        Position {
            revision: Revision(revision),
            ..Position::default()
        }
    }

    fn revisions(history: Option<History>) -> Vec<i64> {
        let Some(History::Changes(changes)) = history else {
            panic!("{history:?}")
        };
        changes.into_iter().map(|(at, _)| at.revision.0).collect()
    }

    #[test]
    fn each_change_is_returned_once_and_in_order() {
        let mut unsent = UnsentChanges::after(at(5));
        let changed = unsent.changed.subscribe();
        (6..9).for_each(|revision| unsent.push(at(revision), Vec::new()));
        assert!(changed.has_changed().unwrap());
        assert_eq!(revisions(unsent.take_after(&at(5))), [6, 7, 8]);
        assert!(revisions(unsent.take_after(&at(8))).is_empty());
        unsent.push(at(9), Vec::new());
        assert_eq!(revisions(unsent.take_after(&at(8))), [9]);
    }

    #[test]
    fn a_follower_at_another_position_is_left_to_the_store() {
        let mut unsent = UnsentChanges::after(at(5));
        (6..9).for_each(|revision| unsent.push(at(revision), Vec::new()));
        let other = Position {
            origin: "other".to_owned(),
            ..at(5)
        };
        for position in [at(4), at(6), at(20), other] {
            assert!(unsent.take_after(&position).is_none(), "{position:?}");
        }
        // It has the changes up to 7 from the store.
        unsent.skip_to(&at(3));
        unsent.skip_to(&at(7));
        assert_eq!(revisions(unsent.take_after(&at(7))), [8]);
    }

    #[test]
    fn too_many_steps_and_other_changes_leave_a_gap() {
        let step = Step::Delete(gw_store::RecordId::Account("acme".parse().unwrap()));
        let mut unsent = UnsentChanges::after(at(5));
        // The size of one change is not limited.
        unsent.push(at(6), vec![step.clone(); limits::UNSENT_STEPS + 1]);
        assert_eq!(revisions(unsent.take_after(&at(5))), [6]);
        unsent.push(at(7), vec![step; limits::UNSENT_STEPS]);
        unsent.push(at(8), Vec::new());
        assert!(matches!(
            unsent.take_after(&at(6)),
            Some(History::Forgotten)
        ));
        unsent.push(at(9), Vec::new());
        assert!(
            matches!(unsent.take_after(&at(8)), Some(History::Forgotten)),
            "a gap stays"
        );
        assert!(unsent.changes.is_empty());

        let mut unsent = UnsentChanges::after(at(5));
        let changed = unsent.changed.subscribe();
        unsent.break_off();
        assert!(changed.has_changed().unwrap());
        assert!(matches!(
            unsent.take_after(&at(5)),
            Some(History::Forgotten)
        ));
    }
}
