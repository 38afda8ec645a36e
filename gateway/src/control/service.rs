//! Services.

use std::collections::BTreeSet;

use gw_shared::id::{AccountId, ServiceId};
use gw_shared::identity::enrollment::SERVICES_MAX;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::{Actor, Control, ControlError, Plan, account};
use crate::affinity::{Affinity, InvalidAffinity};
use crate::hostname::Region;
use crate::page::{Page, PageQuery};
use crate::rate::Rate;
use crate::store::{
    Modes, RecordId, RecordKind, Records, ServicePath, ServiceRecord, Step, StoredRecord,
};

/// A way for callers to authenticate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Mode {
    /// `X-Gw-Authorization: Bearer …` with a token from `/oauth/token`.
    Jwt,
    /// `X-Gw-Service-Key: gw_sk_…`
    ServiceKey,
}

/// A service id, for the description of lists of them.
#[derive(ToSchema)]
#[schema(as = ServiceId, value_type = String, pattern = "^[a-z0-9]([a-z0-9-]{0,56}[a-z0-9])?$")]
#[expect(dead_code, reason = "describes, is never made")]
pub(super) struct ServiceIdText(String);

/// An affinity, for the description of settings.
#[derive(ToSchema)]
#[schema(
    as = Affinity,
    value_type = String,
    pattern = "^(none|client|cookie(:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64})?|header:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64})$"
)]
#[expect(dead_code, reason = "describes, is never made")]
pub(super) struct AffinityText(String);

/// What callers reach under one hostname.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Service)]
pub struct ServiceView {
    #[schema(value_type = String)]
    pub id: ServiceId,
    #[schema(value_type = String)]
    pub account: AccountId,
    /// `{account}--{id}.{region}.{domain}`
    pub hostname: String,
    pub modes: Vec<Mode>,
    pub enabled: bool,
    /// Requests at once before the rate limit takes hold.
    pub burst: u32,
    /// Requests per minute after that.
    pub refill_per_minute: u32,
    pub request_logging: bool,
    pub capture_request_body: bool,
    pub capture_response_body: bool,
    /// Whether a GET, HEAD, OPTIONS or TRACE without a body that may have reached a backend is tried once more on another
    /// agent.
    pub retries: bool,
    /// What requests for the same agent have in common: nothing, a cookie, a field of theirs, or the address of the client.
    #[schema(value_type = AffinityText)]
    pub affinity: Affinity,
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// Settings that are left out get their defaults. The fields of [`ServiceChanges`] again, not flattened in: of two objects
/// that both refuse unknown fields, a schema makes one that refuses everything.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewService {
    /// a-z, 0-9 and inner hyphens; account and id together at most 61 characters.
    #[schema(pattern = "^[a-z0-9]([a-z0-9-]{0,56}[a-z0-9])?$")]
    pub id: String,
    /// At least one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_items = 1)]
    pub modes: Option<Vec<Mode>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 4_294_967_295_u64)]
    pub burst: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 4_294_967_295_u64)]
    pub refill_per_minute: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_logging: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_request_body: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_response_body: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retries: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<AffinityText>)]
    pub affinity: Option<String>,
}

/// Settings that are left out stay as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceChanges {
    /// At least one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_items = 1)]
    pub modes: Option<Vec<Mode>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 4_294_967_295_u64)]
    pub burst: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 4_294_967_295_u64)]
    pub refill_per_minute: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_logging: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_request_body: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capture_response_body: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retries: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<AffinityText>)]
    pub affinity: Option<String>,
}

impl ServiceView {
    fn new(record: &ServiceRecord, region: &Region) -> Self {
        let Modes { jwt, service_key } = record.modes;
        let modes = [(Mode::Jwt, jwt), (Mode::ServiceKey, service_key)];
        Self {
            id: record.id.clone(),
            account: record.account.clone(),
            hostname: region
                .tenant_hostname(&record.account, &record.id)
                .unwrap_or_default(),
            modes: modes
                .into_iter()
                .filter_map(|(mode, on)| on.then_some(mode))
                .collect(),
            enabled: record.enabled,
            burst: record.rate.burst(),
            refill_per_minute: record.rate.refill_per_minute(),
            request_logging: record.request_logging,
            capture_request_body: record.capture_request_body,
            capture_response_body: record.capture_response_body,
            retries: record.retries,
            affinity: record.affinity.clone(),
            created_at: record.created_at.to_string(),
        }
    }
}

impl NewService {
    /// A new service with `settings`.
    pub fn new(id: String, settings: ServiceChanges) -> Self {
        let ServiceChanges {
            modes,
            enabled,
            burst,
            refill_per_minute,
            request_logging,
            capture_request_body,
            capture_response_body,
            retries,
            affinity,
        } = settings;
        Self {
            id,
            modes,
            enabled,
            burst,
            refill_per_minute,
            request_logging,
            capture_request_body,
            capture_response_body,
            retries,
            affinity,
        }
    }

