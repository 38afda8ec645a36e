//! The records and the collection of all records in memory. The control plane checks changes; records only hold data.

use std::collections::{BTreeMap, BTreeSet};

use gw_shared::id::{
    AccountId, AgentId, AuthorityId, ClientId, EnrollmentId, EnrollmentTokenId, KeyId, ServiceId,
    SigningKeyId,
};
use gw_shared::identity::enrollment::EnrollmentStatus;
use gw_shared::identity::secret::{Secret, SecretHash};
use serde::{Deserialize, Serialize};

use crate::affinity::Affinity;
use crate::clock::Timestamp;
use crate::rate::Rate;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountRecord {
    pub id: AccountId,
    /// The plan of the account includes the capture of bodies.
    #[serde(default)]
    pub capture_allowed: bool,
    pub created_at: Timestamp,
}

/// Ways in which callers of a service may authenticate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Modes {
    pub jwt: bool,
    pub service_key: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceRecord {
    pub account: AccountId,
    pub id: ServiceId,
    pub modes: Modes,
    pub enabled: bool,
    pub rate: Rate,
    #[serde(default)]
    pub request_logging: bool,
    #[serde(default)]
    pub capture_request_body: bool,
    #[serde(default)]
    pub capture_response_body: bool,
    #[serde(default)]
    pub created_at: Timestamp,
    /// A safe request that may have reached a backend is tried once more on another agent.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub retries: bool,
    #[serde(default, skip_serializing_if = "Affinity::is_none")]
    pub affinity: Affinity,
}

fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}

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

/// Whether an agent that enrolls has to wait for an administrator.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Approval {
    #[default]
    Auto,
    Manual,
}

/// Lets agents enroll, each once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrollmentTokenRecord {
    pub id: EnrollmentTokenId,
    pub account: AccountId,
    pub secret: SecretHash,
    pub services: BTreeSet<ServiceId>,
    pub approval: Approval,
    /// Its agents are ephemeral, see [`AgentRecord::ephemeral`].
    #[serde(default)]
    pub ephemeral: bool,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
    /// Number of agents that may use it.
    #[serde(default = "once")]
    pub uses: u32,
    /// Number of agents that have used it; absent in records of earlier versions.
    #[serde(default)]
    pub used: u32,
    /// The last agent that used it. Earlier versions know only this: they take a token with it for used up.
    pub used_by: Option<AgentId>,
}

fn once() -> u32 {
    1
}

impl EnrollmentTokenRecord {
    /// Number of agents that have used the token.
    pub fn times_used(&self) -> u32 {
        self.used.max(u32::from(self.used_by.is_some()))
    }

    pub fn is_used_up(&self) -> bool {
        self.times_used() >= self.uses
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRecord {
    pub id: AgentId,
    pub account: AccountId,
    pub name: String,
    pub services: BTreeSet<ServiceId>,
    pub status: EnrollmentStatus,
    /// Gets requests only while no other agent of the service can take them. An agent can also say so itself.
    #[serde(default)]
    pub standby: bool,
    /// The agent is deleted when it has had no tunnel for an hour, as those of pods without a volume.
    #[serde(default)]
    pub ephemeral: bool,
    /// When an ephemeral agent was first seen without a tunnel; `None` while it has one.
    #[serde(default)]
    pub absent_since: Option<Timestamp>,
    /// The token that it enrolled with, which may no longer exist.
    #[serde(default)]
    pub enrollment_token: Option<EnrollmentTokenId>,
    /// The version that the agent reported at enrollment.
    #[serde(default)]
    pub version: Option<String>,
    /// Present until the first certificate, and for some time after it in case the reply is lost.
    #[serde(default)]
    pub enrollment: Option<Box<EnrollmentRecord>>,
    /// Key of the newest certificate.
    #[serde(default)]
    pub key: Option<PublicKeyHash>,
    /// Key of the previous certificate, until a tunnel has used the newest one: an agent that never received that still
    /// uses it.
    #[serde(default)]
    pub previous_key: Option<PublicKeyHash>,
    /// Expiry of the newest certificate.
    #[serde(default)]
    pub certificate_not_after: Option<Timestamp>,
    /// Authority that has issued the newest certificate; absent in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<AuthorityId>,
    #[serde(default)]
    pub created_at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrollmentRecord {
    pub id: EnrollmentId,
    pub secret: SecretHash,
    /// Time from which the enrollment secret is refused.
    pub expires_at: Timestamp,
}

/// SHA-256 of a public key's SubjectPublicKeyInfo, used to recognise the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PublicKeyHash(String);

impl PublicKeyHash {
    pub fn of(subject_public_key_info: &[u8]) -> Self {
        use base64::Engine;
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, subject_public_key_info);
        Self(base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(digest))
    }
}

/// A key that signs access tokens, from its `active_from` to that of the next key.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SigningKeyRecord {
    pub id: SigningKeyId,
    /// Ed25519, PKCS #8, base64url. As sensitive as the authority's key in the data folder.
    #[serde(with = "gw_shared::identity::secret::revealed")]
    pub private_key: Secret,
    pub created_at: Timestamp,
    pub active_from: Timestamp,
}

/// An authority of agents and nodes. There are none until the authority of the data folder is replaced for the first time; from
/// then on, only these count.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AuthorityRecord {
    pub id: AuthorityId,
    pub role: AuthorityRole,
    /// PEM.
    pub certificate: String,
    /// PKCS #8, PEM. Present while the authority issues certificates, or will.
    #[serde(with = "gw_shared::identity::secret::revealed_if_present", default)]
    pub private_key: Option<Secret>,
    pub created_at: Timestamp,
}

