//! The process that has a file open or listens on a port, as proc(5) shows it to this user.

use std::fmt;
use std::fs::{self, Metadata};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// State of a listening socket in `/proc/net/tcp`.
const LISTENING: &str = "0A";

/// A process of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub id: u32,
    pub name: String,
}

impl Holder {
    /// A process that has `path` open, or has locked it.
    pub fn of_file(path: &Path) -> Option<Self> {
        let path = fs::canonicalize(path).ok()?;
        // A process without core dumps hides its descriptors, but not its locks.
        Self::with_descriptor(|link| *link == path)
            .or_else(|| Self::of_lock(&fs::metadata(&path).ok()?))
    }

    /// The only process with a lock on a file (flock(2), fcntl(2)). `None` if it is in another PID
    /// namespace.
    pub fn of_lock(file: &Metadata) -> Option<Self> {
        let inode = format!(":{}", file.ino());
        let locks = fs::read_to_string("/proc/locks").ok()?;
        let mut ids: Vec<u32> = locks
            .lines()
            .filter_map(|line| locker(line, &inode))
            .collect();
        ids.sort_unstable();
        ids.dedup();
        let [id] = ids[..] else { return None };
        Some(Self {
            id,
            name: name_of(id),
        })
    }

    /// A process that listens on the port of `address`, on any address.
    pub fn of_port(address: SocketAddr) -> Option<Self> {
        let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
            .map(|table| fs::read_to_string(table).unwrap_or_default());
        let links: Vec<PathBuf> = tables
            .iter()
            .flat_map(|table| listeners(table, address.port()))
            .map(|inode| format!("socket:[{inode}]").into())
            .collect();
        if links.is_empty() {
            None
        } else {
            Self::with_descriptor(|link| links.contains(link))
        }
    }

    /// Whether this is the calling process.
    pub fn is_this_process(&self) -> bool {
        self.id == std::process::id()
    }

    /// A process with a descriptor that `is_wanted`. Descriptors of other users' processes and of
    /// processes without core dumps are hidden, except from root.
    fn with_descriptor(is_wanted: impl Fn(&PathBuf) -> bool) -> Option<Self> {
        let processes = fs::read_dir("/proc")
            .ok()?
            .filter_map(|entry| Some(entry.ok()?.path()));
        let has = |process: &Path| {
            let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten();
            descriptors
                .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
                .any(|link| is_wanted(&link))
        };
        let processes = processes
            .filter_map(|process| Some((process.file_name()?.to_str()?.parse().ok()?, process)));
        processes
            .filter(|(_, process)| has(process))
            .map(|(id, _)| Self {
                id,
                name: name_of(id),
            })
            .next()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.id, self.name)
    }
}

fn name_of(id: u32) -> String {
    fs::read_to_string(format!("/proc/{id}/comm"))
        .unwrap_or_default()
        .trim_end()
        .to_owned()
}

/// The process that holds a lock, from a line of `/proc/locks` such as `1: FLOCK  ADVISORY  WRITE
/// 4711 fd:01:131074 0 EOF`. The device may be another one than that of the file.
fn locker(line: &str, inode: &str) -> Option<u32> {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let is_held =
        matches!(words.get(1), Some(&"FLOCK" | &"POSIX")) && words.get(5)?.ends_with(inode);
    if is_held {
        words.get(4)?.parse().ok().filter(|id| *id > 0)
    } else {
        None
    }
}

/// Inodes of the sockets that listen on `port`, from a table such as `/proc/net/tcp`.
fn listeners(table: &str, port: u16) -> impl Iterator<Item = &str> {
    table.lines().filter_map(move |line| {
        let mut words = line.split_whitespace();
        let local = words.nth(1)?;
        let state = words.nth(1)?;
        let found = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
        let inode = words.nth(5)?;
        (found == port && state == LISTENING).then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn processes_that_listen_or_have_a_file_open_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert!(Holder::of_port(address).unwrap().is_this_process());
        drop(listener);
        let file = tempfile::NamedTempFile::new().unwrap();
        let holder = Holder::of_file(file.path()).unwrap();
        let expected = format!("process {} ({})", std::process::id(), holder.name);
        assert_eq!(holder.to_string(), expected);
        assert_eq!(Holder::of_file(&file.into_temp_path()), None);
    }

    #[test]
    fn the_process_with_a_lock_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let metadata = file.as_file().metadata().unwrap();
        assert_eq!(Holder::of_lock(&metadata), None);
        file.as_file().try_lock().unwrap();
        assert!(Holder::of_lock(&metadata).unwrap().is_this_process());
    }

    #[test]
    fn locks_of_the_file_that_are_held_are_found_in_the_table() {
        let line = "1: POSIX  ADVISORY  WRITE 4711 fd:01:131074 0 EOF";
        assert_eq!(locker(line, ":131074"), Some(4711));
        assert_eq!(locker(line, ":13107"), None);
        for other in [
            "1: -> FLOCK  ADVISORY  WRITE 4711 fd:01:131074 0 EOF",
            "2: FLOCK ADVISORY WRITE -1 fd:01:131074",
        ] {
            assert_eq!(locker(other, ":131074"), None, "{other}");
        }
    }

    #[test]
    fn only_listening_sockets_of_the_port_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   \
                     uid  timeout inode\n   0: 0100007F:01BB 00000000:0000 0A 00000000:00000000 \
                     00:00000000 00000000     0        0 111 1 x\n   1: 0100007F:01BB \
                     0100007F:0050 01 00000000:00000000 00:00000000 00000000     0        0 222 1 \
                     x\n   2: 0100007F:0050 00000000:0000 0A 00000000:00000000 00:00000000 \
                     00000000     0        0 333 1 x\n";
        assert_eq!(listeners(table, 443).collect::<Vec<_>>(), ["111"]);
    }
}
