//! What a backup reads from the running control plane. Changes wait for each read, not for the whole backup.

use std::path::Path;

use serde_json::json;

use super::{Actor, Control, ControlError};
use crate::store::{AuditQuery, NumberedEntry, Sealing, Snapshot, StoreSource};

impl Control {
    /// The folder of the database; `None` if it is PostgreSQL.
    pub(crate) fn data_dir(&self) -> Option<&Path> {
        match &self.store_source {
            StoreSource::Sqlite(path, _) => path.parent(),
            StoreSource::Postgres(_) => None,
        }
    }

    /// How the secrets in that folder are sealed.
    pub(crate) fn sealing(&self) -> Sealing {
        self.store_source.sealing()
    }

    /// Records in the audit log that a backup is made, and returns all records as of this entry or a later change.
    pub(crate) fn begin_backup(&self, actor: &Actor) -> Result<Snapshot, ControlError> {
        self.note(
            actor,
            "backup.create",
            None,
            self.region.apex().to_owned(),
            json!({}),
        )?;
        // Locked in this order, so that no change is between its commit and its publication.
        let _store = self.store();
        let state = self.state();
        Ok(Snapshot {
            position: state.position.clone(),
            records: state.records.clone(),
            recent: Vec::new(),
        })
    }

    /// At most `limit` entries of the audit log with a lower number than `before`, the newest first.
    pub(crate) fn audit_before(
        &self,
        before: i64,
        limit: usize,
    ) -> Result<Vec<NumberedEntry>, ControlError> {
        let query = AuditQuery {
            account: None,
            before: Some(before),
            limit,
        };
        Ok(self
            .store()
            .as_mut()
            .ok_or(ControlError::HandedOver)?
            .audit_log(&query)?)
    }
}
