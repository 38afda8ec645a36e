//! Where a node keeps its records.

use std::path::{Path, PathBuf};

use gw_region::RegionKeys;

use super::{
    KnownRecords, PostgresSettings, PostgresStore, Sealing, SqliteStore, Store, StoreError,
};

/// What is needed to open the store, also again later.
#[derive(Clone)]
pub enum StoreSource {
    /// A file in the data folder, and how its secrets are sealed.
    Sqlite(PathBuf, Sealing),
    /// A PostgreSQL database, which all nodes of a region share.
    Postgres(PostgresSource),
}

/// A database that the nodes of a region share.
#[derive(Clone)]
pub struct PostgresSource {
    /// Servers, database and credentials.
    pub settings: PostgresSettings,
    /// `{region}.{domain}`
    pub apex: String,
    /// Region keys, which authenticate the rows and seal the secrets of the database.
    pub keys: RegionKeys,
    /// Name of this node in the database.
    pub node: String,
    /// File that is locked while a process uses the store, because the data folder is for one
    /// process.
    pub lock: PathBuf,
    /// Shared by all stores that are opened with this source.
    pub known: KnownRecords,
}

impl StoreSource {
    /// The file of SQLite in a data folder.
    pub fn sqlite_in(data_dir: &Path) -> PathBuf {
        data_dir.join("gw.sqlite")
    }

    /// How secrets in the data folder are sealed. Those of PostgreSQL are sealed in the database
    /// only.
    pub fn sealing(&self) -> Sealing {
        match self {
            Self::Sqlite(_, sealing) => sealing.clone(),
            Self::Postgres(_) => Sealing::default(),
        }
    }

    /// Opens the store. With SQLite, opens or creates the file; with PostgreSQL, locks
    /// [`PostgresSource::lock`] and connects at the first call. Fails with [`StoreError::InUse`] if
    /// another process has the data folder open.
    pub fn open(&self) -> Result<Box<dyn Store>, StoreError> {
        Ok(match self {
            Self::Sqlite(path, sealing) => {
                Box::new(SqliteStore::open(path)?.sealed(sealing.clone())?)
            }
            Self::Postgres(source) => Box::new(PostgresStore::new(source)?.locked()?),
        })
    }
}
