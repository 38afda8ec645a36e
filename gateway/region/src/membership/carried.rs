//! Membership that passes from one process of a node to the next, so that its services stay where
//! they are.

use std::time::Instant;

use super::{Membership, NodeConfig};
use crate::engine::Roster;
use crate::owners::placement::NodeSlot;
use crate::owners::succession::RosterSource;

/// Membership of an earlier process that this one continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CarriedMembership {
    /// Slot of the node.
    pub slot: NodeSlot,
    /// Session of the membership, which stays the same.
    pub session: u128,
    /// Number of the last beat, as far as known.
    pub beats: u64,
    /// The rows that the earlier process knew.
    pub roster: Roster,
    /// The earlier process could admit a moment ago, and does not any more. Otherwise this process
    /// admits once a call has succeeded, or all other owners have said that they know no later
    /// epoch.
    pub has_lease: bool,
}

impl Membership {
    /// Continues the membership of an earlier process, which has ended it. The session stays the
    /// same, so no service moves.
    pub fn resume(config: NodeConfig, carried: CarriedMembership, now: Instant) -> Self {
        let CarriedMembership {
            slot,
            session,
            beats,
            roster,
            has_lease,
        } = carried;
        let mut machine = Self::new(
            NodeConfig {
                slot: Some(slot),
                session,
                ..config
            },
            now,
        );
        machine.beats = beats;
        machine.is_ready = true;
        machine.is_resumed = true;
        machine.succession.admit(&roster);
        machine.install(now, roster, RosterSource::Node);
        if has_lease {
            machine.lease.resume(now);
        }
        machine
    }

