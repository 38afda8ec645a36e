//! Disk space of the request log.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use gw_base::process::disk::DiskSpace;

use super::day::{DAYS_KEPT, Day};
use super::expiry::EXPIRED;

/// Parts of the bound: the days kept, today, a day that expires, and one for write-ahead logs.
const PARTS: u64 = DAYS_KEPT as u64 + 3;
/// Suffix of an empty file, which marks a day that was removed before its time.
const REMOVED: &str = ".removed";

/// Disk space of a request log.
#[derive(Debug, Clone)]
pub struct LogDisk {
    /// Bytes of its files, without days that are being removed.
    pub used: u64,
    /// Bytes that they may take.
    pub most: u64,
    /// The file system with the files.
    pub space: DiskSpace,
    /// The newest day that was removed before its time.
    pub removed: Option<String>,
    pub(crate) oldest: Option<Day>,
}

impl LogDisk {
    /// Measures the log in `folder`. It may take `max_bytes`, by default a quarter of the disk.
    pub fn measure(folder: &Path, max_bytes: Option<u64>) -> io::Result<Self> {
        let space = DiskSpace::of(folder)?;
        let mut used = 0;
        let mut days = BTreeSet::new();
        let mut removed = BTreeSet::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().into_string().unwrap_or_default();
            match Day::of_file_name(&name) {
                Some(day) if name.ends_with(REMOVED) => drop(removed.insert(day)),
                Some(day) if !name.ends_with(EXPIRED) => {
                    days.insert(day);
                    // Another process may remove the file meanwhile.
                    used += entry.metadata().map_or(0, |file| file.blocks() * 512);
                }
                _ => {}
            }
        }
        Ok(Self {
            used,
            most: max_bytes.unwrap_or(space.total / 4).min(space.total),
            space,
            removed: removed.last().map(Day::to_string),
            oldest: days.first().copied(),
        })
    }

    /// Bytes that the file of one day may have.
    pub(crate) fn of_day(&self) -> u64 {
        self.most / PARTS
    }

    /// Checks that `bytes` more can be written.
    pub(crate) fn check(&self, bytes: u64) -> io::Result<()> {
        if self.used <= self.most {
            return self.space.check(bytes);
        }
        let [used, most] = [self.used >> 20, self.most >> 20];
        let text = format!(
            "the files take {used} MiB, more than request_log_max_bytes ({most} MiB): raise it"
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, text))
    }
}

/// Marks that `day` was removed before its time. The mark is removed with the files of that day.
pub(crate) fn mark_removed(folder: &Path, day: Day) -> io::Result<()> {
    fs::write(folder.join(format!("{day}{REMOVED}")), "")
}
