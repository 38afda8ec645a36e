//! Size and free space of the file systems that the gateway writes to.

use std::io;
use std::path::Path;

use crate::limits;

/// Space of a file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// All of it.
    pub total: u64,
    /// Free for this user.
    pub free: u64,
}

impl DiskSpace {
    /// Space of the file system with `path`, which must exist.
    pub fn of(path: &Path) -> io::Result<Self> {
        let space = rustix::fs::statvfs(path)?;
        Ok(Self {
            total: space.f_blocks.saturating_mul(space.f_frsize),
            free: space.f_bavail.saturating_mul(space.f_frsize),
        })
    }

    /// Free space that logs leave to everything else: [`limits::DISK_FLOOR`], and less on a small file system.
    pub fn floor(self) -> u64 {
        limits::DISK_FLOOR.min(self.total / limits::DISK_FLOOR_PART)
    }

    /// Whether the floor stays free after `bytes` more are written.
    pub fn has_room_for(self, bytes: u64) -> bool {
        self.free.saturating_sub(bytes) >= self.floor()
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

    #[test]
    fn the_space_of_this_machine_is_read() {
        let space = DiskSpace::of(Path::new("/")).unwrap();
        assert!(space.total >= space.free && space.total > space.floor());
        assert!(DiskSpace::of(Path::new("/nowhere")).is_err());
    }
}
