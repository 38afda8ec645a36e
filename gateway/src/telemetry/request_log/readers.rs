//! Pool of files open for reading. Opening a file takes a hundred times as long as finding a record in it.

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::LogError;
use super::day::Day;
use super::lookup::Reader;

/// Most idle open files, each with a cache of 4 MiB: one for each day kept.
const IDLE_MAX: usize = 9;

pub(super) struct Readers {
    folder: PathBuf,
    idle: Mutex<Vec<OpenDay>>,
}

/// Open file of a day. Returned with [`Readers::put`] unless reading failed.
pub(super) struct OpenDay {
    pub(super) reader: Reader,
    day: Day,
    /// Device and inode, which detect that the file was replaced.
    file: (u64, u64),
}

impl Readers {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            idle: Mutex::default(),
        }
    }

    /// Takes or opens the file of `day`; `None` if it does not exist or has no tables yet.
    pub(super) fn take(&self, day: Day) -> Result<Option<OpenDay>, LogError> {
        let file = match fs::metadata(self.folder.join(day.file_name())) {
            Ok(metadata) => (metadata.dev(), metadata.ino()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = idle
            .iter()
            .position(|open| open.day == day && open.file == file)
        {
            return Ok(Some(idle.swap_remove(found)));
        }
        drop(idle);
        Ok(Reader::open(&self.folder, day)?.map(|reader| OpenDay { reader, day, file }))
    }

    /// Returns `open` to the pool, and closes idle files of days that are not in `kept`.
    pub(super) fn put(&self, open: OpenDay, kept: &RangeInclusive<Day>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|open| kept.contains(&open.day));
        if idle.len() < IDLE_MAX {
            idle.push(open);
        }
    }

    /// Whether the file of `day` exists.
    pub(super) fn has(&self, day: Day) -> bool {
        self.folder.join(day.file_name()).exists()
    }
}
