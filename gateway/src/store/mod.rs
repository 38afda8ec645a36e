//! Storage of the records: an interface with one implementation on SQLite, and the directory snapshots that workers
//! read instead of a database.

mod directory;
mod records;
mod signing_key;
mod sqlite;

use std::borrow::Cow;

use gw_shared::id::AccountId;

pub use directory::{Agent, Captures, Directory, Service};
pub use records::{
    AccountRecord, AgentRecord, Approval, CallerSecretRecord, EnrollmentRecord, EnrollmentTokenRecord, Modes,
    PublicKeyHash, RecordId, Records, SecretAccess, ServiceRecord, SigningKeyRecord, Step, StoredRecord,
};
pub use signing_key::SigningKey;
pub use sqlite::SqliteStore;

use crate::clock::Timestamp;

/// Durable storage of records and of the audit log.
pub trait Store: Send {
    /// Loads all records in one consistent read.
    fn load(&self) -> Result<Records, StoreError>;
    /// Applies all steps and appends the entry to the audit log, in one durable transaction.
    fn commit(&mut self, steps: &[Step], entry: &AuditEntry) -> Result<(), StoreError>;
    /// Returns entries of the audit log, the newest first.
    fn audit_log(&self, query: &AuditQuery) -> Result<Vec<NumberedEntry>, StoreError>;
}

/// An entry of the audit log: one change or one read of captured data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    pub at: Timestamp,
    /// `admin`, `gateway`, `agent ag_…`, `enrollment-token …`.
    pub actor: String,
    /// For example `service.create`.
    pub action: Cow<'static, str>,
    /// The account that the target belongs to, if any.
    pub account: Option<AccountId>,
    /// Identity of the changed record.
    pub target: String,
    /// The requested change, as JSON of the administration API. Contains no secrets.
    pub detail: serde_json::Value,
}

/// A stored entry with its number. Later entries have higher numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumberedEntry {
    pub number: i64,
    pub entry: AuditEntry,
}

/// Selects entries of the audit log.
#[derive(Debug, Clone)]
pub struct AuditQuery {
    pub account: Option<String>,
    /// Only entries with a lower number.
    pub before: Option<i64>,
    pub limit: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("store: {0}")]
    Sqlite(rusqlite::Error),
    #[error("store: another process has the database open; each gateway needs its own data folder")]
    InUse,
    #[error("store: the disk is full; nothing was changed")]
    Full,
    #[error("store: the database has schema {found}, but this program supports at most {known}; run a newer version")]
    NewerSchema { found: usize, known: usize },
    #[error("store: a stored record cannot be read: {0}")]
    Corrupt(String),
    #[error("store: {0}")]
    Io(#[from] std::io::Error),
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(rusqlite::ErrorCode::DiskFull) => Self::Full,
            _ => Self::Sqlite(error),
        }
    }
}