    /// What another process needs to continue this membership. `None` if this process has no row.
    pub fn carry(&self, now: Instant) -> Option<CarriedMembership> {
        let row = self.succession.own()?;
        Some(CarriedMembership {
            slot: row.slot,
            session: self.session,
            beats: self.beats.max(row.beat),
            roster: self.succession.roster().as_ref().clone(),
            has_lease: self.admit_until().is_some_and(|until| now < until),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::timing::DEAD_AFTER;
    use crate::{
        Call, CallResult, Isolation, MembershipAction, MembershipEvent, NodeMessage, NodeRow,
        NodeState, Statement,
    };

    fn row(slot: u16, session: u128) -> NodeRow {
        NodeRow {
            slot: NodeSlot::new(slot).unwrap(),
            session,
            state: NodeState::Live,
            beat: 40,
            acknowledged: 7,
            peer_address: ([127, 0, 0, 1], 7000 + slot).into(),
            version: "1".into(),
            applied_revision: 3,
            tag: Default::default(),
        }
    }

    fn roster() -> Roster {
        Roster {
            epoch: 7,
            rows: vec![row(0, 100), row(1, 200)],
        }
    }

    fn resumed(has_lease: bool, now: Instant) -> Membership {
        let config = NodeConfig {
            slot: None,
            session: 999,
            peer_address: ([127, 0, 0, 1], 7000).into(),
            version: "1".into(),
            isolation: Isolation::Serve,
        };
        let slot = NodeSlot::new(0).unwrap();
        let carried = CarriedMembership {
            slot,
            session: 100,
            beats: 40,
            roster: roster(),
            has_lease,
        };
        Membership::resume(config, carried, now)
    }

    /// Runs the actions that are due. Returns the call, if any.
    fn act(machine: &mut Membership, now: Instant) -> Option<Call> {
        let mut call = None;
        while let Some(action) = machine.poll(now) {
            match action {
                MembershipAction::Publish(view) => machine.on(
                    now,
                    MembershipEvent::Applied {
                        epoch: view.epoch(),
                    },
                ),
                MembershipAction::Call(next) => call = Some(next),
                MembershipAction::Tell(_) | MembershipAction::Stop(_) => {}
            }
        }
        call
    }

    fn admits(machine: &Membership, now: Instant) -> bool {
        machine.admit_until().is_some_and(|until| now < until)
    }

    #[test]
    fn the_next_process_keeps_session_and_epoch_and_admits_after_its_first_beat() {
        let now = Instant::now() + Duration::from_secs(60);
        let mut machine = resumed(true, now);
        let Call { id, statement } = act(&mut machine, now).unwrap();
        assert!(
            matches!(statement, Statement::Beat { session: 100, beat, .. } if beat > 40),
            "{statement:?}"
        );
        assert!(!admits(&machine, now));
        let done = |applied| CallResult::Done {
            applied,
            roster: roster(),
        };
        machine.on(
            now,
            MembershipEvent::Result {
                call: id,
                result: done(true),
            },
        );
        let Call { id, statement } = act(&mut machine, now).unwrap();
        assert_eq!(statement, Statement::Tick);
        machine.on(
            now,
            MembershipEvent::Result {
                call: id,
                result: done(true),
            },
        );
        assert_eq!(act(&mut machine, now), None, "it does not join");
        assert!(admits(&machine, now) && machine.view().unwrap().epoch() == 7);
        let carried = machine.carry(now).unwrap();
        assert!(carried.has_lease && carried.session == 100 && carried.beats > 40);
    }

    #[test]
    fn a_sender_without_a_row_gives_itself_none_while_the_engine_answers() {
        let now = Instant::now() + Duration::from_secs(60);
        let mut machine = resumed(true, now);
        let call = act(&mut machine, now).unwrap();
        let done = CallResult::Done {
            applied: true,
            roster: roster(),
        };
        machine.on(
            now,
            MembershipEvent::Result {
                call: call.id,
                result: done,
            },
        );
        let slot = NodeSlot::new(2).unwrap();
        let session = 300;
        let stranger = |epoch| NodeMessage {
            slot,
            session,
            acknowledged: epoch,
            roster: Arc::new(Roster {
                epoch,
                rows: vec![row(0, 100), row(1, 200), row(2, session)],
            }),
        };
        let knows = |machine: &Membership, slot: NodeSlot, session| {
            machine.view().unwrap().knows(slot, session)
        };
        for epoch in [8, 9] {
            machine.on(now, MembershipEvent::Message(stranger(epoch)));
            act(&mut machine, now);
            assert_eq!(
                machine.view().unwrap().epoch(),
                epoch,
                "it may tell that the services of this node have moved"
            );
            assert!(!knows(&machine, slot, session));
        }
        // A node that joins again after it was declared dead, and a process that had the slot
        // before.
        let known = NodeSlot::new(1).unwrap();
        assert!(
            knows(&machine, known, 200)
                && knows(&machine, known, 201)
                && !knows(&machine, known, 199)
        );

        machine.on(now + DEAD_AFTER, MembershipEvent::Message(stranger(10)));
        assert!(
            knows(&machine, slot, session),
            "the engine is silent: others may know more"
        );
    }

    #[test]
    fn without_the_engine_it_admits_after_a_failed_call_if_the_earlier_process_could() {
        let now = Instant::now() + Duration::from_secs(60);
        let mut machine = resumed(true, now);
        let call = act(&mut machine, now).unwrap();
        machine.on(
            now,
            MembershipEvent::Result {
                call: call.id,
                result: CallResult::Failed,
            },
        );
        assert!(admits(&machine, now));
    }

    #[test]
    fn without_the_engine_it_otherwise_admits_once_all_other_owners_know_no_later_epoch() {
        let now = Instant::now() + Duration::from_secs(60);
        let mut machine = resumed(false, now);
        let call = act(&mut machine, now).unwrap();
        machine.on(
            now,
            MembershipEvent::Result {
                call: call.id,
                result: CallResult::Failed,
            },
        );
        assert!(!admits(&machine, now));
        let peer = |epoch| NodeMessage {
            slot: NodeSlot::new(1).unwrap(),
            session: 200,
            acknowledged: 7,
            roster: Arc::new(Roster { epoch, ..roster() }),
        };
        machine.on(now, MembershipEvent::Message(peer(7)));
        assert!(admits(&machine, now));

        let mut late = resumed(false, now);
        let call = act(&mut late, now).unwrap();
        late.on(
            now,
            MembershipEvent::Result {
                call: call.id,
                result: CallResult::Failed,
            },
        );
        let mut dead = peer(8);
        Arc::make_mut(&mut dead.roster).rows[0].state = NodeState::Dead;
        late.on(now, MembershipEvent::Message(dead));
        act(&mut late, now);
        assert!(
            !admits(&late, now),
            "another node has declared this session dead"
        );
    }
}
