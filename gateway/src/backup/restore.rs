//! Restoring a backup into an empty data folder. Everything is checked before the first file gets its name.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use gw_shared::files;

use super::archive::unpack;
use super::{BackupError, DATABASE, Manifest};
use crate::config::{Config, StoreSettings};
use crate::store::{SqliteStore, Store};
use crate::tls::certificate;

/// Folder in the data folder for the files that are not checked yet.
const STAGING: &str = "restore.partial";
/// Directory that file systems have of their own.
const LOST_AND_FOUND: &str = "lost+found";

/// A restored backup.
#[derive(Debug)]
pub struct Restored {
    pub manifest: Manifest,
    /// Number of records in the database.
    pub records: usize,
}

/// Restores the archive `input` into `data_dir`, which must be empty or missing. On an error the folder is as before.
pub fn restore(config: &Config, input: impl Read) -> Result<Restored, BackupError> {
    if matches!(config.store, StoreSettings::Postgres(_)) {
        return Err(BackupError::InPostgres);
    }
    let destination = Destination::begin(&config.data_dir)?;
    let manifest = unpack(input, &destination.staging)?;
    if manifest.region != config.region.apex() {
        let configured = config.region.apex().to_owned();
        return Err(BackupError::OtherRegion { found: manifest.region, configured });
    }
    for authority in ["agent-ca", "dev-ca"] {
        check_authority(&destination.staging, authority)?;
    }
    let database = destination.staging.join(DATABASE);
    SqliteStore::check(&database)?;
    let snapshot = SqliteStore::open_existing(&database)?.load()?;
    if snapshot.position.revision.0 != manifest.revision {
        let found = snapshot.position.revision.0;
        let refused = format!("{DATABASE} ends with change {found}, and it should with {}", manifest.revision);
        return Err(BackupError::Refused(refused));
    }
    destination.keep()?;
    Ok(Restored { manifest, records: snapshot.records.into_vec().len() })
}

/// Checks that a certificate authority is whole.
fn check_authority(folder: &Path, name: &str) -> Result<(), BackupError> {
    let [certificate, key] = ["crt", "key"].map(|end| folder.join(format!("{name}.{end}")));
    if !certificate.exists() && !key.exists() {
        return Ok(());
    }
    let chain = certificate::read_chain(&certificate);
    let checked = chain.and_then(|chain| certificate::check_key(&chain, &certificate::read_key(&key)?));
    checked.map_err(|error| BackupError::Refused(format!("{name}.crt and {name}.key: {error}")))
}

/// A data folder that is not complete yet. A drop before [`Self::keep`] deletes what was written.
struct Destination<'a> {
    folder: &'a Path,
    staging: PathBuf,
    /// The folder did not exist before.
    is_new: bool,
    /// User and group of the files: those of the folder, or of the one that it is made in.
    owner: (u32, u32),
}

impl<'a> Destination<'a> {
    fn begin(folder: &'a Path) -> Result<Self, BackupError> {
        let is_new = !folder.exists();
        let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let like = if is_new { parent } else { folder };
        let like = fs::metadata(like).map_err(BackupError::file(like))?;
        if !is_new {
            let entries = fs::read_dir(folder).map_err(BackupError::file(folder))?;
            for entry in entries {
                let name = entry.map_err(BackupError::file(folder))?.file_name();
                if name != LOST_AND_FOUND {
                    let entry = name.to_string_lossy().into_owned();
                    return Err(BackupError::NotEmpty { path: folder.to_owned(), entry });
                }
            }
        }
        let staging = folder.join(STAGING);
        files::create_private_dir(&staging).map_err(BackupError::file(&staging))?;
        Ok(Self { folder, staging, is_new, owner: (like.uid(), like.gid()) })
    }

    /// Gives the files their owner and their places. The database is the last: without it a gateway has no records.
    fn keep(self) -> Result<(), BackupError> {
        let entries = fs::read_dir(&self.staging).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
        let mut names: Vec<_> = entries
            .map_err(BackupError::file(&self.staging))?
            .into_iter()
            .map(|entry| entry.file_name())
            .filter(|name| name != DATABASE)
            .collect();
        names.push(DATABASE.into());
        if self.is_new {
            self.give(self.folder)?;
        }
        for name in &names {
            self.give(&self.staging.join(name))?;
        }
        for name in &names {
            let (from, to) = (self.staging.join(name), self.folder.join(name));
            fs::rename(&from, &to).map_err(BackupError::file(&to))?;
        }
        File::open(self.folder).and_then(|folder| folder.sync_all()).map_err(BackupError::file(self.folder))
    }

    /// Sets the owner of a file, if it has another one.
    fn give(&self, path: &Path) -> Result<(), BackupError> {
        let found = fs::metadata(path).map_err(BackupError::file(path))?;
        if (found.uid(), found.gid()) == self.owner {
            return Ok(());
        }
        chown(path, Some(self.owner.0), Some(self.owner.1)).map_err(BackupError::file(path))
    }
}

impl Drop for Destination<'_> {
    /// Removes the folder of unchecked files, and the data folder if it is new and empty. A failure to do so is of no use
    /// to report beside the reason.
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.staging);
        if self.is_new {
            let _ = fs::remove_dir(self.folder);
        }
    }
}
