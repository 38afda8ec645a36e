//! The label of an own domain that says which documents it comes from.

use gw_store::{Step, StoredRecord};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::find;
use super::view::{DomainView, view_of};
use crate::control::records::name::manager_after;
use crate::control::{Actor, Control, ControlError, Plan};

/// Changes of an own domain. Omitted members keep their values. A domain moves by adding it to
/// another service.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DomainChanges {
    /// Name of what manages it by documents; empty for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 60, pattern = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")]
    pub managed_by: Option<String>,
}

/// Changes the label of a domain of the account.
pub fn change(
    control: &Control,
    actor: &Actor,
    account: &str,
    name: &str,
    changes: &DomainChanges,
) -> Result<DomainView, ControlError> {
    control.change(actor, |records, _| {
        let record = find(records, account, name)?;
        let managed_by = manager_after(changes.managed_by.as_deref(), record.managed_by.as_ref())?;
        if managed_by == record.managed_by {
            return Ok(Plan::already(view_of(control, records, record)));
        }
        let mut changed = record.clone();
        changed.managed_by = managed_by;
        Ok(Plan {
            action: "domain.change",
            account: Some(changed.account.clone()),
            target: changed.id.to_string(),
            detail: json!(changes),
            output: view_of(control, records, &changed),
            steps: vec![Step::Put(StoredRecord::Domain(changed))],
        })
    })
}
