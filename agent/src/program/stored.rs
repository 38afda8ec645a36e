//! Programs in the state folder, and the record of updates.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use gw_shared::files;
use gw_shared::identity::program::{ReleaseKeys, SIZE_MAX, SignedProgram, UpdateReport};
use gw_shared::version::Version;
use gw_shared::version::later_members::LaterMembers;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::identity::state::{self, StateDir, StateError};

/// Failed programs that are remembered.
const FAILED_MAX: usize = 16;

/// `update.json`. Written by the supervisor, and read by workers of other versions too.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UpdateRecord {
    /// The program that runs in place of the installed one.
    #[serde(default)]
    pub(crate) current: Option<SignedProgram>,
    /// Whether `current` has served for the time of its trial.
    #[serde(default)]
    pub(crate) is_proven: bool,
    /// Lowest version of a stored program that may run: the highest that has served for the time of
    /// its trial, or that the release key has required.
    #[serde(default)]
    pub(crate) floor: Option<Version>,
    /// Programs that did not serve, the last one last.
    #[serde(default)]
    pub(crate) failed: Vec<FailedProgram>,
    #[serde(flatten)]
    pub(crate) later: LaterMembers,
}

/// A program that did not serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailedProgram {
    pub(crate) version: Version,
    pub(crate) sha256: String,
    pub(crate) error: String,
    /// Whether the failure is the program's own: it is not tried again.
    #[serde(default)]
    pub(crate) is_refused: bool,
    #[serde(flatten)]
    pub(crate) later: LaterMembers,
}

impl UpdateRecord {
    /// Adds a failure, and forgets the oldest program if there are too many. A refused program is
    /// not tried again.
    pub(crate) fn add_failure(&mut self, program: &SignedProgram, error: &str, is_refused: bool) {
        let SignedProgram {
            version, sha256, ..
        } = program;
        self.failed.retain(|failed| !failed.is(program));
        self.failed.push(FailedProgram {
            version: *version,
            sha256: sha256.clone(),
            error: cut(error),
            is_refused,
            later: LaterMembers::default(),
        });
        let surplus = self.failed.len().saturating_sub(FAILED_MAX);
        self.failed.drain(..surplus);
    }

    /// Raises the floor to `version`, unless it is higher already.
    pub(crate) fn raise_floor(&mut self, version: Option<Version>) {
        self.floor = self.floor.max(version);
    }
}

impl FailedProgram {
    /// Whether this is about `program`.
    pub(crate) fn is(&self, program: &SignedProgram) -> bool {
        self.sha256 == program.sha256 && self.version == program.version
    }
}

/// The beginning of an error, as long as a report to the gateway may contain.
pub(crate) fn cut(error: &str) -> String {
    error[..error.floor_char_boundary(UpdateReport::ERROR_MAX)].to_owned()
}

/// Folder of the programs.
pub(crate) fn folder(state: &StateDir) -> PathBuf {
    state.path().join("programs")
}

/// Path of a program.
pub(crate) fn path(state: &StateDir, program: &SignedProgram) -> PathBuf {
    // The start of a hash in hexadecimal: two builds of one version have files of their own.
    let hash: String = program
        .sha256
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(16)
        .collect();
    folder(state).join(format!("gw-agent-{}-{hash}", program.version))
}

/// The file of a program that is to be downloaded, with its space on the disk. Removed unless the
/// program is stored.
#[derive(Debug)]
pub(crate) struct ReservedFile {
    /// `None` once the program is stored.
    file: Option<File>,
    temporary: PathBuf,
    path: PathBuf,
}

