//! Caller secrets: credentials and service keys.

use std::collections::BTreeSet;

use gw_base::clock::Timestamp;
use gw_shared::id::{AccountId, ClientId, KeyId, ServiceId};
use gw_shared::identity::secret::SecretHash;
use rpds::HashTrieMapSync;
use serde::{Deserialize, Serialize};

use super::{Directory, Indexing, RecordKind, Service};

/// The access that a caller secret gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretAccess {
    pub account: AccountId,
    /// Display name; unique among the records of one kind in an account.
    #[serde(default)]
    pub name: Option<String>,
    pub secret: SecretHash,
    pub allowed_services: BTreeSet<ServiceId>,
    pub enabled: bool,
    #[serde(default)]
    pub created_at: Timestamp,
}

/// A caller secret. With a [`ClientId`] it is a credential: an OAuth client that mints access tokens. With a [`KeyId`] it
/// is a service key, which callers send with each request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallerSecretRecord<Id> {
    pub id: Id,
    #[serde(flatten)]
    pub access: SecretAccess,
}

impl RecordKind for CallerSecretRecord<ClientId> {
    type Id = ClientId;
    type Index = HashTrieMapSync<ClientId, SecretAccess>;

    fn id(&self) -> ClientId {
        self.id.clone()
    }

    fn put_into(&self, directory: &mut Directory, _: &Indexing<'_>) {
        directory
            .credentials
            .insert_mut(self.id.clone(), self.access.clone());
    }

    fn remove_from(id: &ClientId, directory: &mut Directory, _: &Indexing<'_>) {
        directory.credentials.remove_mut(id);
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: ClientId::random(),
            access: SecretAccess::sample(),
        }
    }
}

impl RecordKind for CallerSecretRecord<KeyId> {
    type Id = KeyId;
    type Index = HashTrieMapSync<KeyId, SecretAccess>;

    fn id(&self) -> KeyId {
        self.id.clone()
    }

    fn put_into(&self, directory: &mut Directory, _: &Indexing<'_>) {
        directory
            .service_keys
            .insert_mut(self.id.clone(), self.access.clone());
    }

    fn remove_from(id: &KeyId, directory: &mut Directory, _: &Indexing<'_>) {
        directory.service_keys.remove_mut(id);
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            id: KeyId::random(),
            access: SecretAccess::sample(),
        }
    }
}

impl SecretAccess {
    /// Whether the secret gives access to `service`.
    pub fn permits(&self, service: &Service) -> bool {
        self.enabled
            && self.account == service.account
            && self.allowed_services.contains(&service.id)
    }

    #[cfg(test)]
    fn sample() -> Self {
        Self {
            account: AccountId::new("acme").unwrap(),
            name: Some("it's \"mine\"".into()),
            secret: SecretHash::of("x"),
            allowed_services: super::tests::services(),
            enabled: false,
            created_at: Timestamp(5),
        }
    }
}

impl Directory {
    pub fn service_key(&self, id: &str) -> Option<(&KeyId, &SecretAccess)> {
        self.service_keys.get_key_value(id)
    }

    pub fn credential(&self, id: &str) -> Option<(&ClientId, &SecretAccess)> {
        self.credentials.get_key_value(id)
    }
}
