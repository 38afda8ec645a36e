//! Accounts.

use gw_base::page::{Page, PageQuery};
use gw_shared::id::AccountId;
use gw_shared::version::later_members::LaterMembers;
use gw_store::{AccountRecord, RecordId, Records, Step, StoredRecord};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use crate::control::{Actor, Control, ControlError, Plan};

/// The owner of services, credentials, keys and agents.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Account)]
pub struct AccountView {
    /// Id of the account: the first part of its hostnames.
    #[schema(value_type = String)]
    pub id: AccountId,
    /// Its plan includes keeping bodies: of the services that are set to.
    pub capture_allowed: bool,
    /// RFC 3339.
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// An account to create.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewAccount {
    /// 3 to 15 characters of a-z and 0-9: the first part of its hostnames.
    #[schema(pattern = "^[a-z0-9]{3,15}$")]
    pub id: String,
    /// Its plan includes keeping bodies. Off if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_allowed: Option<bool>,
}

/// Changes of an account. Omitted members keep their values.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AccountChanges {
    /// Whether its plan includes keeping bodies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_allowed: Option<bool>,
}

impl From<&AccountRecord> for AccountView {
    fn from(record: &AccountRecord) -> Self {
        Self {
            id: record.id.clone(),
            capture_allowed: record.capture_allowed,
            created_at: record.created_at.to_string(),
        }
    }
}

/// Creates an account if it does not exist; the flag says whether it was created.
pub fn create(
    control: &Control,
    actor: &Actor,
    new: &NewAccount,
) -> Result<(AccountView, bool), ControlError> {
    let id = AccountId::new(&new.id).map_err(ControlError::bad_id("id"))?;
    control.change(actor, |records, now| {
        if let Some(record) = records.accounts.get(&id) {
            if new
                .capture_allowed
                .is_some_and(|wanted| wanted != record.capture_allowed)
            {
                return Err(ControlError::Conflict(format!(
                    "account {id} exists with other settings; change it instead"
                )));
            }
            return Ok(Plan::already((record.into(), false)));
        }
        let capture_allowed = new.capture_allowed.unwrap_or(false);
        let record = AccountRecord {
            id: id.clone(),
            capture_allowed,
            created_at: now,
            later: LaterMembers::default(),
        };
        Ok(Plan {
            action: "account.create",
            account: Some(record.id.clone()),
            target: record.id.to_string(),
            detail: json!({"capture_allowed": capture_allowed}),
            output: ((&record).into(), true),
            steps: vec![Step::Put(StoredRecord::Account(record))],
        })
    })
}

/// Lists all accounts, page by page.
pub fn list(control: &Control, query: &PageQuery) -> Result<Page<AccountView>, ControlError> {
    let state = control.state();
    Ok(Page::of(
        state.records.accounts.values(),
        |record| record.id.as_str(),
        query,
        AccountView::from,
    )?)
}

/// Returns an account. Fails with [`ControlError::NotFound`] if it does not exist.
pub fn show(control: &Control, id: &str) -> Result<AccountView, ControlError> {
    find(&control.state().records, id).map(AccountView::from)
}

/// Changes the settings of an account.
pub fn change(
    control: &Control,
    actor: &Actor,
    id: &str,
    changes: &AccountChanges,
) -> Result<AccountView, ControlError> {
    control.change(actor, |records, _| {
        let record = find(records, id)?;
        let capture_allowed = changes.capture_allowed.unwrap_or(record.capture_allowed);
        let changed = AccountRecord {
            capture_allowed,
            ..record.clone()
        };
        if changed == *record {
            return Ok(Plan::already(record.into()));
        }
        Ok(Plan {
            action: "account.change",
            account: Some(changed.id.clone()),
            target: changed.id.to_string(),
            detail: json!(changes),
            output: (&changed).into(),
            steps: vec![Step::Put(StoredRecord::Account(changed))],
        })
    })
}

/// Deletes an account that has no services, credentials, service keys or agents left.
pub fn delete(control: &Control, actor: &Actor, id: &str) -> Result<(), ControlError> {
    control.change(actor, |records, _| {
        let id = &find(records, id)?.id;
        let left = [
            ("services", records.services_of(id).next().is_some()),
            (
                "credentials",
                records
                    .credentials
                    .values()
                    .any(|record| record.access.account == *id),
            ),
            (
                "service keys",
                records
                    .service_keys
                    .values()
                    .any(|record| record.access.account == *id),
            ),
            (
                "agents",
                records.agents.values().any(|record| record.account == *id),
            ),
        ];
        let left: Vec<&str> = left
            .into_iter()
            .filter_map(|(what, any)| any.then_some(what))
            .collect();
        if !left.is_empty() {
            return Err(ControlError::Conflict(format!(
                "account {id} still has {}; delete them first",
                left.join(", ")
            )));
        }
        let tokens = records
            .enrollment_tokens
            .values()
            .filter(|token| token.account == *id);
        let tokens = tokens.map(|token| Step::Delete(RecordId::EnrollmentToken(token.id.clone())));
        Ok(Plan {
            steps: tokens
                .chain([Step::Delete(RecordId::Account(id.clone()))])
                .collect(),
            action: "account.delete",
            account: Some(id.clone()),
            target: id.to_string(),
            detail: json!({}),
            output: (),
        })
    })
}

/// The account with this id.
pub(crate) fn find<'a>(records: &'a Records, id: &str) -> Result<&'a AccountRecord, ControlError> {
    records.accounts.get(id).ok_or_else(|| {
        let known = records.accounts.keys().map(AccountId::as_str);
        ControlError::not_found_among("account", id, known, "gw-gateway account list")
    })
}
