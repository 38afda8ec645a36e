//! What a file system shows to programs, and what of it is on the disk.
//!
//! The guarantees are those of POSIX, which are fewer than those of ext4 or XFS: `fsync` of a file
//! makes its contents durable, and not its name; names are durable after an `fsync` of their
//! folder. Of what was not synced, a power cut leaves what [`Loss`] says.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::mem;
use std::path::PathBuf;
use std::time::SystemTime;

use rustix::io::Errno;

/// Inode of the folder where the file system is mounted.
pub(super) const ROOT: u64 = 1;
/// Bytes that a disk writes as a whole.
const SECTOR: usize = 512;

/// What a power cut leaves of changes that were not synced.
pub(crate) enum Loss {
    /// Nothing.
    All,
    /// All names, and of files their length: the journal of a file system may have the metadata,
    /// and not the data.
    Data,
    /// The changes of each folder up to some moment, and any sectors of any writes to files.
    AnyPart(fastrand::Rng),
}

/// The call that fails when a file system has no room for the contents of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoomAt {
    /// A write, beyond a quota (EDQUOT).
    Write,
    /// The sync, on a full disk whose blocks are allocated with it (ENOSPC).
    Sync,
}

/// Files, folders and links of a file system.
pub(super) struct Disk {
    nodes: BTreeMap<u64, Node>,
    next: u64,
    /// Number of power cuts so far.
    pub(super) power_cuts: u32,
    /// Whether an `fsync` of the file or folder of this name does nothing.
    pub(super) ignores_sync: fn(&str) -> bool,
    /// Room for the contents of files, if they have a bound.
    room: Option<(NoRoomAt, usize)>,
}

pub(super) struct Node {
    pub(super) about: About,
    pub(super) kind: Kind,
}

/// Attributes of a node. Changes of them are durable at once.
#[derive(Clone)]
pub(super) struct About {
    pub(super) mode: u32,
    pub(super) user: u32,
    pub(super) group: u32,
    pub(super) modified: SystemTime,
    /// Number of names in folders.
    pub(super) links: u32,
    /// The last name.
    name: OsString,
}

pub(super) enum Kind {
    File(Contents),
    Folder(Entries),
    Link(PathBuf),
}

/// Contents of a file.
#[derive(Default)]
pub(super) struct Contents {
    now: Vec<u8>,
    synced: Vec<u8>,
    /// From `synced` to `now`.
    changes: Vec<Change>,
}

enum Change {
    Write { at: usize, bytes: Vec<u8> },
    Resize(usize),
}

/// Names in a folder, with their inodes.
#[derive(Default)]
pub(super) struct Entries {
    now: BTreeMap<OsString, u64>,
    synced: BTreeMap<OsString, u64>,
    /// From `synced` to `now`. A rename in the folder is one change of two names.
    changes: Vec<Vec<(OsString, Option<u64>)>>,
}

impl Node {
    fn sync(&mut self) {
        match &mut self.kind {
            Kind::File(contents) => contents.sync(),
            Kind::Folder(entries) => entries.sync(),
            Kind::Link(_) => {}
        }
    }
}

impl Contents {
    pub(super) fn now(&self) -> &[u8] {
        &self.now
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        let bytes = bytes.to_vec();
        self.change(Change::Write { at, bytes });
    }

    pub(super) fn resize(&mut self, length: usize) {
        self.change(Change::Resize(length));
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.now);
        self.changes.push(change);
    }

    fn sync(&mut self) {
        for change in self.changes.drain(..) {
            change.apply(&mut self.synced);
        }
    }

    fn lose(&mut self, loss: &mut Loss) {
        for change in mem::take(&mut self.changes) {
            match loss {
                Loss::All => {}
                Loss::Data => change.apply_length(&mut self.synced),
                Loss::AnyPart(random) => change.apply_part(&mut self.synced, random),
            }
        }
        self.now.clone_from(&self.synced);
    }
}

impl Change {
    fn apply(&self, contents: &mut Vec<u8>) {
        match self {
            Self::Resize(length) => contents.resize(*length, 0),
            Self::Write { at, bytes } => write_at(contents, *at, bytes),
        }
    }

    fn apply_length(&self, contents: &mut Vec<u8>) {
        let length = match self {
            Self::Resize(length) => *length,
            Self::Write { at, bytes } => contents.len().max(at + bytes.len()),
        };
        contents.resize(length, 0);
    }

