//! What a backup reads from the running control plane. Changes wait for each read, not for the
//! whole backup.

use std::path::Path;

use gw_store::{AuditQuery, NumberedEntry, Sealing, Snapshot, StoreSource};
use serde_json::json;

use super::changes::audit;
use super::{Actor, Control, ControlError};

/// The folder of the database; `None` if it is PostgreSQL.
pub(crate) fn data_dir(control: &Control) -> Option<&Path> {
    match &control.store_source {
        StoreSource::Sqlite(path, _) => path.parent(),
        StoreSource::Postgres(_) => None,
    }
}

/// How the secrets in that folder are sealed.
pub(crate) fn sealing(control: &Control) -> Sealing {
    control.store_source.sealing()
}

/// Records in the audit log that a backup is made, and returns all records as of this entry or a
/// later change.
pub(crate) fn begin(control: &Control, actor: &Actor) -> Result<Snapshot, ControlError> {
    audit::note(
        control,
        actor,
        "backup.create",
        None,
        control.region.apex().to_owned(),
        json!({}),
    )?;
    // Locked in this order, so that no change is between its commit and its publication.
    let _store = control.store();
    let state = control.state();
    Ok(Snapshot {
        position: state.position.clone(),
        records: state.records.clone(),
        recent: Vec::new(),
    })
}

/// At most `limit` entries of the audit log with a lower number than `before`, the newest first.
pub(crate) fn audit_before(
    control: &Control,
    before: i64,
    limit: usize,
) -> Result<Vec<NumberedEntry>, ControlError> {
    let query = AuditQuery {
        account: None,
        before: Some(before),
        limit,
    };
    Ok(control
        .store()
        .as_mut()
        .ok_or(ControlError::HandedOver)?
        .audit_log(&query)?)
}
