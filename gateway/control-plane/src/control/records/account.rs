//! Accounts.

use gw_base::clock::next_unix_ms;
use gw_base::page::{Page, PageQuery};
use gw_shared::id::{AccountId, ManagerName};
use gw_shared::version::later_members::LaterMembers;
use gw_store::{
    AccountRecord, DeletedAccountRecord, DomainsMax, RecordId, RecordKind, Records, Step,
    StoredRecord,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::name::manager_after;
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
    /// Own domains that it may have.
    #[serde(default)]
    #[schema(value_type = u32, required = true, maximum = 10_000)]
    pub domains_max: DomainsMax,
    /// What manages it by documents; absent if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub managed_by: Option<ManagerName>,
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
    /// Own domains that it may have. 100 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 10_000)]
    pub domains_max: Option<DomainsMax>,
    /// Name of what manages it by documents; empty for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 60, pattern = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")]
    pub managed_by: Option<String>,
}

/// Changes of an account. Omitted members keep their values.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AccountChanges {
    /// Whether its plan includes keeping bodies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_allowed: Option<bool>,
    /// Own domains that it may have. Those beyond a smaller number stay, and none is added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 10_000)]
    pub domains_max: Option<DomainsMax>,
    /// Name of what manages it by documents; empty for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 60, pattern = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")]
    pub managed_by: Option<String>,
}

