//! The region keys of a node as the store uses them. All rows of the database are of one of them,
//! which the row of the region names by its check.

use std::sync::Arc;

use gw_region::{NodeSlot, NodeState, RegionKey, RegionKeys};
use tokio_postgres::Row;

use super::super::{PostgresSource, Sealer, StoreError};
use super::authenticity::{Authenticator, RowCodec, Tag};
use super::schema::{MIGRATIONS, key_check};
use super::{column, nodes};

/// A region key, with what the store derives from it.
pub(super) struct StoreKey {
    /// Index in the accepted keys of this node.
    pub(super) index: usize,
    pub(super) region_key: RegionKey,
    /// As it is in the row of the region if this key is in use.
    pub(super) check: String,
    /// With this key only.
    pub(super) sealer: Sealer,
    pub(super) authenticator: Authenticator,
}

/// The keys that this node accepts.
pub(super) struct StoreKeys {
    shared: RegionKeys,
    accepted: Vec<Arc<StoreKey>>,
}

impl StoreKey {
    /// Writes and reads rows of the region `origin`.
    pub(super) fn codec<'a>(&'a self, origin: &'a str) -> RowCodec<'a> {
        RowCodec {
            sealer: &self.sealer,
            authenticator: &self.authenticator,
            origin,
        }
    }
}

impl StoreKeys {
    pub(super) fn new(source: &PostgresSource) -> Result<Self, StoreError> {
        let key = |(index, key): (usize, &RegionKey)| {
            Ok(Arc::new(StoreKey {
                index,
                region_key: key.clone(),
                check: key_check(key, &source.apex, MIGRATIONS.len()),
                sealer: Sealer::new(&key.clone().into())?,
                authenticator: Authenticator::new(key),
            }))
        };
        let accepted = source
            .keys
            .accepted()
            .iter()
            .enumerate()
            .map(key)
            .collect::<Result<_, StoreError>>()?;
        Ok(Self {
            shared: source.keys.clone(),
            accepted,
        })
    }

    pub(super) fn all(&self) -> &RegionKeys {
        &self.shared
    }

    pub(super) fn in_use(&self) -> Arc<StoreKey> {
        Arc::clone(&self.accepted[self.shared.in_use()])
    }

    /// `region_key_next`, if this node has it.
    pub(super) fn next(&self) -> Option<&StoreKey> {
        self.accepted.get(1).map(|key| &**key)
    }

    /// The key that the row of the region names by `check`. This process uses it from now on.
    pub(super) fn named(&self, check: &str) -> Result<Arc<StoreKey>, StoreError> {
        let key = self
            .accepted
            .iter()
            .find(|key| key.check == check)
            .ok_or_else(other_key)?;
        self.use_key(key.index);
        Ok(Arc::clone(key))
    }

    /// Uses the accepted key at `index` from now on.
    pub(super) fn use_key(&self, index: usize) {
        if self.shared.switch_to(index) {
            let setting = if index == 0 {
                "region_key"
            } else {
                "region_key_next"
            };
            tracing::warn!(
                setting,
                "the region key was replaced: this process uses that of this setting from now on"
            );
        }
    }

    /// Shows which keys the process of a node has, in its row of `gw.nodes`.
    pub(super) fn proofs(&self, slot: NodeSlot, session: u128) -> Vec<u8> {
        let proof = |key: &Arc<StoreKey>| {
            key.authenticator
                .proof(slot, session, env!("CARGO_PKG_VERSION"))
        };
        self.accepted.iter().flat_map(proof).collect()
    }
}

/// The error of a region whose key this node does not have.
pub(super) fn other_key() -> StoreError {
    StoreError::Region(
        "the region key differs from the key of the other nodes: this node has an older one, or \
         one of another region; set region_key to the key that they use, and replace the process \
         (docs/region-operation.md, Replace the region key)"
            .to_owned(),
    )
}

/// The region keys that the process of a node has, as its row shows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvenKeys {
    /// Slot of the node.
    pub slot: NodeSlot,
    /// State of the node in its row.
    pub state: NodeState,
    /// Which of the keys that were asked for, in their order.
    pub has: Vec<bool>,
    /// It has another key.
    pub has_other: bool,
    /// The process is of a version that shows its keys.
    pub is_known: bool,
}

impl ProvenKeys {
    /// Version of the tables that has them.
    pub(super) const SCHEMA: usize = 4;
    pub(super) const SELECT: &str = "SELECT slot, session::text, peer_address, state, version, \
                                     key_proofs, tag FROM gw.nodes ORDER BY slot";

    /// Reads a row that was selected.
    pub(super) fn read(row: &Row, keys: &[&Authenticator]) -> Result<Self, StoreError> {
        let invalid =
            || StoreError::Corrupt("gw.nodes has a row that no gateway writes".to_owned());
        let (slot, session, _) = nodes::identity(row).ok_or_else(invalid)?;
        let state = NodeState::parse(column(row, 3)?).ok_or_else(invalid)?;
        let version: &str = column(row, 4)?;
        let proofs: Option<&[u8]> = column(row, 5)?;
        let proofs: Vec<&[u8]> = proofs
            .unwrap_or_default()
            .chunks(size_of::<Tag>())
            .collect();
        let shows = |key: &&Authenticator| proofs.contains(&&key.proof(slot, session, version)[..]);
        let has: Vec<bool> = keys.iter().map(shows).collect();
        let shown = has.iter().filter(|has| **has).count();
        Ok(Self {
            slot,
            state,
            has,
            has_other: proofs.len() > shown,
            is_known: !proofs.is_empty(),
        })
    }
}
