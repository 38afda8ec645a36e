//! Caller secrets: credentials and service keys, managed by the same rules.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use gw_base::page::{Page, PageQuery};
use gw_interface::auth::service_key;
use gw_shared::id::{AccountId, ClientId, KeyId, ManagerName, ServiceId};
use gw_shared::identity::secret::{Secret, SecretHash};
use gw_shared::version::later_members::LaterMembers;
use gw_store::{CallerSecretRecord, RecordId, Records, SecretAccess, Step, StoredRecord};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::account;
use super::name::{NameText, manager_after};
use super::service::{ServiceIdText, checked_list};
use crate::control::{Actor, Control, ControlError, Plan, checked_name, new_secret};

/// A kind of caller secret. The type of its ids stands for it.
pub trait SecretKind: Clone + Ord + fmt::Display + Borrow<str> {
    /// View without the secret.
    type View;
    /// View with the secret, returned when the secret is created or rotated.
    type NewView;

    #[doc(hidden)]
    const NAME: &'static str;
    #[doc(hidden)]
    const ACTIONS: Actions;
    /// Start of each secret of this kind, before 43 base62 characters.
    #[doc(hidden)]
    const SECRET_PREFIX: &'static str;

    #[doc(hidden)]
    fn random() -> Self;
    #[doc(hidden)]
    fn all(records: &Records) -> &BTreeMap<Self, CallerSecretRecord<Self>>;
    #[doc(hidden)]
    fn put(record: CallerSecretRecord<Self>) -> Step;
    #[doc(hidden)]
    fn delete(id: Self) -> Step;
    #[doc(hidden)]
    fn view(record: &CallerSecretRecord<Self>) -> Self::View;
    #[doc(hidden)]
    fn new_view(record: &CallerSecretRecord<Self>, secret: Option<&Secret>) -> Self::NewView;
    /// Returns the id of the secret in `view`.
    fn id_of(view: &Self::NewView) -> &Self;
}

/// Names of the actions in the audit log.
#[doc(hidden)]
pub struct Actions {
    create: &'static str,
    change: &'static str,
    rotate: &'static str,
    delete: &'static str,
}

/// An OAuth client of the account.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Credential)]
pub struct CredentialView {
    /// Client id for the token endpoint (RFC 6749 §2.2).
    #[schema(value_type = String)]
    pub client_id: ClientId,
    /// Account that the credential belongs to.
    #[schema(value_type = String)]
    pub account: AccountId,
    /// Name for administrators.
    pub name: Option<String>,
    /// Services that the credential gives access to.
    #[schema(value_type = Vec<String>)]
    pub allowed_services: BTreeSet<ServiceId>,
    /// Whether the credential is accepted.
    pub enabled: bool,
    /// What manages it by documents; absent if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub managed_by: Option<ManagerName>,
    /// When the credential was created, RFC 3339.
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// A credential, and its secret when it was made just now.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = NewCredential)]
pub struct NewCredentialView {
    /// The credential without its secret.
    #[serde(flatten)]
    pub credential: CredentialView,
    /// Shown this once. Absent if a credential of this name was there already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_secret: Option<String>,
}

/// A key that callers send with each request.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = ServiceKey)]
pub struct ServiceKeyView {
    /// Id of the key, which is a part of its text.
    #[schema(value_type = String)]
    pub key_id: KeyId,
    /// Account that the key belongs to.
    #[schema(value_type = String)]
    pub account: AccountId,
    /// Name for administrators.
    pub name: Option<String>,
    /// Services that the key gives access to.
    #[schema(value_type = Vec<String>)]
    pub allowed_services: BTreeSet<ServiceId>,
    /// Whether the key is accepted.
    pub enabled: bool,
    /// What manages it by documents; absent if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub managed_by: Option<ManagerName>,
    /// When the key was created, RFC 3339.
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// A service key, and its full text when it was made just now.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = NewServiceKey)]
pub struct NewServiceKeyView {
    /// The key without its secret.
    #[serde(flatten)]
    pub key: ServiceKeyView,
    /// `gw_sk_{key_id}.{secret}`. Shown this once. Absent if a key of this name was there already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_key: Option<String>,
}

/// A credential or service key to create.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewCallerSecret {
    /// Name for administrators. Creating a second one of the same name changes nothing and returns
    /// the existing one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<NameText>)]
    pub name: Option<String>,
    /// Services of the account that it gives access to.
    #[schema(value_type = Vec<ServiceIdText>, max_items = 500)]
    pub allowed_services: Vec<String>,
    /// Whether the secret is accepted. On if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Name of what manages it by documents; empty for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 60, pattern = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")]
    pub managed_by: Option<String>,
}

/// Changes of a credential or service key. Omitted members keep their values.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CallerSecretChanges {
    /// Name for administrators, 1 to 100 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<NameText>)]
    pub name: Option<String>,
    /// Services of the account that it gives access to. Replaces the whole list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<ServiceIdText>>, max_items = 500)]
    pub allowed_services: Option<Vec<String>>,
    /// Whether the secret is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// Name of what manages it by documents; empty for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 60, pattern = "^([A-Za-z0-9][A-Za-z0-9._/-]*)?$")]
    pub managed_by: Option<String>,
}

