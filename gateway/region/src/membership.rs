//! State machine of one node in its region: joins, beats, declares dead nodes, drains. Does no I/O
//! and reads no clock.
//!
//! The caller passes events to [`Membership::on`], then runs the actions of [`Membership::poll`]
//! until there are none, and comes again at [`Membership::next_deadline`] at the latest.
//!
//! # Two owners of one service
//!
//! - Planned moves (join, drain), and every move between nodes that are not dead: never. The old
//!   owner acknowledges that it has stopped; see `succession`. Its bucket levels arrive with the
//!   acknowledgment, or, if the link between the two nodes is broken or two changes follow each
//!   other within the delay of a message, later or not at all: then the new owner starts with a
//!   full bucket.
//! - A node that crashes: never. The new owner starts with a full bucket, which is at most one more
//!   burst.
//! - A node that is paused, or so slow that it is declared dead: never. Its lease ends before it
//!   can be declared dead, and after the pause it admits only once a call that started after the
//!   pause has succeeded or failed.
//! - A node that refused connections but lives, or whose slot another process took: until its next
//!   call, which is at most [`BEAT`] + [`CALL_TIMEOUT`] later, or until its calls fail and then as
//!   follows.
//! - A node whose calls to the engine fail while others' succeed: from its death, at least
//!   [`DEAD_AFTER`] after its last beat, up to its next successful call or the first message of
//!   another node that knows the later epoch. Calls are tried every [`BEAT`], so at most [`BEAT`] +
//!   [`CALL_TIMEOUT`] after the connection is good again. With [`Isolation::Refuse`] it also ends
//!   `max_staleness` after the last contact.
//!
//! Add to each bound the time until the workers use a new view. A request decided before a pause is
//! not decided again.

pub(super) mod carried;
mod events;
pub(super) mod observer;
pub(super) mod requests;
mod statements;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use self::observer::Observer;
use self::requests::{OperatorError, Requests};
use super::engine::{Call, CallResult, NodeState, Roster, Statement};
use super::owners::lease::{Isolation, OwnerLease};
use super::owners::placement::NodeSlot;
use super::owners::succession::{RosterSource, ViewSuccession};
use super::owners::view::View;
use super::timing::{BEAT, CALL_TIMEOUT, DEAD_AFTER, HINT_GAP, JOIN_GAP, LEASE, LEVELS_AHEAD};

pub use self::events::{MembershipAction, MembershipEvent, NodeMessage, StopReason};

/// What a node is told about itself at its start.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// The slot that the node used before or is configured to use; `None` to take a free one.
    pub slot: Option<NodeSlot>,
    /// Random number of this process. Each rejoin uses the next one.
    pub session: u128,
    /// Address at which this node accepts connections of other nodes.
    pub peer_address: SocketAddr,
    /// Version of this program.
    pub version: Arc<str>,
    /// Behaviour of this node without contact.
    pub isolation: Isolation,
}

/// The state machine.
#[derive(Debug)]
pub struct Membership {
    config: NodeConfig,
    slot: Option<NodeSlot>,
    pub(super) session: u128,
    pub(super) succession: ViewSuccession,
    pub(super) observer: Observer,
    pub(super) lease: OwnerLease,
    requests: Requests,
    outstanding: Option<Outstanding>,
    next_call: u64,
    /// Beats sent. Each has another number, so that a lost one is not taken for the next.
    pub(super) beats: u64,
    /// The last answer of the engine, also one with an epoch below the known one.
    answered_at: Option<Instant>,
    /// The last call succeeded, so that the roster is recent.
    is_refreshed: bool,
    /// The row of this session was seen.
    has_row: bool,
    pub(super) is_ready: bool,
    /// Continues the membership of an earlier process.
    pub(super) is_resumed: bool,
    is_handed_over: bool,
    /// The node is to leave, and does not join again.
    is_leaving: bool,
    is_tick_due: bool,
    beat_due: Instant,
    tell_due: Instant,
    last_sent: Option<Instant>,
    last_tell: Option<Instant>,
    /// Last message of each session with a row.
    heard: BTreeMap<u128, Instant>,
    /// Latest epoch that another source named.
    hinted: u64,
    hinted_at: Option<Instant>,
    /// Last epoch whose view all workers use.
    applied: u64,
    applied_at: Option<Instant>,
    /// The acknowledgment before `applied`.
    row_acknowledged: u64,
    applied_revision: u64,
    /// The last session of this process ended at this epoch. The next one begins after the workers
    /// know.
    fenced_at: u64,
    published: Option<Arc<View>>,
    pub(super) stopped: Option<StopReason>,
    is_stop_told: bool,
    /// The engine answered with an epoch below the known one.
    pub(super) went_back: bool,
}

