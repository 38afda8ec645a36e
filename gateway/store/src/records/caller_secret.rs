//! Caller secrets: credentials and service keys.

use std::collections::BTreeSet;

use gw_base::clock::Timestamp;
use gw_shared::id::{AccountId, ClientId, KeyId, ManagerName, ServiceId};
use gw_shared::identity::secret::SecretHash;
use gw_shared::version::later_members::LaterMembers;
use rpds::HashTrieMapSync;
use serde::{Deserialize, Serialize};

use super::{Directory, Indexing, RecordKind, Service};

/// The access that a caller secret gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretAccess {
    /// Account that the secret belongs to.
    pub account: AccountId,
    /// Display name; unique among the records of one kind in an account.
    #[serde(default)]
    pub name: Option<String>,
    /// Hash of the secret.
    pub secret: SecretHash,
    /// Services of the account that the secret gives access to.
    pub allowed_services: BTreeSet<ServiceId>,
    /// Whether the secret is accepted.
    pub enabled: bool,
    /// Time of creation; 0 in records of earlier versions.
    #[serde(default)]
    pub created_at: Timestamp,
}

/// A caller secret. With a [`ClientId`] it is a credential: an OAuth client that mints access
/// tokens. With a [`KeyId`] it is a service key, which callers send with each request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallerSecretRecord<Id> {
    /// Public part of the secret: client id or key id.
    pub id: Id,
    /// Hash of the secret, and the access that it gives.
    #[serde(flatten)]
    pub access: SecretAccess,
    /// What manages the record by documents; `None` if nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_by: Option<ManagerName>,
    /// Members of a later version.
    #[serde(flatten)]
    pub later: LaterMembers,
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
            managed_by: ManagerName::new("git").ok(),
            later: LaterMembers::default(),
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
            managed_by: ManagerName::new("git").ok(),
            later: LaterMembers::default(),
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
    /// Returns the service key with this key id.
    pub fn service_key(&self, id: &str) -> Option<(&KeyId, &SecretAccess)> {
        self.service_keys.get_key_value(id)
    }

    /// Returns the credential with this client id.
    pub fn credential(&self, id: &str) -> Option<(&ClientId, &SecretAccess)> {
        self.credentials.get_key_value(id)
    }
}
