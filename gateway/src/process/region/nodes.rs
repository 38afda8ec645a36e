//! `region drain` and `region remove`: an operator's changes to the nodes of a region.

use std::time::{Duration, Instant};

use gw_interface::config::Config;
use gw_region::{NodeRow, NodeSlot, NodeState, OperatorError, Roster, Statement};
use gw_store::PostgresStore;
use serde::Serialize;

use super::{RegionError, store};

/// Interval at which the state of a draining node is read.
const CHECK: Duration = Duration::from_millis(200);
/// Longest wait for a draining node.
const DRAIN_WITHIN: Duration = Duration::from_secs(60);

/// A row of the table of nodes.
#[derive(Debug, Serialize)]
pub struct ListedNode {
    pub slot: u16,
    /// `joining`, `live`, `draining`, `leaving`, `left` or `dead`.
    pub state: &'static str,
    pub version: String,
    /// Where other nodes connect.
    pub peer_address: String,
    /// Epochs and revisions that the node is behind; 0 after it has ended.
    pub epoch_lag: u64,
    pub revision_lag: u64,
    /// The region keys that the process has: `in use`, `next`, `earlier`, and `another` for one
    /// that this node does not have. Empty if it does not show them.
    pub keys: Vec<&'static str>,
}

impl ListedNode {
    pub(super) fn all(roster: &Roster, revision: u64) -> Vec<Self> {
        let listed = |row: &NodeRow| {
            let lag = |newest: u64, own: u64| {
                if row.state.is_over() {
                    0
                } else {
                    newest.saturating_sub(own)
                }
            };
            Self {
                slot: row.slot.get(),
                state: row.state.as_str(),
                version: row.version.to_string(),
                peer_address: row.peer_address.to_string(),
                epoch_lag: lag(roster.epoch, row.acknowledged),
                revision_lag: lag(revision, row.applied_revision),
                keys: Vec::new(),
            }
        };
        roster.rows.iter().map(listed).collect()
    }
}

/// What became of a node that was to drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// Its services have moved, and its process ends.
    Left,
    /// It was told to leave.
    Told,
}

/// Moves the services of a node to other nodes and ends it. Returns once it has left, or at once
/// unless it `waits`.
pub fn drain(config: &Config, slot: u16, waits: bool) -> Result<Drained, RegionError> {
    let mut store = store(config)?;
    let row = row(&mut store, slot)?;
    match row.state {
        NodeState::Live => {
            let drain = Statement::Drain {
                slot: row.slot,
                session: row.session,
            };
            if !store.run(&drain)?.0 {
                return Err(RegionError::NodeChanged(slot));
            }
        }
        NodeState::Draining | NodeState::Leaving => {}
        NodeState::Joining | NodeState::Left | NodeState::Dead => {
            return Err(OperatorError::NotLive(row.slot).into());
        }
    }
    if !waits {
        return Ok(Drained::Told);
    }
    let deadline = Instant::now() + DRAIN_WITHIN;
    loop {
        let (_, roster) = store.run(&Statement::Read)?;
        match roster.session(row.session).map(|row| row.state) {
            Some(NodeState::Draining | NodeState::Leaving) if Instant::now() >= deadline => {
                return Err(RegionError::StillDraining {
                    slot,
                    seconds: DRAIN_WITHIN.as_secs(),
                });
            }
            Some(NodeState::Draining | NodeState::Leaving) => std::thread::sleep(CHECK),
            Some(NodeState::Left) | None => return Ok(Drained::Left),
            Some(NodeState::Joining | NodeState::Live | NodeState::Dead) => {
                return Err(RegionError::NodeChanged(slot));
            }
        }
    }
}

/// Removes a node that has left or is dead, so that its slot is free.
pub fn remove(config: &Config, slot: u16) -> Result<(), RegionError> {
    let mut store = store(config)?;
    let row = row(&mut store, slot)?;
    if !row.state.is_over() {
        return Err(OperatorError::NotOver(row.slot).into());
    }
    let remove = Statement::Remove {
        slot: row.slot,
        session: row.session,
    };
    if store.run(&remove)?.0 {
        Ok(())
    } else {
        Err(RegionError::NodeChanged(slot))
    }
}

fn row(store: &mut PostgresStore, slot: u16) -> Result<NodeRow, RegionError> {
    let slot = NodeSlot::new(slot).ok_or(RegionError::NoSlot(slot))?;
    let (_, roster) = store.run(&Statement::Read)?;
    Ok(roster
        .slot(slot)
        .ok_or(OperatorError::UnknownSlot(slot))?
        .clone())
}
