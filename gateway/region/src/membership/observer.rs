//! Detection of dead nodes from their beats, on the clock of one observer.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::engine::{NodeRow, Roster};
use crate::owners::placement::NodeSlot;
use crate::timing::{DEAD_AFTER, ENGINE_GRACE, READ_GAP_MAX, REFUSED_DEAD_AFTER, SUSPECT_AFTER};

/// Beats of the other nodes, as one node saw them.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    /// Start of the last successful call.
    last_read: Option<Instant>,
    /// End of the first successful tick after the start, a failure or a pause of this process.
    good_since: Option<Instant>,
    seen: BTreeMap<NodeSlot, Seen>,
}

#[derive(Debug)]
struct Seen {
    session: u128,
    beat: u64,
    /// When this node first saw the beat.
    since: Instant,
    refused: Option<NodeRefusal>,
}

/// A node refused connections.
#[derive(Debug)]
struct NodeRefusal {
    at: Instant,
    /// The beat was read again after that. If it changes from then on, the node lives.
    is_confirmed: bool,
}

impl Observer {
    /// A tick was committed: the server is the primary of the region, and its replies are current.
    pub(crate) fn ticked(&mut self, now: Instant) {
        self.good_since.get_or_insert(now);
    }

    /// Takes note of rows that a call, sent at `sent`, has read.
    pub(crate) fn read(&mut self, sent: Instant, now: Instant, roster: &Roster) {
        // After a longer gap this process was paused, and does not know whether the engine was away
        // meanwhile.
        if self
            .last_read
            .is_none_or(|last| sent.saturating_duration_since(last) > READ_GAP_MAX)
        {
            self.good_since = None;
        }
        self.last_read = Some(sent);
        self.seen.retain(|slot, _| roster.slot(*slot).is_some());
        for row in &roster.rows {
            let fresh = || Seen {
                session: row.session,
                beat: row.beat,
                since: now,
                refused: None,
            };
            let seen = self.seen.entry(row.slot).or_insert_with(fresh);
            if (seen.session, seen.beat) != (row.session, row.beat) {
                let refused = seen
                    .refused
                    .take()
                    .filter(|refusal| !refusal.is_confirmed && seen.session == row.session);
                *seen = Seen { refused, ..fresh() };
            }
            if let Some(refusal) = seen.refused.as_mut().filter(|refusal| sent >= refusal.at) {
                refusal.is_confirmed = true;
            }
        }
    }

    /// A call failed: the silence of others proves nothing.
    pub(crate) fn failed(&mut self) {
        self.good_since = None;
    }

    /// The link to the node broke, and it refused the next connection.
    pub(crate) fn refused(&mut self, now: Instant, slot: NodeSlot, session: u128) {
        if let Some(seen) = self
            .seen
            .get_mut(&slot)
            .filter(|seen| seen.session == session)
        {
            seen.refused = Some(NodeRefusal {
                at: now,
                is_confirmed: false,
            });
        }
    }

    /// Since when calls succeed; `None` if the last one is long ago.
    pub(crate) fn good_for(&self, now: Instant) -> Option<Duration> {
        self.last_read
            .filter(|last| now.saturating_duration_since(*last) <= READ_GAP_MAX)?;
        self.good_since
            .map(|since| now.saturating_duration_since(since))
    }

