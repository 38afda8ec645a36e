//! `region import` and `region export`: the data of a single gateway to a region, and back.

use std::path::{Path, PathBuf};
use std::{fs, io};

use gw_base::process::file_owner::FileOwner;
use gw_control_plane::control::SHARED_SECRETS;
use gw_interface::config::Config;
use gw_shared::files;
use gw_store::{
    Contents, ContentsSummary, NamedSecret, PostgresStore, SqliteStore, StoreError, StoreSource,
};

use super::{RegionError, store};

/// Name of an exported database until it is complete. A gateway does not look for it.
const INCOMPLETE: &str = "gw.sqlite.incomplete";

/// Contents that were moved.
#[derive(Debug)]
pub struct Moved {
    pub source: ContentsSummary,
    /// As read back from the destination; equal to `source`.
    pub destination: ContentsSummary,
    /// Names of shared secrets.
    pub secrets: Vec<&'static str>,
}

/// Moves the data folder of a stopped gateway into the region, which must be empty. The folder
/// stays as it is. As root, works with the rights of the folder's owner.
pub fn import(config: &Config, folder: &Path) -> Result<Moved, RegionError> {
    let mut region = store(config)?;
    as_owner(
        folder,
        || read_and_fill(folder, &mut region),
        source_problem,
    )
}

fn read_and_fill(folder: &Path, region: &mut PostgresStore) -> Result<Moved, RegionError> {
    // Also makes sure that no gateway runs with the folder.
    let mut old = SqliteStore::open_unmigrated(&StoreSource::sqlite_in(folder)).map_err(
        |error| match error {
            StoreError::InUse => source_problem(
                folder,
                "a gateway is running with this folder; stop it first",
                None,
            ),
            error => source_problem(folder, &error.to_string(), error.kind()),
        },
    )?;
    let contents = Contents::read(&mut old).map_err(|error| match error {
        StoreError::Sealed(name) => {
            let reason = format!(
                "{name} is sealed with the seal_key of its gateway, and the region has another \
                 key: make a backup of it (`gw-gateway backup`), restore that into an empty \
                 folder, and import the folder"
            );
            source_problem(folder, &reason, None)
        }
        error => error.into(),
    })?;
    let secrets = shared_secrets(folder)?;
    let source = contents.summary()?;
    let destination = region
        .fill(&contents, &secrets)
        .map_err(|error| match error {
            StoreError::Unavailable(reason) => RegionError::UnknownOutcome(reason),
            error => error.into(),
        })?;
    Ok(Moved {
        source,
        destination,
        secrets: secrets.into_iter().map(|(name, _)| name).collect(),
    })
}

/// The secrets in a data folder that all nodes of a region share.
pub(super) fn shared_secrets(folder: &Path) -> Result<Vec<NamedSecret>, RegionError> {
    let mut secrets: Vec<NamedSecret> = Vec::new();
    for secret in &SHARED_SECRETS {
        let read = secret.read_if_there(folder);
        let read =
            read.map_err(|error| source_problem(folder, &error.to_string(), Some(error.kind())))?;
        secrets.extend(read.map(|stored| (secret.name, stored)));
    }
    Ok(secrets)
}

/// Makes a data folder for a single gateway from the region. `folder` must be empty or missing.
/// Nodes may run. As root, works with the rights of the owner of the folder, or of the one above
/// it.
pub fn export(config: &Config, folder: &Path) -> Result<Moved, RegionError> {
    let mut region = store(config)?;
    let contents = Contents::read(&mut region)?;
    let fill = || {
        let export = Export::begin(folder).map_err(|error| destination(folder, &error))?;
        let moved = export.fill(&mut region, &contents);
        if moved.is_err() {
            export.discard();
        }
        moved
    };
    as_owner(folder, fill, |folder, reason, _| {
        destination(folder, &reason)
    })
}

/// Runs `work` on a folder with the rights of its owner if this process runs as root: the owner
/// controls the names in it.
pub(super) fn as_owner<T>(
    folder: &Path,
    work: impl FnOnce() -> Result<T, RegionError>,
    problem: impl FnOnce(&Path, &str, Option<io::ErrorKind>) -> RegionError,
) -> Result<T, RegionError> {
    let done = FileOwner::of(folder).and_then(|owner| owner.run(work));
    done.map_err(|error| problem(folder, &error.to_string(), Some(error.kind())))?
}

pub(super) fn source_problem(
    folder: &Path,
    reason: &str,
    kind: Option<io::ErrorKind>,
) -> RegionError {
    let remedy = match kind {
        Some(io::ErrorKind::PermissionDenied) => {
            "; run the command as root or as the owner of the folder, to which all files in it \
             must belong"
        }
        _ => "",
    };
    RegionError::Source {
        folder: folder.display().to_string(),
        reason: format!("{reason}{remedy}"),
    }
}

fn destination(folder: &Path, reason: &dyn std::fmt::Display) -> RegionError {
    RegionError::Destination {
        folder: folder.display().to_string(),
        reason: reason.to_string(),
    }
}

/// A data folder that is not complete yet.
struct Export<'a> {
    folder: &'a Path,
    /// The folder did not exist before.
    is_new: bool,
}

impl<'a> Export<'a> {
    fn begin(folder: &'a Path) -> io::Result<Self> {
        let is_new = !folder.exists();
        files::create_private_dir(folder)?;
        if fs::read_dir(folder)?.next().is_some() {
            return Err(io::Error::other(
                "the folder is not empty; give one that is empty or does not exist",
            ));
        }
        Ok(Self { folder, is_new })
    }

    fn fill(&self, region: &mut PostgresStore, contents: &Contents) -> Result<Moved, RegionError> {
        let failed = |error: io::Error| destination(self.folder, &error);
        let mut secrets = Vec::new();
        for secret in &SHARED_SECRETS {
            let Some(stored) = region.find_secret(secret.name)? else {
                continue;
            };
            secret.write(self.folder, &stored).map_err(failed)?;
            if secret.read(self.folder).map_err(failed)? != stored {
                return Err(destination(
                    self.folder,
                    &format!("{} differs after it was written", secret.name),
                ));
            }
            secrets.push(secret.name);
        }
        let incomplete = self.incomplete();
        let mut new = SqliteStore::open(&incomplete)?;
        new.fill(contents)?;
        let source = contents.summary()?;
        let written = Contents::read(&mut new)?.summary()?;
        if source != written {
            return Err(destination(self.folder, &source.difference(&written)));
        }
        // Moves the write-ahead log into the database.
        drop(new);
        fs::rename(&incomplete, StoreSource::sqlite_in(self.folder)).map_err(failed)?;
        fs::File::open(self.folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed)?;
        Ok(Moved {
            source,
            destination: written,
            secrets,
        })
    }

    fn incomplete(&self) -> PathBuf {
        self.folder.join(INCOMPLETE)
    }

    /// Removes what was written. A failure to do so is of no use to report: the reason to discard
    /// it is reported.
    fn discard(&self) {
        if self.is_new {
            let _ = fs::remove_dir_all(self.folder);
            return;
        }
        let secrets = SHARED_SECRETS
            .iter()
            .flat_map(|secret| secret.files)
            .map(|file| self.folder.join(file));
        let journals =
            ["-wal", "-journal", "-shm"].map(|end| self.folder.join(format!("{INCOMPLETE}{end}")));
        for file in secrets.chain(journals).chain([self.incomplete()]) {
            let _ = fs::remove_file(file);
        }
    }
}
