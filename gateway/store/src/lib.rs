//! Storage of the records: an interface with implementations on SQLite and PostgreSQL, and the
//! directory snapshots that workers read instead of a database.

#![warn(missing_docs)]

mod audit_chain;
mod contents;
pub mod failure;
pub mod limits;
mod postgres;
mod records;
mod revocation;
mod sealed;
mod sealing;
mod source;
mod sqlite;
mod usage;

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::PathBuf;

use gw_base::clock::Timestamp;
use gw_base::sqlite_file::SqliteOpenError;
use gw_region::Roster;
use gw_shared::id::AccountId;
use rusqlite::ErrorCode;
use serde::{Deserialize, Serialize};

use audit_chain::StoredColumns;
pub use audit_chain::{AuditCheck, AuditFindings, AuditHash, AuditHead, InvalidHead};
pub use contents::{Contents, ContentsSummary};
pub use postgres::Rekeyed;
pub use postgres::{Authenticator, NamedSecret};
pub use postgres::{
    EngineState, KnownRecords, LastChange, PostgresInspector, PostgresSettings, PostgresStore,
    PostgresUrlError, Primary, ProvenKeys, RecordsOfKind, RegionIdentity, RegionState, Replication,
};
pub use records::NotRestored;
pub use records::{
    AccountRecord, AcmeFailures, AcmeLease, AcmeRecord, Agent, AgentRecord, Approval,
    AuthorityRecord, AuthorityRole, CallerSecretRecord, Captures, DeletedAccountRecord, Directory,
    Domain, DomainCertificate, DomainCertificateSource, DomainChallenge, DomainChallengeKind,
    DomainMaterial, DomainOrder, DomainRecord, DomainState, DomainsMax, EnrollmentRecord,
    EnrollmentTokenRecord, Incarnation, Indexing, PublicKeyHash, RecordId, RecordKind, Records,
    SecretAccess, ServedPair, Service, ServicePath, ServiceRecord, SigningKey, SigningKeyRecord,
    Step, StoredRecord, TicketKeyRecord, TooManyDomains, label_of,
};
pub use sealed::Sealer;
pub use sealing::CREDENTIAL as SEAL_KEY_CREDENTIAL;
pub use sealing::Sealing;
pub use source::{PostgresSource, StoreSource};
pub use sqlite::SqliteStore;
pub use usage::{UsageAmounts, UsageQuery, UsageRow};

/// Durable storage of records and of the audit log.
pub trait Store: Send {
    /// Loads all records in one consistent read.
    fn load(&mut self) -> Result<Snapshot, StoreError>;
    /// Applies all steps and appends the entry to the audit log, in one durable transaction, and
    /// returns its position. Fails with [`StoreError::Stale`] if another process has committed a
    /// change after `after`.
    fn commit(
        &mut self,
        after: &Position,
        steps: &[Step],
        entry: &AuditEntry,
    ) -> Result<Position, StoreError>;
    /// The changes after `position` that are committed, in their order.
    fn changes_after(&mut self, position: &Position) -> Result<History, StoreError>;
    /// Returns entries of the audit log, the newest first.
    fn audit_log(&mut self, query: &AuditQuery) -> Result<Vec<NumberedEntry>, StoreError>;
    /// Stores what the file with the UUID `_source` has counted so far, and deletes rows of days
    /// before `_oldest`. Returns whether this store keeps usage: that on SQLite does not, because
    /// the only node has all of it.
    fn put_usage(
        &mut self,
        _source: &str,
        _rows: &[UsageRow],
        _oldest: &str,
    ) -> Result<bool, StoreError> {
        Ok(false)
    }
    /// Usage of all nodes; `None` if this store does not keep it.
    fn usage(&mut self, _query: &UsageQuery) -> Result<Option<Vec<UsageRow>>, StoreError> {
        Ok(None)
    }
    /// The nodes that share the store; `None` with SQLite.
    fn nodes(&mut self) -> Result<Option<Roster>, StoreError> {
        Ok(None)
    }
}

/// Number of a committed change. It is also the number of the change's entry in the audit log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Revision(pub i64);

