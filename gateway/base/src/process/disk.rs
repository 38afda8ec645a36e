//! Free space of the file systems that the gateway writes to.

use std::io;
use std::path::Path;

use rustix::fs::StatVfs;

use crate::limits;

/// Space of a file system, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct DiskSpace {
    /// All of it.
    pub total: u64,
    /// Free for this user.
    pub free: u64,
}

impl From<StatVfs> for DiskSpace {
    fn from(space: StatVfs) -> Self {
        Self {
            total: space.f_blocks.saturating_mul(space.f_frsize),
            free: space.f_bavail.saturating_mul(space.f_frsize),
        }
    }
}

impl DiskSpace {
    /// Space of the file system with `path`, which must exist.
    pub fn of(path: &Path) -> io::Result<Self> {
        Ok(rustix::fs::statvfs(path)?.into())
    }

    /// Free space that logs leave to everything else: [`limits::DISK_FLOOR`], less on a small disk.
    pub fn floor(self) -> u64 {
        limits::DISK_FLOOR.min(self.total / limits::DISK_FLOOR_PART)
    }

    /// Whether the floor stays free after `bytes` more are written.
    pub fn has_room_for(self, bytes: u64) -> bool {
        self.free.saturating_sub(bytes) >= self.floor()
    }

    /// As [`Self::has_room_for`], with an error that says what to do.
    pub fn check(self, bytes: u64) -> io::Result<()> {
        if self.has_room_for(bytes) {
            return Ok(());
        }
        let [free, floor] = [self.free >> 20, self.floor() >> 20];
        let text = format!(
            "the disk has {free} MiB free, and {floor} MiB are kept for changes: free some space"
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_floor_is_a_part_of_a_small_file_system() {
        const MIB: u64 = 1 << 20;
        let room = |total, free, bytes| DiskSpace { total, free }.has_room_for(bytes);
        let large = 100 * 1024 * MIB;
        assert!(room(large, 256 * MIB, 0) && !room(large, 256 * MIB, 1));
        assert!(room(160 * MIB, 30 * MIB, 10 * MIB) && !room(160 * MIB, 30 * MIB, 11 * MIB));
        assert!(!room(large, 0, MIB));
    }
}