impl SecretKind for ClientId {
    type View = CredentialView;
    type NewView = NewCredentialView;

    const NAME: &'static str = "credential";
    const ACTIONS: Actions = Actions {
        create: "credential.create",
        change: "credential.change",
        rotate: "credential.rotate_secret",
        delete: "credential.delete",
    };
    const SECRET_PREFIX: &'static str = "gw_cs_";

    fn random() -> Self {
        Self::random()
    }

    fn all(records: &Records) -> &BTreeMap<Self, CallerSecretRecord<Self>> {
        &records.credentials
    }

    fn put(record: CallerSecretRecord<Self>) -> Step {
        Step::Put(StoredRecord::Credential(record))
    }

    fn delete(id: Self) -> Step {
        Step::Delete(RecordId::Credential(id))
    }

    fn view(record: &CallerSecretRecord<Self>) -> CredentialView {
        let SecretAccess {
            account,
            name,
            allowed_services,
            enabled,
            created_at,
            ..
        } = record.access.clone();
        CredentialView {
            client_id: record.id.clone(),
            account,
            name,
            allowed_services,
            enabled,
            managed_by: record.managed_by.clone(),
            created_at: created_at.to_string(),
        }
    }

    fn new_view(record: &CallerSecretRecord<Self>, secret: Option<&Secret>) -> NewCredentialView {
        NewCredentialView {
            credential: Self::view(record),
            client_secret: secret.map(|secret| secret.reveal().to_owned()),
        }
    }

    fn id_of(view: &NewCredentialView) -> &Self {
        &view.credential.client_id
    }
}

impl SecretKind for KeyId {
    type View = ServiceKeyView;
    type NewView = NewServiceKeyView;

    const NAME: &'static str = "service key";
    const ACTIONS: Actions = Actions {
        create: "service_key.create",
        change: "service_key.change",
        rotate: "service_key.rotate_secret",
        delete: "service_key.delete",
    };
    const SECRET_PREFIX: &'static str = "";

    fn random() -> Self {
        Self::random()
    }

    fn all(records: &Records) -> &BTreeMap<Self, CallerSecretRecord<Self>> {
        &records.service_keys
    }

    fn put(record: CallerSecretRecord<Self>) -> Step {
        Step::Put(StoredRecord::ServiceKey(record))
    }

    fn delete(id: Self) -> Step {
        Step::Delete(RecordId::ServiceKey(id))
    }

    fn view(record: &CallerSecretRecord<Self>) -> ServiceKeyView {
        let SecretAccess {
            account,
            name,
            allowed_services,
            enabled,
            created_at,
            ..
        } = record.access.clone();
        ServiceKeyView {
            key_id: record.id.clone(),
            account,
            name,
            allowed_services,
            enabled,
            managed_by: record.managed_by.clone(),
            created_at: created_at.to_string(),
        }
    }

    fn new_view(record: &CallerSecretRecord<Self>, secret: Option<&Secret>) -> NewServiceKeyView {
        NewServiceKeyView {
            key: Self::view(record),
            service_key: secret.map(|secret| service_key::text(&record.id, secret.reveal())),
        }
    }

    fn id_of(view: &NewServiceKeyView) -> &Self {
        &view.key.key_id
    }
}

/// Creates a credential or service key; the flag says whether it was created. Only the returned
/// view holds the secret.
pub fn create<K: SecretKind>(
    control: &Control,
    actor: &Actor,
    account: &str,
    new: &NewCallerSecret,
) -> Result<(K::NewView, bool), ControlError> {
    let name = new.name.as_deref().map(checked_name).transpose()?;
    control.change(actor, |records, now| {
        let account = &account::find(records, account)?.id;
        let allowed_services =
            checked_list(records, account, "allowed_services", &new.allowed_services)?;
        let enabled = new.enabled.unwrap_or(true);
        if let Some(existing) = named::<K>(records, account, name.as_deref()) {
            let access = &existing.access;
            let before = existing.managed_by.as_ref();
            if access.allowed_services != allowed_services
                || access.enabled != enabled
                || manager_after(new.managed_by.as_deref(), before)? != existing.managed_by
            {
                return Err(taken(existing));
            }
            return Ok(Plan::already((K::new_view(existing, None), false)));
        }
        let secret = fresh_secret::<K>();
        let access = SecretAccess {
            account: account.clone(),
            name: name.clone(),
            secret: SecretHash::of(secret.reveal()),
            allowed_services,
            enabled,
            created_at: now,
        };
        let record = CallerSecretRecord {
            id: K::random(),
            access,
            managed_by: manager_after(new.managed_by.as_deref(), None)?,
            later: LaterMembers::default(),
        };
        Ok(Plan {
            action: K::ACTIONS.create,
            account: Some(account.clone()),
            target: record.id.to_string(),
            detail: json!(new),
            output: (K::new_view(&record, Some(&secret)), true),
            steps: vec![K::put(record)],
        })
    })
}