    /// A node to declare dead, other than the one with the session `own`.
    pub(crate) fn dead<'a>(
        &self,
        now: Instant,
        roster: &'a Roster,
        own: u128,
    ) -> Option<&'a NodeRow> {
        let good_for = self.good_for(now)?;
        // Soon after an outage of the engine silence alone proves nothing, and a node that refuses
        // connections has the time for one more beat.
        let is_trusted = good_for >= ENGINE_GRACE;
        let silence = |seen: &Seen| now.saturating_duration_since(seen.since);
        roster
            .rows
            .iter()
            .filter(|row| row.session != own && !row.state.is_over())
            .find(|row| {
                self.seen.get(&row.slot).is_some_and(|seen| {
                    let is_same = (seen.session, seen.beat) == (row.session, row.beat);
                    let is_refused = seen
                        .refused
                        .as_ref()
                        .is_some_and(|refusal| refusal.is_confirmed);
                    let is_dead = if is_refused {
                        is_trusted || silence(seen).min(good_for) >= REFUSED_DEAD_AFTER
                    } else {
                        is_trusted && silence(seen) >= DEAD_AFTER
                    };
                    is_same && is_dead
                })
            })
    }

    /// Nodes other than the one with the session `own` whose beats have not changed for a while.
    pub(crate) fn suspects<'a>(
        &self,
        now: Instant,
        roster: &'a Roster,
        own: u128,
    ) -> impl Iterator<Item = &'a NodeRow> {
        // After an outage of the engine the silence of before proves nothing.
        let good_for = self.good_for(now).unwrap_or_default();
        let others = roster
            .rows
            .iter()
            .filter(move |row| row.session != own && !row.state.is_over());
        others.filter(move |row| {
            self.seen.get(&row.slot).is_some_and(|seen| {
                let silence = now.saturating_duration_since(seen.since).min(good_for);
                (seen.session, seen.beat) == (row.session, row.beat) && silence >= SUSPECT_AFTER
            })
        })
    }

    /// When the beat of a node last changed, as seen here.
    pub(crate) fn last_change(&self, row: &NodeRow) -> Option<Instant> {
        self.seen
            .get(&row.slot)
            .filter(|seen| seen.session == row.session)
            .map(|seen| seen.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::NodeState;

    fn roster(beats: [u64; 3]) -> Roster {
        let row = |(slot, beat): (u16, u64)| NodeRow {
            slot: NodeSlot::new(slot).unwrap(),
            session: slot.into(),
            state: NodeState::Live,
            beat,
            acknowledged: 1,
            peer_address: ([127, 0, 0, 1], 7000 + slot).into(),
            version: "1".into(),
            applied_revision: 1,
            tag: [0; 16],
        };
        Roster {
            epoch: 1,
            rows: (0..).zip(beats).map(row).collect(),
        }
    }

    fn suspects(observer: &Observer, now: Instant, roster: &Roster) -> Vec<u128> {
        observer
            .suspects(now, roster, 0)
            .map(|row| row.session)
            .collect()
    }

    #[test]
    fn a_node_whose_beat_stands_still_is_suspect_before_it_is_dead() {
        let mut observer = Observer::default();
        let start = Instant::now();
        for second in 0..=5 {
            let now = start + Duration::from_secs(second);
            let roster = roster([second, second, 7]);
            observer.read(now, now, &roster);
            observer.ticked(now);
            let expected: &[u128] = if second >= SUSPECT_AFTER.as_secs() {
                &[2]
            } else {
                &[]
            };
            assert_eq!(
                suspects(&observer, now, &roster),
                expected,
                "after {second} s"
            );
        }
        let mut over = roster([5, 5, 7]);
        over.rows[2].state = NodeState::Dead;
        assert_eq!(
            suspects(&observer, start + Duration::from_secs(5), &over),
            []
        );
    }

    #[test]
    fn no_node_is_suspect_because_this_one_could_not_read() {
        let mut observer = Observer::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let roster = roster([1, 1, 1]);
        observer.read(start, start, &roster);
        observer.ticked(start);
        assert_eq!(
            suspects(&observer, at(20), &roster),
            [],
            "the last read is long ago"
        );
        observer.failed();
        for second in 20..23 {
            observer.read(at(second), at(second), &roster);
            observer.ticked(at(second));
            assert_eq!(
                suspects(&observer, at(second), &roster),
                [],
                "calls succeed since 20 s"
            );
        }
        observer.read(at(23), at(23), &roster);
        assert_eq!(suspects(&observer, at(23), &roster), [1, 2]);
    }
}
