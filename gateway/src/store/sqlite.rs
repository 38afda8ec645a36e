//! The store on SQLite: write-ahead log, every commit synced.

use std::path::Path;

use gw_shared::id::{AccountId, ServiceId};
use gw_shared::secret::SecretHash;
use rusqlite::{Connection, Row, params};

use super::{AgentRecord, Modes, Record, Records, ServiceKeyRecord, ServiceRecord, Store, StoreError};
use crate::limit::Rate;

/// Each entry brings a database from the schema numbered by its index to the next. Append only.
const MIGRATIONS: &[&str] = &["
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
"];

/// A store in one SQLite file.
pub struct SqliteStore(Connection);

impl SqliteStore {
    /// Opens or creates the database at `path` and brings its schema up to date.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let connection = Connection::open(path)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", "ON")?;
        let mut store = Self(connection);
        store.migrate()?;
        Ok(store)
    }

    fn migrate(&mut self) -> Result<(), StoreError> {
        let transaction = self.0.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let found: u32 = transaction.pragma_query_value(None, "user_version", |row| row.get(0))?;
        let found = found as usize;
        let Some(missing) = MIGRATIONS.get(found..) else {
            return Err(StoreError::NewerSchema { found, known: MIGRATIONS.len() });
        };
        for migration in missing {
            transaction.execute_batch(migration)?;
        }
        transaction.pragma_update(None, "user_version", MIGRATIONS.len() as u32)?;
        transaction.commit()?;
        Ok(())
    }
}

impl Store for SqliteStore {
    fn load(&self) -> Result<Records, StoreError> {
        // One transaction, so that what is read fits together.
        let reading = self.0.unchecked_transaction()?;
        let records = Records {
            accounts: read(&reading, "SELECT id FROM accounts", |row| parse(row, 0))?,
            services: read(
                &reading,
                "SELECT account, id, mode_jwt, mode_service_key, enabled, burst, refill_per_minute FROM services",
                read_service,
            )?,
            service_keys: read(
                &reading,
                "SELECT id, account, secret_sha256, allowed_services, enabled FROM service_keys",
                read_service_key,
            )?,
            agents: read(&reading, "SELECT id, account, name, services, revoked FROM agents", read_agent)?,
        };
        reading.finish()?;
        Ok(records)
    }

    fn put(&mut self, record: Record) -> Result<(), StoreError> {
        let account = match &record {
            Record::Account(_) => None,
            Record::Service(service) => Some(service.account.clone()),
            Record::ServiceKey(key) => Some(key.account.clone()),
            Record::Agent(agent) => Some(agent.account.clone()),
        };
        let written = match record {
            Record::Account(id) => {
                self.0.execute("INSERT INTO accounts (id) VALUES (?1) ON CONFLICT DO NOTHING", params![id.as_str()])
            }
            Record::Service(service) => self.0.execute(
                "INSERT OR REPLACE INTO services VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                params![
                    service.account.as_str(),
                    service.id.as_str(),
                    service.modes.jwt,
                    service.modes.service_key,
                    service.enabled,
                    service.rate.burst(),
                    service.rate.refill_per_minute(),
                ],
            ),
            Record::ServiceKey(key) => self.0.execute(
                "INSERT OR REPLACE INTO service_keys VALUES (?1, ?2, ?3, ?4, ?5)",
                params![
                    key.id.as_str(),
                    key.account.as_str(),
                    key.secret.as_bytes(),
                    join(&key.allowed_services),
                    key.enabled,
                ],
            ),
            Record::Agent(agent) => self.0.execute(
                "INSERT OR REPLACE INTO agents VALUES (?1, ?2, ?3, ?4, ?5)",
                params![agent.id.as_str(), agent.account.as_str(), agent.name, join(&agent.services), agent.revoked,],
            ),
        };
        match (written, account) {
            (Err(rusqlite::Error::SqliteFailure(error, _)), Some(account))
                if error.extended_code == rusqlite::ffi::SQLITE_CONSTRAINT_FOREIGNKEY =>
            {
                Err(StoreError::NoSuchAccount(account))
            }
            (written, _) => written.map(drop).map_err(Into::into),
        }
    }
}

