//! Output of the access log: appends whole lines to a file, or to the standard output of the
//! process.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use gw_base::process::disk::DiskSpace;
use rustix::fs::OFlags;

use super::AccessLogTarget;

/// Most bytes of one write to a file. A write with `O_APPEND` is not interleaved with those of
/// another process.
const FILE_PIECE: usize = 256 * 1024;
/// Most bytes of one write to a pipe that no other write can interleave (`PIPE_BUF` of pipe(7)).
const PIPE_PIECE: usize = 4096;

pub(super) struct LogOutput {
    target: AccessLogTarget,
    file: File,
    /// Bytes that one write should have at most.
    pub(super) piece: usize,
    /// The output ends with a part of a line.
    is_torn: bool,
}

/// Lines that could not be appended.
#[derive(Debug)]
pub(super) struct Unwritten {
    /// Whole lines that were written before the error.
    pub(super) written: usize,
    pub(super) error: io::Error,
}

impl LogOutput {
    /// Opens or creates the file (mode 0640), or duplicates standard output.
    pub(super) fn open(target: &AccessLogTarget) -> io::Result<Self> {
        let file = match target {
            AccessLogTarget::Stdout => File::from(io::stdout().as_fd().try_clone_to_owned()?),
            AccessLogTarget::File(path) => open_file(path)?,
        };
        let piece = if file.metadata()?.is_file() {
            FILE_PIECE
        } else {
            PIPE_PIECE
        };
        let is_torn = matches!(target, AccessLogTarget::File(path) if ends_with_part(path));
        Ok(Self {
            target: target.clone(),
            file,
            piece,
            is_torn,
        })
    }

    pub(super) fn target(&self) -> &AccessLogTarget {
        &self.target
    }

    /// Opens the file again. On an error the open one stays in use.
    pub(super) fn reopen(&mut self) -> io::Result<()> {
        let reopened = Self::open(&self.target)?;
        let id = |file: &File| file.metadata().map(|file| (file.dev(), file.ino())).ok();
        let is_torn = reopened.is_torn || self.is_torn && id(&self.file) == id(&reopened.file);
        *self = Self {
            is_torn,
            ..reopened
        };
        Ok(())
    }

    /// Appends whole lines, with one write if the output takes them at once.
    pub(super) fn append(&mut self, lines: &[u8]) -> Result<(), Unwritten> {
        let none = |error| Unwritten { written: 0, error };
        if self.is_removed() {
            self.reopen().map_err(none)?;
        }
        if self.piece == FILE_PIECE {
            let space = rustix::fs::fstatvfs(&self.file).map_err(|error| none(error.into()))?;
            let room = DiskSpace::from(space).check(lines.len() as u64);
            room.map_err(none)?;
        }
        if self.is_torn {
            self.write(b"\n").map_err(|(_, error)| none(error))?;
            self.is_torn = false;
        }
        self.write(lines).map_err(|(bytes, error)| {
            let whole = lines[..bytes]
                .iter()
                .rposition(|byte| *byte == b'\n')
                .map_or(0, |last| last + 1);
            // Not removed: another process may have appended to the file since.
            self.is_torn = whole < bytes;
            Unwritten {
                written: memchr::memchr_iter(b'\n', &lines[..whole]).count(),
                error,
            }
        })
    }

    /// Whether the file was deleted, or another file was moved to its place.
    fn is_removed(&self) -> bool {
        matches!(self.target, AccessLogTarget::File(_))
            && self.file.metadata().is_ok_and(|file| file.nlink() == 0)
    }

    /// On an error, returns how many bytes were written before it.
    fn write(&mut self, mut bytes: &[u8]) -> Result<(), (usize, io::Error)> {
        let all = bytes.len();
        while !bytes.is_empty() {
            match self.file.write(bytes) {
                Ok(0) => return Err((all - bytes.len(), io::ErrorKind::WriteZero.into())),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((all - bytes.len(), error)),
            }
        }
        Ok(())
    }
}

