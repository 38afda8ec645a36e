//! Nodes that may serve without a change: those that were asked and have not said that they use it,
//! and dead ones, which are not asked. A node that was declared dead may live, cut off from
//! PostgreSQL and from the others, and serve the callers that reach it by what it last knew.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use gw_region::{Member, NodeRow, NodeSlot, NodeState, Roster};

/// Time for a message that was under way when a node was declared dead.
const UNDER_WAY: Duration = Duration::from_secs(5);

/// The other nodes, as far as a change concerns them.
#[derive(Debug, Default)]
pub struct OtherNodes {
    /// Those that have not ended.
    pub alive: Vec<Member>,
    /// Dead ones that may still serve.
    pub dead: Vec<NodeSlot>,
}

impl OtherNodes {
    /// All nodes of these rows but the one in slot `here`. Each dead one may serve.
    pub fn of(roster: &Roster, here: NodeSlot) -> Self {
        let others = || roster.rows.iter().filter(|row| row.slot != here);
        Self {
            alive: others()
                .filter(|row| !row.state.is_over())
                .map(NodeRow::member)
                .collect(),
            dead: others()
                .filter(|row| is_dead(row))
                .map(|row| row.slot)
                .collect(),
        }
    }

    /// The nodes that may serve without a change, as a list of slots with parameters (RFC 8941
    /// §3.1): `2, 5;dead`. `behind` are those that were asked and have not said that they use it.
    /// `None` if there are none.
    pub fn pending(&self, behind: &[NodeSlot]) -> Option<String> {
        let asked = behind.iter().map(|slot| (*slot, ""));
        // A node can have been declared dead after it was asked.
        let named: BTreeMap<NodeSlot, &str> = asked
            .chain(self.dead.iter().map(|slot| (*slot, ";dead")))
            .collect();
        let named: Vec<String> = named
            .into_iter()
            .map(|(slot, dead)| format!("{}{dead}", slot.get()))
            .collect();
        (!named.is_empty()).then(|| named.join(", "))
    }
}

/// The time until which dead nodes may serve.
#[derive(Default)]
pub(crate) struct DeadNodes {
    /// Time without contact after which a session refuses requests, as it has said. Others serve
    /// without a limit.
    max_staleness: HashMap<u128, Duration>,
    /// When this node has first seen that a session is dead.
    dead_since: HashMap<u128, Instant>,
}

impl DeadNodes {
    /// A session says after how long without contact it refuses requests.
    pub(crate) fn told(&mut self, session: u128, max_staleness: Option<Duration>, roster: &Roster) {
        match max_staleness {
            // Others would fill the map.
            Some(time) if roster.session(session).is_some() => {
                self.max_staleness.insert(session, time);
            }
            Some(_) => {}
            None => {
                self.max_staleness.remove(&session);
            }
        }
    }

    /// Takes note of newer rows.
    pub(super) fn note(&mut self, roster: &Roster, now: Instant) {
        self.max_staleness
            .retain(|session, _| roster.session(*session).is_some());
        self.dead_since
            .retain(|session, _| roster.session(*session).is_some_and(is_dead));
        for row in roster.rows.iter().filter(|row| is_dead(row)) {
            self.dead_since.entry(row.session).or_insert(now);
        }
    }

    /// The nodes other than that of the session `own`. `newer` are rows that were read since, if
    /// any: this node may not know yet of one that has just joined.
    pub(crate) fn others(
        &mut self,
        roster: &Roster,
        newer: Option<&Roster>,
        own: u128,
        now: Instant,
    ) -> OtherNodes {
        self.note(roster, now);
        let others = || roster.rows.iter().filter(|row| row.session != own);
        let new = newer.into_iter().flat_map(|newer| &newer.rows);
        let new = new.filter(|row| row.session != own && roster.session(row.session).is_none());
        OtherNodes {
            alive: others()
                .chain(new)
                .filter(|row| !row.state.is_over())
                .map(NodeRow::member)
                .collect(),
            dead: others()
                .filter(|row| is_dead(row) && self.may_serve(row, now))
                .map(|row| row.slot)
                .collect(),
        }
    }

    /// Whether a dead node may serve, if it lives. Its last contact was before its death: later
    /// messages would have told it of that.
    fn may_serve(&self, row: &NodeRow, now: Instant) -> bool {
        let (Some(since), Some(max_staleness)) = (
            self.dead_since.get(&row.session),
            self.max_staleness.get(&row.session),
        ) else {
            return true;
        };
        // The rates of the clocks of two nodes may differ by a fifth.
        let until = since.checked_add(max_staleness.saturating_mul(6) / 5 + UNDER_WAY);
        until.is_none_or(|until| now < until)
    }
}

