//! The order in which nodes admit for a service: a node begins only after every earlier owner has
//! stopped.
//!
//! A node acknowledges an epoch once all its workers use the placement of that epoch. A node that
//! gains a service at epoch `e` awaits each session that may have owned the service at an earlier
//! epoch and has acknowledged less than `e`. An acknowledgment ends the wait, and so does a row
//! that says the session has left, is dead or was replaced.
//!
//! An acknowledgment of a *later* epoch than `e` does not end the wait: the other node may have got
//! the service back in between without ever stopping.
//!
//! # Why two sessions never admit for one service
//!
//! Let P and Q both admit for a service, neither declared dead, and let `p` and `q` be the last
//! epochs at which each gained it, `p < q`. (They differ: an epoch has one owner.) Q began after it
//! knew either
//! - P's acknowledgment of `q`: then P used the placement of `q`, lost the service, and `p` is not
//!   its last gain; or
//! - P's acknowledgment of `k < q`, and that P owned the service at no epoch from `k` to `q` - 1:
//!   if `p >= k`, P owned it at `p`; if `p < k`, P used the placement of `k` and, as it still held
//!   the service, owned it at `k`.
//!
//! Each case contradicts the assumption. A node that has missed an epoch awaits every session for
//! every service that it did not hold before.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::placement::{Member, NodeSlot, Placement};
use super::view::{Awaited, View};
use crate::engine::{NodeRow, Roster, is_among};

/// Placements that are kept, to know which services a session may still admit.
const HISTORY: usize = 16;

/// The known rows, and the view that follows from them.
#[derive(Debug)]
pub(crate) struct ViewSuccession {
    session: u128,
    roster: Arc<Roster>,
    /// Placements of known epochs, the last one current.
    history: VecDeque<Arc<Placement>>,
    /// Slot and session of the processes that may call this node.
    processes: Arc<[(NodeSlot, u128)]>,
    /// Last acknowledged epoch of each session.
    acknowledged: BTreeMap<u128, u64>,
    view: Option<Arc<View>>,
}

/// Where a roster was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RosterSource {
    Engine,
    Node,
}

impl ViewSuccession {
    pub(crate) fn new(session: u128) -> Self {
        Self {
            session,
            roster: Arc::new(Roster::empty()),
            history: VecDeque::new(),
            processes: Arc::default(),
            acknowledged: BTreeMap::new(),
            view: None,
        }
    }

    pub(crate) fn roster(&self) -> &Arc<Roster> {
        &self.roster
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.roster.epoch
    }

    /// `None` until this node has a slot.
    pub(crate) fn view(&self) -> Option<&Arc<View>> {
        self.view.as_ref()
    }

    /// The own row.
    pub(crate) fn own(&self) -> Option<&NodeRow> {
        self.roster.session(self.session)
    }

    /// Goes on with another session, which owns nothing yet.
    pub(crate) fn renew(&mut self, session: u128) {
        self.session = session;
        if let Some(view) = self.view.as_ref().filter(|view| view.is_member) {
            self.view = Some(Arc::new(View {
                is_member: false,
                awaited: Vec::new(),
                held: None,
                ..(**view).clone()
            }));
        }
    }

    /// Uses a roster, if it is not older than the known one. `here` is the slot of this node, if it
    /// has one.
    pub(crate) fn install(&mut self, roster: Roster, source: RosterSource, here: Option<NodeSlot>) {
        let noted: Vec<_> = roster
            .rows
            .iter()
            .map(|row| (row.session, row.acknowledged))
            .collect();
        let is_later = roster.epoch > self.roster.epoch;
        // Rows that another node read at the same epoch can be older than the ones here.
        if is_later || (roster.epoch == self.roster.epoch && source == RosterSource::Engine) {
            self.roster = Arc::new(roster);
            let Self {
                acknowledged,
                roster,
                ..
            } = self;
            acknowledged.retain(|session, _| roster.session(*session).is_some());
        }
        for (session, epoch) in noted {
            self.note(session, epoch);
        }
        let Some(here) = here else { return };
        let is_same =
            |view: &Arc<View>| (view.epoch(), view.placement.here()) == (self.roster.epoch, here);
        if self.view.as_ref().is_some_and(is_same) {
            self.refresh();
        } else {
            self.advance(here);
        }
    }

    /// Lets the processes with these rows call this node, and no others.
    pub(crate) fn admit(&mut self, roster: &Roster) {
        self.processes = roster.processes();
        self.refresh();
    }

    /// Whether the process with this slot and session may call this node.
    pub(crate) fn knows(&self, slot: NodeSlot, session: u128) -> bool {
        is_among(&self.processes, slot, session)
    }

