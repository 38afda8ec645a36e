//! Work with the rights of another user, for commands of root on the folder of a service. That
//! service's user controls the names in the folder: with the rights of root, its symbolic links
//! would lead the commands to any file of the machine.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::{getegid, geteuid, getgroups};
use rustix::thread::{CapabilitySet, Gid, Uid, capabilities, set_capabilities};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

/// A user and its groups, the first of which new files get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileOwner {
    user: Uid,
    group: Gid,
    groups: Vec<Gid>,
}

impl FileOwner {
    /// `groups` are all groups of the user.
    pub fn new(user: u32, group: u32, groups: &[u32]) -> Self {
        let groups = groups.iter().map(|group| Gid::from_raw(*group)).collect();
        Self {
            user: Uid::from_raw(user),
            group: Gid::from_raw(group),
            groups,
        }
    }

    /// The owner of `path`. If there is no such file, the owner of the nearest folder above it.
    pub fn of(path: &Path) -> io::Result<Self> {
        for path in path.ancestors() {
            let path = if path.as_os_str().is_empty() {
                Path::new(".")
            } else {
                path
            };
            match fs::metadata(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                found => {
                    let found = found?;
                    return Ok(Self::new(found.uid(), found.gid(), &[found.gid()]));
                }
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    /// Returns the id of the user.
    pub fn user(&self) -> u32 {
        self.user.as_raw()
    }

    /// Returns the id of the group that new files get.
    pub fn group(&self) -> u32 {
        self.group.as_raw()
    }

    /// Whether this process runs as root and the files belong to another user: [`Self::run`]
    /// changes the rights then.
    pub fn is_lesser(&self) -> bool {
        geteuid().is_root() && !self.user.is_root()
    }

    /// Runs `work` as [`Self::run`] does, and lets it bind ports below 1024 if this process may, as
    /// the unit of systemd does.
    pub fn run_server<T>(&self, work: impl FnOnce() -> T) -> io::Result<T> {
        if !self.is_lesser() {
            return Ok(work());
        }
        self.run(|| {
            let mut rights = capabilities(None)?;
            rights.effective |= rights.permitted & CapabilitySet::NET_BIND_SERVICE;
            set_capabilities(None, rights)?;
            Ok(work())
        })?
    }

    /// Runs `work` with the rights of this user if this process runs as root, else with those that
    /// it has. Threads that `work` starts keep these rights.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> io::Result<T> {
        if !self.is_lesser() {
            return Ok(work());
        }
        let group = getegid();
        let groups = getgroups()?;
        let failed = |error: rustix::io::Errno| {
            let error = io::Error::from(error);
            let user = self.user.as_raw();
            io::Error::new(
                error.kind(),
                format!(
                    "cannot take the rights of user {user}: {error}; run the command as that user"
                ),
            )
        };
        // The real and the saved user stay root: the owner of the files cannot signal or trace this
        // process.
        set_thread_groups(&self.groups).map_err(failed)?;
        set_thread_res_gid(None, self.group, None).map_err(failed)?;
        set_thread_res_uid(None, self.user, None).map_err(failed)?;
        let done = work();
        set_thread_res_uid(None, Uid::ROOT, None)?;
        set_thread_res_gid(None, group, None)?;
        set_thread_groups(&groups)?;
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn work_has_the_rights_of_the_owner_and_root_gets_its_own_back() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing/below");
        assert_eq!(
            FileOwner::of(&missing).unwrap(),
            FileOwner::of(folder.path()).unwrap()
        );
        if !geteuid().is_root() {
            // Not `eprintln!`: the test harness hides its output of tests that pass.
            io::Write::write_all(&mut io::stderr(), b"file_owner: skipped: needs root\n").unwrap();
            return;
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let [theirs, ours] = ["theirs", "ours"].map(|name| folder.path().join(name));
        for path in [&theirs, &ours] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
        }
        chown(&theirs, Some(23456), Some(23457)).unwrap();
        let before = (getegid(), getgroups().unwrap());
        let owner = FileOwner::of(&theirs).unwrap();
        assert_eq!(owner, FileOwner::new(23456, 23457, &[23457]));
        let refused = owner.run(|| {
            fs::write(theirs.join("file"), "").unwrap();
            assert_eq!(getgroups().unwrap(), [Gid::from_raw(23457)]);
            fs::write(ours.join("file"), "").unwrap_err().kind()
        });
        assert_eq!(refused.unwrap(), io::ErrorKind::PermissionDenied);
        let made = fs::metadata(theirs.join("file")).unwrap();
        assert_eq!((made.uid(), made.gid()), (23456, 23457));
        fs::write(ours.join("file"), "").unwrap();
        assert_eq!((getegid(), getgroups().unwrap()), before);

        // A server may also bind the low ports that root may, and nothing else.
        let effective = || capabilities(None).unwrap().effective;
        let of_root = effective();
        let of_server = owner.run_server(effective).unwrap();
        assert_eq!(of_server, of_root & CapabilitySet::NET_BIND_SERVICE);
        assert_eq!(
            (owner.run(effective).unwrap(), effective()),
            (CapabilitySet::empty(), of_root)
        );
    }
}