fn is_dead(row: &NodeRow) -> bool {
    row.state == NodeState::Dead
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    pub(in crate::members) const OWN: u128 = 100;

    fn slot(slot: u16) -> NodeSlot {
        NodeSlot::new(slot).unwrap()
    }

    /// Nodes in these states, each with its slot added to [`OWN`] as its session.
    pub(in crate::members) fn roster(states: &[NodeState]) -> Roster {
        let row = |(number, state): (u16, &NodeState)| NodeRow {
            slot: slot(number),
            session: OWN + u128::from(number),
            state: *state,
            beat: 0,
            acknowledged: 0,
            peer_address: ([127, 0, 0, 1], 1).into(),
            version: "1".into(),
            applied_revision: 0,
            tag: [0; 16],
        };
        Roster {
            epoch: 1,
            rows: (0..).zip(states).map(row).collect(),
        }
    }

    #[test]
    fn dead_nodes_are_named_and_not_asked() {
        use NodeState::{Dead, Draining, Joining, Left, Live};
        let roster = roster(&[Live, Live, Joining, Draining, Dead, Left]);
        let others = DeadNodes::default().others(&roster, None, OWN, Instant::now());
        assert_eq!(
            others
                .alive
                .iter()
                .map(|member| member.slot.get())
                .collect::<Vec<_>>(),
            [1, 2, 3]
        );
        assert_eq!(others.dead, [slot(4)]);
        assert_eq!(others.pending(&[]).unwrap(), "4;dead");
        assert_eq!(others.pending(&[slot(1), slot(9)]).unwrap(), "1, 4;dead, 9");
        assert_eq!(
            others.pending(&[slot(4)]).unwrap(),
            "4;dead",
            "it died after it was asked"
        );
        assert_eq!(OtherNodes::default().pending(&[]), None);
    }

    #[test]
    fn nodes_that_this_one_does_not_know_yet_are_asked() {
        use NodeState::{Dead, Joining, Live};
        let known = roster(&[Live, Live]);
        let newer = roster(&[Live, Dead, Joining, Dead]);
        let others = DeadNodes::default().others(&known, Some(&newer), OWN, Instant::now());
        assert_eq!(
            others
                .alive
                .iter()
                .map(|member| member.slot.get())
                .collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!(others.dead, []);
    }

    #[test]
    fn without_the_membership_all_nodes_of_the_table_count() {
        use NodeState::{Dead, Joining, Left, Live};
        let others = OtherNodes::of(&roster(&[Live, Live, Joining, Dead, Left]), slot(0));
        assert_eq!(
            others
                .alive
                .iter()
                .map(|member| member.slot.get())
                .collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!(others.dead, [slot(3)]);
    }

    #[test]
    fn a_dead_node_is_named_until_it_refuses_requests_by_itself() {
        let mut dead = DeadNodes::default();
        let start = Instant::now();
        let alive = roster(&[NodeState::Live, NodeState::Live]);
        let over = roster(&[NodeState::Live, NodeState::Dead]);
        dead.told(OWN + 1, Some(60 * SECOND), &alive);
        dead.told(OWN + 2, Some(60 * SECOND), &alive);
        assert_eq!(dead.max_staleness.len(), 1, "a session without a row");
        let is_named = |dead: &mut DeadNodes, at: Duration| {
            !dead.others(&over, None, OWN, start + at).dead.is_empty()
        };
        assert!(is_named(&mut dead, Duration::ZERO) && is_named(&mut dead, 76 * SECOND));
        assert!(
            !is_named(&mut dead, 77 * SECOND),
            "60 s, a fifth more, and 5 s"
        );
        // The same slot with another process.
        dead.note(&alive, start + 80 * SECOND);
        assert!(is_named(&mut dead, 80 * SECOND), "its death was seen again");
        dead.told(OWN + 1, None, &over);
        assert!(
            is_named(&mut dead, 8000 * SECOND),
            "it serves without a limit"
        );
        dead.told(OWN + 1, Some(Duration::MAX), &over);
        assert!(is_named(&mut dead, 8000 * SECOND));
        dead.note(&roster(&[NodeState::Live]), start);
        assert!(dead.max_staleness.is_empty() && dead.dead_since.is_empty());
    }
}
