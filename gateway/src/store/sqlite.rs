//! The store on SQLite: write-ahead log, every commit synced, one process at a time.

use std::borrow::Cow;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use gw_shared::id::AccountId;
use rusqlite::{Connection, OpenFlags, OptionalExtension, TransactionBehavior, params};

use super::{
    AuditEntry, AuditQuery, Contents, History, NumberedEntry, Position, Records, Revision, Sealing,
    Snapshot, Step, Store, StoreError, StoredRecord, document,
};
use crate::clock::Timestamp;
use crate::sqlite_file::FileKind;

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
            'jwt', json(iif(mode_jwt, 'true', 'false')), 'service_key', json(iif(mode_service_key, 'true', 'false'))),
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
    ],
    set_up: |connection| {
        // Also keeps the index of the log in memory instead of in a memory-mapped file, where a full disk would cause
        // SIGBUS.
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
        Self::new(DATABASE.open(path)?, path)
    }

    /// As [`Self::open`], but fails if there is no database at `path`.
    pub fn open_existing(path: &Path) -> Result<Self, StoreError> {
        check_exists(path)?;
        Self::open(path)
    }

    /// As [`Self::open_existing`], but fails if the schema is of another version, and never changes it.
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
    pub(crate) fn with_sealing(self, sealing: Sealing) -> Self {
        Self { sealing, ..self }
    }

    /// As [`Self::with_sealing`], and seals the secrets that are not sealed yet. Leaves no copy of them in the file.
    pub(crate) fn sealed(self, sealing: Sealing) -> Result<Self, StoreError> {
        let mut store = self.with_sealing(sealing);
        if store.sealing.has_key() {
            store.seal_stored()?;
        }
        Ok(store)
    }

    fn seal_stored(&mut self) -> Result<(), StoreError> {
        let select =
            "SELECT kind, document FROM records WHERE kind IN ('signing_key', 'authority')";
        let mut statement = self.connection.prepare(select)?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let rows = rows.collect::<Result<Vec<(String, String)>, _>>()?;
        drop(statement);
        let records = rows
            .iter()
            .map(|(kind, document)| document::read(kind, document));
        let mut plain = records.collect::<Result<Vec<StoredRecord>, _>>()?;
        plain.retain_mut(Sealing::is_plain);
        if plain.is_empty() {
            return Ok(());
        }
        // No part of a key may be left in the file: neither in pages that are free already, nor in what is replaced.
        self.connection.execute_batch("VACUUM")?;
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        for record in &plain {
            let (kind, id) = document::key(&record.id());
            let document = document::write(&self.sealing.seal_record(record)?)?;
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

    /// Writes `contents` into an empty database, in one transaction.
    pub fn fill(&mut self, contents: &Contents) -> Result<(), StoreError> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        insert_records(&transaction, &contents.records)?;
        for NumberedEntry { number, entry } in &contents.audit {
            insert_entry(&transaction, Some(*number), entry)?;
        }
        Ok(transaction.commit()?)
    }

    /// As [`Self::fill`], with the audit log in pages up to an empty one.
    pub(crate) fn fill_in_pages<E: From<StoreError>>(
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
            for NumberedEntry { number, entry } in page {
                insert_entry(&transaction, Some(number), &entry)?;
            }
        }
    }

    /// Checks the file of a database that another program may have changed: its pages, and that its schema runs nothing.
    pub(crate) fn check(path: &Path) -> Result<(), StoreError> {
        let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        let found: String =
            connection.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
        if found != "ok" {
            return Err(StoreError::Damaged(found));
        }
        let foreign = "SELECT type || ' ' || name FROM sqlite_schema WHERE type NOT IN ('table', 'index') LIMIT 1";
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
        let (kind, id) = document::key(&record.id());
        connection
            .prepare_cached("INSERT INTO records VALUES (?1, ?2, ?3)")?
            .execute(params![kind, id, document::write(record)?])?;
    }
    Ok(())
}

