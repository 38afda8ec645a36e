//! Atomic writes and private files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

/// Replaces a file atomically; only its owner can read it (mode 0600). A crash leaves the old file
/// or the new one.
pub fn write_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    // A file that a crash left behind may have other permissions.
    remove_if_there(Path::new(&temporary))?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)?;
    let written = file.write_all(contents).and_then(|()| file.sync_all());
    if let Err(error) = written.and_then(|()| fs::rename(&temporary, path)) {
        // On a full disk, others need the room. The first error says more than one of this.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    File::open(folder_of(path))?.sync_all()
}

fn folder_of(path: &Path) -> &Path {
    // The parent of a name without a folder is empty.
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Creates a file that only its owner can read (mode 0600). Fails if there is a file or link of
/// this name: of two processes that create it, one succeeds.
pub fn create_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    let written = file.write_all(contents).and_then(|()| file.sync_all());
    let written = written.and_then(|()| File::open(folder_of(path))?.sync_all());
    if written.is_err() {
        // An incomplete file would be in the way of the next attempt. The first error says more
        // than one of this.
        let _ = fs::remove_file(path);
    }
    written
}

/// Creates a folder that only its owner can enter (mode 0700), and the missing ones above it. An
/// existing folder stays as it is. A crash does not lose the names of the new folders, and with
/// them the files that are synced in them.
pub fn create_private_dir(path: &Path) -> io::Result<()> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)?;
    for created in missing {
        match File::open(folder_of(created)) {
            // A folder that can be written, and not read, cannot be synced.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            folder => folder?.sync_all()?,
        }
    }
    Ok(())
}

/// What to tell the user of a file that cannot be read: path, cause and remedy.
pub fn cannot_read(path: &Path, error: &io::Error) -> String {
    format!("{}: {}", path.display(), unreadable(path, error))
}

/// [`cannot_read`] without the path.
pub fn unreadable(path: &Path, error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound if path.is_relative() => {
            "check the path, which is relative to the folder of this process".to_owned()
        }
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => "check the path".to_owned(),
        io::ErrorKind::PermissionDenied => format!(
            "user {} has to be able to read it",
            rustix::process::geteuid().as_raw()
        ),
        io::ErrorKind::IsADirectory => "name a file".to_owned(),
        io::ErrorKind::InvalidData => "it must be text in UTF-8".to_owned(),
        _ => "name another file, or correct the cause".to_owned(),
    };
    format!("cannot be read: {error}; {remedy}")
}

/// Removes a file if it exists. A crash does not bring it back.
pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => File::open(folder_of(path))?.sync_all(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Reads a text file; the error contains the path.
pub fn read_text(path: &Path) -> io::Result<String> {
    fs::read_to_string(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_file_is_created_once_and_never_in_place_of_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let [path, link] = ["secret", "link"].map(|name| directory.path().join(name));
        create_private(&path, b"first").unwrap();
        std::os::unix::fs::symlink(directory.path().join("missing"), &link).unwrap();
        for taken in [&path, &link] {
            let error = create_private(taken, b"second").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        assert_eq!(mode(&path), 0o600);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn a_private_file_stays_private_after_a_crash_left_a_temporary_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        fs::write(directory.path().join("secret.new"), "left by a crash").unwrap();
        fs::write(&path, "old").unwrap();
        write_private(&path, b"new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn a_file_that_cannot_be_replaced_leaves_no_temporary_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        fs::create_dir_all(path.join("in the way")).unwrap();
        write_private(&path, b"new").unwrap_err();
        assert!(!directory.path().join("secret.new").exists());
    }
}
