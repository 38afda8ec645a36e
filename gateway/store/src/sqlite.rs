//! The store on SQLite: write-ahead log, every commit synced, one process at a time.

mod system_errno;
#[cfg(test)]
mod tests;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use gw_base::sqlite_file::FileKind;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Params, TransactionBehavior, params};

use self::system_errno::is_full;
use super::audit_chain::StoredColumns;
use super::{
    AuditEntry, AuditHash, AuditQuery, Contents, History, NumberedEntry, Position, Records,
    Revision, Sealing, Snapshot, Step, Store, StoreError, StoredRecord,
};

/// The database of the records.
const DATABASE: FileKind = FileKind {
    migrations: &[
        "
    CREATE TABLE accounts (id TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
    CREATE TABLE services (
        account TEXT NOT NULL REFERENCES accounts (id),
        id TEXT NOT NULL,
        mode_jwt INTEGER NOT NULL,
        mode_service_key INTEGER NOT NULL,
        enabled INTEGER NOT NULL,
        burst INTEGER NOT NULL CHECK (burst > 0),
        refill_per_minute INTEGER NOT NULL CHECK (refill_per_minute > 0),
        PRIMARY KEY (account, id)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE service_keys (
        id TEXT PRIMARY KEY,
        account TEXT NOT NULL REFERENCES accounts (id),
        secret_sha256 BLOB NOT NULL CHECK (length(secret_sha256) = 32),
        allowed_services TEXT NOT NULL,
        enabled INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE agents (
        id TEXT PRIMARY KEY,
        account TEXT NOT NULL REFERENCES accounts (id),
        name TEXT NOT NULL,
        services TEXT NOT NULL,
        revoked INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
",
        "
    -- One table for records of every kind, each a JSON document, and the audit log beside it.
    CREATE TABLE records (
        kind TEXT NOT NULL,
        id TEXT NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (kind, id)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE audit (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        at INTEGER NOT NULL,
        actor TEXT NOT NULL,
        action TEXT NOT NULL,
        account TEXT,
        target TEXT NOT NULL,
        detail TEXT NOT NULL
    ) STRICT;
    CREATE INDEX audit_of_account ON audit (account, number);
    INSERT INTO records SELECT 'account', id, json_object('id', id, 'created_at', 0) FROM accounts;
    INSERT INTO records SELECT 'service', account || '/' || id, json_object(
        'account', account, 'id', id,
        'modes', json_object(
            'jwt', json(iif(mode_jwt, 'true', 'false')),
            'service_key', json(iif(mode_service_key, 'true', 'false'))),
        'enabled', json(iif(enabled, 'true', 'false')),
        'rate', json_object('burst', burst, 'refill_per_minute', refill_per_minute)
    ) FROM services;
    INSERT INTO records SELECT 'service_key', id, json_object(
        'id', id, 'account', account, 'secret', lower(hex(secret_sha256)),
        'allowed_services', json('[\"' || replace(allowed_services, ' ', '\",\"') || '\"]'),
        'enabled', json(iif(enabled, 'true', 'false'))
    ) FROM service_keys;
    INSERT INTO records SELECT 'agent', id, json_object(
        'id', id, 'account', account, 'name', name,
        'services', json('[\"' || replace(services, ' ', '\",\"') || '\"]'),
        'status', iif(revoked, 'revoked', 'approved')
    ) FROM agents;
    DROP TABLE agents;
    DROP TABLE service_keys;
    DROP TABLE services;
    DROP TABLE accounts;
",
        "ALTER TABLE audit ADD COLUMN hash BLOB NOT NULL DEFAULT x''",
    ],
    set_up: |connection| {
        // Also keeps the index of the log in memory instead of in a memory-mapped file, where a
        // full disk would cause SIGBUS.
        connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        // The private keys of records that are deleted or replaced do not stay in the file.
        connection.pragma_update(None, "secure_delete", "ON")
    },
};

/// A store in one SQLite file.
pub struct SqliteStore {
    connection: Connection,
    /// See [`Position::origin`].
    origin: String,
    /// How secrets in records are stored.
    sealing: Sealing,
}

impl SqliteStore {
    /// Opens or creates the database at `path` (mode 0600) and migrates its schema.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let store = Self::new(DATABASE.open(path)?, path)?;
        store.look_for_hashes()?;
        Ok(store)
    }

    /// As [`Self::open`], but fails if there is no database at `path`.
    pub fn open_existing(path: &Path) -> Result<Self, StoreError> {
        check_exists(path)?;
        Self::open(path)
    }

    /// As [`Self::open_existing`], but fails if the schema is of another version, and never changes
    /// it.
    pub fn open_unmigrated(path: &Path) -> Result<Self, StoreError> {
        check_exists(path)?;
        Self::new(DATABASE.open_unmigrated(path)?, path)
    }

    fn new(connection: Connection, path: &Path) -> Result<Self, StoreError> {
        let file = path.metadata()?;
        Ok(Self {
            connection,
            origin: format!("{}:{}", file.dev(), file.ino()),
            sealing: Sealing::default(),
        })
    }

    /// Opens and seals secrets with `sealing` from now on.
    pub fn with_sealing(self, sealing: Sealing) -> Self {
        Self { sealing, ..self }
    }

    /// As [`Self::with_sealing`], and seals the secrets that are not sealed yet. Leaves no copy of
    /// them in the file.
    pub fn sealed(self, sealing: Sealing) -> Result<Self, StoreError> {
        let mut store = self.with_sealing(sealing);
        if store.sealing.has_key() {
            store.seal_stored()?;
        }
        Ok(store)
    }

    /// Logs that an entry of the audit log has no hash. A check of the chain finds each of them.
    fn look_for_hashes(&self) -> Result<(), StoreError> {
        const WITHOUT: &str = "SELECT number FROM audit WHERE length(hash) <> 32 LIMIT 1";
        let found = self.connection.query_row(WITHOUT, [], |row| row.get(0));
        if let Some(number) = found.optional()? {
            let number: i64 = number;
            tracing::error!(
                number,
                "audit log: an entry has no hash: version 0.1 wrote it, or something other than a \
                 gateway; `gw-gateway audit verify` names all such entries: compare those since \
                 the upgrade with a backup"
            );
        }
        Ok(())
    }

    fn seal_stored(&mut self) -> Result<(), StoreError> {
        let mut plain = Vec::new();
        for kind in StoredRecord::kinds_with_secret() {
            let mut select = self
                .connection
                .prepare("SELECT document FROM records WHERE kind = ?1")?;
            let mut rows = select.query([kind])?;
            while let Some(row) = rows.next()? {
                let document: String = row.get(0)?;
                plain.push(StoredRecord::read(kind, &document)?);
            }
        }
        plain.retain_mut(Sealing::is_plain);
        if plain.is_empty() {
            return Ok(());
        }
        // No part of a key may be left in the file: neither in pages that are free already, nor in
        // what is replaced.
        self.connection.execute_batch("VACUUM")?;
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        for record in &plain {
            let (kind, id) = record.id().columns();
            let document = self.sealing.seal_record(record)?.document()?;
            let update = "UPDATE records SET document = ?3 WHERE kind = ?1 AND id = ?2";
            transaction.execute(update, params![kind, id, document])?;
        }
        transaction.commit()?;
        self.connection
            .execute_batch("PRAGMA wal_checkpoint(TRUNCATE)")?;
        tracing::info!(
            count = plain.len(),
            "sealed the private keys in the database with seal_key"
        );
        Ok(())
    }

    /// The position of the records in the database.
    fn newest(&self) -> Result<Position, StoreError> {
        let newest = "SELECT coalesce(max(number), 0) FROM audit";
        Ok(self.position(Revision(
            self.connection.query_row(newest, [], |row| row.get(0))?,
        )))
    }

    fn position(&self, revision: Revision) -> Position {
        Position {
            origin: self.origin.clone(),
            revision,
            change: String::new(),
        }
    }

    fn write(&mut self, steps: &[Step], entry: &AuditEntry) -> Result<Position, StoreError> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        for step in steps {
            match step {
                Step::Put(record) => {
                    let (kind, id) = record.id().columns();
                    transaction
                        .prepare_cached("INSERT OR REPLACE INTO records VALUES (?1, ?2, ?3)")?
                        .execute(params![
                            kind,
                            id,
                            self.sealing.seal_record(record)?.document()?
                        ])?;
                }
                Step::Delete(record) => {
                    let (kind, id) = record.columns();
                    transaction
                        .prepare_cached("DELETE FROM records WHERE kind = ?1 AND id = ?2")?
                        .execute(params![kind, id])?;
                }
            }
        }
        let entry = next_entry(&transaction, entry)?;
        insert_entry(&transaction, &entry)?;
        transaction.commit()?;
        Ok(self.position(Revision(entry.number)))
    }

    /// Writes `contents` into an empty database, in one transaction.
    pub fn fill(&mut self, contents: &Contents) -> Result<(), StoreError> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        insert_records(&transaction, &contents.records)?;
        for entry in &contents.audit {
            insert_entry(&transaction, entry)?;
        }
        Ok(transaction.commit()?)
    }

    /// As [`Self::fill`], with the audit log in pages up to an empty one.
    pub fn fill_in_pages<E: From<StoreError>>(
        &mut self,
        records: &[StoredRecord],
        mut next_page: impl FnMut() -> Result<Vec<NumberedEntry>, E>,
    ) -> Result<(), E> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate);
        let transaction = transaction.map_err(StoreError::from)?;
        insert_records(&transaction, records)?;
        loop {
            let page = next_page()?;
            if page.is_empty() {
                return Ok(transaction.commit().map_err(StoreError::from)?);
            }
            for entry in &page {
                insert_entry(&transaction, entry)?;
            }
        }
    }

    /// Checks the file of a database that another program may have changed: its pages, and that its
    /// schema runs nothing.
    pub fn check(path: &Path) -> Result<(), StoreError> {
        let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        let found: String =
            connection.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
        if found != "ok" {
            return Err(StoreError::Damaged(found));
        }
        let foreign = "SELECT type || ' ' || name FROM sqlite_schema WHERE type NOT IN ('table', \
                       'index') LIMIT 1";
        match connection
            .query_row(foreign, [], |row| row.get::<_, String>(0))
            .optional()?
        {
            Some(found) => Err(StoreError::Damaged(format!(
                "it has the {found}, which no gateway makes"
            ))),
            None => Ok(()),
        }
    }
}