    fn apply_part(&self, contents: &mut Vec<u8>, random: &mut fastrand::Rng) {
        let Self::Write { at, bytes } = self else {
            if random.bool() {
                self.apply(contents);
            }
            return;
        };
        match random.u8(..3) {
            0 => {}
            1 => self.apply(contents),
            _ => {
                let (mut at, mut rest) = (*at, bytes.as_slice());
                while !rest.is_empty() {
                    let (sector, behind) = rest.split_at(rest.len().min(SECTOR - at % SECTOR));
                    if random.bool() {
                        write_at(contents, at, sector);
                    }
                    at += sector.len();
                    rest = behind;
                }
            }
        }
    }
}

fn write_at(contents: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if contents.len() < end {
        contents.resize(end, 0);
    }
    contents[at..end].copy_from_slice(bytes);
}

impl Entries {
    pub(super) fn now(&self) -> &BTreeMap<OsString, u64> {
        &self.now
    }

    fn change(&mut self, names: Vec<(OsString, Option<u64>)>) {
        apply(&names, &mut self.now);
        self.changes.push(names);
    }

    fn sync(&mut self) {
        self.changes.clear();
        self.synced.clone_from(&self.now);
    }

    fn lose(&mut self, loss: &mut Loss) {
        let kept = match loss {
            Loss::All => 0,
            Loss::Data => self.changes.len(),
            Loss::AnyPart(random) => random.usize(..=self.changes.len()),
        };
        for names in self.changes.drain(..).take(kept) {
            apply(&names, &mut self.synced);
        }
        self.changes.clear();
        self.now.clone_from(&self.synced);
    }
}

fn apply(names: &[(OsString, Option<u64>)], entries: &mut BTreeMap<OsString, u64>) {
    for (name, inode) in names {
        match inode {
            Some(inode) => drop(entries.insert(name.clone(), *inode)),
            None => drop(entries.remove(name)),
        }
    }
}

impl Disk {
    pub(super) fn new(user: u32, group: u32) -> Self {
        let root = Node {
            about: About {
                mode: 0o700,
                user,
                group,
                modified: SystemTime::now(),
                links: 1,
                name: OsString::new(),
            },
            kind: Kind::Folder(Entries::default()),
        };
        Self {
            nodes: BTreeMap::from([(ROOT, root)]),
            next: ROOT + 1,
            power_cuts: 0,
            ignores_sync: |_| false,
            room: None,
        }
    }

    pub(super) fn node(&self, inode: u64) -> Result<&Node, Errno> {
        self.nodes.get(&inode).ok_or(Errno::STALE)
    }

