//! The job that deletes ephemeral agents an hour after their last tunnel. It runs beside the admin
//! listener, which can ask the other nodes for their tunnels.

use std::collections::BTreeSet;
use std::time::Duration;

use gw_base::clock::Timestamp;
use gw_region::Placement;
use tokio::time::sleep;

use super::nodes::{Live, LiveQuery};
use super::{Admin, Panicked};
use crate::control::records::ephemeral_agents;

/// Interval at which tunnels are compared with the records. It is also that of the changes that
/// agents make by coming and going.
const INTERVAL: Duration = Duration::from_secs(300);
/// Time after a start in which agents are not looked at. Those that lost their tunnels by the stop
/// come back within it: they try again after 2 minutes at most.
const GRACE: Duration = Duration::from_secs(300);

/// Deletes ephemeral agents as they end, for as long as the future is polled.
pub(super) async fn keep_deleting(admin: Admin) {
    sleep(GRACE).await;
    loop {
        // A panic was logged, and the next attempt may succeed.
        let _ = admin.sweep().await;
        sleep(INTERVAL).await;
    }
}

impl Admin {
    async fn sweep(&self) -> Result<(), Panicked> {
        let is_first = is_first_node(self.control.local_node().placement().as_deref());
        if !is_first || !self.clone().run(ephemeral_agents::exist).await? {
            return Ok(());
        }
        let Some(connected) = connected(&self.live(LiveQuery::default()).await?) else {
            tracing::debug!(
                "not all nodes and workers report their tunnels: ephemeral agents are not looked at"
            );
            return Ok(());
        };
        let swept = self.clone().run(move |control| {
            let now = Timestamp::now();
            ephemeral_agents::note_absent(control, &connected, now)?;
            ephemeral_agents::delete_absent(control, &connected, now)
        });
        if let Err(error) = swept.await? {
            tracing::error!(%error,
                "cannot delete ephemeral agents that have ended; trying again in five minutes");
        }
        Ok(())
    }
}

/// Whether this node does the work for the region: the member with the lowest slot. Two nodes that
/// disagree about the members do it both, which does no harm.
fn is_first_node(placement: Option<&Placement>) -> bool {
    placement.is_none_or(|placement| {
        let first = placement.members().iter().map(|member| member.slot).min();
        first.is_none_or(|first| first == placement.here())
    })
}

/// Ids of the agents with a tunnel; `None` unless all workers of all nodes report theirs.
fn connected(live: &Live) -> Option<BTreeSet<String>> {
    let is_complete = live.missing.is_empty()
        && live
            .nodes()
            .all(|node| node.workers_answering == node.workers);
    is_complete.then(|| {
        live.tunnels()
            .map(|tunnel| tunnel.agent_id.clone())
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use gw_region::{Member, NodeSlot};

    use super::*;
    use crate::admin::nodes::NodeLive;

    #[test]
    fn the_member_with_the_lowest_slot_does_the_work() {
        let slot = |slot| NodeSlot::new(slot).unwrap();
        let member = |number| Member {
            slot: slot(number),
            session: 1,
            peer_address: ([127, 0, 0, 1], 7000).into(),
        };
        let is_first = |here, members: &[u16]| {
            let members = members.iter().copied().map(member).collect();
            is_first_node(Some(&Placement::new(1, slot(here), members)))
        };
        assert!(is_first_node(None));
        assert_eq!(
            [1, 4, 7].map(|here| is_first(here, &[7, 1, 4])),
            [true, false, false]
        );
        // A node that leaves is no member any more. Without members, each node does the work.
        assert_eq!(
            (is_first(1, &[4, 7]), is_first(4, &[4, 7]), is_first(4, &[])),
            (false, true, true)
        );
    }

    #[test]
    fn nothing_is_known_unless_all_workers_of_all_nodes_report() {
        let node = |workers_answering| NodeLive {
            workers: 2,
            workers_answering,
            ..NodeLive::default()
        };
        let live = |here, other, missing| Live {
            here: node(here),
            others: vec![(4, node(other))],
            missing,
        };
        assert_eq!(connected(&live(2, 2, vec![])), Some(BTreeSet::new()));
        for incomplete in [live(1, 2, vec![]), live(2, 1, vec![]), live(2, 2, vec![7])] {
            assert_eq!(connected(&incomplete), None);
        }
    }
}