/// Appends an entry to the audit log, with the next number if `number` is `None`.
fn insert_entry(
    connection: &Connection,
    number: Option<i64>,
    entry: &AuditEntry,
) -> Result<(), StoreError> {
    connection
        .prepare_cached(
            "INSERT INTO audit (number, at, actor, action, account, target, detail) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?
        .execute(params![
            number,
            entry.at.0,
            entry.actor,
            entry.action,
            entry.account.as_ref().map(|account| account.as_str()),
            entry.target,
            entry.detail.to_string(),
        ])?;
    Ok(())
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
                    .open_record(document::read(&kind, &document)?)?,
            );
        }
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
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        for step in steps {
            match step {
                Step::Put(record) => {
                    let (kind, id) = document::key(&record.id());
                    transaction
                        .prepare_cached("INSERT OR REPLACE INTO records VALUES (?1, ?2, ?3)")?
                        .execute(params![
                            kind,
                            id,
                            document::write(&self.sealing.seal_record(record)?)?
                        ])?;
                }
                Step::Delete(record) => {
                    let (kind, id) = document::key(record);
                    transaction
                        .prepare_cached("DELETE FROM records WHERE kind = ?1 AND id = ?2")?
                        .execute(params![kind, id])?;
                }
            }
        }
        insert_entry(&transaction, None, entry)?;
        let revision = Revision(transaction.last_insert_rowid());
        transaction.commit()?;
        Ok(self.position(revision))
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
        let mut statement = self.connection.prepare_cached(
            "SELECT number, at, actor, action, account, target, detail FROM audit
             WHERE (?1 IS NULL OR account = ?1) AND number < ?2 ORDER BY number DESC LIMIT ?3",
        )?;
        let limit = i64::try_from(query.limit).unwrap_or(i64::MAX);
        let mut rows = statement.query(params![
            query.account,
            query.before.unwrap_or(i64::MAX),
            limit
        ])?;
        let mut entries = Vec::new();
        while let Some(row) = rows.next()? {
            let detail: String = row.get(6)?;
            let account: Option<String> = row.get(4)?;
            let entry = AuditEntry {
                at: Timestamp(row.get(1)?),
                actor: row.get(2)?,
                action: Cow::Owned(row.get(3)?),
                account: account
                    .map(|id| AccountId::new(&id))
                    .transpose()
                    .map_err(StoreError::corrupt)?,
                target: row.get(5)?,
                detail: serde_json::from_str(&detail).map_err(StoreError::corrupt)?,
            };
            entries.push(NumberedEntry {
                number: row.get(0)?,
                entry,
            });
        }
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use gw_shared::id::{
        AgentId, AuthorityId, ClientId, EnrollmentId, EnrollmentTokenId, KeyId, ServiceId,
        SigningKeyId,
    };
    use gw_shared::identity::enrollment::EnrollmentStatus;
    use gw_shared::identity::secret::{Secret, SecretHash};

    use super::super::*;
    use super::*;
    use crate::rate::Rate;

    fn entry(action: &'static str) -> AuditEntry {
        AuditEntry {
            at: Timestamp(7),
            actor: "admin".into(),
            action: action.into(),
            account: Some(AccountId::new("acme").unwrap()),
            target: "x".into(),
            detail: serde_json::json!({"a": [1, "it's"]}),
        }
    }

    /// One record of each kind.
    fn samples() -> Vec<StoredRecord> {
        let account = AccountId::new("acme").unwrap();
        let services = BTreeSet::from([
            ServiceId::new("api").unwrap(),
            ServiceId::new("b--c").unwrap(),
        ]);
        let access = SecretAccess {
            account: account.clone(),
            name: Some("it's \"mine\"".into()),
            secret: SecretHash::of("x"),
            allowed_services: services.clone(),
            enabled: false,
            created_at: Timestamp(5),
        };
        vec![
            StoredRecord::Account(AccountRecord {
                id: account.clone(),
                capture_allowed: true,
                created_at: Timestamp(1),
            }),
            StoredRecord::Service(ServiceRecord {
                account: account.clone(),
                id: ServiceId::new("api").unwrap(),
                modes: Modes {
                    jwt: true,
                    service_key: false,
                },
                enabled: true,
                rate: Rate::new(1000, 300).unwrap(),
                request_logging: true,
                capture_request_body: false,
                capture_response_body: true,
                retries: false,
                affinity: "cookie:sid".parse().unwrap(),
                created_at: Timestamp(2),
            }),
            StoredRecord::Credential(CallerSecretRecord {
                id: ClientId::random(),
                access: access.clone(),
            }),
            StoredRecord::ServiceKey(CallerSecretRecord {
                id: KeyId::random(),
                access,
            }),
            StoredRecord::EnrollmentToken(EnrollmentTokenRecord {
                id: EnrollmentTokenId::random(),
                account: account.clone(),
                secret: SecretHash::of("y"),
                services: services.clone(),
                approval: Approval::Manual,
                ephemeral: true,
                created_at: Timestamp(3),
                expires_at: Timestamp(4),
                uses: 50,
                used: 3,
                used_by: Some(AgentId::random()),
            }),
            StoredRecord::Agent(AgentRecord {
                id: AgentId::random(),
                account,
                name: "a".into(),
                services,
                status: EnrollmentStatus::Pending,
                standby: true,
                ephemeral: true,
                absent_since: Some(Timestamp(7)),
                enrollment_token: Some(EnrollmentTokenId::random()),
                version: Some("0.1.0".into()),
                enrollment: Some(Box::new(EnrollmentRecord {
                    id: EnrollmentId::random(),
                    secret: SecretHash::of("z"),
                    expires_at: Timestamp(9),
                })),
                key: Some(PublicKeyHash::of(b"key")),
                previous_key: None,
                certificate_not_after: Some(Timestamp(10)),
                authority: Some(AuthorityId::new(&"a".repeat(40)).unwrap()),
                created_at: Timestamp(6),
            }),
            StoredRecord::SigningKey(SigningKeyRecord {
                id: SigningKeyId::new(&"k".repeat(43)).unwrap(),
                private_key: Secret::new("private".into()),
                created_at: Timestamp(1),
                active_from: Timestamp(2),
            }),
            StoredRecord::Authority(AuthorityRecord {
                id: AuthorityId::new(&"b".repeat(40)).unwrap(),
                role: AuthorityRole::Issuing,
                certificate: "certificate".into(),
                private_key: Some(Secret::new("private".into())),
                created_at: Timestamp(1),
            }),
        ]
    }

    /// All records of a store as comparable text, secrets included.
    fn contents(store: &mut SqliteStore) -> Vec<String> {
        let records = store.load().unwrap().records;
        let mut all: Vec<StoredRecord> = Vec::new();
        all.extend(records.accounts.into_values().map(StoredRecord::Account));
        all.extend(records.services.into_values().map(StoredRecord::Service));
        all.extend(
            records
                .credentials
                .into_values()
                .map(StoredRecord::Credential),
        );
        all.extend(
            records
                .service_keys
                .into_values()
                .map(StoredRecord::ServiceKey),
        );
        all.extend(
            records
                .enrollment_tokens
                .into_values()
                .map(StoredRecord::EnrollmentToken),
        );
        all.extend(records.agents.into_values().map(StoredRecord::Agent));
        all.extend(
            records
                .signing_keys
                .into_values()
                .map(StoredRecord::SigningKey),
        );
        all.extend(
            records
                .authorities
                .into_values()
                .map(StoredRecord::Authority),
        );
        all.iter()
            .map(|record| document::write(record).unwrap())
            .collect()
    }

    fn all() -> AuditQuery {
        AuditQuery {
            account: None,
            before: None,
            limit: 100,
        }
    }

    #[test]
    fn records_survive_reopening_until_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gw.sqlite");
        let mut store = SqliteStore::open(&path).unwrap();
        let samples = samples();
        let expected: Vec<String> = samples
            .iter()
            .map(|record| document::write(record).unwrap())
            .collect();
        let puts: Vec<Step> = samples.iter().cloned().map(Step::Put).collect();
        store
            .commit(&Position::default(), &puts, &entry("first"))
            .unwrap();
        store
            .commit(&Position::default(), &puts, &entry("second"))
            .unwrap();
        assert_eq!(contents(&mut store), expected);
        drop(store);
        let mut store = SqliteStore::open(&path).unwrap();
        assert_eq!(contents(&mut store), expected);
        let deletes: Vec<Step> = samples
            .iter()
            .map(|record| Step::Delete(record.id()))
            .collect();
        store
            .commit(&Position::default(), &deletes, &entry("third"))
            .unwrap();
        assert_eq!(contents(&mut store), Vec::<String>::new());
        let actions: Vec<_> = store
            .audit_log(&all())
            .unwrap()
            .into_iter()
            .map(|row| row.entry.action)
            .collect();
        assert_eq!(actions, ["third", "second", "first"]);
        assert_eq!(
            store
                .audit_log(&AuditQuery {
                    before: Some(2),
                    ..all()
                })
                .unwrap()[0]
                .entry
                .detail,
            entry("").detail
        );
        assert!(
            store
                .audit_log(&AuditQuery {
                    account: Some("other".to_owned()),
                    ..all()
                })
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn a_deleted_key_does_not_stay_in_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gw.sqlite");
        let mut store = SqliteStore::open(&path).unwrap();
        let samples = samples();
        let StoredRecord::Authority(authority) = samples.last().unwrap().clone() else {
            panic!("an authority")
        };
        let secret = "a private key that is gone";
        let with_key = AuthorityRecord {
            private_key: Some(Secret::new(secret.repeat(10))),
            ..authority.clone()
        };
        let put = |record| [Step::Put(StoredRecord::Authority(record))];
        store
            .commit(&Position::default(), &put(with_key), &entry("first"))
            .unwrap();
        let ended = AuthorityRecord {
            private_key: None,
            role: AuthorityRole::Ended,
            ..authority
        };
        store
            .commit(&Position::default(), &put(ended), &entry("second"))
            .unwrap();
        // Writes the log back, and deletes it.
        drop(store);
        let file = std::fs::read(&path).unwrap();
        assert_eq!(memchr::memmem::find(&file, secret.as_bytes()), None);
    }

    #[test]
    fn a_full_disk_refuses_a_change_as_a_whole() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = SqliteStore::open(&directory.path().join("gw.sqlite")).unwrap();
        store
            .commit(
                &Position::default(),
                &samples().into_iter().map(Step::Put).collect::<Vec<_>>(),
                &entry("first"),
            )
            .unwrap();
        let before = contents(&mut store);
        let pages: u32 = store
            .connection
            .pragma_query_value(None, "page_count", |row| row.get(0))
            .unwrap();
        store
            .connection
            .pragma_update(None, "max_page_count", pages)
            .unwrap();
        let many: Vec<Step> = (0..100).flat_map(|_| samples()).map(Step::Put).collect();
        assert!(matches!(
            store.commit(&Position::default(), &many, &entry("second")),
            Err(StoreError::Full)
        ));
        assert_eq!(contents(&mut store), before);
        assert_eq!(store.audit_log(&all()).unwrap().len(), 1);
        store
            .connection
            .pragma_update(None, "max_page_count", 1_000_000)
            .unwrap();
        store
            .commit(&Position::default(), &many, &entry("third"))
            .unwrap();
    }

    #[test]
    fn a_database_of_the_first_schema_is_migrated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gw.sqlite");
        let key = KeyId::random();
        let agent = AgentId::random();
        let old = Connection::open(&path).unwrap();
        old.execute_batch(DATABASE.migrations[0]).unwrap();
        old.execute_batch(&format!(
            "PRAGMA user_version = 1;
             INSERT INTO accounts VALUES ('acme');
             INSERT INTO services VALUES ('acme', 'api', 1, 0, 1, 10, 20);
             INSERT INTO service_keys VALUES ('{key}', 'acme', zeroblob(32), 'api b', 1);
             INSERT INTO agents VALUES ('{agent}', 'acme', 'a', 'api', 1);"
        ))
        .unwrap();
        drop(old);
        let records = SqliteStore::open(&path).unwrap().load().unwrap().records;
        let service = records.services.values().next().unwrap();
        assert_eq!(
            (service.rate, service.modes),
            (
                Rate::new(10, 20).unwrap(),
                Modes {
                    jwt: true,
                    service_key: false
                }
            )
        );
        let access = &records.service_keys[&key].access;
        assert_eq!(
            (
                access.enabled,
                access.allowed_services.len(),
                access.secret.as_bytes()
            ),
            (true, 2, &[0; 32][..])
        );
        assert_eq!(records.agents[&agent].status, EnrollmentStatus::Revoked);
        assert_eq!(records.accounts.len(), 1);
    }

    #[test]
    fn a_second_process_and_a_newer_schema_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gw.sqlite");
        let store = SqliteStore::open(&path).unwrap();
        assert!(matches!(SqliteStore::open(&path), Err(StoreError::InUse)));
        store
            .connection
            .pragma_update(None, "user_version", 999)
            .unwrap();
        drop(store);
        assert!(matches!(
            SqliteStore::open(&path),
            Err(StoreError::NewerSchema { found: 999, .. })
        ));
    }
}