    fn settings(&self) -> ServiceChanges {
        ServiceChanges {
            modes: self.modes.clone(),
            enabled: self.enabled,
            burst: self.burst,
            refill_per_minute: self.refill_per_minute,
            request_logging: self.request_logging,
            capture_request_body: self.capture_request_body,
            capture_response_body: self.capture_response_body,
            retries: self.retries,
            affinity: self.affinity.clone(),
        }
    }
}

impl ServiceChanges {
    /// A copy of `record` with these settings.
    fn applied_to(&self, record: &ServiceRecord) -> Result<ServiceRecord, ControlError> {
        let mut changed = record.clone();
        if let Some(modes) = &self.modes {
            if modes.is_empty() {
                return Err(ControlError::invalid(
                    "modes",
                    "must contain at least one of \"jwt\" and \"service_key\"",
                ));
            }
            changed.modes = Modes {
                jwt: modes.contains(&Mode::Jwt),
                service_key: modes.contains(&Mode::ServiceKey),
            };
        }
        let burst = self.burst.unwrap_or(record.rate.burst());
        let refill = self
            .refill_per_minute
            .unwrap_or(record.rate.refill_per_minute());
        let field = if burst == 0 {
            "burst"
        } else {
            "refill_per_minute"
        };
        changed.rate =
            Rate::new(burst, refill).ok_or_else(|| ControlError::invalid(field, "at least 1"))?;
        let switches = [
            (&mut changed.enabled, self.enabled),
            (&mut changed.request_logging, self.request_logging),
            (&mut changed.capture_request_body, self.capture_request_body),
            (
                &mut changed.capture_response_body,
                self.capture_response_body,
            ),
            (&mut changed.retries, self.retries),
        ];
        for (switch, wanted) in switches {
            *switch = wanted.unwrap_or(*switch);
        }
        if let Some(affinity) = &self.affinity {
            let invalid =
                |error: InvalidAffinity| ControlError::invalid("affinity", error.to_string());
            changed.affinity = affinity.parse().map_err(invalid)?;
        }
        Ok(changed)
    }
}

/// Creates a service; the flag says whether it was created. An existing service with the same settings stays
/// unchanged.
pub fn create(
    control: &Control,
    actor: &Actor,
    account: &str,
    new: &NewService,
) -> Result<(ServiceView, bool), ControlError> {
    let id = ServiceId::new(&new.id).map_err(ControlError::bad_id("id"))?;
    let settings = new.settings();
    control.change(actor, |records, now| {
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
            if settings.applied_to(existing)? != *existing {
                let message = format!("service {id} exists with other settings; change it instead");
                return Err(ControlError::Conflict(message));
            }
            return Ok(Plan::already((
                ServiceView::new(existing, &control.region),
                false,
            )));
        }
        let record = settings.applied_to(&ServiceRecord {
            account: account.clone(),
            id: id.clone(),
            modes: Modes {
                jwt: true,
                service_key: true,
            },
            enabled: true,
            rate: control.default_rate,
            request_logging: true,
            capture_request_body: false,
            capture_response_body: false,
            retries: true,
            affinity: Affinity::None,
            created_at: now,
        })?;
        let view = ServiceView::new(&record, &control.region);
        Ok(Plan {
            action: "service.create",
            account: Some(record.account.clone()),
            target: view.hostname.clone(),
            detail: json!(settings),
            output: (view, true),
            steps: vec![Step::Put(StoredRecord::Service(record))],
        })
    })
}

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
        |record| ServiceView::new(record, &control.region),
    )?)
}

pub fn show(control: &Control, account: &str, id: &str) -> Result<ServiceView, ControlError> {
    find(&control.state().records, account, id)
        .map(|record| ServiceView::new(record, &control.region))
}

pub fn change(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
    changes: &ServiceChanges,
) -> Result<ServiceView, ControlError> {
    control.change(actor, |records, _| {
        let record = find(records, account, id)?;
        let changed = changes.applied_to(record)?;
        let view = ServiceView::new(&changed, &control.region);
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

/// Deletes a service and removes it from every list, so that a later service of the same name starts without
/// access.
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

fn find<'a>(
    records: &'a Records,
    account: &str,
    id: &str,
) -> Result<&'a ServiceRecord, ControlError> {
    let missing = || ControlError::not_found("service", format_args!("{account}--{id}"));
    let account = &account::find(records, account)?.id;
    let id = ServiceId::new(id).map_err(|_| missing())?;
    records
        .services
        .get(&ServicePath(account.clone(), id))
        .ok_or_else(missing)
}

/// Checks a list of service ids: each must exist in the account.
pub(super) fn checked_list(
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
                    "{field}: account {account} has no service {id}; create it first"
                )))
            }
        })
        .collect()
}
