//! Caller secrets: credentials and service keys, managed by the same rules.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use gw_shared::id::{AccountId, ClientId, KeyId, ServiceId};
use gw_shared::identity::secret::{Secret, SecretHash};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::service::{ServiceIdText, checked_list};
use super::{Actor, Control, ControlError, Plan, account, checked_name, new_secret};
use crate::auth::service_key;
use crate::page::{Page, PageQuery};
use crate::store::{CredentialRecord, Record, Records, SecretAccess, ServiceKeyRecord, Step};

/// A record with an id, a secret and the services that the secret gives access to.
pub trait CallerSecret: Clone {
    type Id: Clone + Ord + fmt::Display + Borrow<str>;
    /// View without the secret.
    type View;
    /// View with the secret, returned when the secret is created or rotated.
    type NewView;

    #[doc(hidden)]
    const KIND: &'static str;
    #[doc(hidden)]
    const ACTIONS: Actions;

    #[doc(hidden)]
    fn of(records: &Records) -> &BTreeMap<Self::Id, Self>;
    #[doc(hidden)]
    fn new(access: SecretAccess) -> Self;
    fn id(&self) -> &Self::Id;
    fn access(&self) -> &SecretAccess;
    #[doc(hidden)]
    fn access_mut(&mut self) -> &mut SecretAccess;
    #[doc(hidden)]
    fn into_record(self) -> Record;
    fn view(&self) -> Self::View;
    #[doc(hidden)]
    fn new_view(&self, secret: Option<&Secret>) -> Self::NewView;
    fn id_of(view: &Self::NewView) -> String;
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
    #[schema(value_type = String)]
    pub client_id: ClientId,
    #[schema(value_type = String)]
    pub account: AccountId,
    pub name: Option<String>,
    #[schema(value_type = Vec<String>)]
    pub allowed_services: BTreeSet<ServiceId>,
    pub enabled: bool,
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// A credential, and its secret when it was made just now.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = NewCredential)]
pub struct NewCredentialView {
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
    #[schema(value_type = String)]
    pub key_id: KeyId,
    #[schema(value_type = String)]
    pub account: AccountId,
    pub name: Option<String>,
    #[schema(value_type = Vec<String>)]
    pub allowed_services: BTreeSet<ServiceId>,
    pub enabled: bool,
    #[schema(format = DateTime)]
    pub created_at: String,
}

/// A service key, and its full text when it was made just now.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = NewServiceKey)]
pub struct NewServiceKeyView {
    #[serde(flatten)]
    pub key: ServiceKeyView,
    /// `gw_sk_{key_id}.{secret}`. Shown this once. Absent if a key of this name was there already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_key: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = NewGrant)]
#[serde(deny_unknown_fields)]
pub struct NewCallerSecret {
    /// Name for administrators. Creating a second one of the same name changes nothing and returns the existing one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 100, pattern = r"^[^\p{C}\s]([^\p{C}]*[^\p{C}\s])?$")]
    pub name: Option<String>,
    /// Services of the account that it opens.
    #[schema(value_type = Vec<ServiceIdText>, max_items = 500)]
    pub allowed_services: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Changes. Omitted members keep their values.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = GrantChanges)]
#[serde(deny_unknown_fields)]
pub struct CallerSecretChanges {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 100, pattern = r"^[^\p{C}\s]([^\p{C}]*[^\p{C}\s])?$")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<ServiceIdText>>, max_items = 500)]
    pub allowed_services: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

impl CallerSecret for CredentialRecord {
    type Id = ClientId;
    type View = CredentialView;
    type NewView = NewCredentialView;

    const KIND: &'static str = "credential";
    const ACTIONS: Actions = Actions {
        create: "credential.create",
        change: "credential.change",
        rotate: "credential.rotate_secret",
        delete: "credential.delete",
    };

    fn of(records: &Records) -> &BTreeMap<ClientId, Self> {
        &records.credentials
    }

    fn new(access: SecretAccess) -> Self {
        Self { id: ClientId::random(), access }
    }

    fn id(&self) -> &ClientId {
        &self.id
    }

