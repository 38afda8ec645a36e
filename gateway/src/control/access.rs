//! Audit entries of reads and replays of captures, which may hold personal data.

use gw_shared::id::AccountId;
use serde_json::json;

use super::{Actor, Control, ControlError, ReplayEdits};
use crate::clock::Timestamp;
use crate::store::AuditEntry;
use crate::telemetry::request_log::{RequestView, Side};

impl Control {
    /// Enters into the audit log that a captured body of `request` is read. To be called before it is handed out.
    pub(crate) fn note_body_read(&self, actor: &Actor, request: &RequestView, side: Side) -> Result<(), ControlError> {
        self.note(actor, "request.read_body", request, json!({ "body": side }))
    }

    /// Enters a replay of `request` into the audit log, with the names of the edited parts.
    pub(super) fn note_replay(
        &self,
        actor: &Actor,
        request: &RequestView,
        edits: &ReplayEdits,
    ) -> Result<(), ControlError> {
        let edited = [
            ("method", edits.method.is_some()),
            ("target", edits.target.is_some()),
            ("headers", edits.headers.is_some() || !edits.set_headers.is_empty()),
            ("body", edits.body.is_some() || edits.body_base64.is_some()),
        ];
        let edited: Vec<&str> = edited.into_iter().filter_map(|(name, is_edited)| is_edited.then_some(name)).collect();
        self.note(actor, "request.replay", request, json!({ "body": Side::Request, "edited": edited }))
    }

    fn note(
        &self,
        actor: &Actor,
        action: &'static str,
        request: &RequestView,
        detail: serde_json::Value,
    ) -> Result<(), ControlError> {
        let entry = AuditEntry {
            at: Timestamp::now(),
            actor: actor.to_string(),
            action,
            account: AccountId::new(&request.account).ok(),
            target: request.id.clone(),
            detail,
        };
        self.state().store.as_mut().ok_or(ControlError::HandedOver)?.commit(&[], &entry)?;
        tracing::info!(actor = entry.actor, action, target = entry.target, "audited");
        Ok(())
    }
}
