//! Programs in the state folder, and the record of updates.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use gw_shared::files;
use gw_shared::identity::program::{ReleaseKey, SIZE_MAX, SignedProgram};
use gw_shared::version::Version;
use serde::{Deserialize, Serialize};

use crate::identity::state::{StateDir, StateError};

/// Failed programs that are remembered.
const FAILED_MAX: usize = 16;

/// `update.json`
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UpdateRecord {
    /// The program that runs in place of the installed one.
    #[serde(default)]
    pub(crate) current: Option<SignedProgram>,
    /// Programs that are not tried again, the last one last.
    #[serde(default)]
    pub(crate) failed: Vec<FailedProgram>,
}

/// A program that did not serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FailedProgram {
    pub(crate) version: Version,
    pub(crate) sha256: String,
    pub(crate) error: String,
}

/// A checked program in the state folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredProgram {
    pub(crate) description: SignedProgram,
    pub(crate) path: PathBuf,
}

impl UpdateRecord {
    /// Adds a program that failed, and forgets the oldest one if there are too many.
    pub(crate) fn add_failure(&mut self, program: &SignedProgram, error: &str) {
        let error = error.chars().take(300).collect();
        self.failed.retain(|failed| failed.sha256 != program.sha256);
        self.failed.push(FailedProgram { version: program.version, sha256: program.sha256.clone(), error });
        let surplus = self.failed.len().saturating_sub(FAILED_MAX);
        self.failed.drain(..surplus);
    }
}

/// Folder of the programs.
pub(crate) fn folder(state: &StateDir) -> PathBuf {
    state.path().join("programs")
}

fn path(state: &StateDir, program: &SignedProgram) -> PathBuf {
    // The start of a hash in hexadecimal: two builds of one version have files of their own.
    let hash: String = program.sha256.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    folder(state).join(format!("gw-agent-{}-{hash}", program.version))
}

impl StoredProgram {
    /// Writes a program whose content was checked.
    pub(crate) fn write(state: &StateDir, program: &SignedProgram, content: &[u8]) -> io::Result<Self> {
        let path = path(state, program);
        files::create_private_dir(&folder(state))?;
        let new = path.with_extension("new");
        files::remove_if_there(&new)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o700).open(&new)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        Ok(Self { description: program.clone(), path })
    }

    /// Finds a program that was stored before, and checks signature and content again.
    pub(crate) fn find(state: &StateDir, program: &SignedProgram, key: &ReleaseKey) -> Result<Self, String> {
        let path = path(state, program);
        let explain = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        program.verify(key).map_err(|error| explain(&error))?;
        let length = fs::metadata(&path).map_err(|error| explain(&error))?.len();
        if length > SIZE_MAX {
            return Err(explain(&"the file is too large"));
        }
        let content = fs::read(&path).map_err(|error| explain(&error))?;
        program.verify_content(&content).map_err(|error| explain(&error))?;
        Ok(Self { description: program.clone(), path })
    }

    /// Removes all stored programs but `kept`.
    pub(crate) fn remove_others(state: &StateDir, kept: Option<&Path>) {
        for entry in fs::read_dir(folder(state)).into_iter().flatten().filter_map(Result::ok) {
            if kept.is_none_or(|kept| kept != entry.path())
                && let Err(error) = fs::remove_file(entry.path())
            {
                tracing::warn!(file = %entry.path().display(), %error, "cannot remove an old program");
            }
        }
    }
}

impl StateDir {
    /// Reads the record of updates; empty if there is none.
    pub(crate) fn updates(&self) -> Result<UpdateRecord, StateError> {
        Ok(self.read_json_if_there(UPDATES)?.unwrap_or_default())
    }

    pub(crate) fn write_updates(&self, record: &UpdateRecord) -> Result<(), StateError> {
        self.write_json(UPDATES, record)
    }
}

const UPDATES: &str = "update.json";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use aws_lc_rs::signature::Ed25519KeyPair;
    use gw_shared::identity::program::TARGET;

    use super::*;

    #[test]
    fn stored_programs_are_checked_again() {
        let (directory, pair) = (tempfile::tempdir().unwrap(), Ed25519KeyPair::generate().unwrap());
        let (state, key) = (StateDir::new(directory.path()), ReleaseKey::of(&pair));
        let program = SignedProgram::sign("9.0.0".parse().unwrap(), TARGET, b"program", &pair);
        let stored = StoredProgram::write(&state, &program, b"program").unwrap();
        assert_eq!(fs::metadata(&stored.path).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(StoredProgram::find(&state, &program, &key), Ok(stored.clone()));
        fs::write(&stored.path, b"Program").unwrap();
        assert!(StoredProgram::find(&state, &program, &key).unwrap_err().contains("SHA-256"));
        StoredProgram::write(&state, &program, b"program").unwrap();
        StoredProgram::remove_others(&state, Some(&stored.path));
        assert!(stored.path.exists());
        StoredProgram::remove_others(&state, None);
        assert!(!stored.path.exists());
        assert!(StoredProgram::find(&state, &program, &key).is_err());
    }

    #[test]
    fn the_record_remembers_a_bounded_number_of_failures() {
        let (directory, pair) = (tempfile::tempdir().unwrap(), Ed25519KeyPair::generate().unwrap());
        let state = StateDir::new(directory.path());
        let mut record = state.updates().unwrap();
        assert_eq!(record, UpdateRecord::default());
        for number in 0..=FAILED_MAX {
            let program = SignedProgram::sign("9.0.0".parse().unwrap(), TARGET, &[number as u8], &pair);
            record.add_failure(&program, "it failed");
            record.add_failure(&program, "it failed again");
        }
        assert_eq!(record.failed.len(), FAILED_MAX);
        state.write_updates(&record).unwrap();
        assert_eq!(state.updates().unwrap(), record);
    }
}
