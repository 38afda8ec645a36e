//! Records, the collection of all records in memory, and the directory that is made of it. The
//! control plane checks changes; records only hold data.
//!
//! A kind of record is a file of this folder and a line in the list of kinds below.

mod account;
mod acme;
mod agent;
mod authority;
mod caller_secret;
mod deleted_account;
mod domain;
mod enrollment_token;
mod incarnation;
mod service;
mod signing_key;
mod ticket_key;

use std::collections::BTreeMap;
use std::fmt::Display;

use gw_base::service::hostname::Region;
use gw_shared::id::{ClientId, KeyId};
use gw_shared::identity::secret::Secret;
use serde::{Deserialize, Serialize};

pub use self::account::{AccountRecord, DomainsMax, TooManyDomains};
pub use self::acme::{AcmeFailures, AcmeLease, AcmeRecord};
pub use self::agent::{Agent, AgentRecord, EnrollmentRecord, PublicKeyHash};
pub use self::authority::{AuthorityRecord, AuthorityRole};
pub use self::caller_secret::{CallerSecretRecord, SecretAccess};
pub use self::deleted_account::DeletedAccountRecord;
pub use self::domain::{
    Domain, DomainCertificate, DomainCertificateSource, DomainChallenge, DomainChallengeKind,
    DomainMaterial, DomainOrder, DomainRecord, DomainState, ServedPair,
};
pub use self::enrollment_token::{Approval, EnrollmentTokenRecord};
pub use self::incarnation::{Incarnation, label_of};
pub use self::service::{Captures, Service, ServicePath, ServiceRecord};
pub use self::signing_key::{SigningKey, SigningKeyRecord};
pub use self::ticket_key::TicketKeyRecord;
use super::StoreError;

/// A kind of record.
pub trait RecordKind: Sized {
    /// Identity of a record, unique among the records of this kind.
    type Id: Clone + Ord + Display;
    /// What the directory holds of the records of this kind; `()` if admission does not use them.
    type Index: Clone + Default;

    /// What a restored backup says of the records of this kind, which it deletes; `None` if it
    /// keeps them.
    const DELETED_BY_RESTORE: Option<&'static str> = None;
    /// Whether a record can contain a secret as it is, which is sealed in the store. Of other
    /// secrets only hashes are stored.
    const HAS_SECRET: bool = false;

    /// Returns the identity of the record.
    fn id(&self) -> Self::Id;

    /// The secret that is sealed in the store; `None` if the record has none.
    fn secret_mut(&mut self) -> Option<&mut Secret> {
        None
    }