/// A point in the history of one store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// UUID of the region in PostgreSQL; device and inode of the file with SQLite. A database that
    /// was created again has another one.
    pub origin: String,
    /// Revision at this point.
    pub revision: Revision,
    /// UUID of the change that made this revision; empty for SQLite, and if no change made it.
    /// After a failover that lost changes, another change can have the same revision.
    pub change: String,
}

/// All records as of one position.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Position that the records were read at.
    pub position: Position,
    /// Records of all kinds.
    pub records: Records,
    /// The last positions of the history up to `position`, as far as they are known.
    pub recent: Vec<Position>,
}

/// The changes after a revision.
#[derive(Debug)]
pub enum History {
    /// Each with the position after it, without gaps.
    Changes(Vec<(Position, Vec<Step>)>),
    /// The changes are not stored any more: load all records.
    Forgotten,
    /// The position is not in the history of the database, which was replaced or restored from a
    /// backup. Its records apply from now on: load all records.
    Replaced,
}

/// An entry of the audit log: one change or one read of captured data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditEntry {
    /// Time of the change or read.
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
    /// Number of the entry; for a change, its [`Revision`].
    pub number: i64,
    /// The entry as it was committed.
    pub entry: AuditEntry,
    /// SHA-256 of the stored values.
    pub digest: AuditHash,
    /// Hash of the entry in the chain of the log.
    pub hash: AuditHash,
}

impl NumberedEntry {
    /// The entry after the one with the hash `before`.
    pub fn new(number: i64, entry: AuditEntry, before: AuditHash) -> Self {
        let columns = StoredColumns {
            number,
            at: entry.at.0,
            actor: &entry.actor,
            action: &entry.action,
            account: entry.account.as_ref().map(AccountId::as_str),
            target: &entry.target,
            detail: &entry.detail.to_string(),
        };
        let digest = columns.digest();
        Self {
            number,
            hash: before.then(digest),
            digest,
            entry,
        }
    }

    /// Reads a stored entry.
    fn read(columns: &StoredColumns<'_>, hash: &[u8]) -> Result<Self, StoreError> {
        let account = columns.account.map(AccountId::new).transpose();
        let entry = AuditEntry {
            at: Timestamp(columns.at),
            actor: columns.actor.to_owned(),
            action: Cow::Owned(columns.action.to_owned()),
            account: account.map_err(StoreError::corrupt)?,
            target: columns.target.to_owned(),
            detail: serde_json::from_str(columns.detail).map_err(StoreError::corrupt)?,
        };
        Ok(Self {
            number: columns.number,
            entry,
            digest: columns.digest(),
            hash: AuditHash::stored(hash),
        })
    }

    /// Number and hash.
    pub fn head(&self) -> AuditHead {
        AuditHead {
            number: self.number,
            hash: self.hash,
        }
    }
}

/// Selects entries of the audit log.
#[derive(Debug, Clone)]
pub struct AuditQuery {
    /// Only entries of this account; `None` for all entries.
    pub account: Option<String>,
    /// Only entries with a lower number.
    pub before: Option<i64>,
    /// Most entries that are returned.
    pub limit: usize,
}

/// What a pool of connections does that is not of use to a node.
pub const POOLED: &str = "a connection pool gives the sessions of this node to others, such as \
                          PgBouncer with pool_mode = transaction";