    fn access(&self) -> &SecretAccess {
        &self.access
    }

    fn access_mut(&mut self) -> &mut SecretAccess {
        &mut self.access
    }

    fn into_record(self) -> Record {
        Record::Credential(self)
    }

    fn view(&self) -> CredentialView {
        CredentialView {
            client_id: self.id.clone(),
            account: self.access.account.clone(),
            name: self.access.name.clone(),
            allowed_services: self.access.allowed_services.clone(),
            enabled: self.access.enabled,
            created_at: self.access.created_at.to_string(),
        }
    }

    fn new_view(&self, secret: Option<&Secret>) -> NewCredentialView {
        NewCredentialView { credential: self.view(), client_secret: secret.map(|secret| secret.reveal().to_owned()) }
    }

    fn id_of(view: &NewCredentialView) -> String {
        view.credential.client_id.to_string()
    }
}

impl CallerSecret for ServiceKeyRecord {
    type Id = KeyId;
    type View = ServiceKeyView;
    type NewView = NewServiceKeyView;

    const KIND: &'static str = "service key";
    const ACTIONS: Actions = Actions {
        create: "service_key.create",
        change: "service_key.change",
        rotate: "service_key.rotate_secret",
        delete: "service_key.delete",
    };

    fn of(records: &Records) -> &BTreeMap<KeyId, Self> {
        &records.service_keys
    }

    fn new(access: SecretAccess) -> Self {
        Self { id: KeyId::random(), access }
    }

    fn id(&self) -> &KeyId {
        &self.id
    }

    fn access(&self) -> &SecretAccess {
        &self.access
    }

    fn access_mut(&mut self) -> &mut SecretAccess {
        &mut self.access
    }

    fn into_record(self) -> Record {
        Record::ServiceKey(self)
    }

    fn view(&self) -> ServiceKeyView {
        ServiceKeyView {
            key_id: self.id.clone(),
            account: self.access.account.clone(),
            name: self.access.name.clone(),
            allowed_services: self.access.allowed_services.clone(),
            enabled: self.access.enabled,
            created_at: self.access.created_at.to_string(),
        }
    }

    fn new_view(&self, secret: Option<&Secret>) -> NewServiceKeyView {
        NewServiceKeyView {
            key: self.view(),
            service_key: secret.map(|secret| service_key::text(&self.id, secret.reveal())),
        }
    }

    fn id_of(view: &NewServiceKeyView) -> String {
        view.key.key_id.to_string()
    }
}

/// A client secret is `gw_cs_` and 43 base62 characters; the secret part of a service key has no prefix.
fn secret_of<G: CallerSecret>() -> Secret {
    let secret = new_secret();
    if G::KIND == CredentialRecord::KIND { Secret::new(format!("gw_cs_{}", secret.reveal())) } else { secret }
}

impl Control {
    /// Creates a credential or service key; the flag says whether it was created. Only the returned view holds the
    /// secret.
    pub fn create_caller_secret<G: CallerSecret>(
        &self,
        actor: &Actor,
        account: &str,
        new: &NewCallerSecret,
    ) -> Result<(G::NewView, bool), ControlError> {
        let name = new.name.as_deref().map(checked_name).transpose()?;
        self.change(actor, |records, now| {
            let account = &account::find(records, account)?.id;
            let allowed_services = checked_list(records, account, "allowed_services", &new.allowed_services)?;
            let enabled = new.enabled.unwrap_or(true);
            if let Some(existing) = named::<G>(records, account, name.as_deref()) {
                let access = existing.access();
                if access.allowed_services != allowed_services || access.enabled != enabled {
                    return Err(taken::<G>(existing));
                }
                return Ok(Plan::already((existing.new_view(None), false)));
            }
            let secret = secret_of::<G>();
            let record = G::new(SecretAccess {
                account: account.clone(),
                name,
                secret: SecretHash::of(secret.reveal()),
                allowed_services,
                enabled,
                created_at: now,
            });
            Ok(Plan {
                action: G::ACTIONS.create,
                account: Some(account.clone()),
                target: record.id().to_string(),
                detail: json!(new),
                output: (record.new_view(Some(&secret)), true),
                steps: vec![Step::Put(record.into_record())],
            })
        })
    }