    /// Indexes a record that is new or changed.
    fn put_into(&self, _directory: &mut Directory, _all: &Indexing<'_>) {}

    /// Removes a record from the directory.
    fn remove_from(_id: &Self::Id, _directory: &mut Directory, _all: &Indexing<'_>) {}

    /// Indexes the records of this kind in a new directory.
    fn fill(records: &BTreeMap<Self::Id, Self>, directory: &mut Directory, all: &Indexing<'_>) {
        for record in records.values() {
            record.put_into(directory, all);
        }
    }

    /// Returns a record with a value in every field.
    #[cfg(test)]
    fn sample() -> Self;
}

/// What a record is indexed with.
pub struct Indexing<'a> {
    /// All records, after the change.
    pub records: &'a Records,
    /// Region of this gateway, for the hostnames of services.
    pub region: &'a Region,
    /// Number of workers.
    pub workers: usize,
}

/// Records of one kind that a restored backup does not keep.
pub struct NotRestored {
    /// Name of the kind in the store, for example `enrollment_token`.
    pub kind: &'static str,
    /// See [`RecordKind::DELETED_BY_RESTORE`].
    pub notice: &'static str,
    /// Identities of the records of this kind.
    pub ids: Vec<RecordId>,
}

/// Declares the kinds of records: name in the store, place in [`Records`] and in [`Directory`],
/// variant of [`StoredRecord`] and of [`RecordId`], type.
macro_rules! kinds {
    ($($name:literal $place:ident $variant:ident($record:ty);)*) => {
        /// One record of any kind.
        #[derive(Debug, Clone, Serialize, Deserialize)]
        pub enum StoredRecord {
            $(
                #[doc = concat!("Record of the kind `", $name, "`.")]
                #[serde(rename = $name)]
                $variant($record),
            )*
        }

        /// The identity of a record.
        #[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum RecordId {
            $(
                #[doc = concat!("Identity of a record of the kind `", $name, "`.")]
                #[serde(rename = $name)]
                $variant(<$record as RecordKind>::Id),
            )*
        }

        /// Every record, by identity.
        #[derive(Debug, Clone, Default)]
        pub struct Records {
            $(
                #[doc = concat!("Records of the kind `", $name, "`, by identity.")]
                pub $place: BTreeMap<<$record as RecordKind>::Id, $record>,
            )*
        }

        /// The data that admission needs, indexed for its lookups: the immutable snapshot that
        /// every worker holds a reference to. The maps share their nodes with earlier directories:
        /// a copy takes constant time, and a change of one record logarithmic time.
        #[allow(dead_code, reason = "`()` for kinds that admission does not use")]
        #[derive(Clone, Default)]
        pub struct Directory {
            $($place: <$record as RecordKind>::Index,)*
        }

        impl StoredRecord {
            /// Names of the kinds whose records can contain a secret.
            pub(super) fn kinds_with_secret() -> impl Iterator<Item = &'static str> {
                let all = [$(<$record as RecordKind>::HAS_SECRET.then_some($name),)*];
                all.into_iter().flatten()
            }

            /// Reads a document of the store.
            pub(super) fn read(kind: &str, document: &str) -> Result<Self, StoreError> {
                let record = match kind {
                    $($name => serde_json::from_str(document).map(Self::$variant),)*
                    other => return Err(unknown_kind(other)),
                };
                record.map_err(|error| StoreError::Corrupt(format!("{kind}: {error}")))
            }

            /// The record as JSON for the store.
            pub(super) fn document(&self) -> Result<String, StoreError> {
                match self {
                    $(Self::$variant(record) => serde_json::to_string(record),)*
                }
                .map_err(StoreError::corrupt)
            }

            /// Returns the identity of the record.
            pub fn id(&self) -> RecordId {
                match self {
                    $(Self::$variant(record) => RecordId::$variant(record.id()),)*
                }
            }

            /// The secret that is sealed in the store, with the name that it is bound to.
            pub(super) fn secret_mut(&mut self) -> Option<(String, &mut Secret)> {
                match self {
                    $(Self::$variant(record) => {
                        let id = record.id();
                        record.secret_mut().map(|secret| (format!("{} {id}", $name), secret))
                    })*
                }
            }

            /// One record of each kind.
            #[cfg(test)]
            pub(super) fn samples() -> Vec<Self> {
                vec![$(Self::$variant(RecordKind::sample()),)*]
            }
        }

        impl RecordId {
            /// Reads the columns `kind` and `id` of the store.
            pub(super) fn read(kind: &str, id: &str) -> Result<Self, StoreError> {
                match kind {
                    $($name => id.parse().map(Self::$variant),)*
                    other => return Err(unknown_kind(other)),
                }
                .map_err(StoreError::corrupt)
            }

            /// The columns `kind` and `id` of the store.
            pub fn columns(&self) -> (&'static str, String) {
                match self {
                    $(Self::$variant(id) => ($name, id.to_string()),)*
                }
            }
        }

        impl Records {
            /// Returns the records kind by kind, those of a kind in the order of their identities.
            pub fn into_vec(self) -> Vec<StoredRecord> {
                let mut all = Vec::new();
                $(all.extend(self.$place.into_values().map(StoredRecord::$variant));)*
                all
            }

            /// The records that a restored backup does not keep.
            pub fn not_restored(&self) -> Vec<NotRestored> {
                let mut all = Vec::new();
                $(if let Some(notice) = <$record as RecordKind>::DELETED_BY_RESTORE {
                    let ids = self.$place.keys().cloned().map(RecordId::$variant);
                    all.push(NotRestored { kind: $name, notice, ids: ids.collect() });
                })*
                all
            }