/// Reason why a call of a [`Store`] failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// SQLite reported an error other than a full disk.
    #[error("store: {0}")]
    Sqlite(rusqlite::Error),
    /// Another process has locked the data folder or the file of SQLite.
    #[error("store: another process has the data folder open; each gateway needs its own")]
    InUse,
    /// Another node committed a change first. Nothing was changed.
    #[error("store: another node has changed the records; nothing was changed, try again")]
    Stale,
    /// PostgreSQL cannot be reached, or the connection ended.
    #[error("store: {}", failure::explained(.0))]
    Unavailable(String),
    /// Several servers take changes: this one is older than another one, or none is the newest.
    #[error("PostgreSQL takes changes at {0}: stop all but the highest timeline")]
    SeveralPrimaries(String),
    /// PostgreSQL refused a statement.
    #[error("store: PostgreSQL: {0}")]
    Postgres(String),
    /// The connection goes through a pool that shares sessions between nodes.
    #[error(
        "store: {POOLED}: connect to PostgreSQL itself, or set pool_mode = session for this \
         database"
    )]
    Pooled,
    /// The database holds no region or another one, its key is not a key of this node, or its state
    /// does not permit the operation.
    #[error("store: {0}")]
    Region(String),
    /// This file or record is sealed, and no seal key is set.
    #[error(
        "store: {0} is sealed, and there is no key to open it: set seal_key to the key that sealed \
         it, or have systemd hand it over (LoadCredentialEncrypted=seal-key: in the unit)"
    )]
    Sealed(String),
    /// The seal key cannot be read, or is not the key of the sealed secrets.
    #[error("store: {0}")]
    SealKey(String),
    /// The disk is full. Nothing was changed.
    #[error("store: the disk is full; nothing was changed")]
    Full,
    /// The disk is full, but for the reserve with this path. Nothing was changed.
    #[error(
        "store: the disk is full; nothing was changed: free space in the folder of {} (`df -h` \
         shows it), or raise the quota of its user. Until then, only changes that take access away \
         are made, as long as this file has room for them", .0.display()
    )]
    NoRoom(PathBuf),
    /// A later version of the program has migrated the database.
    #[error(
        "store: the database has schema {found}, which is too new for this program, of schema \
         {known}: install the version of gw-gateway that upgraded the database, and replace the \
         process"
    )]
    NewerSchema {
        /// Schema version of the database.
        found: usize,
        /// Newest schema version that this program knows.
        known: usize,
    },
    /// The database has the schema of an earlier version, and the caller asked for no migration.
    #[error(
        "store: the database has schema {found}, of an older version, and this program has schema \
         {known}: use the program of the version that ran with it, or start this version's gateway \
         once, which migrates the database"
    )]
    OlderSchema {
        /// Schema version of the database.
        found: usize,
        /// Schema version of this program.
        known: usize,
    },
    /// SQLite's check found damage in the file.
    #[error("store: the database is damaged: {0}")]
    Damaged(String),
    /// Rows of PostgreSQL have no valid tag, or the set of rows is not the one that the nodes
    /// wrote.
    #[error(
        "store: the database was changed by something other than a gateway of this region: {what}; \
         restore it from a backup, or write the records of a node back with `gw-gateway region \
         repair`"
    )]
    Forged {
        /// The rows, for the message.
        what: String,
        /// Number of rows.
        count: usize,
    },
    /// A stored value cannot be decoded, decrypted or encoded.
    #[error("store: a stored record cannot be read: {0}")]
    Corrupt(String),
    /// A file cannot be read, written or locked.
    #[error("store: {0}")]
    Io(#[from] std::io::Error),
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => Self::Full,
            _ => Self::Sqlite(error),
        }
    }
}

impl From<SqliteOpenError> for StoreError {
    fn from(error: SqliteOpenError) -> Self {
        match error {
            SqliteOpenError::Sqlite(error) => match error.sqlite_error_code() {
                Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::InUse,
                _ => error.into(),
            },
            SqliteOpenError::Io(error) => Self::Io(error),
            SqliteOpenError::NewerSchema { found, known } => Self::NewerSchema { found, known },
            SqliteOpenError::OlderSchema { found, known } => Self::OlderSchema { found, known },
        }
    }
}

impl StoreError {
    /// What failed, in the words of the operating system; `None` if nothing there did.
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::InUse => Some(ErrorKind::ResourceBusy),
            Self::Full | Self::NoRoom(_) => Some(ErrorKind::StorageFull),
            Self::Io(error) => Some(error.kind()),
            Self::Sqlite(error) => match error.sqlite_error_code()? {
                ErrorCode::CannotOpen | ErrorCode::ReadOnly | ErrorCode::PermissionDenied => {
                    Some(ErrorKind::PermissionDenied)
                }
                _ => None,
            },
            _ => None,
        }
    }

    fn corrupt(error: impl std::fmt::Display) -> Self {
        Self::Corrupt(error.to_string())
    }
}