impl From<&AccountRecord> for AccountView {
    fn from(record: &AccountRecord) -> Self {
        Self {
            id: record.id.clone(),
            capture_allowed: record.capture_allowed,
            domains_max: record.domains_max,
            managed_by: record.managed_by.clone(),
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
            let managed_by = manager_after(new.managed_by.as_deref(), record.managed_by.as_ref())?;
            let other_capture = new
                .capture_allowed
                .is_some_and(|wanted| wanted != record.capture_allowed);
            let other_quota = new
                .domains_max
                .is_some_and(|wanted| wanted != record.domains_max);
            if other_capture || other_quota || managed_by != record.managed_by {
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
            domains_max: new.domains_max.unwrap_or_default(),
            created_at: now,
            created_ms: Some(next_unix_ms()),
            managed_by: manager_after(new.managed_by.as_deref(), None)?,
            later: LaterMembers::default(),
        };
        Ok(Plan {
            action: "account.create",
            account: Some(record.id.clone()),
            target: record.id.to_string(),
            detail: json!(AccountChanges {
                capture_allowed: Some(capture_allowed),
                domains_max: new.domains_max,
                managed_by: new.managed_by.clone(),
            }),
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
            domains_max: changes.domains_max.unwrap_or(record.domains_max),
            managed_by: manager_after(changes.managed_by.as_deref(), record.managed_by.as_ref())?,
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

/// Records of an account, which a cascade deletes with it. Names the first 100 of each kind.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = AccountContents)]
pub struct AccountContents {
    /// Services, by their ids.
    pub services: NamedRecords,
    /// Credentials, by their names and ids.
    pub credentials: NamedRecords,
    /// Service keys, by their names and ids.
    pub service_keys: NamedRecords,
    /// Agents, by their names and ids.
    pub agents: NamedRecords,
    /// Own domains, by their names.
    pub domains: NamedRecords,
    /// Enrollment tokens, by their ids.
    pub enrollment_tokens: NamedRecords,
}

/// Records of one kind.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct NamedRecords {
    /// Number of records.
    pub count: usize,
    /// Names of the first of them.
    pub names: Vec<String>,
}

/// Most records of a kind that are named.
const NAMED_MAX: usize = 100;

impl AccountContents {
    /// Labels of the kinds, with their records.
    pub fn kinds(&self) -> [(&'static str, &NamedRecords); 6] {
        [
            ("services", &self.services),
            ("credentials", &self.credentials),
            ("service keys", &self.service_keys),
            ("agents", &self.agents),
            ("domains", &self.domains),
            ("enrollment tokens", &self.enrollment_tokens),
        ]
    }

    /// Reads what an account has, and the ids of its records.
    fn of(records: &Records, account: &AccountId) -> (Self, Vec<RecordId>) {
        let ids = &mut Vec::new();
        let services = records
            .services_of(account)
            .map(|record| (RecordId::Service(record.id()), None));
        let credentials = records.credentials.values();
        let credentials = credentials
            .filter(|record| record.access.account == *account)
            .map(|record| {
                let id = RecordId::Credential(record.id.clone());
                (id, record.access.name.as_deref())
            });
        let service_keys = records.service_keys.values();
        let service_keys = service_keys
            .filter(|record| record.access.account == *account)
            .map(|record| {
                let id = RecordId::ServiceKey(record.id.clone());
                (id, record.access.name.as_deref())
            });
        let agents = records.agents.values();
        let agents = agents
            .filter(|record| record.account == *account)
            .map(|record| {
                let id = RecordId::Agent(record.id.clone());
                (id, Some(record.name.as_str()))
            });
        let domains = records
            .domains_of(account)
            .map(|record| (RecordId::Domain(record.id.clone()), None));
        let tokens = records.enrollment_tokens.values();
        let tokens = tokens
            .filter(|record| record.account == *account)
            .map(|record| (RecordId::EnrollmentToken(record.id.clone()), None));
        let contents = Self {
            services: NamedRecords::of(services, ids),
            credentials: NamedRecords::of(credentials, ids),
            service_keys: NamedRecords::of(service_keys, ids),
            agents: NamedRecords::of(agents, ids),
            domains: NamedRecords::of(domains, ids),
            enrollment_tokens: NamedRecords::of(tokens, ids),
        };
        (contents, std::mem::take(ids))
    }
}

impl NamedRecords {
    /// Reads records with their display names. Adds their ids to `ids`.
    fn of<'a>(
        records: impl Iterator<Item = (RecordId, Option<&'a str>)>,
        ids: &mut Vec<RecordId>,
    ) -> Self {
        let mut found = Self::default();
        for (record, name) in records {
            found.count += 1;
            if found.names.len() < NAMED_MAX {
                let (_, id) = record.columns();
                let id = id.rsplit('/').next().unwrap_or(&id);
                found
                    .names
                    .push(name.map_or_else(|| id.to_owned(), |name| format!("{name} ({id})")));
            }
            ids.push(record);
        }
        found
    }
}

/// Returns what an account has, which a deletion with `cascade` deletes.
pub fn contents(control: &Control, id: &str) -> Result<AccountContents, ControlError> {
    let state = control.state();
    let account = find(&state.records, id)?;
    Ok(AccountContents::of(&state.records, &account.id).0)
}

/// Deletes an account, in one change. Without `cascade`, refuses one that has more than enrollment
/// tokens.
pub fn delete(
    control: &Control,
    actor: &Actor,
    id: &str,
    cascade: bool,
) -> Result<(), ControlError> {
    control.change(actor, |records, _| {
        let id = &find(records, id)?.id;
        let (contents, deleted) = AccountContents::of(records, id);
        let tokens = contents.enrollment_tokens.count;
        if !cascade && deleted.len() > tokens {
            let left = contents
                .kinds()
                .into_iter()
                .take(5)
                .filter(|(_, records)| records.count > 0)
                .map(|(kind, _)| kind);
            let left: Vec<&str> = left.collect();
            return Err(ControlError::Conflict(format!(
                "account {id} still has {}; delete them first, or delete it with all that it has \
                 (`account delete --cascade`, `?cascade=true`)",
                left.join(", ")
            )));
        }
        let before = records.deleted_accounts.get(id);
        let kept = DeletedAccountRecord {
            id: id.clone(),
            deletions: before.map_or(0, |it| it.deletions).saturating_add(1),
            later: LaterMembers::default(),
        };
        Ok(Plan {
            steps: deleted
                .into_iter()
                .chain([RecordId::Account(id.clone())])
                .map(Step::Delete)
                .chain([Step::Put(StoredRecord::DeletedAccount(kept))])
                .collect(),
            action: "account.delete",
            account: Some(id.clone()),
            target: id.to_string(),
            detail: json!({ "cascade": cascade, "deleted": contents }),
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
