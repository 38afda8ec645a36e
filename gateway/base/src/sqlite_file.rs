//! Opens the SQLite files of the data folder: permissions, settings of the connection, version of
//! the schema.
//!
//! `rusqlite_migration` would do the last part. Its newest version, 2.6, needs rusqlite 0.40, and a
//! second rusqlite in one program would link SQLite twice.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

/// A kind of SQLite file.
pub struct FileKind {
    /// Entry at index N upgrades the schema from version N to N + 1. Append only.
    pub migrations: &'static [&'static str],
    /// Sets up a connection, before the first read.
    pub set_up: fn(&Connection) -> rusqlite::Result<()>,
}

/// Reason why a SQLite file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SqliteOpenError {
    /// SQLite has failed, for example because the file is not a database.
    #[error("{0}")]
    Sqlite(#[from] rusqlite::Error),
    /// The file cannot be created or opened.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A later version of the program has migrated the file.
    #[error(
        "the file has schema {found}, of a newer version than this program, which has schema \
         {known}"
    )]
    NewerSchema {
        /// Version of the schema in the file.
        found: usize,
        /// Version of the schema of this program.
        known: usize,
    },
    /// The file has not been migrated to the schema of this program.
    #[error(
        "the file has schema {found}, of an older version than this program, which has schema \
         {known}"
    )]
    OlderSchema {
        /// Version of the schema in the file.
        found: usize,
        /// Version of the schema of this program.
        known: usize,
    },
}

impl FileKind {
    /// Opens or creates the file at `path` (mode 0600) and migrates its schema.
    pub fn open(&self, path: &Path) -> Result<Connection, SqliteOpenError> {
        // SQLite creates its other files with the permissions of this one.
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        let mut connection = self.connect(path)?;
        self.migrate(&mut connection)?;
        Ok(connection)
    }

    /// Opens the file at `path`. Fails if there is none, or if its schema is of another version.
    pub fn open_unmigrated(&self, path: &Path) -> Result<Connection, SqliteOpenError> {
        let connection = self.connect(path)?;
        let known = self.migrations.len();
        match version(&connection)? {
            found if found < known => Err(SqliteOpenError::OlderSchema { found, known }),
            found if found > known => Err(SqliteOpenError::NewerSchema { found, known }),
            _ => Ok(connection),
        }
    }

    fn connect(&self, path: &Path) -> rusqlite::Result<Connection> {
        // Without `CREATE`, which would ignore the mode.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        (self.set_up)(&connection)?;
        Ok(connection)
    }

    fn migrate(&self, connection: &mut Connection) -> Result<(), SqliteOpenError> {
        let known = self.migrations.len();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let found = version(&transaction)?;
        let Some(missing) = self.migrations.get(found..) else {
            return Err(SqliteOpenError::NewerSchema { found, known });
        };
        for migration in missing {
            transaction.execute_batch(migration)?;
        }
        if !missing.is_empty() {
            transaction.pragma_update(None, "user_version", known as u32)?;
        }
        Ok(transaction.commit()?)
    }
}

fn version(connection: &Connection) -> rusqlite::Result<usize> {
    let found: u32 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    Ok(found as usize)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const FIRST: FileKind = FileKind {
        migrations: &["CREATE TABLE a (number INTEGER)"],
        set_up: |_| Ok(()),
    };
    const SECOND: FileKind = FileKind {
        migrations: &[FIRST.migrations[0], "INSERT INTO a VALUES (7)"],
        ..FIRST
    };

    #[test]
    fn a_file_is_migrated_from_any_version_and_a_newer_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let number = |connection: &Connection| {
            connection.query_row("SELECT sum(number) FROM a", [], |row| {
                row.get::<_, Option<i64>>(0)
            })
        };
        assert!(matches!(
            FIRST.open_unmigrated(&path),
            Err(SqliteOpenError::Sqlite(_))
        ));
        assert_eq!(number(&FIRST.open(&path).unwrap()).unwrap(), None);
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(
            SECOND.open_unmigrated(&path),
            Err(SqliteOpenError::OlderSchema { found: 1, known: 2 })
        ));
        for _ in 0..2 {
            assert_eq!(number(&SECOND.open(&path).unwrap()).unwrap(), Some(7));
        }
        for refused in [FIRST.open(&path), FIRST.open_unmigrated(&path)] {
            assert!(matches!(
                refused,
                Err(SqliteOpenError::NewerSchema { found: 2, known: 1 })
            ));
        }
    }

    #[test]
    fn a_failed_migration_leaves_the_file_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        FIRST.open(&path).unwrap();
        const BROKEN: FileKind = FileKind {
            migrations: &[
                FIRST.migrations[0],
                "INSERT INTO a VALUES (7); DROP TABLE b",
            ],
            ..FIRST
        };
        assert!(matches!(
            BROKEN.open(&path),
            Err(SqliteOpenError::Sqlite(_))
        ));
        assert!(FIRST.open_unmigrated(&path).is_ok());
    }
}
