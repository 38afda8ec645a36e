//! A file system of 150 MB, which a test fills.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{UnmountFlags, unmount};

use super::{move_to, programs};

const BYTES: u64 = 150_000_000;

/// A mounted file system. It is unmounted on drop.
pub(crate) struct SmallDisk {
    folder: tempfile::TempDir,
}

impl SmallDisk {
    /// A file system in memory, and one with a journal and delayed allocation. Without root, or
    /// without loop devices, those that this machine cannot mount are left out. Neither waits for
    /// the disk of this machine, which other tests use at the same time.
    pub(crate) fn of_each_kind() -> Vec<Self> {
        let kinds: [fn(&Path) -> Command; 2] = [memory, ext4];
        if !programs::is_root() {
            return Vec::new();
        }
        kinds.into_iter().filter_map(Self::mount).collect()
    }

    fn mount(command: fn(&Path) -> Command) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("disk")).unwrap();
        let output = command(folder.path()).output().unwrap();
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr);
            programs::skipped(&format!("a disk of 150 MB: {}", reason.trim()));
            return None;
        }
        Some(Self { folder })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// Moves a folder of another file system to this one, and leaves a link in its place.
    pub(crate) fn take(&self, folder: &Path) {
        move_to(folder, &self.path());
    }

    /// Writes until not a byte is left.
    pub(crate) fn fill(&self) {
        let name = format!("filler{}", fs::read_dir(self.path()).unwrap().count());
        let mut file = File::create(self.path().join(name)).unwrap();
        let block = vec![1; 1 << 20];
        for size in [block.len(), 4096, 1] {
            let error = loop {
                if let Err(error) = file.write_all(&block[..size]) {
                    break error;
                }
            };
            assert_eq!(error.kind(), ErrorKind::StorageFull);
        }
        file.sync_all().unwrap();
    }

    /// Removes what [`Self::fill`] has written.
    pub(crate) fn make_room(&self) {
        for entry in fs::read_dir(self.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::remove_file(path).unwrap();
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Also if a process of a failed test still uses it.
        let _ = unmount(self.path(), UnmountFlags::DETACH);
        // The file system with the image. The one in memory has none.
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
    }
}

fn memory(folder: &Path) -> Command {
    let mut command = Command::new("mount");
    let size = format!("size={BYTES},mode=700");
    command.args(["-t", "tmpfs", "-o", &size, "none"]);
    command.arg(folder.join("disk"));
    command
}

/// The image is a file of a file system in memory.
fn ext4(folder: &Path) -> Command {
    let mut command = Command::new("sh");
    let script = r#"
        mount -t tmpfs -o size=$(($2 * 2)),mode=700 none "$1" && mkdir "$1/disk" &&
        truncate -s "$2" "$1/image" &&
        mkfs.ext4 -q "$1/image" && mount -o loop "$1/image" "$1/disk"
    "#;
    command.args(["-c", script, "sh"]).arg(folder);
    command.arg(BYTES.to_string());
    command
}
