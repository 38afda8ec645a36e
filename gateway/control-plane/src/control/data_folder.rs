//! The data folder at the start: whether this process can use it, and the reasons for which it
//! cannot.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use gw_base::tls::pki::PkiError;
use gw_shared::doctor::holder::Holder;
use gw_shared::files;
use gw_store::StoreSource;
use rustix::fs::Access;

use super::ControlError;

/// File that is locked in place of a database if the store is PostgreSQL.
pub(super) const LOCK_FILE: &str = "gw.lock";
/// Folder in the data folder that exists while a backup is restored.
pub(crate) const INCOMPLETE_RESTORE: &str = "restore.partial";

/// Creates the folder if it is missing, and checks that this process may read and write it, and
/// that no restore is incomplete.
pub(super) fn prepare(path: &Path) -> Result<(), ControlError> {
    let user = rustix::process::geteuid().as_raw();
    if let Err(error) = files::create_private_dir(path) {
        return Err(unusable(
            path,
            match fs::metadata(path) {
                Ok(found) if !found.is_dir() => {
                    "it is not a folder; name a folder in data_dir".to_owned()
                }
                _ => format!(
                    "it cannot be created: {error}; {}",
                    creation(path, &error, user)
                ),
            },
        ));
    }
    let usable = rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK);
    usable.map_err(io::Error::from).map_err(|error| {
        let advice = match (error.kind(), fs::metadata(path)) {
            (ErrorKind::PermissionDenied, Ok(found)) if found.uid() == user => {
                format!(
                    "its mode is {:04o}: `chmod 700 {}`",
                    found.mode() & 0o7777,
                    path.display()
                )
            }
            (ErrorKind::PermissionDenied, Ok(found)) => format!(
                "user {user} has to read and write it, and it belongs to user {owner} with mode \
                 {mode:04o}: give it to user {user} with `chown -R {user} {path}`, or run the \
                 gateway as its owner",
                owner = found.uid(),
                mode = found.mode() & 0o7777,
                path = path.display()
            ),
            (ErrorKind::ReadOnlyFilesystem, _) => READ_ONLY.to_owned(),
            _ => "name another folder in data_dir".to_owned(),
        };
        unusable(path, format!("{error}; {advice}"))
    })?;
    refuse_incomplete_restore(path)
}

/// Refuses a folder that does not have all files of a backup yet. Called again after the database
/// was opened: a restore that begins later finds the database and refuses.
pub(super) fn refuse_incomplete_restore(path: &Path) -> Result<(), ControlError> {
    if !path.join(INCOMPLETE_RESTORE).exists() {
        return Ok(());
    }
    let reason = format!(
        "a restore of a backup is running or was interrupted, because it has {INCOMPLETE_RESTORE}: \
         wait until `gw-gateway restore` has ended. If it does not run, empty the folder and \
         restore the backup again"
    );
    Err(unusable(path, reason))
}

const READ_ONLY: &str = "name a folder on a file system that can be written; under systemd, \
                         ReadWritePaths= of the unit lists the folders that can";

/// What to do about a folder that could not be created.
fn creation(path: &Path, error: &io::Error, user: u32) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => {
            format!(
                "create it for user {user} with `install -d -m 0700 -o {user} {}`",
                path.display()
            )
        }
        ErrorKind::ReadOnlyFilesystem => READ_ONLY.to_owned(),
        ErrorKind::StorageFull => "free space on its disk".to_owned(),
        _ => "name another folder in data_dir".to_owned(),
    }
}

/// Adds folder, cause and remedy to an error of opening the files of the folder.
pub(super) fn explain(path: &Path, error: ControlError) -> ControlError {
    let reason = match kind(&error) {
        Some(ErrorKind::ResourceBusy) => {
            let holder = holder(path)
                .map_or_else(|| "another process".to_owned(), |holder| holder.to_string());
            let reason = format!(
                "{holder} uses it, and a data folder is for one gateway: stop that process, \
                 replace it with SIGUSR2, or name another folder in data_dir"
            );
            return ControlError::DataFolderInUse {
                path: path.to_owned(),
                reason,
            };
        }
        Some(ErrorKind::StorageFull) => {
            let path = path.display();
            format!(
                "the disk is full: free space (`df -h {path}` shows it), then start again ({error})"
            )
        }
        Some(ErrorKind::PermissionDenied) => {
            let user = rustix::process::geteuid().as_raw();
            let path = path.display();
            format!(
                "{error}; all files in it must belong to the user of the gateway: `chown -R {user} \
                 {path}`"
            )
        }
        _ => return error,
    };
    unusable(path, reason)
}

fn unusable(path: &Path, reason: String) -> ControlError {
    ControlError::DataFolder {
        path: path.to_owned(),
        reason,
    }
}

/// What failed, in the words of the operating system.
pub(super) fn kind(error: &ControlError) -> Option<ErrorKind> {
    match error {
        ControlError::Store(error) => error.kind(),
        ControlError::Io(error) | ControlError::Pki(PkiError::Io(error)) => Some(error.kind()),
        _ => None,
    }
}

/// The process that uses the folder, if this process may see it.
fn holder(path: &Path) -> Option<Holder> {
    let files = [StoreSource::sqlite_in(path), path.join(LOCK_FILE)];
    files
        .iter()
        .filter_map(|file| Holder::of_file(file))
        .find(|holder| !holder.is_this_process())
}

#[cfg(test)]
mod tests {
    use gw_store::StoreError;

    use super::*;

    fn text(error: &ControlError) -> String {
        error.to_string()
    }

    #[test]
    fn errors_have_the_folder_and_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let named = |rest: &str| format!("data_dir {}: {rest}", path.display());
        prepare(&path).unwrap();
        prepare(&path).unwrap();
        let full = text(&explain(&path, StoreError::Full.into()));
        assert!(
            full.starts_with(&named("the disk is full: free space (`df -h ")),
            "{full}"
        );
        let full = text(&explain(
            &path,
            io::Error::from(ErrorKind::StorageFull).into(),
        ));
        assert!(full.starts_with(&named("the disk is full")), "{full}");
        let denied = text(&explain(
            &path,
            StoreError::Io(ErrorKind::PermissionDenied.into()).into(),
        ));
        assert!(denied.contains("`chown -R "), "{denied}");
        let used = text(&explain(&path, StoreError::InUse.into()));
        assert!(
            used.starts_with(&named("another process uses it")),
            "{used}"
        );
        // Others have nothing to do with the folder.
        let newer = StoreError::NewerSchema { found: 9, known: 1 };
        assert_eq!(
            text(&explain(
                &path,
                StoreError::NewerSchema { found: 9, known: 1 }.into()
            )),
            newer.to_string()
        );

        fs::create_dir(path.join(INCOMPLETE_RESTORE)).unwrap();
        let incomplete = text(&prepare(&path).unwrap_err());
        assert!(
            incomplete.starts_with(&named(
                "a restore of a backup is running or was interrupted"
            )),
            "{incomplete}"
        );
        fs::remove_dir(path.join(INCOMPLETE_RESTORE)).unwrap();

        fs::remove_dir(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(
            text(&prepare(&path).unwrap_err()),
            named("it is not a folder; name a folder in data_dir")
        );
        let below = path.join("below");
        assert!(
            text(&prepare(&below).unwrap_err()).contains("it cannot be created: Not a directory")
        );
    }
}
