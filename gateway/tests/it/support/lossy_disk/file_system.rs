//! The kernel's requests, answered from the [`Disk`].

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use fuser::{
    FileAttr, FileType, Filesystem, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
};
use rustix::io::Errno;

use super::disk::{Contents, Disk, Entries, Kind};

/// How long the kernel may keep names and attributes: until the file system is mounted again,
/// because it alone changes them.
const KEPT: Duration = Duration::from_secs(86_400);
const BLOCK: u32 = 4096;
/// Space of the disk, all of it free.
const BLOCKS: u64 = 1 << 20;

/// A mounted [`Disk`]. Refuses all requests after the next power cut.
pub(super) struct FileSystem {
    disk: Arc<Mutex<Disk>>,
    power_cuts: u32,
}

impl FileSystem {
    pub(super) fn new(disk: Arc<Mutex<Disk>>) -> Self {
        let power_cuts = disk.lock().unwrap().power_cuts;
        Self { disk, power_cuts }
    }

    fn disk(&self) -> Result<MutexGuard<'_, Disk>, Errno> {
        let disk = self.disk.lock().unwrap();
        if disk.power_cuts == self.power_cuts {
            Ok(disk)
        } else {
            Err(Errno::IO)
        }
    }

    fn create_node(
        &self,
        request: &Request<'_>,
        folder: u64,
        name: &OsStr,
        mode: u32,
        kind: Kind,
    ) -> Result<FileAttr, Errno> {
        let mut disk = self.disk()?;
        let owner = (request.uid(), request.gid());
        let inode = disk.create(folder, name, owner, mode & 0o7777, kind)?;
        attributes(&disk, inode)
    }
}

fn attributes(disk: &Disk, inode: u64) -> Result<FileAttr, Errno> {
    let node = disk.node(inode)?;
    let about = &node.about;
    let (kind, size) = match &node.kind {
        Kind::File(contents) => (FileType::RegularFile, contents.now().len()),
        Kind::Folder(_) => (FileType::Directory, 0),
        Kind::Link(target) => (FileType::Symlink, target.as_os_str().len()),
    };
    Ok(FileAttr {
        ino: inode,
        size: size as u64,
        blocks: (size as u64).div_ceil(512),
        atime: about.modified,
        mtime: about.modified,
        ctime: about.modified,
        crtime: about.modified,
        kind,
        perm: about.mode as u16,
        nlink: about.links,
        uid: about.user,
        gid: about.group,
        rdev: 0,
        blksize: BLOCK,
        flags: 0,
    })
}

fn entry(reply: ReplyEntry, found: Result<FileAttr, Errno>) {
    match found {
        Ok(found) => reply.entry(&KEPT, &found, 0),
        Err(error) => reply.error(error.raw_os_error()),
    }
}

fn empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error.raw_os_error()),
    }
}

fn attr(reply: ReplyAttr, found: Result<FileAttr, Errno>) {
    match found {
        Ok(found) => reply.attr(&KEPT, &found),
        Err(error) => reply.error(error.raw_os_error()),
    }
}

impl Filesystem for FileSystem {
    fn lookup(&mut self, _: &Request<'_>, folder: u64, name: &OsStr, reply: ReplyEntry) {
        let found = self.disk().and_then(|disk| {
            let inode = disk.find(folder, name)?;
            attributes(&disk, inode)
        });
        entry(reply, found);
    }

    fn getattr(&mut self, _: &Request<'_>, inode: u64, _: Option<u64>, reply: ReplyAttr) {
        attr(reply, self.disk().and_then(|disk| attributes(&disk, inode)));
    }

    fn setattr(
        &mut self,
        _: &Request<'_>,
        inode: u64,
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<u64>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<u32>,
        reply: ReplyAttr,
    ) {
        let changed = self.disk().and_then(|mut disk| {
            if let Some(size) = size {
                disk.file(inode)?.resize(size as usize);
            }
            let about = &mut disk.node_mut(inode)?.about;
            about.mode = mode.map_or(about.mode, |mode| mode & 0o7777);
            about.user = user.unwrap_or(about.user);
            about.group = group.unwrap_or(about.group);
            about.modified = match modified {
                Some(TimeOrNow::SpecificTime(time)) => time,
                Some(TimeOrNow::Now) => SystemTime::now(),
                None => about.modified,
            };
            attributes(&disk, inode)
        });
        attr(reply, changed);
    }

    fn readlink(&mut self, _: &Request<'_>, inode: u64, reply: ReplyData) {
        let target = self.disk().and_then(|disk| match &disk.node(inode)?.kind {
            Kind::Link(target) => Ok(target.clone()),
            _ => Err(Errno::INVAL),
        });
        match target {
            Ok(target) => reply.data(target.as_os_str().as_bytes()),
            Err(error) => reply.error(error.raw_os_error()),
        }
    }