/// What an authority is for. Its role changes from top to bottom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AuthorityRole {
    /// Trusted, and issues nothing until every node trusts it.
    Next,
    /// Issues all certificates.
    Issuing,
    /// Trusted, and issues nothing any more.
    Earlier,
    /// Not trusted any more. Its certificates count as expired, so that their agents ask for others.
    Ended,
}

/// One record of any kind.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredRecord {
    Account(AccountRecord),
    Service(ServiceRecord),
    Credential(CallerSecretRecord<ClientId>),
    ServiceKey(CallerSecretRecord<KeyId>),
    EnrollmentToken(EnrollmentTokenRecord),
    Agent(AgentRecord),
    SigningKey(SigningKeyRecord),
    Authority(AuthorityRecord),
}

/// The identity of a record.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordId {
    Account(AccountId),
    Service(AccountId, ServiceId),
    Credential(ClientId),
    ServiceKey(KeyId),
    EnrollmentToken(EnrollmentTokenId),
    Agent(AgentId),
    SigningKey(SigningKeyId),
    Authority(AuthorityId),
}

/// One step of a change. The steps of a change take effect together or not at all.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Creates or replaces the record of the same identity.
    Put(StoredRecord),
    Delete(RecordId),
}

/// Every record, by identity.
#[derive(Debug, Clone, Default)]
pub struct Records {
    pub accounts: BTreeMap<AccountId, AccountRecord>,
    pub services: BTreeMap<(AccountId, ServiceId), ServiceRecord>,
    pub credentials: BTreeMap<ClientId, CallerSecretRecord<ClientId>>,
    pub service_keys: BTreeMap<KeyId, CallerSecretRecord<KeyId>>,
    pub enrollment_tokens: BTreeMap<EnrollmentTokenId, EnrollmentTokenRecord>,
    pub agents: BTreeMap<AgentId, AgentRecord>,
    pub signing_keys: BTreeMap<SigningKeyId, SigningKeyRecord>,
    pub authorities: BTreeMap<AuthorityId, AuthorityRecord>,
}

impl StoredRecord {
    pub fn id(&self) -> RecordId {
        match self {
            Self::Account(record) => RecordId::Account(record.id.clone()),
            Self::Service(record) => RecordId::Service(record.account.clone(), record.id.clone()),
            Self::Credential(record) => RecordId::Credential(record.id.clone()),
            Self::ServiceKey(record) => RecordId::ServiceKey(record.id.clone()),
            Self::EnrollmentToken(record) => RecordId::EnrollmentToken(record.id.clone()),
            Self::Agent(record) => RecordId::Agent(record.id.clone()),
            Self::SigningKey(record) => RecordId::SigningKey(record.id.clone()),
            Self::Authority(record) => RecordId::Authority(record.id.clone()),
        }
    }