/// Lists the secrets of an account, page by page.
pub fn list<K: SecretKind>(
    control: &Control,
    account: &str,
    query: &PageQuery,
) -> Result<Page<K::View>, ControlError> {
    let state = control.state();
    let account = &account::find(&state.records, account)?.id;
    let records = K::all(&state.records)
        .values()
        .filter(|record| record.access.account == *account);
    Ok(Page::of(
        records,
        |record| record.id.borrow(),
        query,
        K::view,
    )?)
}

/// Returns a secret of the account. Fails with [`ControlError::NotFound`] if it does not exist.
pub fn show<K: SecretKind>(
    control: &Control,
    account: &str,
    id: &str,
) -> Result<K::View, ControlError> {
    find::<K>(&control.state().records, account, id).map(K::view)
}

/// Changes a secret. Fails with [`ControlError::Conflict`] if another one has the new name.
pub fn change<K: SecretKind>(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
    changes: &CallerSecretChanges,
) -> Result<K::View, ControlError> {
    let name = changes.name.as_deref().map(checked_name).transpose()?;
    control.change(actor, |records, _| {
        let record = find::<K>(records, account, id)?;
        let account = &record.access.account;
        if let Some(other) = named::<K>(records, account, name.as_deref())
            && other.id != record.id
        {
            return Err(taken(other));
        }
        let mut changed = record.clone();
        let access = &mut changed.access;
        if let Some(list) = &changes.allowed_services {
            access.allowed_services = checked_list(records, account, "allowed_services", list)?;
        }
        access.enabled = changes.enabled.unwrap_or(access.enabled);
        access.name = name.clone().or(access.name.take());
        let before = record.managed_by.as_ref();
        changed.managed_by = manager_after(changes.managed_by.as_deref(), before)?;
        if changed == *record {
            return Ok(Plan::already(K::view(&changed)));
        }
        Ok(Plan {
            action: K::ACTIONS.change,
            account: Some(account.clone()),
            target: record.id.to_string(),
            detail: json!(changes),
            output: K::view(&changed),
            steps: vec![K::put(changed)],
        })
    })
}

/// Replaces the secret; the old one is refused from now on.
pub fn rotate<K: SecretKind>(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
) -> Result<K::NewView, ControlError> {
    control.change(actor, |records, _| {
        let mut record = find::<K>(records, account, id)?.clone();
        let secret = fresh_secret::<K>();
        record.access.secret = SecretHash::of(secret.reveal());
        Ok(Plan {
            action: K::ACTIONS.rotate,
            account: Some(record.access.account.clone()),
            target: record.id.to_string(),
            detail: json!({}),
            output: K::new_view(&record, Some(&secret)),
            steps: vec![K::put(record)],
        })
    })
}

/// Deletes a secret.
pub fn delete<K: SecretKind>(
    control: &Control,
    actor: &Actor,
    account: &str,
    id: &str,
) -> Result<(), ControlError> {
    control.change(actor, |records, _| {
        let record = find::<K>(records, account, id)?;
        Ok(Plan {
            steps: vec![K::delete(record.id.clone())],
            action: K::ACTIONS.delete,
            account: Some(record.access.account.clone()),
            target: record.id.to_string(),
            detail: json!({}),
            output: (),
        })
    })
}

fn find<'a, K: SecretKind>(
    records: &'a Records,
    account: &str,
    id: &str,
) -> Result<&'a CallerSecretRecord<K>, ControlError> {
    let account = &account::find(records, account)?.id;
    K::all(records)
        .get(id)
        .filter(|record| record.access.account == *account)
        .ok_or_else(|| ControlError::not_found(K::NAME, id))
}

fn named<'a, K: SecretKind>(
    records: &'a Records,
    account: &AccountId,
    name: Option<&str>,
) -> Option<&'a CallerSecretRecord<K>> {
    let name = name?;
    K::all(records).values().find(|record| {
        record.access.account == *account && record.access.name.as_deref() == Some(name)
    })
}

fn taken<K: SecretKind>(existing: &CallerSecretRecord<K>) -> ControlError {
    let kind = K::NAME;
    let id = &existing.id;
    ControlError::Conflict(format!(
        "{kind} {id} has this name and other settings; change it, or choose another name"
    ))
}

fn fresh_secret<K: SecretKind>() -> Secret {
    Secret::new(format!("{}{}", K::SECRET_PREFIX, new_secret().reveal()))
}
