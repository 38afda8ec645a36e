//! Rows that the nodes of a region share in PostgreSQL, and the statements that read and change
//! them.

use std::net::SocketAddr;
use std::sync::Arc;

use super::owners::placement::{Member, NodeSlot};

/// State of a row of `nodes`. A session only moves forward in this order, or from any of the first
/// four to `Dead`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NodeState {
    /// Owns nothing yet: loads the directory and connects to the other nodes.
    Joining,
    /// Owns services.
    Live,
    /// Owns services, which are about to move to other nodes.
    Draining,
    /// Owns nothing from this epoch on, but may admit until its workers have stopped.
    Leaving,
    /// Has stopped admitting and has ended.
    Left,
    /// Was declared dead by another node.
    Dead,
}

impl NodeState {
    /// All states, in order.
    pub const ALL: [Self; 6] = [
        Self::Joining,
        Self::Live,
        Self::Draining,
        Self::Leaving,
        Self::Left,
        Self::Dead,
    ];

    /// Whether the node is a member of the placement.
    pub fn owns(self) -> bool {
        matches!(self, Self::Live | Self::Draining)
    }

    /// Whether the node may still admit requests, by the placement of this epoch or of an earlier
    /// one.
    pub fn may_admit(self) -> bool {
        self.owns() || self == Self::Leaving
    }

    /// Whether the session never owns services again.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Left | Self::Dead)
    }

    /// Name in the database and in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Live => "live",
            Self::Draining => "draining",
            Self::Leaving => "leaving",
            Self::Left => "left",
            Self::Dead => "dead",
        }
    }

    /// The state with this [name](Self::as_str), if there is one.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == name)
    }
}

/// A row of `nodes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRow {
    /// Slot of the node: the key of the row.
    pub slot: NodeSlot,
    /// Random; differs between two processes, and after each rejoin of one process.
    pub session: u128,
    /// State of this session.
    pub state: NodeState,
    /// Differs after every beat of the session. Falls when the engine loses a commit.
    pub beat: u64,
    /// Last epoch whose placement all workers of the node use: the node admits by no earlier
    /// placement.
    pub acknowledged: u64,
    /// Address at which the node accepts connections of other nodes.
    pub peer_address: SocketAddr,
    /// Version of the program of the node.
    pub version: Arc<str>,
    /// Last revision of the records that the node uses.
    pub applied_revision: u64,
    /// Shows that a holder of the region key has written slot, session and address.
    pub tag: [u8; 16],
}

impl NodeRow {
    /// The node as a member of the placement.
    pub fn member(&self) -> Member {
        Member {
            slot: self.slot,
            session: self.session,
            peer_address: self.peer_address,
        }
    }
}

/// Whether the process with the session `earlier` has joined again with this one: each rejoin uses
/// the next number, and each process begins with a random one.
pub fn is_rejoin(earlier: u128, session: u128) -> bool {
    (1..=u128::from(u32::MAX)).contains(&session.wrapping_sub(earlier))
}

/// All rows at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roster {
    /// `region.epoch`. Every change of the members increments it, so it identifies them.
    pub epoch: u64,
    /// In ascending order of slots, each slot once.
    pub rows: Vec<NodeRow>,
}

impl Roster {
    /// Most rows: one per slot.
    pub const ROWS_MAX: usize = NodeSlot::MAX as usize + 1;

    pub(super) fn empty() -> Self {
        Self {
            epoch: 0,
            rows: Vec::new(),
        }
    }

    /// The row in this slot, if there is one.
    pub fn slot(&self, slot: NodeSlot) -> Option<&NodeRow> {
        self.rows
            .binary_search_by_key(&slot, |row| row.slot)
            .ok()
            .map(|index| &self.rows[index])
    }

    /// The row of this session, if there is one.
    pub fn session(&self, session: u128) -> Option<&NodeRow> {
        self.rows.iter().find(|row| row.session == session)
    }

    /// Slot and session of each row.
    pub(super) fn processes(&self) -> Arc<[(NodeSlot, u128)]> {
        self.rows
            .iter()
            .map(|row| (row.slot, row.session))
            .collect()
    }

    /// The lowest slot without a row.
    pub(super) fn free_slot(&self) -> Option<NodeSlot> {
        (0..=NodeSlot::MAX)
            .filter_map(NodeSlot::new)
            .find(|slot| self.slot(*slot).is_none())
    }

    /// Whether each slot appears once and in order.
    pub fn is_valid(&self) -> bool {
        self.rows.len() <= Self::ROWS_MAX
            && self.rows.is_sorted_by(|one, next| one.slot < next.slot)
    }
}

