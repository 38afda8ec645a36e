//! Days' files that are open for reading. Opening one takes a hundred times as long as finding a record in it.

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use super::LogError;
use super::day::Day;
use super::lookup::Reader;

/// Files that stay open while nobody reads, each with its cache of 4 MiB: one for each day that is kept.
const IDLE_MAX: usize = 9;

pub(super) struct Readers {
    folder: PathBuf,
    idle: Mutex<Vec<OpenDay>>,
}

/// A day's file, open. Given back with [`Readers::put`] unless reading it failed.
pub(super) struct OpenDay {
    pub(super) reader: Reader,
    day: Day,
    /// Device and inode: another file may have taken its place.
    file: (u64, u64),
}

impl Readers {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, idle: Mutex::default() }
    }

    /// The file of `day`; `None` if there is none, or nothing in it yet.
    pub(super) fn take(&self, day: Day) -> Result<Option<OpenDay>, LogError> {
        let file = match fs::metadata(self.folder.join(day.file_name())) {
            Ok(metadata) => (metadata.dev(), metadata.ino()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = idle.iter().position(|open| open.day == day && open.file == file) {
            return Ok(Some(idle.swap_remove(found)));
        }
        drop(idle);
        Ok(Reader::open(&self.folder, day)?.map(|reader| OpenDay { reader, day, file }))
    }

    /// Keeps `open` for others, and closes what is of no day in `kept`.
    pub(super) fn put(&self, open: OpenDay, kept: &RangeInclusive<Day>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|open| kept.contains(&open.day));
        if idle.len() < IDLE_MAX {
            idle.push(open);
        }
    }

    /// Whether a file of this day is there.
    pub(super) fn has(&self, day: Day) -> bool {
        self.folder.join(day.file_name()).exists()
    }
}
