//! Services.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use gw_base::clock::next_unix_ms;
use gw_base::page::{Page, PageQuery};
use gw_base::service::hostname::Region;
use gw_base::service::service_settings::{
    InvalidSetting, NewService, ServiceChanges, ServiceSettings, ServiceView,
};
use gw_shared::id::{AccountId, ServiceId};
use gw_shared::identity::enrollment::SERVICES_MAX;
use gw_shared::version::later_members::LaterMembers;
use gw_store::{RecordId, RecordKind, Records, ServicePath, ServiceRecord, Step, StoredRecord};
use serde_json::json;
use utoipa::ToSchema;

use super::account;
use super::name::manager_after;
use crate::control::error::similar;
use crate::control::{Actor, Control, ControlError, Plan};

/// A service id, for the description of lists of them.
#[derive(ToSchema)]
#[schema(as = ServiceId, value_type = String, pattern = "^[a-z0-9]([a-z0-9-]{0,56}[a-z0-9])?$")]
#[expect(dead_code, reason = "describes, is never made")]
pub(crate) struct ServiceIdText(String);

fn view_of(record: &ServiceRecord, region: &Region) -> ServiceView {
    ServiceView::new(
        record.id.clone(),
        record.account.clone(),
        region
            .tenant_hostname(&record.account, &record.id)
            .unwrap_or_default(),
        &record.settings,
        record.managed_by.clone(),
        record.created_at.to_string(),
    )
}

impl From<InvalidSetting> for ControlError {
    fn from(InvalidSetting { field, message }: InvalidSetting) -> Self {
        Self::invalid(field, message)
    }
}

/// Creates a service; the flag says whether it was created. An existing service with the same
/// settings stays unchanged.
pub fn create(
    control: &Control,
    actor: &Actor,
    account: &str,
    new: &NewService,
) -> Result<(ServiceView, bool), ControlError> {
    let id = ServiceId::new(&new.id).map_err(ControlError::bad_id("id"))?;
    let settings = new.settings();
    let created = control.change(actor, |records, now| {
        let account = &account::find(records, account)?.id;
        if control.region.tenant_hostname(account, &id).is_none() {
            let message = format!(
                "{account}--{id} is longer than the 63 characters that DNS allows in a label"
            );
            return Err(ControlError::Conflict(message));
        }
        if let Some(existing) = records
            .services
            .get(&ServicePath(account.clone(), id.clone()))
        {
            let before = existing.managed_by.as_ref();
            let managed_by = manager_after(new.managed_by.as_deref(), before)?;
            if settings.applied_to(&existing.settings)? != existing.settings
                || managed_by != existing.managed_by
            {
                let message = format!("service {id} exists with other settings; change it instead");
                return Err(ControlError::Conflict(message));
            }
            return Ok(Plan::already((view_of(existing, &control.region), false)));
        }
        let defaults = ServiceSettings {
            rate: control.default_rate,
            ..ServiceSettings::default()
        };
        let record = ServiceRecord {
            account: account.clone(),
            id: id.clone(),
            settings: settings.applied_to(&defaults)?,
            created_at: now,
            created_ms: Some(next_unix_ms()),
            managed_by: manager_after(new.managed_by.as_deref(), None)?,
            later: LaterMembers::default(),
        };
        let view = view_of(&record, &control.region);
        Ok(Plan {
            action: "service.create",
            account: Some(record.account.clone()),
            target: view.hostname.clone(),
            detail: json!(settings),
            output: (view, true),
            steps: vec![Step::Put(StoredRecord::Service(record))],
        })
    });
    // A request in the millisecond of the creation could be of an earlier service of this name.
    thread::sleep(Duration::from_millis(1));
    created
}

/// Lists the services of an account, page by page.
pub fn list(
    control: &Control,
    account: &str,
    query: &PageQuery,
) -> Result<Page<ServiceView>, ControlError> {
    let state = control.state();
    let account = &account::find(&state.records, account)?.id;
    Ok(Page::of(
        state.records.services_of(account),
        |record| record.id.as_str(),
        query,
        |record| view_of(record, &control.region),
    )?)
}

/// Returns a service of the account. Fails with [`ControlError::NotFound`] if it does not exist.
pub fn show(control: &Control, account: &str, id: &str) -> Result<ServiceView, ControlError> {
    find(&control.state().records, account, id).map(|record| view_of(record, &control.region))
}

