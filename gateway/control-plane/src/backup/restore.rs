//! Restoring a backup into an empty data folder. Everything is checked before the first file gets
//! its name.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use gw_base::clock::Timestamp;
use gw_base::process::file_owner::FileOwner;
use gw_base::tls::certificate;
use gw_interface::config::{Config, StoreSettings};
use gw_shared::files;
use gw_shared::net::tls::pem;
use gw_store::{
    AuditEntry, AuditQuery, NotRestored, NumberedEntry, Snapshot, SqliteStore, Step, Store,
};
use rustix::fs::OFlags;
use serde_json::json;
use tempfile::TempPath;

use super::archive::unpack;
use super::{BackupError, DATABASE, Manifest};
use crate::control::{Actor, INCOMPLETE_RESTORE};

/// Directory that file systems have of their own.
const LOST_AND_FOUND: &str = "lost+found";

/// A restored backup.
#[derive(Debug)]
pub struct Restored {
    /// Region, time and revision of the backup.
    pub manifest: Manifest,
    /// Number of records in the database.
    pub records: usize,
    /// Numbers of records in the backup that were deleted, with a notice for each kind.
    pub deleted: Vec<(usize, &'static str)>,
}

/// Restores the archive `input` into `data_dir`, which must be empty or missing. On an error the
/// folder is as before. As root, works with the rights of the folder's owner. Ends early when
/// `is_cancelled`.
pub fn restore(
    config: &Config,
    input: impl Read,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Restored, BackupError> {
    if matches!(config.store, StoreSettings::Postgres(_)) {
        return Err(BackupError::InPostgres);
    }
    let owner = FileOwner::of(&config.data_dir).map_err(BackupError::file(&config.data_dir))?;
    owner
        .run(|| restore_files(config, input, is_cancelled))
        .map_err(BackupError::file(&config.data_dir))?
}

fn restore_files(
    config: &Config,
    input: impl Read,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Restored, BackupError> {
    let destination = UnfinishedFolder::begin(&config.data_dir)?;
    let manifest = unpack(input, &destination.staging)?;
    if manifest.region != config.region.apex() {
        let configured = config.region.apex().to_owned();
        return Err(BackupError::OtherRegion {
            found: manifest.region,
            configured,
        });
    }
    for authority in ["agent-ca", "dev-ca"] {
        check_authority(&destination.staging, authority)?;
    }
    let database = destination.staging.join(DATABASE);
    SqliteStore::check(&database)?;
    let mut store = SqliteStore::open_existing(&database)?;
    let snapshot = store.load()?;
    if snapshot.position.revision.0 != manifest.revision {
        let found = snapshot.position.revision.0;
        let refused = format!(
            "{DATABASE} ends with change {found}, and it should with {}",
            manifest.revision
        );
        return Err(BackupError::Refused(refused));
    }
    if let Some(noted) = manifest.audit_head {
        let newest = AuditQuery {
            account: None,
            before: None,
            limit: 1,
        };
        let found = store.audit_log(&newest)?.first().map(NumberedEntry::head);
        if found != Some(noted) {
            let refused =
                format!("the audit log of {DATABASE} does not end with the entry {noted}");
            return Err(BackupError::Refused(refused));
        }
    }
    let records = snapshot.records.clone().into_vec().len();
    let deleted = delete_not_restored(&mut store, &snapshot, &manifest)?;
    // Moves the write-ahead log into the database.
    drop(store);
    if is_cancelled() {
        return Err(BackupError::Cancelled);
    }
    destination.keep()?;
    Ok(Restored {
        manifest,
        records: records - deleted.iter().map(|(count, _)| count).sum::<usize>(),
        deleted,
    })
}

/// Deletes records that may have been used or deleted since the backup, and notes the restore in
/// the audit log. Returns their numbers and notices.
fn delete_not_restored(
    store: &mut SqliteStore,
    restored: &Snapshot,
    manifest: &Manifest,
) -> Result<Vec<(usize, &'static str)>, BackupError> {
    let mut detail = json!({ "created_at": manifest.created_at, "revision": manifest.revision });
    let mut steps = Vec::new();
    let mut deleted = Vec::new();
    for NotRestored { kind, notice, ids } in restored.records.not_restored() {
        let names = ids.iter().map(|id| id.columns().1);
        detail[format!("deleted_{kind}s")] = names.collect();
        if !ids.is_empty() {
            deleted.push((ids.len(), notice));
        }
        steps.extend(ids.into_iter().map(Step::Delete));
    }
    let entry = AuditEntry {
        at: Timestamp::now(),
        actor: Actor::Admin.to_string(),
        action: "backup.restore".into(),
        account: None,
        target: manifest.region.clone(),
        detail,
    };
    store.commit(&restored.position, &steps, &entry)?;
    Ok(deleted)
}

/// Checks that a certificate authority is whole.
fn check_authority(folder: &Path, name: &str) -> Result<(), BackupError> {
    let [certificate, key] = ["crt", "key"].map(|end| folder.join(format!("{name}.{end}")));
    if !certificate.exists() && !key.exists() {
        return Ok(());
    }
    let chain = pem::read_certificates(&certificate);
    let checked =
        chain.and_then(|chain| certificate::check_key(&chain, &pem::read_private_key(&key)?));
    checked.map_err(|error| BackupError::Refused(format!("{name}.crt and {name}.key: {error}")))
}

/// A data folder that is not complete yet. A drop before [`Self::keep`] deletes what was written.
struct UnfinishedFolder<'a> {
    folder: &'a Path,
    /// Folder for the files that are not checked yet. While it exists, no gateway starts with the
    /// data folder.
    staging: PathBuf,
    /// `staging`, locked: another restore fails.
    _lock: File,
    /// The data folder did not exist before.
    is_new: bool,
}

impl<'a> UnfinishedFolder<'a> {
    fn begin(folder: &'a Path) -> Result<Self, BackupError> {
        let is_new = !folder.exists();
        if !is_new {
            check_empty(folder)?;
        }
        let staging = folder.join(INCOMPLETE_RESTORE);
        let lock = create_staging(&staging)?;
        let destination = Self {
            folder,
            staging,
            _lock: lock,
            is_new,
        };
        // A gateway that started before the folder of unchecked files existed has made its database
        // by now, or refuses.
        check_empty(folder)?;
        Ok(destination)
    }

    /// Gives the files their places. The database is the last: without it a gateway has no records.
    fn keep(self) -> Result<(), BackupError> {
        let mut names: Vec<_> = names(&self.staging)
            .map_err(BackupError::file(&self.staging))?
            .filter(|name| name != DATABASE)
            .collect();
        names.push(DATABASE.into());
        check_empty(self.folder)?;
        let mut kept = Kept(Vec::new());
        for name in &names {
            let path = self.folder.join(name);
            // Not over a file that another process has made since.
            let unchecked = TempPath::try_from_path(self.staging.join(name))
                .map_err(BackupError::file(&path))?;
            unchecked
                .persist_noclobber(&path)
                .map_err(|error| BackupError::file(&path)(error.error))?;
            kept.0.push(path);
        }
        let sync = || File::open(self.folder).and_then(|folder| folder.sync_all());
        sync().map_err(BackupError::file(self.folder))?;
        kept.0.clear();
        // No gateway would start if it came back after a crash.
        fs::remove_dir_all(&self.staging)
            .and_then(|()| sync())
            .map_err(BackupError::file(&self.staging))
    }
}

impl Drop for UnfinishedFolder<'_> {
    /// Removes the folder of unchecked files, and the data folder if it is new and empty. A failure
    /// to do so is of no use to report beside the reason.
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.staging);
        if self.is_new {
            let _ = fs::remove_dir(self.folder);
        }
    }
}