    /// The secret of a record that is stored as it is, with its name; `None` if there is none. Of other secrets only hashes are
    /// stored.
    pub(super) fn secret_mut(&mut self) -> Option<(String, &mut Secret)> {
        match self {
            Self::SigningKey(key) => {
                Some((format!("signing_key {}", key.id), &mut key.private_key))
            }
            Self::Authority(authority) => {
                let name = format!("authority {}", authority.id);
                authority.private_key.as_mut().map(|key| (name, key))
            }
            _ => None,
        }
    }
}

impl Step {
    /// Whether the step changes the authorities of agents and nodes.
    pub(crate) fn is_of_authority(&self) -> bool {
        matches!(
            self,
            Self::Put(StoredRecord::Authority(_)) | Self::Delete(RecordId::Authority(_))
        )
    }
}

impl FromIterator<StoredRecord> for Records {
    fn from_iter<T: IntoIterator<Item = StoredRecord>>(all: T) -> Self {
        let mut records = Self::default();
        all.into_iter().for_each(|record| records.put(record));
        records
    }
}

impl Records {
    pub fn into_vec(self) -> Vec<StoredRecord> {
        let Self {
            accounts,
            services,
            credentials,
            service_keys,
            enrollment_tokens,
            agents,
            signing_keys,
            authorities,
        } = self;
        let mut all: Vec<StoredRecord> =
            accounts.into_values().map(StoredRecord::Account).collect();
        all.extend(services.into_values().map(StoredRecord::Service));
        all.extend(credentials.into_values().map(StoredRecord::Credential));
        all.extend(service_keys.into_values().map(StoredRecord::ServiceKey));
        all.extend(
            enrollment_tokens
                .into_values()
                .map(StoredRecord::EnrollmentToken),
        );
        all.extend(agents.into_values().map(StoredRecord::Agent));
        all.extend(signing_keys.into_values().map(StoredRecord::SigningKey));
        all.extend(authorities.into_values().map(StoredRecord::Authority));
        all
    }

    /// The services of an account, by id.
    pub fn services_of(&self, account: &AccountId) -> impl Iterator<Item = &ServiceRecord> {
        let of_account = self
            .services
            .range((account.clone(), ServiceId::lower_bound())..);
        of_account
            .map(|(_, record)| record)
            .take_while(|record| record.account == *account)
    }

    pub fn apply(&mut self, step: Step) {
        match step {
            Step::Put(record) => self.put(record),
            Step::Delete(id) => self.delete(&id),
        }
    }

    pub fn put(&mut self, record: StoredRecord) {
        match record {
            StoredRecord::Account(record) => drop(self.accounts.insert(record.id.clone(), record)),
            StoredRecord::Service(record) => {
                drop(
                    self.services
                        .insert((record.account.clone(), record.id.clone()), record),
                );
            }
            StoredRecord::Credential(record) => {
                drop(self.credentials.insert(record.id.clone(), record))
            }
            StoredRecord::ServiceKey(record) => {
                drop(self.service_keys.insert(record.id.clone(), record))
            }
            StoredRecord::EnrollmentToken(record) => {
                drop(self.enrollment_tokens.insert(record.id.clone(), record))
            }
            StoredRecord::Agent(record) => drop(self.agents.insert(record.id.clone(), record)),
            StoredRecord::SigningKey(record) => {
                drop(self.signing_keys.insert(record.id.clone(), record))
            }
            StoredRecord::Authority(record) => {
                drop(self.authorities.insert(record.id.clone(), record))
            }
        }
    }

    fn delete(&mut self, id: &RecordId) {
        match id {
            RecordId::Account(id) => drop(self.accounts.remove(id)),
            RecordId::Service(account, id) => {
                drop(self.services.remove(&(account.clone(), id.clone())))
            }
            RecordId::Credential(id) => drop(self.credentials.remove(id)),
            RecordId::ServiceKey(id) => drop(self.service_keys.remove(id)),
            RecordId::EnrollmentToken(id) => drop(self.enrollment_tokens.remove(id)),
            RecordId::Agent(id) => drop(self.agents.remove(id)),
            RecordId::SigningKey(id) => drop(self.signing_keys.remove(id)),
            RecordId::Authority(id) => drop(self.authorities.remove(id)),
        }
    }
}
