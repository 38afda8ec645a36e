//! What is kept: accounts, services, service keys, agents. An interface, with SQLite as its first implementation, and
//! the snapshots that workers read instead of a database.

mod directory;
mod sqlite;

use gw_shared::id::{AccountId, AgentId, KeyId, ServiceId};
use gw_shared::secret::SecretHash;

pub use directory::{Agent, Directory, Service, ServiceKey};
pub use sqlite::SqliteStore;

use crate::limit::Rate;

/// Where records are kept. Every method either takes effect whole, and then survives a crash, or not at all.
pub trait Store: Send {
    /// Everything that admission needs, in one consistent reading.
    fn load(&self) -> Result<Records, StoreError>;
    /// Creates or replaces the record of the same identity.
    fn put(&mut self, record: Record) -> Result<(), StoreError>;
}

/// One record of any kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    Account(AccountId),
    Service(ServiceRecord),
    ServiceKey(ServiceKeyRecord),
    Agent(AgentRecord),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Records {
    pub accounts: Vec<AccountId>,
    pub services: Vec<ServiceRecord>,
    pub service_keys: Vec<ServiceKeyRecord>,
    pub agents: Vec<AgentRecord>,
}

/// Ways in which callers of a service may authenticate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Modes {
    pub jwt: bool,
    pub service_key: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceRecord {
    pub account: AccountId,
    pub id: ServiceId,
    pub modes: Modes,
    pub enabled: bool,
    pub rate: Rate,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceKeyRecord {
    pub id: KeyId,
    pub account: AccountId,
    pub secret: SecretHash,
    pub allowed_services: Vec<ServiceId>,
    pub enabled: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentRecord {
    pub id: AgentId,
    pub account: AccountId,
    pub name: String,
    pub services: Vec<ServiceId>,
    pub revoked: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("store: {0}")]
    Sqlite(#[from] rusqlite::Error),
    #[error("store: the database is of schema {found}, this program knows up to {known}: run the newer version")]
    NewerSchema { found: usize, known: usize },
    #[error("store: a stored record cannot be read: {0}")]
    Corrupt(String),
    #[error("no account {0}; create it first")]
    NoSuchAccount(AccountId),
}
