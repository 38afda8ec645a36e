//! `region repair` and `region forget`: what an operator does about a database that was changed by
//! something other than a gateway, and about a shared secret that was stolen.

use std::path::Path;

use gw_base::clock::Timestamp;
use gw_control_plane::control::{ADMIN_TOKEN, AGENT_CA, read_copy};
use gw_interface::config::Config;
use gw_store::{
    AuditEntry, NamedSecret, PostgresSource, PostgresStore, RecordId, Revision, Snapshot, Step,
    Store, StoreError,
};

use super::transfer::{as_owner, shared_secrets, source_problem};
use super::{RegionError, source, store};

/// Records that were written back.
#[derive(Debug)]
pub struct Repaired {
    /// Revision of the records that were written.
    pub known: Revision,
    /// The revision of the region from now on.
    pub revision: Revision,
}

/// Replaces the records in the database with those of this node's data folder and the authentic
/// changes after them, and the shared secrets with those of the folder. Nodes may run: they load
/// what was written. As root, reads the folder with the rights of its owner. `may_discard` allows
/// that changes after those of the folder are lost, if the database does not have all of them any
/// more.
pub fn repair(config: &Config, may_discard: bool) -> Result<Repaired, RegionError> {
    let folder = &config.data_dir;
    let source = source(config)?;
    let (copy, secrets) = as_owner(folder, || read_folder(folder, &source), source_problem)?;
    let entry = AuditEntry {
        at: Timestamp::now(),
        actor: "operator".to_owned(),
        action: "region.repair".into(),
        account: None,
        target: config.region.apex().to_owned(),
        detail: serde_json::json!({ "records_of_revision": copy.position.revision }),
    };
    let (known, repaired) = store(config)?.repair(copy, &secrets, &entry, may_discard)?;
    Ok(Repaired {
        known: known.revision,
        revision: repaired.revision,
    })
}

fn read_folder(
    folder: &Path,
    source: &PostgresSource,
) -> Result<(Snapshot, Vec<NamedSecret>), RegionError> {
    let copy = read_copy(folder, source)
        .map_err(|error| source_problem(folder, &error.to_string(), None))?;
    let none =
        "it has no copy of the records: run this on a machine whose node has served in the region";
    Ok((
        copy.ok_or_else(|| source_problem(folder, none, None))?,
        shared_secrets(folder)?,
    ))
}

/// A secret of the region that can be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ReplaceableSecret {
    /// The token of the administration API.
    AdminToken,
    /// The authority of agents and nodes.
    AgentCa,
}

/// Deletes a secret that all nodes share. The next node that starts without its files makes another
/// one. Authorities that have replaced the first one are deleted before it.
pub fn forget(config: &Config, secret: ReplaceableSecret) -> Result<(), RegionError> {
    let mut store = store(config)?;
    let stored = match secret {
        ReplaceableSecret::AdminToken => ADMIN_TOKEN,
        ReplaceableSecret::AgentCa => AGENT_CA,
    };
    if matches!(secret, ReplaceableSecret::AgentCa) {
        forget_authorities(&mut store)?;
    }
    Ok(store.forget_secret(stored.name)?)
}

fn forget_authorities(store: &mut PostgresStore) -> Result<(), StoreError> {
    let Snapshot {
        position, records, ..
    } = store.load()?;
    let ids: Vec<String> = records
        .authorities
        .keys()
        .map(ToString::to_string)
        .collect();
    if ids.is_empty() {
        return Ok(());
    }
    let entry = AuditEntry {
        at: Timestamp::now(),
        actor: "operator".to_owned(),
        action: "agent_ca.forget".into(),
        account: None,
        target: ids.join(" "),
        detail: serde_json::json!({}),
    };
    let steps: Vec<Step> = records
        .authorities
        .into_keys()
        .map(|id| Step::Delete(RecordId::Authority(id)))
        .collect();
    store.commit(&position, &steps, &entry).map(drop)
}
