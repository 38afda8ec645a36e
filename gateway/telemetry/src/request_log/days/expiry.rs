//! Removes the files of expired days. A file is truncated step by step, so that a large one blocks
//! neither the log thread nor the file system.

use std::collections::VecDeque;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use gw_shared::files::remove_if_there;

use super::day::Day;

/// Bytes removed in one step, which takes some milliseconds. There is one step per write, or one
/// per second.
pub(crate) const STEP_BYTES: u64 = 32 * 1024 * 1024;
/// Suffix of the name of a file that is being removed.
pub(crate) const EXPIRED: &str = ".expired";

/// Files being removed.
#[derive(Default)]
pub(crate) struct Expiry {
    rest: VecDeque<PathBuf>,
}

impl Expiry {
    /// Renames all files of days before `oldest`, damaged ones included, so that readers no longer
    /// find them.
    pub(crate) fn begin(&mut self, folder: &Path, oldest: Day) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            if Day::of_file_name(name).is_none_or(|day| day >= oldest) || self.rest.contains(&path)
            {
                continue;
            }
            if name.ends_with(EXPIRED) {
                // Renamed by another process, which removes it or has left it behind.
                self.rest.push_back(path);
                continue;
            }
            // Renamed first: SQLite must not open a truncated file. Another process may rename it
            // before.
            let expired = folder.join(format!("{name}{EXPIRED}"));
            match fs::rename(&path, &expired) {
                Ok(()) => self.rest.push_back(expired),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Continues the removal of files that an earlier process renamed.
    pub(crate) fn resume(&mut self, folder: &Path) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            if name.is_some_and(|name| name.ends_with(EXPIRED) && Day::of_file_name(name).is_some())
            {
                self.rest.push_back(path);
            }
        }
        Ok(())
    }

    /// Removes one step of the first file. Returns whether files remain.
    pub(crate) fn step(&mut self) -> io::Result<bool> {
        let Some(path) = self.rest.front() else {
            return Ok(false);
        };
        let done = shorten(path);
        if !matches!(done, Ok(false)) {
            // After an error too: the file is tried again when the next day begins.
            self.rest.pop_front();
        }
        done.map(|_| !self.rest.is_empty())
    }
}

/// Truncates a file by [`STEP_BYTES`], or removes it if it is not longer. Returns whether it is
/// removed.
fn shorten(path: &Path) -> io::Result<bool> {
    let file = match OpenOptions::new().write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        file => file?,
    };
    let length = file.metadata()?.len();
    if length <= STEP_BYTES {
        remove_if_there(path)?;
        return Ok(true);
    }
    file.set_len(length - STEP_BYTES)?;
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::File;

    use super::*;

    fn names(folder: &Path) -> BTreeSet<String> {
        let entries = fs::read_dir(folder).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn expired_days_are_removed_in_steps_and_other_files_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path();
        let old = Day::of_file_name("2026-11-13.").unwrap();
        let kept = [
            "2026-11-14.sqlite",
            "2026-11-14.sqlite-wal",
            "notes.txt",
            "2026-11-21.sqlite",
        ];
        let gone = [
            "2026-11-12.sqlite.expired",
            "2026-11-13.sqlite-wal",
            "2026-11-13.sqlite.corrupt",
        ];
        for name in kept.iter().chain(&gone) {
            fs::write(folder.join(name), "x").unwrap();
        }
        let large = folder.join(old.file_name());
        File::create(&large)
            .unwrap()
            .set_len(2 * STEP_BYTES + 1)
            .unwrap();

        let mut expiry = Expiry::default();
        expiry.resume(folder).unwrap();
        assert_eq!(expiry.rest.len(), 1);
        expiry.begin(folder, Day(old.0 + 1)).unwrap();
        expiry.begin(folder, Day(old.0 + 1)).unwrap();
        assert!(!large.exists(), "renamed at once");
        let mut steps = 1;
        while expiry.step().unwrap() {
            steps += 1;
        }
        assert_eq!(steps, gone.len() + 3);
        assert_eq!(
            names(folder),
            kept.iter().map(|name| (*name).to_owned()).collect()
        );
        assert!(!expiry.step().unwrap());
    }
}