/// Whether a file has a part of a line at its end, which a full disk left there. False if the file
/// cannot be read.
fn ends_with_part(path: &Path) -> bool {
    let last = || -> io::Result<u8> {
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(path)?;
        let mut byte = [0];
        file.read_exact_at(
            &mut byte,
            file.metadata()?
                .len()
                .checked_sub(1)
                .ok_or(io::ErrorKind::UnexpectedEof)?,
        )?;
        Ok(byte[0])
    };
    last().is_ok_and(|last| last != b'\n')
}

fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o640);
    // A FIFO without a reader is an error, and does not block the start.
    let file = options
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn output(path: &Path) -> LogOutput {
        LogOutput::open(&AccessLogTarget::File(path.to_owned())).unwrap()
    }

    #[test]
    fn two_processes_append_to_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.jsonl");
        let mut first = output(&path);
        let mut second = output(&path);
        first.append(b"1\n2\n").unwrap();
        second.append(b"3\n").unwrap();
        first.append(b"4\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n2\n3\n4\n");
        assert_eq!(
            (first.piece, fs::metadata(&path).unwrap().mode() & 0o777),
            (FILE_PIECE, 0o640 & !umask())
        );
    }

    fn umask() -> u32 {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("any");
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o777)
            .open(&file)
            .unwrap();
        !fs::metadata(&file).unwrap().mode() & 0o777
    }

    #[test]
    fn a_renamed_file_is_written_until_the_log_is_reopened_and_a_removed_one_is_created() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.jsonl");
        let old = folder.path().join("access.jsonl.1");
        let mut output = output(&path);
        output.append(b"1\n").unwrap();
        fs::rename(&path, &old).unwrap();
        output.append(b"2\n").unwrap();
        output.reopen().unwrap();
        output.append(b"3\n").unwrap();
        assert_eq!(
            (
                fs::read_to_string(&old).unwrap(),
                fs::read_to_string(&path).unwrap()
            ),
            ("1\n2\n".into(), "3\n".into())
        );
        fs::remove_file(&path).unwrap();
        output.append(b"4\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "4\n");
        // The folder is gone: an error, until it is back.
        fs::remove_file(&path).unwrap();
        let aside = folder.path().with_extension("aside");
        fs::rename(folder.path(), &aside).unwrap();
        assert_eq!(output.append(b"5\n").unwrap_err().written, 0);
        fs::rename(&aside, folder.path()).unwrap();
        output.append(b"6\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "6\n");
    }

    #[test]
    fn a_part_of_a_line_is_ended_and_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.jsonl");
        fs::write(&path, "1\n{\"par").unwrap();
        let mut first = output(&path);
        let mut other = output(&path);
        assert!(first.is_torn);
        first.append(b"2\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n{\"par\n2\n");
        // The line of another process, which has found the part too, stays.
        other.append(b"3\n").unwrap();
        first.append(b"4\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n{\"par\n2\n\n3\n4\n");
        assert!(!output(&path).is_torn);
    }

    /// A pipe takes a part of a write, as a disk does that becomes full: nothing is taken back from
    /// what was written.
    #[test]
    fn a_line_that_was_written_in_part_is_ended_by_the_next_write() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let mut options = OpenOptions::new();
        let reader = options
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(&fifo)
            .unwrap();
        let mut output = output(&fifo);
        rustix::fs::fcntl_setfl(&output.file, OFlags::NONBLOCK | OFlags::APPEND).unwrap();
        // More than any pipe holds by default.
        let mut lines = vec![b'x'; 2 << 20];
        lines[1] = b'\n';
        let Unwritten { written, error } = output.append(&lines).unwrap_err();
        assert_eq!(
            (written, error.kind(), output.is_torn),
            (1, io::ErrorKind::WouldBlock, true)
        );
        drop(reader);
    }

    #[test]
    fn a_full_device_and_a_pipe_without_a_reader_are_errors() {
        let mut full = output(Path::new("/dev/full"));
        assert_eq!(full.piece, PIPE_PIECE);
        let Unwritten { written, error } = full.append(b"1\n").unwrap_err();
        assert_eq!((written, error.kind()), (0, io::ErrorKind::StorageFull));
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        assert!(LogOutput::open(&AccessLogTarget::File(fifo)).is_err());
    }
}