#[derive(Debug)]
struct Outstanding {
    call: Call,
    sent: Instant,
}

impl Membership {
    /// A node without a row, which joins from `now` on.
    pub fn new(config: NodeConfig, now: Instant) -> Self {
        Self {
            slot: config.slot,
            session: config.session,
            succession: ViewSuccession::new(config.session),
            observer: Observer::default(),
            lease: OwnerLease::new(config.isolation),
            requests: Requests::default(),
            outstanding: None,
            next_call: 1,
            beats: 0,
            answered_at: None,
            is_refreshed: false,
            has_row: false,
            is_ready: false,
            is_resumed: false,
            is_handed_over: false,
            is_leaving: false,
            is_tick_due: false,
            beat_due: now,
            tell_due: now,
            last_sent: None,
            last_tell: None,
            heard: BTreeMap::new(),
            hinted: 0,
            hinted_at: None,
            applied: 0,
            applied_at: None,
            row_acknowledged: 0,
            fenced_at: 0,
            applied_revision: 0,
            published: None,
            stopped: None,
            is_stop_told: false,
            went_back: false,
            config,
        }
    }

    /// The slot of this node, once it has one.
    pub fn slot(&self) -> Option<NodeSlot> {
        self.slot
    }

    /// The session of this node. Changes when the node rejoins; certificates for other nodes name
    /// it.
    pub fn session(&self) -> u128 {
        self.session
    }

    /// The state of the own row, once it was seen.
    pub fn state(&self) -> Option<NodeState> {
        self.succession.own().map(|row| row.state)
    }

    /// The last view; `None` until the node has a slot.
    pub fn view(&self) -> Option<&Arc<View>> {
        self.succession.view()
    }

    /// The known rows.
    pub fn roster(&self) -> &Roster {
        self.succession.roster()
    }

    /// End of the time in which this node may admit for its services. Changes with every result of
    /// a call. Workers compare it with their clock at each request: after a pause of the process it
    /// has passed.
    pub fn admit_until(&self) -> Option<Instant> {
        self.lease.until(self.heard_all(), self.is_outdated())
    }

    /// Takes note of an event.
    pub fn on(&mut self, now: Instant, event: MembershipEvent) {
        match event {
            MembershipEvent::Result { call, result } => self.on_result(now, call, result),
            MembershipEvent::Disconnected => self.observer.failed(),
            MembershipEvent::Message(state) => self.on_message(now, state),
            MembershipEvent::Refused { slot, session } => {
                self.observer.refused(now, slot, session);
                self.read_soon(now);
            }
            MembershipEvent::Hint { epoch } => self.hint(now, epoch),
            MembershipEvent::Applied { epoch } => self.on_applied(now, epoch),
            MembershipEvent::Revision(revision) => self.applied_revision = revision,
            MembershipEvent::Ready => self.is_ready = true,
            MembershipEvent::HandedOver => self.is_handed_over = true,
        }
    }

    /// Ends the membership of this node: its services move first, if it has any.
    pub fn leave(&mut self) {
        self.is_leaving = true;
    }

    /// Asks that a node drains: this one or another. The outcome is seen in its row.
    pub fn drain(&mut self, slot: NodeSlot) -> Result<(), OperatorError> {
        self.requests.drain(slot, self.succession.roster())
    }

    /// Asks to remove the row of a node that has left or is dead, so that its slot is free.
    pub fn remove(&mut self, slot: NodeSlot) -> Result<(), OperatorError> {
        self.requests.remove(slot, self.succession.roster())
    }

    /// The next action, until there is none.
    pub fn poll(&mut self, now: Instant) -> Option<MembershipAction> {
        self.expire(now);
        if let Some(view) = self.succession.view()
            && self
                .published
                .as_ref()
                .is_none_or(|published| !Arc::ptr_eq(published, view))
        {
            self.published = Some(Arc::clone(view));
            return Some(MembershipAction::Publish(Arc::clone(view)));
        }
        if let Some(slot) = self.slot
            && now >= self.tell_due
        {
            self.tell_due = now + BEAT;
            self.last_tell = Some(now);
            let roster = Arc::clone(self.succession.roster());
            let state = NodeMessage {
                slot,
                session: self.session,
                acknowledged: self.applied,
                roster,
            };
            return Some(MembershipAction::Tell(state));
        }
        if let Some(reason) = self.stopped {
            return (!std::mem::replace(&mut self.is_stop_told, true))
                .then_some(MembershipAction::Stop(reason));
        }
        if self.outstanding.is_some() {
            return None;
        }
        let Some(statement) = self.next_statement(now) else {
            // A node without a row leaves at once.
            let reason = self.stopped?;
            self.is_stop_told = true;
            return Some(MembershipAction::Stop(reason));
        };
        let call = Call {
            id: self.next_call,
            statement,
        };
        self.next_call += 1;
        self.last_sent = Some(now);
        self.outstanding = Some(Outstanding {
            call: call.clone(),
            sent: now,
        });
        Some(MembershipAction::Call(call))
    }