fn read<T>(
    connection: &Connection,
    query: &str,
    mut record: impl FnMut(&Row<'_>) -> Result<T, StoreError>,
) -> Result<Vec<T>, StoreError> {
    let mut statement = connection.prepare(query)?;
    let mut rows = statement.query([])?;
    let mut records = Vec::new();
    while let Some(row) = rows.next()? {
        records.push(record(row)?);
    }
    Ok(records)
}

fn read_service(row: &Row<'_>) -> Result<ServiceRecord, StoreError> {
    Ok(ServiceRecord {
        account: parse(row, 0)?,
        id: parse(row, 1)?,
        modes: Modes { jwt: row.get(2)?, service_key: row.get(3)? },
        enabled: row.get(4)?,
        rate: Rate::new(row.get(5)?, row.get(6)?)
            .ok_or_else(|| StoreError::Corrupt("a service's rate is zero".to_owned()))?,
    })
}

fn read_service_key(row: &Row<'_>) -> Result<ServiceKeyRecord, StoreError> {
    let secret: Vec<u8> = row.get(2)?;
    Ok(ServiceKeyRecord {
        id: parse(row, 0)?,
        account: parse(row, 1)?,
        secret: SecretHash::from_bytes(&secret)
            .ok_or_else(|| StoreError::Corrupt("a service key's hash is not 32 bytes".to_owned()))?,
        allowed_services: split(row, 3)?,
        enabled: row.get(4)?,
    })
}

fn read_agent(row: &Row<'_>) -> Result<AgentRecord, StoreError> {
    Ok(AgentRecord {
        id: parse(row, 0)?,
        account: parse::<AccountId>(row, 1)?,
        name: row.get(2)?,
        services: split(row, 3)?,
        revoked: row.get(4)?,
    })
}

fn parse<T: std::str::FromStr<Err: ToString>>(row: &Row<'_>, column: usize) -> Result<T, StoreError> {
    let text: String = row.get(column)?;
    text.parse().map_err(|error: T::Err| StoreError::Corrupt(error.to_string()))
}

/// Service ids have no spaces: a list of them is kept as text with spaces between.
fn join(services: &[ServiceId]) -> String {
    services.iter().map(ServiceId::as_str).collect::<Vec<_>>().join(" ")
}

fn split(row: &Row<'_>, column: usize) -> Result<Vec<ServiceId>, StoreError> {
    let text: String = row.get(column)?;
    text.split_whitespace()
        .map(|id| ServiceId::new(id).map_err(|error| StoreError::Corrupt(error.to_string())))
        .collect()
}

#[cfg(test)]
mod tests {
    use gw_shared::id::{AgentId, KeyId};

    use super::*;

    fn sample() -> Records {
        let account = AccountId::new("acme").unwrap();
        let services = vec![ServiceId::new("api").unwrap(), ServiceId::new("b--c").unwrap()];
        Records {
            accounts: vec![account.clone()],
            services: vec![ServiceRecord {
                account: account.clone(),
                id: services[0].clone(),
                modes: Modes { jwt: true, service_key: false },
                enabled: true,
                rate: Rate::new(1000, 300).unwrap(),
            }],
            service_keys: vec![ServiceKeyRecord {
                id: KeyId::random(),
                account: account.clone(),
                secret: SecretHash::of("x"),
                allowed_services: services.clone(),
                enabled: false,
            }],
            agents: vec![AgentRecord {
                id: AgentId::random(),
                account,
                name: "it's \"mine\"".into(),
                services,
                revoked: true,
            }],
        }
    }

    fn put_all(store: &mut SqliteStore, records: Records) {
        let accounts = records.accounts.into_iter().map(Record::Account);
        let services = records.services.into_iter().map(Record::Service);
        let keys = records.service_keys.into_iter().map(Record::ServiceKey);
        let agents = records.agents.into_iter().map(Record::Agent);
        accounts.chain(services).chain(keys).chain(agents).for_each(|record| store.put(record).unwrap());
    }

    #[test]
    fn records_come_back_as_they_were_also_after_reopening() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gw.sqlite");
        let mut store = SqliteStore::open(&path).unwrap();
        put_all(&mut store, sample_once());
        put_all(&mut store, sample_once());
        assert_eq!(store.load().unwrap(), sample_once());
        drop(store);
        assert_eq!(SqliteStore::open(&path).unwrap().load().unwrap(), sample_once());
    }

    /// The same sample each time, random ids included.
    fn sample_once() -> Records {
        static SAMPLE: std::sync::OnceLock<Records> = std::sync::OnceLock::new();
        SAMPLE.get_or_init(sample).clone()
    }

    #[test]
    fn what_refers_to_a_missing_account_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = SqliteStore::open(&directory.path().join("gw.sqlite")).unwrap();
        let service = sample().services.remove(0);
        let error = store.put(Record::Service(service)).unwrap_err();
        assert_eq!(error.to_string(), "no account acme; create it first");
        assert_eq!(store.load().unwrap(), Records::default());
    }

    #[test]
    fn a_database_of_a_newer_version_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gw.sqlite");
        SqliteStore::open(&path).unwrap().0.pragma_update(None, "user_version", 999).unwrap();
        assert!(matches!(SqliteStore::open(&path), Err(StoreError::NewerSchema { found: 999, .. })));
    }
}