    pub fn caller_secrets<G: CallerSecret>(
        &self,
        account: &str,
        query: &PageQuery,
    ) -> Result<Page<G::View>, ControlError> {
        let state = self.state();
        let account = &account::find(&state.records, account)?.id;
        let records = G::of(&state.records).values().filter(|record| record.access().account == *account);
        Ok(Page::of(records, |record| record.id().borrow(), query, |record| record.view())?)
    }

    pub fn caller_secret<G: CallerSecret>(&self, account: &str, id: &str) -> Result<G::View, ControlError> {
        find::<G>(&self.state().records, account, id).map(G::view)
    }

    pub fn change_caller_secret<G: CallerSecret>(
        &self,
        actor: &Actor,
        account: &str,
        id: &str,
        changes: &CallerSecretChanges,
    ) -> Result<G::View, ControlError> {
        let name = changes.name.as_deref().map(checked_name).transpose()?;
        self.change(actor, |records, _| {
            let record = find::<G>(records, account, id)?;
            let account = &record.access().account;
            if let Some(other) = named::<G>(records, account, name.as_deref())
                && other.id() != record.id()
            {
                return Err(taken::<G>(other));
            }
            let mut changed = record.clone();
            let access = changed.access_mut();
            if let Some(list) = &changes.allowed_services {
                access.allowed_services = checked_list(records, account, "allowed_services", list)?;
            }
            access.enabled = changes.enabled.unwrap_or(access.enabled);
            access.name = name.or(access.name.take());
            if changed.access() == record.access() {
                return Ok(Plan::already(changed.view()));
            }
            Ok(Plan {
                action: G::ACTIONS.change,
                account: Some(account.clone()),
                target: record.id().to_string(),
                detail: json!(changes),
                output: changed.view(),
                steps: vec![Step::Put(changed.into_record())],
            })
        })
    }

    /// Replaces the secret; the old one is refused from now on.
    pub fn rotate_secret<G: CallerSecret>(
        &self,
        actor: &Actor,
        account: &str,
        id: &str,
    ) -> Result<G::NewView, ControlError> {
        self.change(actor, |records, _| {
            let mut record = find::<G>(records, account, id)?.clone();
            let secret = secret_of::<G>();
            record.access_mut().secret = SecretHash::of(secret.reveal());
            Ok(Plan {
                action: G::ACTIONS.rotate,
                account: Some(record.access().account.clone()),
                target: record.id().to_string(),
                detail: json!({}),
                output: record.new_view(Some(&secret)),
                steps: vec![Step::Put(record.into_record())],
            })
        })
    }

    pub fn delete_caller_secret<G: CallerSecret>(
        &self,
        actor: &Actor,
        account: &str,
        id: &str,
    ) -> Result<(), ControlError> {
        self.change(actor, |records, _| {
            let record = find::<G>(records, account, id)?;
            Ok(Plan {
                steps: vec![Step::Delete(record.clone().into_record().id())],
                action: G::ACTIONS.delete,
                account: Some(record.access().account.clone()),
                target: record.id().to_string(),
                detail: json!({}),
                output: (),
            })
        })
    }
}

fn find<'a, G: CallerSecret>(records: &'a Records, account: &str, id: &str) -> Result<&'a G, ControlError> {
    let account = &account::find(records, account)?.id;
    G::of(records)
        .get(id)
        .filter(|record| record.access().account == *account)
        .ok_or_else(|| ControlError::not_found(G::KIND, id))
}

fn named<'a, G: CallerSecret>(records: &'a Records, account: &AccountId, name: Option<&str>) -> Option<&'a G> {
    let name = name?;
    G::of(records)
        .values()
        .find(|record| record.access().account == *account && record.access().name.as_deref() == Some(name))
}

fn taken<G: CallerSecret>(existing: &G) -> ControlError {
    let (kind, id) = (G::KIND, existing.id());
    ControlError::Conflict(format!("{kind} {id} has this name and other settings; change it, or choose another name"))
}
