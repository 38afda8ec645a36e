//! `region rekey`: replaces the region key while the nodes run.

use gw_base::clock::Timestamp;
use gw_interface::config::Config;
use gw_store::{AuditEntry, Rekeyed, Revision};

use super::{RegionError, store};

/// A region key that was replaced.
#[derive(Debug)]
pub struct ReplacedKey {
    /// The revision of the region from now on.
    pub revision: Revision,
    /// Number of records that were written again.
    pub records: usize,
}

/// Writes everything in the database with `region_key_next`, which all nodes use from then on.
/// Nodes may run. Refuses if a node that runs does not have that key, unless it `is_forced`.
pub fn rekey(config: &Config, is_forced: bool) -> Result<ReplacedKey, RegionError> {
    let entry = AuditEntry {
        at: Timestamp::now(),
        actor: "operator".to_owned(),
        action: "region.rekey".into(),
        account: None,
        target: config.region.apex().to_owned(),
        detail: serde_json::json!({ "forced": is_forced }),
    };
    match store(config)?.rekey(is_forced, &entry) {
        Ok(Rekeyed::Done(revision, records)) => Ok(ReplacedKey { revision, records }),
        Ok(Rekeyed::Unready(nodes)) => {
            let nodes: Vec<String> = nodes.iter().map(|slot| slot.get().to_string()).collect();
            Err(RegionError::KeyNotKnown {
                nodes: nodes.join(", "),
            })
        }
        Ok(Rekeyed::Unknown(reason)) => Err(RegionError::UnknownReplacement(reason)),
        Err(error) => Err(error.into()),
    }
}