    /// Whether the engine's last answer was older than what this node knows.
    pub fn engine_went_back(&self) -> bool {
        self.went_back
    }

    /// When [`Self::poll`] has something to do without an event.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.is_stop_told {
            return None;
        }
        let call = self
            .outstanding
            .as_ref()
            .map_or(self.beat_due, |outstanding| outstanding.sent + CALL_TIMEOUT);
        Some(if self.slot.is_some() {
            call.min(self.tell_due)
        } else {
            call
        })
    }

    fn on_result(&mut self, now: Instant, id: u64, result: CallResult) {
        let Some(Outstanding { call, sent }) = self
            .outstanding
            .take_if(|outstanding| outstanding.call.id == id)
        else {
            return self.on_late_result(now, result);
        };
        let (applied, roster) = match result {
            CallResult::Done { applied, roster } if roster.is_valid() => (applied, roster),
            _ => return self.call_failed(now, sent),
        };
        self.answered_at = Some(now);
        self.succession.admit(&roster);
        self.went_back = roster.epoch < self.succession.epoch();
        if self.went_back {
            // Older rows come from a server that is not the primary any more, or was restored.
            return self.call_failed(now, sent);
        }
        self.is_refreshed = true;
        self.observer.read(sent, now, &roster);
        match call.statement {
            Statement::Beat { .. } if applied => {
                self.lease.beat(sent);
                self.beat_due = sent + BEAT;
                self.is_tick_due = true;
            }
            Statement::Tick if applied => {
                self.lease.tick();
                self.observer.ticked(now);
                self.is_tick_due = false;
                if self.hinted_at.is_some_and(|at| sent > at) {
                    // The engine is right: the other source was wrong.
                    self.hinted = self.hinted.min(roster.epoch);
                }
            }
            Statement::Join(_) if !applied => self.beat_due = now + JOIN_GAP,
            Statement::Join(_) | Statement::Read => self.beat_due = now,
            _ => {}
        }
        self.install(now, roster, RosterSource::Engine);
    }

    /// A call that has timed out proves nothing about the engine, but its rows can be news.
    fn on_late_result(&mut self, now: Instant, result: CallResult) {
        if let CallResult::Done { roster, .. } = result
            && roster.is_valid()
            && roster.epoch > self.succession.epoch()
        {
            self.install(now, roster, RosterSource::Node);
        }
    }

    fn on_applied(&mut self, now: Instant, epoch: u64) {
        if epoch <= self.applied {
            return;
        }
        // Other nodes get the acknowledgment with the levels; the row follows, for those that
        // cannot be reached.
        self.row_acknowledged = self.acknowledgment(now);
        self.applied = epoch;
        self.applied_at = Some(now);
        self.tell_due = now;
        if self.succession.own().is_none() {
            self.beat_due = self.beat_due.min(now);
        } else if self.is_refreshed {
            self.beat_due = self.beat_due.min(now + LEVELS_AHEAD);
        }
    }

    /// The acknowledged epoch to write into the row.
    fn acknowledgment(&self, now: Instant) -> u64 {
        let is_told = self
            .applied_at
            .is_none_or(|at| now.saturating_duration_since(at) >= LEVELS_AHEAD);
        if is_told {
            self.applied
        } else {
            self.row_acknowledged
        }
    }

    fn call_failed(&mut self, now: Instant, sent: Instant) {
        self.observer.failed();
        self.lease.failed(sent, now);
        self.is_refreshed = false;
        self.is_tick_due = false;
        self.beat_due = now.max(sent + BEAT);
    }

    fn expire(&mut self, now: Instant) {
        let is_late = |outstanding: &mut Outstanding| now >= outstanding.sent + CALL_TIMEOUT;
        if let Some(Outstanding { sent, .. }) = self.outstanding.take_if(is_late) {
            self.call_failed(now, sent);
        }
    }

    fn on_message(&mut self, now: Instant, state: NodeMessage) {
        if state.session == self.session || !state.roster.is_valid() {
            return;
        }
        let theirs = state.roster.epoch;
        if theirs < self.succession.epoch() {
            // The other node needs the rows of this node. One message to all is enough for many
            // such nodes.
            let earliest = self.last_tell.map_or(now, |last| last + HINT_GAP);
            self.tell_due = self.tell_due.min(earliest.max(now));
        }
        let session = state.session;
        let acknowledged = state.acknowledged;
        if theirs >= self.succession.epoch() {
            self.hint(now, theirs);
            // A later epoch counts, whatever the sender: it may have the services of this node. But
            // as long as the engine answers, a sender without a row cannot give itself one, and so
            // call this node.
            let is_believed =
                self.succession.knows(state.slot, session) || self.is_engine_silent(now);
            if is_believed && theirs > self.succession.epoch() {
                self.succession.admit(&state.roster);
            }
            self.install(now, Arc::unwrap_or_clone(state.roster), RosterSource::Node);
        }
        self.succession.acknowledge(session, acknowledged);
        if self.succession.roster().session(session).is_some() {
            self.heard.insert(session, now);
        }
        if self.is_resumed
            && self.lease.contact().is_none()
            && self.heard_all().is_some()
            && !self.is_outdated()
        {
            // No other node has declared this session dead, as far as nodes without the engine can
            // know.
            self.lease.resume(now);
        }
    }

    fn hint(&mut self, now: Instant, epoch: u64) {
        if epoch > self.hinted {
            self.hinted = epoch;
            self.hinted_at = Some(now);
        }
        if epoch > self.succession.epoch() {
            self.read_soon(now);
        }
    }

    /// Reads the rows again, soon after the last call.
    fn read_soon(&mut self, now: Instant) {
        let earliest = self.last_sent.map_or(now, |last| last + HINT_GAP);
        if self.is_refreshed {
            self.beat_due = self.beat_due.min(earliest.max(now));
        }
    }

    /// Whether another source named an epoch that the workers do not use yet.
    fn is_outdated(&self) -> bool {
        self.hinted > self.applied
    }

    fn is_engine_silent(&self, now: Instant) -> bool {
        self.answered_at
            .is_none_or(|at| now.saturating_duration_since(at) >= DEAD_AFTER)
    }

    /// Since when all other owners were heard.
    pub(super) fn heard_all(&self) -> Option<Instant> {
        let others = self
            .roster()
            .rows
            .iter()
            .filter(|row| row.state.owns() && row.session != self.session);
        others
            .map(|row| self.heard.get(&row.session).copied())
            .min()
            .flatten()
    }

    pub(super) fn install(&mut self, now: Instant, roster: Roster, source: RosterSource) {
        let before = self.succession.epoch();
        let owned = self.state().is_some_and(NodeState::may_admit);
        if let Some(row) = roster.session(self.session) {
            self.slot = Some(row.slot);
            self.has_row |= source == RosterSource::Engine || row.state.may_admit();
            // An earlier process may have sent more than this one knows of.
            self.beats = self.beats.max(row.beat);
        }
        self.succession.install(roster, source, self.slot);
        let roster = self.succession.roster();
        self.heard
            .retain(|session, _| roster.session(*session).is_some());
        self.requests.settle(roster);
        if self.succession.epoch() > before {
            self.tell_due = now;
            // Another node can know a row of this node that is older than the engine's.
            self.is_refreshed &= source == RosterSource::Engine;
        }
        self.is_leaving |= matches!(self.state(), Some(NodeState::Draining | NodeState::Leaving));
        match self.state() {
            Some(NodeState::Left) => self.stopped = Some(StopReason::Left),
            Some(NodeState::Dead) => self.fenced(now),
            None if self.has_row && (source == RosterSource::Engine || owned) => self.fenced(now),
            _ => {}
        }
    }

    /// The session of this node has ended at the engine: stop, or join with another one.
    fn fenced(&mut self, now: Instant) {
        let own = self.config.session..=self.session;
        let is_taken = self
            .slot
            .and_then(|slot| self.roster().slot(slot))
            .is_some_and(|row| !own.contains(&row.session));
        if is_taken {
            self.stopped = Some(StopReason::TakenOver);
        } else if self.is_leaving {
            self.stopped = Some(StopReason::Left);
        }
        self.is_resumed = false;
        self.session = self.session.wrapping_add(1);
        // The row of the next session begins at 0. What an earlier row had may be of another
        // writer.
        self.beats = 0;
        self.succession.renew(self.session);
        self.lease.reset();
        self.fenced_at = self.succession.epoch();
        self.has_row = false;
        self.is_handed_over = false;
        self.is_tick_due = false;
        self.beat_due = now;
    }

    pub(super) fn contact(&self) -> Option<Instant> {
        self.lease.contact()
    }

    /// Whether the node admits only because the engine does not answer.
    pub(super) fn is_isolated(&self, now: Instant) -> bool {
        self.lease
            .contact()
            .is_some_and(|contact| now > contact + LEASE)
    }
}