impl ReservedFile {
    /// Makes the file. Fails if the disk has no space for the program.
    pub(crate) fn new(state: &StateDir, program: &SignedProgram) -> io::Result<Self> {
        let path = path(state, program);
        files::create_private_dir(&folder(state))?;
        // The name has the process id, because a predecessor may still be downloading.
        let temporary = path.with_extension(format!("{}.new", std::process::id()));
        files::remove_if_there(&temporary)?;
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o700)
            .open(&temporary)?;
        let reserved = Self {
            file: Some(file),
            temporary,
            path,
        };
        if let Some(file) = &reserved.file {
            match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, program.size) {
                // The file system cannot reserve space: a full disk is found when the program is
                // written.
                Ok(()) | Err(Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(reserved)
    }

    /// Stores a program whose content was checked.
    pub(crate) fn store(mut self, content: &[u8]) -> io::Result<()> {
        if let Some(mut file) = self.file.take() {
            let stored = file
                .write_all(content)
                .and_then(|()| file.sync_all())
                .and_then(|()| {
                    // Closed first: a file that is open for writing cannot be executed (ETXTBSY).
                    drop(file);
                    fs::rename(&self.temporary, &self.path)
                });
            if let Err(error) = stored {
                let _ = fs::remove_file(&self.temporary);
                return Err(error);
            }
        }
        if let Some(folder) = self.path.parent() {
            File::open(folder)?.sync_all()?;
        }
        Ok(())
    }
}

impl Drop for ReservedFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            // A program that is not stored leaves nothing; what remains after a crash is removed
            // with other old programs.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Reads a program that was stored before, and checks signature and content again.
pub(crate) fn read(
    state: &StateDir,
    program: &SignedProgram,
    keys: &ReleaseKeys,
) -> Result<Vec<u8>, String> {
    let path = path(state, program);
    let explain = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    program.verify(keys).map_err(|error| explain(&error))?;
    let content = read_own(&path).map_err(|error| explain(&error))?;
    program
        .verify_content(&content)
        .map_err(|error| explain(&error))?;
    Ok(content)
}

/// Removes a program.
pub(crate) fn remove(state: &StateDir, program: &SignedProgram) {
    let path = path(state, program);
    if let Err(error) = files::remove_if_there(&path) {
        tracing::warn!(file = %path.display(), %error, "cannot remove a program");
    }
}

/// Removes all stored programs but `kept`.
pub(crate) fn remove_others(state: &StateDir, kept: Option<&Path>) {
    for entry in fs::read_dir(folder(state))
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
    {
        if kept.is_none_or(|kept| kept != entry.path())
            && let Err(error) = fs::remove_file(entry.path())
        {
            tracing::warn!(file = %entry.path().display(), %error, "cannot remove an old program");
        }
    }
}

/// Reads a file of this user, of at most one byte more than the largest program. Follows no link at
/// the end of the path.
fn read_own(path: &Path) -> io::Result<Vec<u8>> {
    // Without waiting for the other end of a pipe.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    state::check_owner(&about).map_err(io::Error::other)?;
    let mut content = Vec::new();
    file.take(SIZE_MAX + 1).read_to_end(&mut content)?;
    Ok(content)
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
    use gw_shared::identity::program::{ReleaseKey, TARGET};

    use super::*;
    use crate::later_member::pass;

    fn program(version: &str, content: &[u8], key: &Ed25519KeyPair) -> SignedProgram {
        SignedProgram::sign(version.parse().unwrap(), TARGET, content, key)
    }

    #[test]
    fn stored_programs_are_checked_again() {
        let directory = tempfile::tempdir().unwrap();
        let pair = Ed25519KeyPair::generate().unwrap();
        let state = StateDir::new(directory.path());
        let keys = ReleaseKey::of(&pair).into();
        let program = program("9.0.0", b"program", &pair);
        let path = path(&state, &program);
        let write = || {
            let file = ReservedFile::new(&state, &program).unwrap();
            file.store(b"program").unwrap();
        };
        write();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        assert_eq!(read(&state, &program, &keys).unwrap(), b"program");
        fs::write(&path, b"Program").unwrap();
        let error = read(&state, &program, &keys).unwrap_err();
        assert!(error.contains("SHA-256"), "{error}");
        write();
        remove_others(&state, Some(&path));
        assert!(path.exists());
        remove_others(&state, None);
        assert!(!path.exists());
        assert!(read(&state, &program, &keys).is_err());
    }

    #[test]
    fn only_regular_files_of_the_own_user_and_bounded_size_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        let link = directory.path().join("link");
        fs::write(&file, b"program").unwrap();
        assert_eq!(read_own(&file).unwrap(), b"program");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let error = read_own(&link).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::LOOP.raw_os_error()));
        let pipe = directory.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        for other in [directory.path(), &pipe] {
            let error = read_own(other).unwrap_err().to_string();
            assert!(error.contains("regular file"), "{other:?}: {error}");
        }
        let opened = File::options().write(true).open(&file).unwrap();
        opened.set_len(SIZE_MAX + 9).unwrap();
        assert_eq!(read_own(&file).unwrap().len() as u64, SIZE_MAX + 1);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&file, Some(65534), None).unwrap();
            let error = read_own(&file).unwrap_err().to_string();
            assert!(error.contains("belongs to user 65534"), "{error}");
        }
    }

    #[test]
    fn a_program_that_is_not_stored_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let pair = Ed25519KeyPair::generate().unwrap();
        let state = StateDir::new(directory.path());
        let files = || fs::read_dir(folder(&state)).unwrap().count();
        let program = program("9.0.0", b"program", &pair);
        drop(ReservedFile::new(&state, &program).unwrap());
        assert_eq!(files(), 0);
        let large = SignedProgram {
            size: 1 << 60,
            ..program
        };
        // No disk has the space.
        assert!(ReservedFile::new(&state, &large).is_err());
        assert_eq!(files(), 0);
    }

    #[test]
    fn the_record_remembers_a_bounded_number_of_failures() {
        let directory = tempfile::tempdir().unwrap();
        let pair = Ed25519KeyPair::generate().unwrap();
        let state = StateDir::new(directory.path());
        let mut record = state.updates().unwrap();
        assert_eq!(record, UpdateRecord::default());
        for number in 0..=FAILED_MAX {
            let program = program("9.0.0", &[number as u8], &pair);
            record.add_failure(&program, "it failed", false);
            record.add_failure(&program, &"é".repeat(1000), true);
        }
        assert_eq!(record.failed.len(), FAILED_MAX);
        assert_eq!(record.failed[0].error.len(), UpdateReport::ERROR_MAX);
        let other = program("9.0.1", b"program", &pair);
        record.add_failure(&other, "it crashed", true);
        state.write_updates(&record).unwrap();
        assert_eq!(state.updates().unwrap(), record);
    }

    #[test]
    fn the_record_keeps_members_of_a_later_version() {
        let pair = Ed25519KeyPair::generate().unwrap();
        let program = program("9.0.0", b"program", &pair);
        let mut record = UpdateRecord::default();
        record.add_failure(&program, "it failed", false);
        record.current = Some(program);
        let kept = pass(&record, &[]);
        assert_eq!(kept, ["", "/current", "/failed/0"]);
    }
}
