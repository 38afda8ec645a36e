//! Detection of dead nodes from their beats, on the clock of one observer.

use std::collections::BTreeMap;
use std::time::Instant;

use super::engine::{NodeRow, Roster};
use super::placement::NodeSlot;
use super::timing::{DEAD_AFTER, ENGINE_GRACE, READ_GAP_MAX};

/// Beats of the other nodes, as one node saw them.
#[derive(Debug, Default)]
pub(super) struct Observer {
    /// Start of the last successful call.
    last_read: Option<Instant>,
    /// End of the first successful call after the start, a failure or a pause of this process.
    good_since: Option<Instant>,
    seen: BTreeMap<NodeSlot, Seen>,
}

#[derive(Debug)]
struct Seen {
    session: u128,
    beat: u64,
    /// When this node first saw the beat.
    since: Instant,
    /// The node refused connections, and its beat has not changed since.
    is_refused: bool,
}

impl Observer {
    /// Takes note of rows that a call, sent at `sent`, has read.
    pub(super) fn read(&mut self, sent: Instant, now: Instant, roster: &Roster) {
        // After a longer gap this process was paused, and does not know whether the engine was away meanwhile.
        if self.last_read.is_none_or(|last| sent.saturating_duration_since(last) > READ_GAP_MAX) {
            self.good_since = None;
        }
        self.last_read = Some(sent);
        self.good_since.get_or_insert(now);
        self.seen.retain(|slot, _| roster.slot(*slot).is_some());
        for row in &roster.rows {
            let fresh = || Seen { session: row.session, beat: row.beat, since: now, is_refused: false };
            let seen = self.seen.entry(row.slot).or_insert_with(fresh);
            if (seen.session, seen.beat) != (row.session, row.beat) {
                *seen = fresh();
            }
        }
    }

    /// A call failed: the silence of others proves nothing.
    pub(super) fn failed(&mut self) {
        self.good_since = None;
    }

    /// The link to the node broke, and it refused the next connection.
    pub(super) fn refused(&mut self, slot: NodeSlot, session: u128) {
        if let Some(seen) = self.seen.get_mut(&slot).filter(|seen| seen.session == session) {
            seen.is_refused = true;
        }
    }

    /// Whether calls succeed, and have for so long that silence of a node means its death.
    pub(super) fn is_trusted(&self, now: Instant) -> bool {
        let is_recent = self.last_read.is_some_and(|last| now.saturating_duration_since(last) <= READ_GAP_MAX);
        is_recent && self.good_since.is_some_and(|since| now.saturating_duration_since(since) >= ENGINE_GRACE)
    }

    /// A node to declare dead, other than the one with the session `own`.
    pub(super) fn dead<'a>(&self, now: Instant, roster: &'a Roster, own: u128) -> Option<&'a NodeRow> {
        if !self.is_trusted(now) {
            return None;
        }
        roster.rows.iter().filter(|row| row.session != own && !row.state.is_over()).find(|row| {
            self.seen.get(&row.slot).is_some_and(|seen| {
                let is_same = (seen.session, seen.beat) == (row.session, row.beat);
                is_same && (seen.is_refused || now.saturating_duration_since(seen.since) >= DEAD_AFTER)
            })
        })
    }

    /// When the beat of a node last changed, as seen here.
    pub(super) fn last_change(&self, row: &NodeRow) -> Option<Instant> {
        self.seen.get(&row.slot).filter(|seen| seen.session == row.session).map(|seen| seen.since)
    }
}
