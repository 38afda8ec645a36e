//! Messages between the control planes of nodes.

use std::time::{Duration, Instant};

use gw_interface::rate_limit::Bucket;
use gw_region::{
    CallResult, CarriedMembership, Isolation, Membership, MembershipAction, MembershipEvent,
    NodeConfig, NodeRow, NodeSlot, NodeState, Roster,
};

use crate::members::CarriedNode;
use crate::members::messages::StateMessage;
use crate::members::pending::DeadNodes;

/// Most actions of the membership after one event.
const ACTIONS_MAX: usize = 100;
/// Most messages of an input.
const MESSAGES_MAX: usize = 50;

/// Messages of other nodes to one that is a member, each on a line: JSON. A line `+N` lets N
/// seconds pass, and a line `!` makes the call of the database fail that is under way. An accepted
/// message is written and read back unchanged. The member keeps a valid table of nodes, and hands
/// it over unchanged to its successor.
pub fn node_state(data: &[u8]) {
    let begin = Instant::now();
    let mut member = Member {
        machine: member(begin),
        dead: DeadNodes::default(),
        call: None,
        now: begin,
    };
    member.act();
    for line in data.split(|byte| *byte == b'\n').take(MESSAGES_MAX) {
        match line {
            [b'+', seconds @ ..] => {
                let seconds = std::str::from_utf8(seconds)
                    .ok()
                    .and_then(|it| it.parse().ok());
                member.now += Duration::from_secs(u64::from(seconds.unwrap_or(0u16)));
            }
            b"!" => member.fail(),
            message => {
                if let Ok(message) = StateMessage::parse(message) {
                    member.receive(message);
                }
            }
        }
        member.act();
        member.check();
    }
}

struct Member {
    machine: Membership,
    dead: DeadNodes,
    /// Call of the database that has not ended.
    call: Option<u64>,
    now: Instant,
}

impl Member {
    fn receive(&mut self, message: StateMessage) {
        let written = message.to_json().expect("a read message can be written");
        let again = StateMessage::parse(&written).expect("it can be read back");
        assert_eq!(again, message);
        for level in &message.levels {
            let until_full = Duration::from_millis(level.until_full_ms);
            let bucket = Bucket::filling(level.rate, until_full, self.now);
            assert!(bucket.until_full(self.now) <= until_full);
        }
        let StateMessage {
            state,
            max_staleness,
            ..
        } = message;
        let roster = self.machine.roster();
        self.dead.told(state.session, max_staleness, roster);
        let event = MembershipEvent::Message(state);
        self.machine.on(self.now, event);
    }

    fn fail(&mut self) {
        if let Some(call) = self.call.take() {
            let result = CallResult::Failed;
            let event = MembershipEvent::Result { call, result };
            self.machine.on(self.now, event);
        }
    }

    fn act(&mut self) {
        for _ in 0..ACTIONS_MAX {
            match self.machine.poll(self.now) {
                None => return,
                Some(MembershipAction::Publish(view)) => {
                    let epoch = view.epoch();
                    let event = MembershipEvent::Applied { epoch };
                    self.machine.on(self.now, event);
                }
                Some(MembershipAction::Call(call)) => self.call = Some(call.id),
                Some(MembershipAction::Tell(_) | MembershipAction::Stop(_)) => {}
            }
        }
        panic!("the membership has always something to do");
    }

    fn check(&mut self) {
        let roster = self.machine.roster();
        assert!(roster.is_valid());
        let own = self.machine.session();
        self.dead.others(roster, None, own, self.now);
        let revision = 0;
        drop(self.machine.status(self.now, revision, std::iter::empty()));
        if let Some(carried) = self.machine.carry(self.now) {
            let written = serde_json::to_vec(&CarriedNode::from(carried.clone()));
            let written = written.expect("a membership can be written");
            let read: CarriedNode = serde_json::from_slice(&written).expect("and read back");
            let again = CarriedMembership::try_from(read);
            assert_eq!(again.ok(), Some(carried));
        }
    }
}

/// The first of three nodes, which continues its membership.
fn member(now: Instant) -> Membership {
    let config = NodeConfig {
        slot: None,
        session: 999,
        peer_address: ([127, 0, 0, 1], 7000).into(),
        version: "1".into(),
        isolation: Isolation::Serve,
    };
    let row = |slot: u16| NodeRow {
        slot: NodeSlot::new(slot).expect("a slot"),
        session: 100 * u128::from(slot + 1),
        state: NodeState::Live,
        beat: 40,
        acknowledged: 7,
        peer_address: ([127, 0, 0, 1], 7000 + slot).into(),
        version: "1".into(),
        applied_revision: 3,
        tag: Default::default(),
    };
    let carried = CarriedMembership {
        slot: NodeSlot::new(0).expect("a slot"),
        session: 100,
        beats: 40,
        roster: Roster {
            epoch: 7,
            rows: (0..3).map(row).collect(),
        },
        has_lease: true,
    };
    Membership::resume(config, carried, now)
}