    fn mkdir(
        &mut self,
        request: &Request<'_>,
        folder: u64,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let kind = Kind::Folder(Entries::default());
        entry(
            reply,
            self.create_node(request, folder, name, mode & !umask, kind),
        );
    }

    fn symlink(
        &mut self,
        request: &Request<'_>,
        folder: u64,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let kind = Kind::Link(target.to_owned());
        entry(reply, self.create_node(request, folder, name, 0o777, kind));
    }

    fn create(
        &mut self,
        request: &Request<'_>,
        folder: u64,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let kind = Kind::File(Contents::default());
        match self.create_node(request, folder, name, mode & !umask, kind) {
            Ok(created) => reply.created(&KEPT, &created, 0, 0, 0),
            Err(error) => reply.error(error.raw_os_error()),
        }
    }

    fn link(&mut self, _: &Request<'_>, inode: u64, folder: u64, name: &OsStr, reply: ReplyEntry) {
        let linked = self.disk().and_then(|mut disk| {
            disk.link(inode, folder, name)?;
            attributes(&disk, inode)
        });
        entry(reply, linked);
    }

    fn unlink(&mut self, _: &Request<'_>, folder: u64, name: &OsStr, reply: ReplyEmpty) {
        empty(
            reply,
            self.disk().and_then(|mut disk| disk.remove(folder, name)),
        );
    }

    fn rmdir(&mut self, _: &Request<'_>, folder: u64, name: &OsStr, reply: ReplyEmpty) {
        empty(
            reply,
            self.disk().and_then(|mut disk| disk.remove(folder, name)),
        );
    }

    fn rename(
        &mut self,
        _: &Request<'_>,
        folder: u64,
        name: &OsStr,
        new_folder: u64,
        new_name: &OsStr,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let renamed = self
            .disk()
            .and_then(|mut disk| disk.rename((folder, name), (new_folder, new_name)));
        empty(reply, renamed);
    }

    fn read(
        &mut self,
        _: &Request<'_>,
        inode: u64,
        _: u64,
        offset: i64,
        size: u32,
        _: i32,
        _: Option<u64>,
        reply: ReplyData,
    ) {
        let mut disk = match self.disk() {
            Ok(disk) => disk,
            Err(error) => return reply.error(error.raw_os_error()),
        };
        match disk.file(inode) {
            Ok(contents) => {
                let rest = contents.now().get(offset as usize..).unwrap_or_default();
                reply.data(&rest[..rest.len().min(size as usize)]);
            }
            Err(error) => reply.error(error.raw_os_error()),
        }
    }

    fn write(
        &mut self,
        _: &Request<'_>,
        inode: u64,
        _: u64,
        offset: i64,
        data: &[u8],
        _: u32,
        _: i32,
        _: Option<u64>,
        reply: ReplyWrite,
    ) {
        let written = self.disk().and_then(|mut disk| {
            disk.write(inode, offset as usize, data)?;
            disk.node_mut(inode)?.about.modified = SystemTime::now();
            Ok(())
        });
        match written {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error.raw_os_error()),
        }
    }

    fn flush(&mut self, _: &Request<'_>, _: u64, _: u64, _: u64, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&mut self, _: &Request<'_>, inode: u64, _: u64, _: bool, reply: ReplyEmpty) {
        empty(reply, self.disk().and_then(|mut disk| disk.sync(inode)));
    }

    fn fsyncdir(&mut self, _: &Request<'_>, inode: u64, _: u64, _: bool, reply: ReplyEmpty) {
        empty(reply, self.disk().and_then(|mut disk| disk.sync(inode)));
    }

    fn readdir(
        &mut self,
        _: &Request<'_>,
        folder: u64,
        _: u64,
        offset: i64,
        mut reply: ReplyDirectory,
    ) {
        let names = self.disk().and_then(|disk| {
            let mut names = vec![(folder, FileType::Directory, ".".into())];
            for (name, inode) in disk.folder(folder)?.now() {
                names.push((*inode, attributes(&disk, *inode)?.kind, name.clone()));
            }
            // An offset stays where it is while names come and go.
            names.sort_by_key(|(inode, ..)| *inode);
            Ok(names)
        });
        match names {
            Ok(names) => {
                for (inode, kind, name) in names {
                    let at = inode as i64;
                    if at > offset && reply.add(inode, at, kind, name) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(error) => reply.error(error.raw_os_error()),
        }
    }

    fn statfs(&mut self, _: &Request<'_>, _: u64, reply: ReplyStatfs) {
        reply.statfs(BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCK, 255, BLOCK);
    }
}
