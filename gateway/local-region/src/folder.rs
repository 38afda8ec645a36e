//! The data folder of a region.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use gw_shared::files;
use rustix::process::geteuid;
use tempfile::TempDir;

use crate::Error;

pub(crate) struct Folder {
    pub(crate) path: PathBuf,
    /// Removed with its contents when the region ends.
    _temporary: Option<TempDir>,
}

impl Folder {
    /// Makes the folder, unless it exists; a new temporary one if none is given.
    pub(crate) fn new(given: Option<&Path>) -> Result<Self, Error> {
        let Some(path) = given else {
            let temporary = temporary()?;
            let path = temporary.path().to_owned();
            enterable(&path)?;
            return Ok(Self {
                path,
                _temporary: Some(temporary),
            });
        };
        let option = || format!("--data-dir {}", path.display());
        let is_new = !path.exists();
        files::create_private_dir(path).map_err(Error::io(option()))?;
        let path = std::path::absolute(path).map_err(Error::io(option()))?;
        if path.to_str().is_none() {
            return Err(Error::Usage(format!(
                "{}: it is not UTF-8, as a configuration file is",
                option()
            )));
        }
        if is_new {
            enterable(&path)?;
        }
        Ok(Self {
            path,
            _temporary: None,
        })
    }
}

pub(crate) fn temporary() -> Result<TempDir, Error> {
    tempfile::Builder::new()
        .prefix("gw-demo-")
        .tempdir()
        .map_err(Error::io(std::env::temp_dir().display()))
}

/// Lets other users enter the folder, but not list it, if this process is root: the user of
/// PostgreSQL must reach its own folder there. All others are private.
fn enterable(path: &Path) -> Result<(), Error> {
    if !geteuid().is_root() {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(0o711)).map_err(Error::io(path.display()))
}
