//! Backups of a single gateway: one archive of the database, the certificate authorities and the
//! admin token. A running gateway makes it itself, because it has its database exclusively; the
//! folder of a stopped one is read directly.

mod archive;
mod create;
mod restore;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

use gw_store::{AuditHead, StoreError};
use serde::{Deserialize, Serialize};

pub use self::create::of_folder;
pub(crate) use self::create::{PreparedBackup, of_running};
pub use self::restore::{Restored, restore};

/// Version of the archive's contents.
pub(crate) const FORMAT: u32 = 1;
/// The first file of an archive: what it is a backup of.
pub(crate) const MANIFEST: &str = "backup.json";
/// The database, in the archive and in the data folder.
pub(crate) const DATABASE: &str = "gw.sqlite";
/// What to do for a region on PostgreSQL.
pub(crate) const IN_POSTGRES: &str = "the records of this region are in PostgreSQL: back up its \
                                      database with pg_dump, and keep the region key apart from it \
                                      (docs/region-operation.md, section Backup)";

/// What an archive is a backup of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub(crate) format: u32,
    /// Version of the program that has made it.
    pub(crate) program: String,
    /// `{region}.{domain}`, which certificates and tokens contain.
    pub region: String,
    /// RFC 3339.
    pub created_at: String,
    /// Number of the last change in it.
    pub revision: i64,
    /// The newest entry of its audit log, as `NUMBER:HASH`. Versions before did not write it.
    #[serde(default)]
    pub audit_head: Option<AuditHead>,
}

/// Why a backup cannot be made or restored.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The records of the region are in PostgreSQL.
    #[error("{IN_POSTGRES}")]
    InPostgres,
    /// A file of the data folder cannot be read or written.
    #[error("{}: {error}{}", path.display(), remedy(Some(error.kind())))]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
    /// Cancelled by the caller.
    #[error("cancelled")]
    Cancelled,
    /// The archive cannot be written.
    #[error("{0}")]
    Output(io::Error),
    /// Error of the database.
    #[error("{0}{remedy}", remedy = remedy(.0.kind()))]
    Store(#[from] StoreError),
    /// The data folder is not empty.
    #[error("data_dir: {} is not empty: it has {entry}; move the folder away, or restore into \
             another one", path.display())]
    NotEmpty {
        /// The data folder.
        path: PathBuf,
        /// Name of an entry in it.
        entry: String,
    },
    /// Another restore into the data folder is running.
    #[error(
        "{}: another restore into this folder is running; wait until it has ended",
        path.display()
    )]
    Restoring {
        /// The data folder.
        path: PathBuf,
    },
    /// The archive cannot be read to its end.
    #[error("the archive is damaged or incomplete: {0}; use another backup")]
    Damaged(io::Error),
    /// The archive has other contents than a backup, as the text explains.
    #[error("this is no backup of a gateway: {0}; use another file")]
    Refused(String),
    /// The backup is of another region than the configured one.
    #[error(
        "the backup is of the region {found}, and the configuration is of {configured}; use a \
         backup of {configured}"
    )]
    OtherRegion {
        /// Apex of the region of the backup.
        found: String,
        /// Apex of the configured region.
        configured: String,
    },
}

/// What to do about an error of the data folder.
fn remedy(kind: Option<io::ErrorKind>) -> &'static str {
    match kind {
        Some(io::ErrorKind::StorageFull) => "; free space on the disk of data_dir and try again",
        Some(io::ErrorKind::PermissionDenied) => {
            "; run the command as root or as the owner of data_dir, to which all files in it must \
             belong"
        }
        _ => "",
    }
}

impl BackupError {
    fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| Self::File { path, error }
    }
}
