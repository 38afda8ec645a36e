//! A file system that loses what was not synced, as a machine does when its power fails.
//!
//! A process that is killed leaves its writes in the page cache, so that a kill alone does not show
//! a missing `fsync`. This file system (FUSE) keeps files in memory, and knows what of them is on
//! the disk.
//!
//! Alternatives: LazyFS needs a build of C++ with libfuse, and loses the contents of files only,
//! not names of files that were created or renamed. A snapshot of a block device needs the device
//! mapper, which many kernels of CI lack, and tests the file system on it: ext4 syncs folders
//! together with files, which POSIX does not promise.

mod disk;
mod file_system;

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use fuser::{BackgroundSession, MountOption, Session};
use rustix::mount::{UnmountFlags, unmount};

use self::disk::Disk;
pub(crate) use self::disk::{Loss, NoRoomAt};
use self::file_system::FileSystem;
use super::{move_to, programs};

/// A mounted file system that loses what was not synced.
pub(crate) struct LossyDisk {
    disk: Arc<Mutex<Disk>>,
    folder: tempfile::TempDir,
    session: Option<BackgroundSession>,
}

impl LossyDisk {
    /// Mounts an empty disk; `None` if this machine has no FUSE. Then the calling test must return.
    pub(crate) fn mount() -> Option<Self> {
        Self::mount_ignoring(|_| false)
    }

    /// As [`Self::mount`]; an `fsync` of a file or folder whose name `ignores_sync` accepts does
    /// nothing.
    pub(crate) fn mount_ignoring(ignores_sync: fn(&str) -> bool) -> Option<Self> {
        let user = rustix::process::geteuid().as_raw();
        let group = rustix::process::getegid().as_raw();
        let mut disk = Disk::new(user, group);
        disk.ignores_sync = ignores_sync;
        let mut mounted = Self {
            disk: Arc::new(Mutex::new(disk)),
            folder: tempfile::tempdir().unwrap(),
            session: None,
        };
        match mounted.switch_on() {
            Ok(()) => Some(mounted),
            Err(error) => {
                programs::skipped(&format!("FUSE cannot be used: {error}"));
                None
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Names of files and folders with changes that are not synced.
    pub(crate) fn unsynced(&self) -> Vec<String> {
        self.disk.lock().unwrap().unsynced()
    }

    /// Moves a folder of another file system to this one, and leaves a link in its place.
    pub(crate) fn take(&self, folder: &Path) {
        move_to(folder, self.path());
        self.sync_all();
    }

    /// Makes all that there is durable, as a file system does some time after the last change.
    pub(crate) fn sync_all(&self) {
        self.disk.lock().unwrap().sync_all();
    }

    /// Leaves no room for the contents of files, as it is found `at` a call.
    pub(crate) fn fill(&self, at: NoRoomAt) {
        self.disk.lock().unwrap().fill(at);
    }

    /// Answers no program until the result is dropped.
    pub(crate) fn stall(&self) -> impl Sized {
        self.disk.lock().unwrap()
    }

    /// Loses what was not synced, and mounts the rest again. No process uses the disk any more.
    pub(crate) fn cut_power(&mut self, loss: Loss) {
        self.disk.lock().unwrap().cut_power(loss);
        self.unmount();
        self.switch_on().unwrap();
    }

    fn switch_on(&mut self) -> std::io::Result<()> {
        let options = [
            MountOption::FSName("gw-lossy-disk".to_owned()),
            MountOption::DefaultPermissions,
        ];
        let file_system = FileSystem::new(Arc::clone(&self.disk));
        let session = Session::new(file_system, self.folder.path(), &options)?;
        self.session = Some(session.spawn()?);
        // Waits until the file system answers.
        fs::read_dir(self.folder.path()).map(drop)
    }

    fn unmount(&mut self) {
        let Some(session) = self.session.take() else {
            return;
        };
        // A mount namespace that another test has made meanwhile may still have the file system,
        // which answers with EIO after a power cut. Without root this fails, and the session asks
        // fusermount.
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
        drop(session);
    }
}

impl Drop for LossyDisk {
    fn drop(&mut self) {
        self.unmount();
    }
}