            /// Inserts the record; replaces the record of the same identity.
            pub fn put(&mut self, record: StoredRecord) {
                match record {
                    $(
                        StoredRecord::$variant(record) => {
                            drop(self.$place.insert(record.id(), record));
                        }
                    )*
                }
            }

            /// The record with this identity, if there is one.
            pub(crate) fn get(&self, id: &RecordId) -> Option<StoredRecord> {
                match id {
                    $(
                        RecordId::$variant(id) => {
                            self.$place.get(id).cloned().map(StoredRecord::$variant)
                        }
                    )*
                }
            }

            fn delete(&mut self, id: &RecordId) {
                match id {
                    $(RecordId::$variant(id) => drop(self.$place.remove(id)),)*
                }
            }

            /// Moves the records into as few nodes of the maps as possible. Insertion in ascending
            /// order leaves them half full.
            pub(super) fn compact(&mut self) {
                $(compact(&mut self.$place);)*
            }
        }

        impl Directory {
            /// Indexes `records` for `workers` workers.
            pub fn new(records: &Records, region: &Region, workers: usize) -> Self {
                let mut directory = Self::default();
                let all = Indexing { records, region, workers };
                $(<$record as RecordKind>::fill(&records.$place, &mut directory, &all);)*
                directory
            }

            /// Indexes the records that `steps` have changed. `records` are all records after these
            /// steps.
            pub fn apply(
                &mut self,
                steps: &[Step],
                records: &Records,
                region: &Region,
                workers: usize,
            ) {
                let all = Indexing { records, region, workers };
                for step in steps {
                    match step {
                        $(
                            Step::Put(StoredRecord::$variant(record)) => {
                                record.put_into(self, &all);
                            }
                            Step::Delete(RecordId::$variant(id)) => {
                                <$record as RecordKind>::remove_from(id, self, &all);
                            }
                        )*
                    }
                }
            }
        }
    };
}

kinds! {
    "account" accounts Account(AccountRecord);
    "service" services Service(ServiceRecord);
    "credential" credentials Credential(CallerSecretRecord<ClientId>);
    "service_key" service_keys ServiceKey(CallerSecretRecord<KeyId>);
    "enrollment_token" enrollment_tokens EnrollmentToken(EnrollmentTokenRecord);
    "agent" agents Agent(AgentRecord);
    "signing_key" signing_keys SigningKey(SigningKeyRecord);
    "acme" acme Acme(AcmeRecord);
    "authority" authorities Authority(AuthorityRecord);
    "ticket_key" ticket_keys TicketKey(TicketKeyRecord);
    "domain" domains Domain(DomainRecord);
    "deleted_account" deleted_accounts DeletedAccount(DeletedAccountRecord);
}

/// Fills the nodes of `map`, as [`BTreeMap::append`] does unless one of the maps is empty.
fn compact<K: Ord, V>(map: &mut BTreeMap<K, V>) {
    if let Some(last) = map.pop_last() {
        map.append(&mut BTreeMap::from([last]));
    }
}

fn unknown_kind(kind: &str) -> StoreError {
    StoreError::Corrupt(format!(
        "unknown kind of record {kind:?}: a later version of the program has written it; start \
         that version again, or restore a backup from before"
    ))
}

/// One step of a change. The steps of a change take effect together or not at all.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(
    clippy::large_enum_variant,
    reason = "nearly all steps put a record, and none lives longer than its change"
)]
pub enum Step {
    /// Creates or replaces the record of the same identity.
    Put(StoredRecord),
    /// Deletes the record with this identity, if it exists.
    Delete(RecordId),
}

impl FromIterator<StoredRecord> for Records {
    fn from_iter<T: IntoIterator<Item = StoredRecord>>(all: T) -> Self {
        let mut records = Self::default();
        all.into_iter().for_each(|record| records.put(record));
        records
    }
}

impl Records {
    /// Applies one step of a change.
    pub fn apply(&mut self, step: Step) {
        match step {
            Step::Put(record) => self.put(record),
            Step::Delete(id) => self.delete(&id),
        }
    }
}

#[cfg(test)]
mod tests;
