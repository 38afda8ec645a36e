//! Executable copies of checked programs. The file in the state folder could be replaced between
//! its check and its execution; the copy cannot.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::io::Errno;

/// A copy of a program. Executed by its path, while this exists.
#[derive(Debug)]
struct Executable(File);

/// Why a checked program was not executed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecutionError {
    #[error("cannot execute the checked program: {0}")]
    Io(#[from] io::Error),
    #[error(
        "a copy of the program in memory may not be executed: {0}; {ALLOW}, or install this \
         version as a package"
    )]
    Memory(io::Error),
    #[error(
        "a copy of the program may be executed neither in memory ({memory}) nor in {folder} \
         ({file}); {ALLOW}, or mount the folder without noexec"
    )]
    MemoryAndFolder {
        memory: io::Error,
        folder: String,
        file: io::Error,
    },
}

const ALLOW: &str =
    "set the sysctl vm.memfd_noexec to 0 or 1, and let the security policy allow it";

/// Copies checked content, and executes the copy by `spawn`, which gets its path. The copy is in
/// memory. Where memory may not be executed, root uses a file without a name on the file system of
/// `folder`.
pub(crate) fn execute<T>(
    name: &str,
    content: &[u8],
    folder: &Path,
    is_root: bool,
    spawn: impl Fn(&Path) -> io::Result<T>,
) -> Result<T, ExecutionError> {
    let in_memory = Executable::sealed(name, content).and_then(|copy| spawn(&copy.path()));
    let memory = match in_memory {
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::PermissionDenied | ErrorKind::Unsupported
            ) =>
        {
            error
        }
        other => return Ok(other?),
    };
    // Each process of the same user can change such a file. Those of root can do everything anyway.
    if !is_root {
        return Err(ExecutionError::Memory(memory));
    }
    let in_folder = Executable::nameless(folder, content).and_then(|copy| spawn(&copy.path()));
    let folder = folder.display().to_string();
    match in_folder {
        Ok(spawned) => {
            tracing::warn!(error = %memory, folder,
                "memory may not be executed: a file of root is used in its place");
            Ok(spawned)
        }
        Err(file) => Err(ExecutionError::MemoryAndFolder {
            memory,
            folder,
            file,
        }),
    }
}

impl Executable {
    /// Copies a program to memory, and seals the copy (memfd_create(2), `F_ADD_SEALS`): no process
    /// can change it.
    fn sealed(name: &str, content: &[u8]) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(
            match rustix::fs::memfd_create(name, flags | MemfdFlags::EXEC) {
                // Linux before 6.3, where every memfd is executable.
                Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
                created => created?,
            },
        );
        file.write_all(content)?;
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Self::compared(file, content)
    }

    /// Copies a program to a file without a name on the file system of `folder` (`O_TMPFILE`). Only
    /// this process, its user and root can change it: for root, where memory is not executable.
    fn nameless(folder: &Path, content: &[u8]) -> io::Result<Self> {
        let without_a_name = OFlags::TMPFILE.bits().cast_signed();
        let mut written = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(without_a_name)
            .mode(0o500)
            .open(folder)?;
        written.write_all(content)?;
        // A file that is open for writing cannot be executed (ETXTBSY).
        let file = File::open(path(&written))?;
        drop(written);
        Self::compared(file, content)
    }

    /// Compares the sealed copy with the checked bytes: before the seal, another process of the
    /// same user could change it.
    fn compared(mut file: File, content: &[u8]) -> io::Result<Self> {
        let mut copy = Vec::with_capacity(content.len());
        file.rewind()?;
        (&file)
            .take(content.len() as u64 + 1)
            .read_to_end(&mut copy)?;
        if copy == content {
            Ok(Self(file))
        } else {
            Err(io::Error::other("the copy was changed by another process"))
        }
    }

    /// Path by which this process and its children execute the copy.
    fn path(&self) -> PathBuf {
        path(&self.0)
    }
}

fn path(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    #[test]
    fn copies_are_executed() {
        let folder = tempfile::tempdir().unwrap();
        let content = fs::read("/bin/false").unwrap();
        let copies = [
            Executable::sealed("false", &content),
            Executable::nameless(folder.path(), &content),
        ];
        for copy in copies.map(Result::unwrap) {
            let status = Command::new(copy.path()).status().unwrap();
            assert_eq!(status.code(), Some(1), "{copy:?}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn where_memory_may_not_be_executed_only_root_uses_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let run = |is_root, forbidden: &'static [&'static str]| {
            let spawn = |path: &Path| {
                let file = fs::read_link(path)?.to_string_lossy().into_owned();
                let is_forbidden = forbidden.iter().any(|part| file.contains(part));
                match is_forbidden {
                    true => Err(ErrorKind::PermissionDenied.into()),
                    false => Ok(file),
                }
            };
            execute("gw-agent-1.2.3", b"program", folder.path(), is_root, spawn)
        };
        let in_memory = run(false, &[]).unwrap();
        assert!(in_memory.starts_with("/memfd:gw-agent-1.2.3"));
        let in_file = run(true, &["/memfd:"]).unwrap();
        assert!(in_file.starts_with(folder.path().to_str().unwrap()));
        assert!(matches!(
            run(false, &["/memfd:"]),
            Err(ExecutionError::Memory(_))
        ));
        let error = run(true, &["/"]).unwrap_err().to_string();
        for part in ["vm.memfd_noexec", "without noexec"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_sealed_copy_cannot_be_changed() {
        let mut copy = Executable::sealed("program", b"program").unwrap();
        copy.0.rewind().unwrap();
        assert!(copy.0.write_all(b"P").is_err());
        for length in [1, 99] {
            assert!(copy.0.set_len(length).is_err(), "{length}");
        }
        // Opened again for writing, it is the same sealed file.
        let again = OpenOptions::new().write(true).open(copy.path());
        assert!(again.is_err() || again.unwrap().write_all(b"P").is_err());
        assert_eq!(fs::read(copy.path()).unwrap(), b"program");
    }

    #[test]
    fn a_copy_that_differs_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("copy");
        for content in ["Program", "program and more", "pro"] {
            fs::write(&file, content).unwrap();
            let compared = Executable::compared(File::open(&file).unwrap(), b"program");
            assert!(compared.is_err(), "{content}");
        }
    }
}
