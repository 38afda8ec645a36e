//! Other nodes that refuse the messages of this one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gw_region::{NodeRow, RegionStatus, Roster, Standing, StateRefusal};

use super::outbox::Delivery;

/// Time after which a refusal is logged. A shorter one is that of a node that does not know yet
/// that this one has joined.
const LASTS: Duration = Duration::from_secs(2);
/// Time after which this node counts as shut out.
const SHUT_OUT_AFTER: Duration = Duration::from_secs(10);
/// Time for which a node counts as heard after its last message. Nodes send one a second.
const HEARD_FOR: Duration = Duration::from_secs(5);

/// What other sessions do with the messages of this node, and when theirs came.
#[derive(Default)]
pub(super) struct SessionRefusals {
    refused: HashMap<u128, RefusedSession>,
    /// When the last message of a session was accepted here.
    heard: HashMap<u128, Instant>,
}

struct RefusedSession {
    since: Instant,
    reason: Arc<str>,
    is_logged: bool,
}

/// A change that is worth a line in the log.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RefusalChange {
    /// A node refuses messages, and not just for a moment.
    Lasts(Arc<str>),
    /// A refusal that was logged has ended.
    Ended,
}

impl SessionRefusals {
    /// A message of this session was accepted.
    pub(super) fn heard(&mut self, session: u128, now: Instant) {
        self.heard.insert(session, now);
    }

    /// A message to this session has arrived or failed. A node that does not answer may still
    /// refuse.
    pub(super) fn note(
        &mut self,
        session: u128,
        delivery: &Delivery,
        now: Instant,
    ) -> Option<RefusalChange> {
        match delivery {
            Delivery::Denied(reason) => {
                let new = || RefusedSession {
                    since: now,
                    reason: Arc::clone(reason),
                    is_logged: false,
                };
                let refusal = self.refused.entry(session).or_insert_with(new);
                refusal.reason = Arc::clone(reason);
                let is_due = now.saturating_duration_since(refusal.since) >= LASTS;
                (is_due && !std::mem::replace(&mut refusal.is_logged, is_due))
                    .then(|| RefusalChange::Lasts(Arc::clone(reason)))
            }
            Delivery::Delivered => self
                .refused
                .remove(&session)
                .filter(|refusal| refusal.is_logged)
                .map(|_| RefusalChange::Ended),
            Delivery::Refused | Delivery::Failed => None,
        }
    }

    /// Forgets sessions without a row.
    pub(super) fn retain(&mut self, roster: &Roster) {
        self.refused
            .retain(|session, _| roster.session(*session).is_some());
        self.heard
            .retain(|session, _| roster.session(*session).is_some());
    }

    /// Adds the refusals to the status of this node, whose session is `own`.
    pub(super) fn show(&self, status: &mut RegionStatus, roster: &Roster, own: u128, now: Instant) {
        for node in &mut status.nodes {
            let refusal = roster
                .slot(node.slot)
                .and_then(|row| self.refused.get(&row.session));
            node.refusal = refusal.map(|refusal| StateRefusal {
                reason: Arc::clone(&refusal.reason),
                lasts: now.saturating_duration_since(refusal.since),
            });
        }
        let is_owner = matches!(status.standing, Standing::Member | Standing::Isolated);
        status.is_shut_out = is_owner && self.is_shut_out(roster, own, now);
    }

    /// Whether all other owners refuse the messages of this node, which accepts those of one of
    /// them. Such a node does not refuse all others itself: not all nodes of a region are shut out
    /// at once.
    fn is_shut_out(&self, roster: &Roster, own: u128, now: Instant) -> bool {
        let others = || {
            roster
                .rows
                .iter()
                .filter(|row| row.session != own && row.state.owns())
        };
        let refuses = |row: &NodeRow| {
            let refusal = self.refused.get(&row.session);
            refusal.is_some_and(|refusal| {
                now.saturating_duration_since(refusal.since) >= SHUT_OUT_AFTER
            })
        };
        let is_heard = |row: &NodeRow| {
            self.heard
                .get(&row.session)
                .is_some_and(|at| now.saturating_duration_since(*at) < HEARD_FOR)
        };
        others().all(refuses) && others().any(is_heard)
    }
}

#[cfg(test)]
mod tests {
    use gw_region::NodeState;

    use super::*;
    use crate::members::pending::tests::{OWN, roster};

    const SECOND: Duration = Duration::from_secs(1);

    fn denied(reason: &str) -> Delivery {
        Delivery::Denied(reason.into())
    }

    #[test]
    fn a_refusal_is_logged_once_when_it_lasts_and_once_when_it_has_ended() {
        let mut refusals = SessionRefusals::default();
        let start = Instant::now();
        assert_eq!(refusals.note(1, &denied("a"), start), None);
        assert_eq!(
            refusals.note(1, &Delivery::Delivered, start + SECOND),
            None,
            "it was only for a moment"
        );
        assert_eq!(refusals.note(1, &denied("a"), start + 2 * SECOND), None);
        assert_eq!(
            refusals.note(1, &Delivery::Failed, start + 3 * SECOND),
            None
        );
        let lasts = refusals.note(1, &denied("b"), start + 4 * SECOND);
        assert_eq!(lasts, Some(RefusalChange::Lasts("b".into())));
        assert_eq!(refusals.note(1, &denied("b"), start + 5 * SECOND), None);
        assert_eq!(
            refusals.note(1, &Delivery::Delivered, start + 6 * SECOND),
            Some(RefusalChange::Ended)
        );
        assert_eq!(
            refusals.note(1, &Delivery::Delivered, start + 7 * SECOND),
            None
        );
    }

    #[test]
    fn a_node_is_shut_out_if_all_other_owners_refuse_and_one_of_them_is_accepted() {
        use NodeState::{Dead, Left, Live};
        let mut refusals = SessionRefusals::default();
        let start = Instant::now();
        let roster = roster(&[Live, Live, Live, Dead, Left]);
        let later = start + SHUT_OUT_AFTER;
        refusals.note(OWN + 1, &denied("a"), start);
        refusals.heard(OWN + 1, later);
        assert!(
            !refusals.is_shut_out(&roster, OWN, later),
            "one owner accepts the messages"
        );
        refusals.note(OWN + 2, &denied("a"), start + SECOND);
        assert!(
            !refusals.is_shut_out(&roster, OWN, later),
            "one refusal is too short"
        );
        assert!(refusals.is_shut_out(&roster, OWN, later + SECOND));
        assert!(
            !refusals.is_shut_out(&roster, OWN, later + HEARD_FOR),
            "this node does not hear the others either"
        );
        refusals.heard(OWN + 3, later + HEARD_FOR);
        assert!(
            !refusals.is_shut_out(&roster, OWN, later + HEARD_FOR),
            "a dead node is no owner"
        );
    }

    #[test]
    fn a_node_without_others_is_not_shut_out() {
        let refusals = SessionRefusals::default();
        let roster = roster(&[NodeState::Live]);
        assert!(!refusals.is_shut_out(&roster, OWN, Instant::now()));
    }

    #[test]
    fn sessions_without_a_row_are_forgotten() {
        let mut refusals = SessionRefusals::default();
        let now = Instant::now();
        refusals.note(7, &denied("a"), now);
        refusals.heard(7, now);
        refusals.retain(&roster(&[NodeState::Live]));
        assert!(refusals.refused.is_empty() && refusals.heard.is_empty());
    }
}
