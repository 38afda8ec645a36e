//! Making a backup: a copy of the records and of the audit log as of one revision, and the secrets
//! beside the database.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use gw_base::clock::Timestamp;
use gw_base::process::file_owner::FileOwner;
use gw_interface::config::{Config, StoreSettings};
use gw_shared::files;
use gw_store::{AuditQuery, NumberedEntry, Sealing, Snapshot, SqliteStore, Store, StoreSource};
use zeroize::Zeroizing;

use super::archive::ArchiveWriter;
use super::{BackupError, DATABASE, FORMAT, IN_POSTGRES, MANIFEST, Manifest};
use crate::control::{Actor, Control, ControlError, SHARED_SECRETS, backup};

/// Folder in the data folder for the copy of the database while a backup is made.
const STAGING: &str = "backup.partial";
/// Entries of the audit log that are read at once. Changes wait meanwhile.
const PAGE: usize = 1_000;

/// Everything that a backup contains. The copy of the database is deleted with it.
pub(crate) struct PreparedBackup {
    staging: Staging,
    manifest: Manifest,
    created_at: Timestamp,
    /// Names and contents.
    secrets: Vec<(&'static str, Zeroizing<Vec<u8>>)>,
}

/// Adds the path to an error.
fn at(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Folder that is deleted on drop.
struct Staging(PathBuf);

impl Drop for Staging {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, folder = %self.0.display(),
                "cannot delete the copy of the database");
        }
    }
}

/// Prepares a backup of a running gateway. Changes go on meanwhile, and later ones are not in it.
/// Ends early when `is_cancelled`.
pub(crate) fn of_running(
    control: &Control,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<PreparedBackup, ControlError> {
    let data_dir =
        backup::data_dir(control).ok_or_else(|| ControlError::Conflict(IN_POSTGRES.to_owned()))?;
    let snapshot = backup::begin(control, &Actor::Admin)?;
    PreparedBackup::new(
        data_dir,
        &backup::sealing(control),
        control.region().apex(),
        snapshot,
        |before| {
            if is_cancelled() {
                Err(ControlError::Stopping)
            } else {
                backup::audit_before(control, before, PAGE)
            }
        },
    )
}

/// Writes a backup of the data folder of a stopped gateway to `out`. As root, works with the rights
/// of the folder's owner. Ends early when `is_cancelled`.
pub fn of_folder(
    config: &Config,
    out: impl Write,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<(), BackupError> {
    if matches!(config.store, StoreSettings::Postgres(_)) {
        return Err(BackupError::InPostgres);
    }
    let owner = FileOwner::of(&config.data_dir).map_err(BackupError::file(&config.data_dir))?;
    let made = owner.run(|| {
        prepare_folder(config, is_cancelled)?
            .write(out)
            .map_err(BackupError::Output)
    });
    made.map_err(BackupError::file(&config.data_dir))?
}

fn prepare_folder(
    config: &Config,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<PreparedBackup, BackupError> {
    let sealing = Sealing::load(config.seal_key.as_deref())?;
    let store = SqliteStore::open_unmigrated(&StoreSource::sqlite_in(&config.data_dir))?;
    let mut store = store.with_sealing(sealing.clone());
    let snapshot = store.load()?;
    let prepared = PreparedBackup::new(
        &config.data_dir,
        &sealing,
        config.region.apex(),
        snapshot,
        |before| {
            if is_cancelled() {
                return Err(ControlError::Stopping);
            }
            let query = AuditQuery {
                account: None,
                before: Some(before),
                limit: PAGE,
            };
            store.audit_log(&query).map_err(ControlError::from)
        },
    );
    prepared.map_err(|error| match error {
        ControlError::Stopping => BackupError::Cancelled,
        ControlError::Store(error) => error.into(),
        error => BackupError::file(&config.data_dir)(io::Error::other(error)),
    })
}

impl PreparedBackup {
    /// `audit` returns entries with a lower number than its argument, the newest first.
    fn new(
        data_dir: &Path,
        sealing: &Sealing,
        apex: &str,
        snapshot: Snapshot,
        mut audit: impl FnMut(i64) -> Result<Vec<NumberedEntry>, ControlError>,
    ) -> Result<Self, ControlError> {
        let staging = data_dir.join(STAGING);
        if staging.exists() {
            // Left by a process that ended during a backup.
            fs::remove_dir_all(&staging).map_err(|error| {
                let path = staging.display();
                let message = format!(
                    "{path}: the rest of an interrupted backup cannot be deleted: {error}; delete \
                     it as root with `rm -r {path}`, and make the backup again"
                );
                io::Error::new(error.kind(), message)
            })?;
        }
        files::create_private_dir(&staging).map_err(at(&staging))?;
        let staging = Staging(staging);
        let revision = snapshot.position.revision.0;
        let mut copy = SqliteStore::open(&staging.0.join(DATABASE))?;
        let mut before = revision.saturating_add(1);
        let mut audit_head = None;
        copy.fill_in_pages(&snapshot.records.into_vec(), || {
            let page = audit(before)?;
            audit_head = audit_head.or(page.first().map(NumberedEntry::head));
            before = page.last().map_or(before, |oldest| oldest.number);
            Ok::<_, ControlError>(page)
        })?;
        // Moves the write-ahead log into the database.
        drop(copy);
        let mut secrets = Vec::new();
        for secret in &SHARED_SECRETS {
            if secret.read_if_there(data_dir)?.is_some() {
                for file in secret.files {
                    secrets.push((
                        *file,
                        Zeroizing::new(sealing.read_file(&data_dir.join(file))?.into_bytes()),
                    ));
                }
            }
        }
        let created_at = Timestamp::now();
        let manifest = Manifest {
            format: FORMAT,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            region: apex.to_owned(),
            created_at: created_at.to_string(),
            revision,
            audit_head,
        };
        Ok(Self {
            staging,
            manifest,
            created_at,
            secrets,
        })
    }

    /// Writes the archive.
    pub(crate) fn write(&self, out: impl Write) -> io::Result<()> {
        let mut writer = ArchiveWriter::begin(out, u64::try_from(self.created_at.0).unwrap_or(0))?;
        let manifest = serde_json::to_vec(&self.manifest)?;
        writer.add(MANIFEST, manifest.len() as u64, &manifest[..])?;
        for (name, contents) in &self.secrets {
            writer.add(name, contents.len() as u64, &contents[..])?;
        }
        let database = File::open(self.staging.0.join(DATABASE))?;
        writer.add(DATABASE, database.metadata()?.len(), database)?;
        writer.finish()
    }
}