    pub(super) fn node_mut(&mut self, inode: u64) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&inode).ok_or(Errno::STALE)
    }

    pub(super) fn file(&mut self, inode: u64) -> Result<&mut Contents, Errno> {
        match &mut self.node_mut(inode)?.kind {
            Kind::File(contents) => Ok(contents),
            _ => Err(Errno::ISDIR),
        }
    }

    /// Writes to a file, if there is room.
    pub(super) fn write(&mut self, inode: u64, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        let grown = (at + bytes.len()).saturating_sub(self.file(inode)?.now.len());
        if grown > self.left(NoRoomAt::Write) {
            return Err(Errno::DQUOT);
        }
        self.file(inode)?.write(at, bytes);
        Ok(())
    }

    /// Leaves no room for the contents of files.
    pub(super) fn fill(&mut self, at: NoRoomAt) {
        self.room = Some((at, self.used(at)));
    }

    /// Bytes that files may still grow by.
    fn left(&self, at: NoRoomAt) -> usize {
        match self.room {
            Some((bounded, room)) if bounded == at => room.saturating_sub(self.used(at)),
            _ => usize::MAX,
        }
    }

    fn used(&self, at: NoRoomAt) -> usize {
        let size = |node: &Node| match (&node.kind, at) {
            (Kind::File(contents), NoRoomAt::Write) => contents.now.len(),
            (Kind::File(contents), NoRoomAt::Sync) => contents.synced.len(),
            _ => 0,
        };
        let named = self.nodes.values().filter(|node| node.about.links > 0);
        named.map(size).sum()
    }

    pub(super) fn folder(&self, inode: u64) -> Result<&Entries, Errno> {
        match &self.node(inode)?.kind {
            Kind::Folder(entries) => Ok(entries),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn folder_mut(&mut self, inode: u64) -> Result<&mut Entries, Errno> {
        match &mut self.node_mut(inode)?.kind {
            Kind::Folder(entries) => Ok(entries),
            _ => Err(Errno::NOTDIR),
        }
    }

    pub(super) fn find(&self, folder: u64, name: &OsStr) -> Result<u64, Errno> {
        let inode = self.folder(folder)?.now.get(name);
        inode.copied().ok_or(Errno::NOENT)
    }

    pub(super) fn create(
        &mut self,
        folder: u64,
        name: &OsStr,
        (user, group): (u32, u32),
        mode: u32,
        kind: Kind,
    ) -> Result<u64, Errno> {
        let inode = self.next;
        let entries = self.folder_mut(folder)?;
        if entries.now.contains_key(name) {
            return Err(Errno::EXIST);
        }
        entries.change(vec![(name.to_owned(), Some(inode))]);
        self.next += 1;
        let about = About {
            mode,
            user,
            group,
            modified: SystemTime::now(),
            links: 1,
            name: name.to_owned(),
        };
        self.nodes.insert(inode, Node { about, kind });
        Ok(inode)
    }

    pub(super) fn link(&mut self, inode: u64, folder: u64, name: &OsStr) -> Result<(), Errno> {
        let entries = self.folder_mut(folder)?;
        if entries.now.contains_key(name) {
            return Err(Errno::EXIST);
        }
        entries.change(vec![(name.to_owned(), Some(inode))]);
        self.node_mut(inode)?.about.links += 1;
        Ok(())
    }

    /// Removes a file or link, or an empty folder.
    pub(super) fn remove(&mut self, folder: u64, name: &OsStr) -> Result<(), Errno> {
        let inode = self.find(folder, name)?;
        self.unlink(inode)?;
        self.folder_mut(folder)?
            .change(vec![(name.to_owned(), None)]);
        Ok(())
    }

    /// Counts a name less. Fails for a folder that is not empty.
    fn unlink(&mut self, inode: u64) -> Result<(), Errno> {
        let node = self.node_mut(inode)?;
        if matches!(&node.kind, Kind::Folder(entries) if !entries.now.is_empty()) {
            return Err(Errno::NOTEMPTY);
        }
        node.about.links -= 1;
        Ok(())
    }

    pub(super) fn rename(
        &mut self,
        (folder, name): (u64, &OsStr),
        (new_folder, new_name): (u64, &OsStr),
    ) -> Result<(), Errno> {
        let inode = self.find(folder, name)?;
        match self.find(new_folder, new_name) {
            Ok(replaced) if replaced == inode => return Ok(()),
            Ok(replaced) => self.unlink(replaced)?,
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        let removed = (name.to_owned(), None);
        let added = (new_name.to_owned(), Some(inode));
        if folder == new_folder {
            self.folder_mut(folder)?.change(vec![removed, added]);
        } else {
            self.folder_mut(new_folder)?.change(vec![added]);
            self.folder_mut(folder)?.change(vec![removed]);
        }
        new_name.clone_into(&mut self.node_mut(inode)?.about.name);
        Ok(())
    }

    pub(super) fn sync(&mut self, inode: u64) -> Result<(), Errno> {
        let ignores_sync = self.ignores_sync;
        if let Kind::File(contents) = &self.node(inode)?.kind {
            let grown = contents.now.len().saturating_sub(contents.synced.len());
            if grown > self.left(NoRoomAt::Sync) {
                return Err(Errno::NOSPC);
            }
        }
        let node = self.node_mut(inode)?;
        if ignores_sync(&node.about.name.to_string_lossy()) {
            return Ok(());
        }
        node.sync();
        Ok(())
    }

    pub(super) fn unsynced(&self) -> Vec<String> {
        let is_unsynced = |node: &&Node| match &node.kind {
            Kind::File(contents) => !contents.changes.is_empty(),
            Kind::Folder(entries) => !entries.changes.is_empty(),
            Kind::Link(_) => false,
        };
        let named = self.nodes.values().filter(|node| node.about.links > 0);
        named
            .filter(is_unsynced)
            .map(|node| node.about.name.to_string_lossy().into_owned())
            .collect()
    }

    pub(super) fn sync_all(&mut self) {
        for node in self.nodes.values_mut() {
            node.sync();
        }
    }

    /// Goes back to what is on the disk.
    pub(super) fn cut_power(&mut self, mut loss: Loss) {
        self.power_cuts += 1;
        for node in self.nodes.values_mut() {
            node.about.links = 0;
            match &mut node.kind {
                Kind::File(contents) => contents.lose(&mut loss),
                Kind::Folder(entries) => entries.lose(&mut loss),
                Kind::Link(_) => {}
            }
        }
        let mut reached = BTreeSet::from([ROOT]);
        let mut rest = vec![ROOT];
        while let Some(inode) = rest.pop() {
            let names = self.folder(inode).map(Entries::now).cloned();
            for (name, inode) in names.into_iter().flatten() {
                let Some(node) = self.nodes.get_mut(&inode) else {
                    continue;
                };
                node.about.links += 1;
                node.about.name = name;
                if reached.insert(inode) {
                    rest.push(inode);
                }
            }
        }
        self.nodes.retain(|inode, _| reached.contains(inode));
    }
}
