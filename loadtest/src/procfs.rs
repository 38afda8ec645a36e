//! CPU time, memory and children of processes from `/proc`.

use std::fs;
use std::time::Duration;

use rustix::process::Pid;

use crate::failure::Failure;

/// Clock ticks per second in `/proc` (USER_HZ, fixed by the kernel's ABI).
const TICKS_PER_SECOND: u64 = 100;

/// `pid` and its running descendants.
pub(crate) fn tree(pid: u32) -> Vec<u32> {
    let parents: Vec<(u32, u32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u32| Some((pid, Stat::read(&format!("/proc/{pid}/stat"))?.parent)))
        .collect();
    let mut tree = vec![pid];
    let mut next = 0;
    while let Some(&parent) = tree.get(next) {
        tree.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(child, _)| *child));
        next += 1;
    }
    tree
}

/// User and system time of all threads of a process, including ended ones; zero if the process has ended.
pub(crate) fn cpu(pid: u32) -> Duration {
    Stat::read(&format!("/proc/{pid}/stat")).map(|stat| stat.cpu).unwrap_or_default()
}

/// User and system time of the threads of a process with this name.
pub(crate) fn cpu_of_thread(pid: u32, name: &str) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
    threads
        .filter_map(|thread| Stat::read(thread.path().join("stat").to_str()?))
        .filter(|stat| stat.name == name)
        .map(|stat| stat.cpu)
        .sum()
}

/// The threads of a process and their names.
pub(crate) fn threads(pid: u32) -> Result<Vec<(Pid, String)>, Failure> {
    let folder = format!("/proc/{pid}/task");
    let threads = fs::read_dir(&folder).map_err(|error| Failure::during(&folder, error))?;
    let named = threads.filter_map(Result::ok).filter_map(|thread| {
        let id = Pid::from_raw(thread.file_name().to_str()?.parse().ok()?)?;
        let name = fs::read_to_string(thread.path().join("comm")).ok()?;
        Some((id, name.trim_end().to_owned()))
    });
    Ok(named.collect())
}

/// Memory of a process, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) resident: u64,
    /// Peak resident memory.
    pub(crate) peak: u64,
}

impl Memory {
    pub(crate) fn of(pid: u32) -> Result<Self, Failure> {
        let path = format!("/proc/{pid}/status");
        let status = fs::read_to_string(&path).map_err(|error| Failure::during(&path, error))?;
        Self::parse(&status).ok_or_else(|| Failure::new(format!("{path}: no VmRSS and VmHWM")))
    }

    fn parse(status: &str) -> Option<Self> {
        let bytes = |key: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(key))?;
            Some(value.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
        };
        Some(Self { resident: bytes("VmRSS:")?, peak: bytes("VmHWM:")? })
    }
}

/// Kernel memory of all TCP sockets of the machine, in bytes.
pub(crate) fn tcp_memory() -> Result<u64, Failure> {
    const PATH: &str = "/proc/net/sockstat";
    let text = fs::read_to_string(PATH).map_err(|error| Failure::during(PATH, error))?;
    let pages =
        text.lines().find_map(|line| line.strip_prefix("TCP:")?.rsplit_once("mem ")?.1.trim().parse::<u64>().ok());
    let pages = pages.ok_or_else(|| Failure::new(format!("{PATH}: no memory of TCP")))?;
    Ok(pages * rustix::param::page_size() as u64)
}

struct Stat {
    name: String,
    parent: u32,
    cpu: Duration,
}

impl Stat {
    fn read(path: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(path).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name may contain spaces and parentheses.
        let (before, after) = text.rsplit_once(')')?;
        let fields: Vec<&str> = after.split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let ticks = number(11)? + number(12)?;
        Some(Self {
            name: before.split_once('(')?.1.to_owned(),
            parent: u32::try_from(number(1)?).ok()?,
            cpu: Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_of_a_process_with_spaces_in_its_name_is_parsed() {
        let text = "42 (a) (b c)) S 7 42 42 0 -1 4194560 1 2 3 4 150 25 0 0 20 0 9 0 100 1 1";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.name.as_str(), stat.parent, stat.cpu), ("a) (b c)", 7, Duration::from_millis(1750)));
        assert!(Stat::parse("42 (cut").is_none());
    }

    #[test]
    fn memory_is_converted_to_bytes() {
        let memory = Memory::parse("Name:\tx\nVmHWM:\t    20 kB\nVmRSS:\t    10 kB\n").unwrap();
        assert_eq!(memory, Memory { resident: 10_240, peak: 20_480 });
    }

    #[test]
    fn this_process_is_the_root_of_its_own_tree() {
        let pid = std::process::id();
        assert_eq!(tree(pid)[0], pid);
        assert!(Memory::of(pid).unwrap().resident > 0);
    }
}