fn check_exists(path: &Path) -> Result<(), StoreError> {
    if path.exists() {
        return Ok(());
    }
    let missing = format!("{}: there is no such database", path.display());
    Err(std::io::Error::new(std::io::ErrorKind::NotFound, missing).into())
}

fn insert_records(connection: &Connection, records: &[StoredRecord]) -> Result<(), StoreError> {
    for record in records {
        let (kind, id) = record.id().columns();
        connection
            .prepare_cached("INSERT INTO records VALUES (?1, ?2, ?3)")?
            .execute(params![kind, id, record.document()?])?;
    }
    Ok(())
}

/// Adds an entry to the audit log. Keeps its hash, so that a mistake in the chain of a copied log
/// shows in the copy, too.
fn insert_entry(connection: &Connection, numbered: &NumberedEntry) -> Result<(), StoreError> {
    let NumberedEntry {
        number,
        entry,
        hash,
        ..
    } = numbered;
    connection
        .prepare_cached(
            "INSERT INTO audit (number, at, actor, action, account, target, detail, hash)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?
        .execute(params![
            number,
            entry.at.0,
            entry.actor,
            entry.action,
            entry.account.as_ref().map(|account| account.as_str()),
            entry.target,
            entry.detail.to_string(),
            hash.as_bytes(),
        ])?;
    Ok(())
}

/// The entry that follows the newest one.
fn next_entry(connection: &Connection, entry: &AuditEntry) -> Result<NumberedEntry, StoreError> {
    const LAST: &str = "SELECT seq FROM sqlite_sequence WHERE name = 'audit'";
    const HASH: &str = "SELECT hash FROM audit ORDER BY number DESC LIMIT 1";
    let last: Option<i64> = connection
        .query_row(LAST, [], |row| row.get(0))
        .optional()?;
    let before = connection.query_row(HASH, [], |row| row.get::<_, Vec<u8>>(0));
    let before = AuditHash::stored(&before.optional()?.unwrap_or_default());
    Ok(NumberedEntry::new(
        last.unwrap_or(0) + 1,
        entry.clone(),
        before,
    ))
}

/// Columns of entries, as [`entries`] reads them.
const ENTRIES: &str = "SELECT number, at, actor, action, account, target, detail, hash FROM audit";

fn entries(
    connection: &Connection,
    select: &str,
    parameters: impl Params,
) -> Result<Vec<NumberedEntry>, StoreError> {
    let mut statement = connection.prepare_cached(select)?;
    let mut rows = statement.query(parameters)?;
    let mut entries = Vec::new();
    while let Some(row) = rows.next()? {
        let [actor, action, target, detail] =
            [2, 3, 5, 6].map(|column| row.get::<_, String>(column));
        let account: Option<String> = row.get(4)?;
        let columns = StoredColumns {
            number: row.get(0)?,
            at: row.get(1)?,
            actor: &actor?,
            action: &action?,
            account: account.as_deref(),
            target: &target?,
            detail: &detail?,
        };
        let hash: Vec<u8> = row.get(7)?;
        entries.push(NumberedEntry::read(&columns, &hash)?);
    }
    Ok(entries)
}

impl Store for SqliteStore {
    fn load(&mut self) -> Result<Snapshot, StoreError> {
        let mut statement = self
            .connection
            .prepare("SELECT kind, document FROM records")?;
        let mut rows = statement.query([])?;
        let mut records = Records::default();
        while let Some(row) = rows.next()? {
            let kind: String = row.get(0)?;
            let document: String = row.get(1)?;
            records.put(
                self.sealing
                    .open_record(StoredRecord::read(&kind, &document)?)?,
            );
        }
        records.compact();
        Ok(Snapshot {
            position: self.newest()?,
            records,
            recent: Vec::new(),
        })
    }

    /// `after` is always the newest revision, because one process has the database open.
    fn commit(
        &mut self,
        _after: &Position,
        steps: &[Step],
        entry: &AuditEntry,
    ) -> Result<Position, StoreError> {
        self.write(steps, entry).map_err(|error| match error {
            StoreError::Sqlite(it) if is_full(&self.connection, &it) => StoreError::Full,
            other => other,
        })
    }

    fn changes_after(&mut self, position: &Position) -> Result<History, StoreError> {
        // The database has no changes, only their result.
        Ok(if *position == self.newest()? {
            History::Changes(Vec::new())
        } else {
            History::Forgotten
        })
    }

    fn audit_log(&mut self, query: &AuditQuery) -> Result<Vec<NumberedEntry>, StoreError> {
        let select = format!(
            "{ENTRIES} WHERE (?1 IS NULL OR account = ?1) AND number < ?2 ORDER BY number DESC \
             LIMIT ?3"
        );
        let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
        let before = query.before.unwrap_or(i64::MAX);
        entries(
            &self.connection,
            &select,
            params![query.account, before, limit],
        )
    }
}
