//! Secrets of new credentials and keys: where they go.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use gw_shared::text::is_hidden;

use super::object::ObjectId;
use super::percent_encoded;

/// Where secrets go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SecretsTo {
    /// A file for each in this folder.
    Folder(PathBuf),
    /// Standard output.
    Output,
}

/// The file of a secret that is created next. Exists before the secret does, so that the secret
/// cannot be lost to a file that cannot be made.
pub(super) struct SecretFile {
    path: PathBuf,
    file: File,
}

impl SecretFile {
    pub(super) fn create(folder: &Path, id: &ObjectId) -> Result<Self, String> {
        let path = path_of(folder, id);
        let created = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        match created {
            Ok(file) => Ok(Self { path, file }),
            Err(error) => Err(refusal(&path, &error)),
        }
    }

    /// Writes the secret to the disk; returns the path.
    pub(super) fn write(mut self, secret: &str) -> Result<PathBuf, String> {
        let written = self
            .file
            .write_all(format!("{secret}\n").as_bytes())
            .and_then(|()| self.file.sync_all());
        match written {
            Ok(()) => Ok(self.path),
            Err(error) => Err(format!("{}: {error}", self.path.display())),
        }
    }

    /// Removes the empty file.
    pub(super) fn remove(self) -> Result<(), String> {
        fs::remove_file(&self.path).map_err(|error| format!("{}: {error}", self.path.display()))
    }
}

/// Makes the folder if it is missing, and checks that it has no file for any of `ids`.
pub(super) fn prepare(folder: &Path, ids: &[&ObjectId]) -> Result<(), Vec<String>> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| vec![format!("--secrets-dir {}: {error}", folder.display())])?;
    let taken = ids.iter().filter_map(|id| {
        let path = path_of(folder, id);
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(refusal(&path, &error)),
            Ok(_) => Some(refusal(&path, &io::ErrorKind::AlreadyExists.into())),
        }
    });
    let taken: Vec<String> = taken.collect();
    if taken.is_empty() { Ok(()) } else { Err(taken) }
}

fn refusal(path: &Path, error: &io::Error) -> String {
    let path = path.display();
    match error.kind() {
        io::ErrorKind::AlreadyExists => format!(
            "{path} exists, and may hold a secret that is in use; move it away, or use another \
             --secrets-dir"
        ),
        _ => format!("{path}: {error}"),
    }
}

/// `account.kind.name` in the folder, with `%` and two digits for bytes that no name of a file
/// should have.
fn path_of(folder: &Path, id: &ObjectId) -> PathBuf {
    let name = percent_encoded(&id.name, |character| {
        is_hidden(character) || matches!(character, '/' | '%' | ' ')
    });
    folder.join(format!("{}.{}.{name}", id.account, id.kind.table()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::object::ObjectKind;
    use super::*;

    fn key(name: &str) -> ObjectId {
        ObjectId {
            kind: ObjectKind::Key,
            account: "acme".to_owned(),
            name: name.to_owned(),
        }
    }

    #[test]
    fn a_secret_has_a_file_of_its_own_that_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("secrets");
        let ids = [key("ci"), key("../etc/x y%")];
        prepare(&folder, &ids.iter().collect::<Vec<_>>()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        for id in &ids {
            let file = SecretFile::create(&folder, id).unwrap();
            let path = file.write("s3cret").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "s3cret\n");
            assert_eq!((mode(&path), path.parent()), (0o600, Some(&*folder)));
        }
        assert!(folder.join("acme.key...%2Fetc%2Fx%20y%25").exists());
        let taken = prepare(&folder, &ids.iter().collect::<Vec<_>>()).unwrap_err();
        assert_eq!(taken.len(), 2);
        assert!(taken[0].contains("acme.key.ci exists, and may hold a secret"));
        assert!(SecretFile::create(&folder, &ids[0]).is_err());

        let unused = SecretFile::create(&folder, &key("b")).unwrap();
        unused.remove().unwrap();
        assert!(!folder.join("acme.key.b").exists());
    }
}