/// Changes the settings of a service.
pub fn change(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
    changes: &ServiceChanges,
) -> Result<ServiceView, ControlError> {
    control.change(actor, |records, _| {
        let record = find(records, account, id)?;
        let changed = ServiceRecord {
            settings: changes.applied_to(&record.settings)?,
            managed_by: manager_after(changes.managed_by.as_deref(), record.managed_by.as_ref())?,
            ..record.clone()
        };
        let view = view_of(&changed, &control.region);
        if changed == *record {
            return Ok(Plan::already(view));
        }
        Ok(Plan {
            action: "service.change",
            account: Some(changed.account.clone()),
            target: view.hostname.clone(),
            detail: json!(changes),
            output: view,
            steps: vec![Step::Put(StoredRecord::Service(changed))],
        })
    })
}

/// Deletes a service and removes it from every list, so that a later service of the same name
/// starts without access.
pub fn delete(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
) -> Result<(), ControlError> {
    control.change(actor, |records, _| {
        let service = find(records, account, id)?;
        let account = &service.account;
        let id = &service.id;
        let mut steps = vec![Step::Delete(RecordId::Service(service.id()))];
        for mut record in records
            .credentials
            .values()
            .filter(|record| record.access.account == *account)
            .cloned()
        {
            if record.access.allowed_services.remove(id) {
                steps.push(Step::Put(StoredRecord::Credential(record)));
            }
        }
        for mut record in records
            .service_keys
            .values()
            .filter(|record| record.access.account == *account)
            .cloned()
        {
            if record.access.allowed_services.remove(id) {
                steps.push(Step::Put(StoredRecord::ServiceKey(record)));
            }
        }
        for mut record in records
            .agents
            .values()
            .filter(|record| record.account == *account)
            .cloned()
        {
            if record.services.remove(id) {
                steps.push(Step::Put(StoredRecord::Agent(record)));
            }
        }
        for mut record in records
            .enrollment_tokens
            .values()
            .filter(|record| record.account == *account)
            .cloned()
        {
            if record.services.remove(id) {
                steps.push(Step::Put(StoredRecord::EnrollmentToken(record)));
            }
        }
        let domains = records
            .domains_of(account)
            .filter(|record| record.service == *id)
            .map(|record| Step::Delete(RecordId::Domain(record.id.clone())));
        steps.extend(domains);
        Ok(Plan {
            steps,
            action: "service.delete",
            account: Some(account.clone()),
            target: control
                .region
                .tenant_hostname(account, id)
                .unwrap_or_default(),
            detail: json!({}),
            output: (),
        })
    })
}

/// The service of the account with this id.
pub(crate) fn find<'a>(
    records: &'a Records,
    account: &str,
    id: &str,
) -> Result<&'a ServiceRecord, ControlError> {
    let account = &account::find(records, account)?.id;
    let missing = || ControlError::NotFound {
        kind: "service",
        id: format!("{account}--{id}"),
        remedy: similar_service(records, account, id),
    };
    let id = ServiceId::new(id).map_err(|_| missing())?;
    records
        .services
        .get(&ServicePath(account.clone(), id))
        .ok_or_else(missing)
}

/// A service of the account with a similar id, or how to list and create services, after a
/// semicolon.
fn similar_service(records: &Records, account: &AccountId, id: &str) -> String {
    let known = records
        .services_of(account)
        .map(|service| service.id.as_str());
    similar(id, known, &format!("gw-gateway service list {account}"))
}

/// Checks a list of service ids: each must exist in the account.
pub(crate) fn checked_list(
    records: &Records,
    account: &AccountId,
    field: &'static str,
    list: &[String],
) -> Result<BTreeSet<ServiceId>, ControlError> {
    if list.len() > SERVICES_MAX {
        return Err(ControlError::invalid(
            field,
            format!("must have at most {SERVICES_MAX} services"),
        ));
    }
    list.iter()
        .map(|id| {
            let id = ServiceId::new(id).map_err(ControlError::bad_id(field))?;
            if records
                .services
                .contains_key(&ServicePath(account.clone(), id.clone()))
            {
                Ok(id)
            } else {
                Err(ControlError::Conflict(format!(
                    "{field}: account {account} has no service {id}{}",
                    similar_service(records, account, id.as_str())
                )))
            }
        })
        .collect()
}
