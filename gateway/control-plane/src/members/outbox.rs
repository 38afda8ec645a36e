//! Messages of the membership on their way to other nodes: at most one to each node at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::limits;
use gw_interface::rate_limit::Level;
use gw_region::{Member, NodeMessage};

use super::messages::StateMessage;

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Delivery {
    Delivered,
    /// No process listens at the address of the node.
    Refused,
    /// The node has answered with an error, for this reason.
    Denied(Arc<str>),
    /// No answer.
    Failed,
}

pub(super) struct MessageOutbox {
    /// Told with each message, as of this node.
    max_staleness: Option<Duration>,
    parcels: HashMap<u128, Parcel>,
}

/// What goes to one session.
#[derive(Default)]
struct Parcel {
    /// Levels of services that have moved there, and when they were read.
    levels: Vec<(Instant, Level)>,
    /// The number of levels in the message under way.
    under_way: Option<usize>,
    /// Goes next.
    waiting: Option<(Member, NodeMessage)>,
    was_reached: bool,
}

impl MessageOutbox {
    /// `max_staleness` as in [`StateMessage`], for this node.
    pub(super) fn new(max_staleness: Option<Duration>) -> Self {
        Self {
            max_staleness,
            parcels: HashMap::new(),
        }
    }

    /// Adds levels for a session; they go with its next message. Drops those beyond
    /// [`limits::LEVELS`].
    pub(super) fn add_level(&mut self, session: u128, level: Level, now: Instant) {
        let parcel = self.parcels.entry(session).or_default();
        if parcel.levels.len() < limits::LEVELS {
            parcel.levels.push((now, level));
        }
    }

    /// The message to send now to `to`; `None` while another is under way, after which this one
    /// goes.
    pub(super) fn message(
        &mut self,
        to: &Member,
        state: &NodeMessage,
        now: Instant,
    ) -> Option<StateMessage> {
        let parcel = self.parcels.entry(to.session).or_default();
        if parcel.under_way.is_some() {
            parcel.waiting = Some((to.clone(), state.clone()));
            return None;
        }
        parcel.under_way = Some(parcel.levels.len());
        let levels = parcel
            .levels
            .iter()
            .filter_map(|(read, level)| refilled(level, now.duration_since(*read)));
        Some(StateMessage {
            state: state.clone(),
            levels: levels.collect(),
            max_staleness: self.max_staleness,
        })
    }

    /// The message under way to this session has arrived or failed. Returns the one that waited,
    /// and whether the node has stopped to listen since the last message arrived.
    pub(super) fn ended(
        &mut self,
        session: u128,
        delivery: &Delivery,
    ) -> (Option<(Member, NodeMessage)>, bool) {
        let Some(parcel) = self.parcels.get_mut(&session) else {
            return (None, false);
        };
        let count = parcel.under_way.take().unwrap_or(0);
        let mut has_gone = false;
        match delivery {
            Delivery::Delivered => {
                parcel.levels.drain(..count);
                parcel.was_reached = true;
            }
            Delivery::Refused => has_gone = parcel.was_reached,
            Delivery::Denied(_) | Delivery::Failed => {}
        }
        (parcel.waiting.take(), has_gone)
    }

    /// Whether no message is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.parcels
            .values()
            .all(|parcel| parcel.under_way.is_none())
    }

    /// Forgets sessions that have ended.
    pub(super) fn retain(&mut self, is_known: impl Fn(u128) -> bool) {
        self.parcels
            .retain(|session, parcel| parcel.under_way.is_some() || is_known(*session));
    }
}

/// The level after more time; `None` if the bucket is full by then.
fn refilled(level: &Level, after: Duration) -> Option<Level> {
    let after = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
    let until_full_ms = level
        .until_full_ms
        .checked_sub(after)
        .filter(|left| *left > 0)?;
    Some(Level {
        until_full_ms,
        ..level.clone()
    })
}

#[cfg(test)]
mod tests {
    use gw_base::service::rate::Rate;
    use gw_region::{NodeSlot, Roster};

    use super::*;

    fn member(session: u128) -> Member {
        Member {
            slot: NodeSlot::new(1).unwrap(),
            session,
            peer_address: ([127, 0, 0, 1], 1).into(),
        }
    }

    fn state(acknowledged: u64) -> NodeMessage {
        let roster = Arc::new(Roster {
            epoch: acknowledged,
            rows: Vec::new(),
        });
        NodeMessage {
            slot: NodeSlot::new(0).unwrap(),
            session: 1,
            acknowledged,
            roster,
        }
    }

    fn level(until_full_ms: u64) -> Level {
        Level {
            service: "a--b".into(),
            rate: Rate::new(10, 60).unwrap(),
            until_full_ms,
        }
    }

    #[test]
    fn one_message_is_under_way_and_the_latest_state_follows() {
        let mut outbox = MessageOutbox::new(None);
        let now = Instant::now();
        let to = member(5);
        assert_eq!(outbox.message(&to, &state(1), now).unwrap().state, state(1));
        assert!(
            outbox.message(&to, &state(2), now).is_none()
                && outbox.message(&to, &state(3), now).is_none()
        );
        assert!(!outbox.is_idle());
        assert_eq!(
            outbox.ended(5, &Delivery::Delivered),
            (Some((to, state(3))), false)
        );
        assert!(outbox.is_idle());
    }

    #[test]
    fn levels_are_sent_until_they_arrive_and_refill_meanwhile() {
        let mut outbox = MessageOutbox::new(None);
        let now = Instant::now();
        let to = member(5);
        outbox.add_level(5, level(1000), now);
        outbox.add_level(6, level(7), now);
        assert_eq!(
            outbox.message(&to, &state(1), now).unwrap().levels,
            [level(1000)]
        );
        outbox.add_level(5, level(5000), now);
        outbox.ended(5, &Delivery::Failed);
        let later = now + Duration::from_millis(400);
        assert_eq!(
            outbox.message(&to, &state(1), later).unwrap().levels,
            [level(600), level(4600)]
        );
        outbox.ended(5, &Delivery::Delivered);
        assert_eq!(outbox.message(&to, &state(1), later).unwrap().levels, []);
    }

    #[test]
    fn a_node_that_was_reached_and_then_refuses_has_gone() {
        let mut outbox = MessageOutbox::new(None);
        let now = Instant::now();
        let to = member(5);
        for (delivery, has_gone) in [
            (Delivery::Refused, false),
            (Delivery::Delivered, false),
            (Delivery::Failed, false),
            (Delivery::Denied("403".into()), false),
            (Delivery::Refused, true),
        ] {
            outbox.message(&to, &state(1), now).unwrap();
            assert_eq!(outbox.ended(5, &delivery), (None, has_gone), "{delivery:?}");
        }
        outbox.retain(|_| false);
        assert_eq!(outbox.ended(5, &Delivery::Refused), (None, false));
    }
}