/// Files that have their places, but not all of the backup. A drop removes them; a failure to do so
/// is of no use to report beside the reason.
struct Kept(Vec<PathBuf>);

impl Drop for Kept {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

fn names(folder: &Path) -> io::Result<impl Iterator<Item = OsString>> {
    let entries: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    Ok(entries.into_iter().map(|entry| entry.file_name()))
}

/// Refuses a data folder with files of a gateway.
fn check_empty(folder: &Path) -> Result<(), BackupError> {
    let mut names = names(folder).map_err(BackupError::file(folder))?;
    match names.find(|name| name != LOST_AND_FOUND && name != INCOMPLETE_RESTORE) {
        Some(name) => Err(BackupError::NotEmpty {
            path: folder.to_owned(),
            entry: name.to_string_lossy().into_owned(),
        }),
        None => Ok(()),
    }
}

/// Creates and locks the folder of unchecked files. Removes what an interrupted restore left in it.
fn create_staging(staging: &Path) -> Result<File, BackupError> {
    loop {
        files::create_private_dir(staging).map_err(BackupError::file(staging))?;
        let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits().cast_signed();
        let lock = match OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(staging)
        {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened.map_err(BackupError::file(staging))?,
        };
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(BackupError::Restoring {
                    path: staging.to_owned(),
                });
            }
            Err(TryLockError::Error(error)) => return Err(BackupError::file(staging)(error)),
        }
        let id = |file: fs::Metadata| (file.dev(), file.ino());
        let is_same = |found: fs::Metadata| Ok(id(found) == id(lock.metadata()?));
        match fs::symlink_metadata(staging).and_then(is_same) {
            Ok(true) => {
                clear(staging).map_err(BackupError::file(staging))?;
                return Ok(lock);
            }
            // The restore that had locked it has ended since, and removed it.
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(BackupError::file(staging)(error)),
        }
    }
}

/// Removes everything in a folder.
fn clear(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
