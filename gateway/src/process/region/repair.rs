//! `region repair`: writes the records that this node knows back into a database that was changed by something other than
//! a gateway.

use super::{RegionError, source, store};
use crate::clock::Timestamp;
use crate::config::Config;
use crate::control::read_copy;
use crate::store::{AuditEntry, Revision};

/// Records that were written back.
#[derive(Debug)]
pub struct Repaired {
    /// Revision of the records that were written.
    pub known: Revision,
    /// The revision of the region from now on.
    pub revision: Revision,
}

/// Replaces the records in the database with those of this node's data folder and the authentic changes after them. Nodes
/// may run: they load the records that were written.
pub fn repair(config: &Config) -> Result<Repaired, RegionError> {
    let folder = || config.data_dir.display().to_string();
    let source_error = |reason: String| RegionError::Source { folder: folder(), reason };
    let copy = read_copy(&config.data_dir, &source(config)?).map_err(|error| source_error(error.to_string()))?;
    let none = "it has no copy of the records: run this on a machine whose node has served in the region";
    let copy = copy.ok_or_else(|| source_error(none.to_owned()))?;
    let entry = AuditEntry {
        at: Timestamp::now(),
        actor: "operator".to_owned(),
        action: "region.repair".into(),
        account: None,
        target: config.region.apex().to_owned(),
        detail: serde_json::json!({ "records_of_revision": copy.position.revision }),
    };
    let (known, repaired) = store(config)?.repair(copy, &entry)?;
    Ok(Repaired { known: known.revision, revision: repaired.revision })
}