    /// A session has acknowledged an epoch.
    pub(crate) fn acknowledge(&mut self, session: u128, epoch: u64) {
        self.note(session, epoch);
        self.refresh();
    }

    fn note(&mut self, session: u128, epoch: u64) {
        // Sessions without a row are not awaited, and would fill the map.
        if self.roster.session(session).is_some() {
            let last = self.acknowledged.entry(session).or_default();
            *last = epoch.max(*last);
        }
    }

    /// Makes the view of a new epoch.
    fn advance(&mut self, here: NodeSlot) {
        let placement = Arc::new(Placement::new(
            self.roster.epoch,
            here,
            self.members(|row| row.state.owns()),
        ));
        let is_member = self
            .roster
            .slot(here)
            .is_some_and(|row| row.session == self.session && row.state.owns());
        let awaited = if is_member {
            self.awaited(placement.epoch())
        } else {
            Vec::new()
        };
        let before = self
            .view
            .as_ref()
            .filter(|view| view.is_member && view.awaited.is_empty());
        let held = before
            .map(|view| Arc::clone(&view.placement))
            .filter(|held| {
                // An earlier session of this process has lost what it held.
                held.members()
                    .iter()
                    .any(|member| member.slot == here && member.session == self.session)
            });
        if self
            .history
            .back()
            .is_none_or(|last| last.epoch() < placement.epoch())
        {
            self.history.push_back(Arc::clone(&placement));
        }
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
        let next = self.next(here);
        let processes = Arc::clone(&self.processes);
        self.view = Some(Arc::new(View {
            placement,
            next,
            processes,
            is_member,
            awaited,
            held,
        }));
    }

    /// Makes a new view of the same epoch if the next placement, the awaited sessions or the
    /// processes have changed.
    fn refresh(&mut self) {
        let Some(view) = &self.view else { return };
        let epoch = view.epoch();
        let is_awaited = |awaited: &Awaited| match self.roster.session(awaited.session) {
            Some(row) if row.state.may_admit() => {
                self.acknowledged.get(&awaited.session) != Some(&epoch)
            }
            _ => false,
        };
        let awaited: Vec<Awaited> = view
            .awaited
            .iter()
            .filter(|awaited| is_awaited(awaited))
            .cloned()
            .collect();
        let next = self.next(view.placement.here());
        if awaited.len() == view.awaited.len()
            && next == view.next
            && self.processes == view.processes
        {
            return;
        }
        let processes = Arc::clone(&self.processes);
        self.view = Some(Arc::new(View {
            next,
            processes,
            awaited,
            ..(**view).clone()
        }));
    }

    /// Sessions that may admit by a placement before `epoch`.
    fn awaited(&self, epoch: u64) -> Vec<Awaited> {
        let may_admit = self
            .roster
            .rows
            .iter()
            .filter(|row| row.session != self.session && row.state.may_admit());
        may_admit
            .filter_map(|row| self.await_row(row, epoch))
            .collect()
    }

    fn await_row(&self, row: &NodeRow, epoch: u64) -> Option<Awaited> {
        let acknowledged = self.acknowledged.get(&row.session).copied().unwrap_or(0);
        if acknowledged == epoch {
            return None;
        }
        let first = acknowledged.max(1);
        let known: Vec<_> = self
            .history
            .iter()
            .filter(|known| (first..epoch).contains(&known.epoch()))
            .collect();
        // The epochs in the history are different, so their number says whether one is missing.
        let is_complete = acknowledged < epoch && known.len() as u64 == epoch - first;
        let placements = is_complete.then(|| {
            let has_session = |known: &Placement| {
                known
                    .members()
                    .iter()
                    .any(|member| member.session == row.session)
            };
            known
                .into_iter()
                .filter(|known| has_session(known))
                .cloned()
                .collect::<Vec<_>>()
        });
        if placements.as_ref().is_some_and(Vec::is_empty) {
            return None;
        }
        Some(Awaited {
            slot: row.slot,
            session: row.session,
            placements,
        })
    }

    fn next(&self, here: NodeSlot) -> Option<Arc<Placement>> {
        use crate::engine::NodeState::{Draining, Joining, Live};
        let is_planned = self
            .roster
            .rows
            .iter()
            .any(|row| matches!(row.state, Joining | Draining));
        let members = || self.members(|row| matches!(row.state, Joining | Live));
        is_planned.then(|| Arc::new(Placement::new(self.roster.epoch + 1, here, members())))
    }

    fn members(&self, is_member: impl Fn(&NodeRow) -> bool) -> Vec<Member> {
        self.roster
            .rows
            .iter()
            .filter(|row| is_member(row))
            .map(NodeRow::member)
            .collect()
    }
}