/// Whether a process has one of these rows, by slot and session. Its session may be later than that
/// of its row: it goes on with the next number when its session was ended at the engine. Another
/// process has begun with another random number.
pub(super) fn is_among(processes: &[(NodeSlot, u128)], slot: NodeSlot, session: u128) -> bool {
    const REJOINS_MAX: u128 = 1 << 32;
    processes
        .iter()
        .any(|(known, first)| *known == slot && session.wrapping_sub(*first) < REJOINS_MAX)
}

/// A statement to run at the engine.
///
/// Each is applied as a whole or not at all, under the conditions that its fields name. After it,
/// applied or not, the same round trip reads the [`Roster`] in one snapshot, so that the epoch and
/// the rows belong together. "CAS on the epoch" means `UPDATE region SET epoch = epoch + 1 WHERE
/// epoch = $epoch` in the transaction that changes the row. An epoch without a change does no harm;
/// a change of members without an epoch does. All but [`Self::Beat`] and [`Self::Read`] are
/// committed synchronously.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Statement {
    /// Reads the roster.
    Read,
    /// Raises `beat`, `acknowledged` and `applied_revision` to these values (never lowers them)
    /// where the row has this session and is neither left nor dead. May be committed
    /// asynchronously. `beat` is not incremented by the engine: after a failover that lost the last
    /// beat, the next one would restore the lost value, and look like silence.
    Beat {
        /// Slot of the row.
        slot: NodeSlot,
        /// Session of the row.
        session: u128,
        /// Number of this beat.
        beat: u64,
        /// Last epoch whose placement all workers of the node use.
        acknowledged: u64,
        /// Last revision of the records that the node uses.
        applied_revision: u64,
    },
    /// Increments `region.tick`, committed synchronously: proves that the server is still the
    /// primary of the region.
    Tick,
    /// Writes a row in state `Joining` with beat 0.
    Join(Join),
    /// `Joining` → `Live` of this session. CAS on the epoch.
    GoLive {
        /// Slot of the row.
        slot: NodeSlot,
        /// Session of the row.
        session: u128,
        /// Known epoch, for the CAS.
        epoch: u64,
    },
    /// `Live` → `Draining` of this session.
    Drain {
        /// Slot of the row.
        slot: NodeSlot,
        /// Session of the row.
        session: u128,
    },
    /// `Draining` → `Leaving` of this session. CAS on the epoch.
    Leave {
        /// Slot of the row.
        slot: NodeSlot,
        /// Session of the row.
        session: u128,
        /// Known epoch, for the CAS.
        epoch: u64,
    },
    /// `Leaving` or `Joining` → `Left` of this session.
    End {
        /// Slot of the row.
        slot: NodeSlot,
        /// Session of the row.
        session: u128,
    },
    /// `state` → `Dead` where session, beat and state are as given. CAS on the epoch.
    DeclareDead {
        /// Slot of the row.
        slot: NodeSlot,
        /// Session of the row.
        session: u128,
        /// Known beat of the row.
        beat: u64,
        /// Known state of the row.
        state: NodeState,
        /// Known epoch, for the CAS.
        epoch: u64,
    },
    /// Deletes the row of this session where it is left or dead.
    Remove {
        /// Slot of the row.
        slot: NodeSlot,
        /// Session of the row.
        session: u128,
    },
}

impl Statement {
    /// Whether the statement must be committed synchronously.
    pub fn is_synchronous(&self) -> bool {
        !matches!(self, Self::Read | Self::Beat { .. })
    }
}

/// Row of a node that joins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// Slot of the row.
    pub slot: NodeSlot,
    /// Session of the node.
    pub session: u128,
    /// Address at which the node accepts connections of other nodes.
    pub peer_address: SocketAddr,
    /// Version of the program of the node.
    pub version: Arc<str>,
    /// The row to replace. `None`: inserts, and is not applied if the slot has a row.
    pub replaces: Option<Replaced>,
}

/// The row of an earlier process or session of the node. CAS on session, state and the epoch, so
/// that the placement no longer names the earlier session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replaced {
    /// Session of the row.
    pub session: u128,
    /// State of the row.
    pub state: NodeState,
    /// Known epoch, for the CAS.
    pub epoch: u64,
}

/// A statement with the number that its result must carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Number of the call, which no other call of the process has.
    pub id: u64,
    /// The statement to run.
    pub statement: Statement,
}

/// Result of a [`Call`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallResult {
    /// The engine answered.
    Done {
        /// Whether the conditions held.
        applied: bool,
        /// All rows after the statement.
        roster: Roster,
    },
    /// No result, or an error: the statement was applied, was not, or will be.
    Failed,
}
