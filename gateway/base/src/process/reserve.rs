//! Room on the disk of the data folder that is kept for changes that take access away.
//!
//! A file holds the room. It is cut shorter when such a change finds the disk full, and is made
//! whole again when there is room.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::disk::DiskSpace;
use crate::limits;

/// Whether a write has failed for lack of room.
pub fn is_full(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// The reserve of a data folder.
#[derive(Debug, Clone)]
pub struct Reserve {
    path: PathBuf,
    /// File of the records. A change may write all of it again.
    records: PathBuf,
}

impl Reserve {
    /// The reserve beside a file of records. It has at least the size of that file, unless the disk
    /// is small.
    pub fn beside(records: PathBuf) -> Self {
        Self {
            path: records.with_file_name("reserve"),
            records,
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn space(&self) -> io::Result<DiskSpace> {
        DiskSpace::of(self.path.parent().unwrap_or(Path::new(".")))
    }

    /// Bytes that are missing in the file.
    pub fn missing(&self) -> io::Result<u64> {
        let length = |path: &Path| path.metadata().map_or(0, |file| file.len());
        let (least, most) = limits::RESERVE.into_inner();
        let part = self.space()?.total / limits::RESERVE_PART;
        let size = length(&self.records).clamp(least, most).min(part);
        Ok(size.saturating_sub(length(&self.path)))
    }

    /// Makes the file whole, if that leaves a little room. Fails if there is none even beside a
    /// whole file.
    pub fn fill(&self) -> io::Result<()> {
        let missing = self.missing()?;
        if self.space()?.free < missing + limits::RESERVE_TAKEN {
            return Err(ErrorKind::StorageFull.into());
        }
        if missing == 0 {
            return Ok(());
        }
        let mut options = OpenOptions::new();
        let mut file = options
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&self.path)?;
        let length = file.metadata()?.len();
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), length, missing) {
            Ok(()) => {}
            // The file system has no such call, and allocates written bytes only.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                io::copy(&mut io::Read::take(io::repeat(0), missing), &mut file)?;
                file.sync_all()?;
            }
            Err(error) => return Err(error.into()),
        }
        tracing::info!(path = %self.path.display(), bytes = length + missing,
            "the reserve on the disk is whole");
        Ok(())
    }

    /// Runs `write`, and again with more room from the reserve as long as `kind` of its error says
    /// that the disk is full.
    pub fn lend<T, E>(
        &self,
        mut write: impl FnMut() -> Result<T, E>,
        kind: impl Fn(&E) -> Option<ErrorKind>,
    ) -> Result<T, E> {
        let mut taken = limits::RESERVE_TAKEN;
        loop {
            match write() {
                Err(error) if kind(&error).is_some_and(is_full) && self.take(taken) => taken *= 2,
                written => return written,
            }
        }
    }

    /// Returns whether there was anything to take.
    fn take(&self, bytes: u64) -> bool {
        let taken = OpenOptions::new()
            .write(true)
            .open(&self.path)
            .and_then(|file| {
                let length = file.metadata()?.len();
                let left = length.saturating_sub(bytes);
                file.set_len(left)?;
                // Some file systems give the room back only now.
                file.sync_all()?;
                Ok(Some(left).filter(|_| length > 0))
            });
        let left = taken.unwrap_or(None);
        if let Some(left) = left {
            tracing::warn!(path = %self.path.display(), left,
                "the disk is full: a change that takes access away uses the reserve");
        }
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(reserve: &Reserve) -> u64 {
        reserve.path().metadata().map_or(0, |file| file.len())
    }

    #[test]
    fn the_file_is_whole_again_after_a_change_has_taken_room() {
        let folder = tempfile::tempdir().unwrap();
        let reserve = Reserve::beside(folder.path().join("records"));
        let full = || io::Error::from(ErrorKind::StorageFull);
        let kind = |error: &io::Error| Some(error.kind());
        assert!(
            reserve.lend(|| Err::<(), _>(full()), kind).is_err(),
            "there is none"
        );
        let size = reserve.missing().unwrap();
        assert!((1..=*limits::RESERVE.start()).contains(&size));
        reserve.fill().unwrap();
        assert_eq!((held(&reserve), reserve.missing().unwrap()), (size, 0));

        let mut left = Vec::new();
        let write = || {
            left.push(size - held(&reserve));
            if left.len() < 4 { Err(full()) } else { Ok(()) }
        };
        reserve.lend(write, kind).unwrap();
        assert_eq!(
            left,
            [0, 1, 3, 7].map(|times| times * limits::RESERVE_TAKEN)
        );
        let other = || Err::<(), _>(io::Error::from(ErrorKind::PermissionDenied));
        assert!(reserve.lend(other, kind).is_err());
        assert_eq!(
            reserve.missing().unwrap(),
            left[3],
            "only a full disk takes room"
        );
        assert!(reserve.lend(|| Err::<(), _>(full()), kind).is_err());
        assert_eq!(held(&reserve), 0, "no attempt is left");
        reserve.fill().unwrap();
        assert_eq!(reserve.missing().unwrap(), 0);
    }

    #[test]
    fn the_file_grows_with_the_records() {
        let folder = tempfile::tempdir().unwrap();
        let records = folder.path().join("records");
        let reserve = Reserve::beside(records.clone());
        reserve.fill().unwrap();
        let size = 2 * limits::RESERVE.start();
        OpenOptions::new()
            .create_new(true)
            .write(true)
            .open(records)
            .and_then(|file| file.set_len(size))
            .unwrap();
        let total = DiskSpace::of(folder.path()).unwrap().total;
        reserve.fill().unwrap();
        assert_eq!(held(&reserve), size.min(total / limits::RESERVE_PART));
    }
}
