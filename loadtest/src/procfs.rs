//! CPU time, memory and children of processes from `/proc`.

use std::fs;
use std::iter::Sum;
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
        tree.extend(
            parents
                .iter()
                .filter(|(_, of)| *of == parent)
                .map(|(child, _)| *child),
        );
        next += 1;
    }
    tree
}

/// Name of the program of a process, at most 15 bytes; `None` if it has ended.
pub(crate) fn name(pid: u32) -> Option<String> {
    Some(Stat::read(&format!("/proc/{pid}/stat"))?.name)
}

/// Whether a process runs. One that has ended and was not waited for does not.
pub(crate) fn runs(pid: u32) -> bool {
    Stat::read(&format!("/proc/{pid}/stat")).is_some_and(|stat| stat.state != 'Z')
}

/// CPU time, with the part spent in the kernel apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cpu {
    pub(crate) user: Duration,
    pub(crate) kernel: Duration,
}

impl Cpu {
    /// CPU time of all threads of a process, including ended ones; zero if the process has ended.
    pub(crate) fn of(pid: u32) -> Self {
        Stat::read(&format!("/proc/{pid}/stat"))
            .map(|stat| stat.cpu)
            .unwrap_or_default()
    }

    pub(crate) fn total(self) -> Duration {
        self.user + self.kernel
    }

    /// CPU time since `earlier`.
    pub(crate) fn since(self, earlier: Self) -> Self {
        Self {
            user: self.user.saturating_sub(earlier.user),
            kernel: self.kernel.saturating_sub(earlier.kernel),
        }
    }
}

impl Sum for Cpu {
    fn sum<I: Iterator<Item = Self>>(times: I) -> Self {
        times.fold(Self::default(), |sum, time| Self {
            user: sum.user + time.user,
            kernel: sum.kernel + time.kernel,
        })
    }
}

/// User and system time of all threads of a process, including ended ones; zero if the process has ended.
pub(crate) fn cpu(pid: u32) -> Duration {
    Cpu::of(pid).total()
}

/// CPU time of all programs of the machine but this one and its children, with the time that the hypervisor gave to other
/// machines.
pub(crate) fn cpu_of_others() -> Result<Duration, Failure> {
    const PATH: &str = "/proc/stat";
    let text = fs::read_to_string(PATH).map_err(|error| Failure::during(PATH, error))?;
    let all = busy(&text).ok_or_else(|| Failure::new(format!("{PATH}: no CPU time")))?;
    let own = tree(std::process::id())
        .into_iter()
        .filter_map(|pid| Stat::read(&format!("/proc/{pid}/stat")));
    Ok(all.saturating_sub(own.map(|stat| stat.cpu.total() + stat.ended_children).sum()))
}

/// Time of all cores in which they were neither idle nor waiting for a disk.
fn busy(stat: &str) -> Option<Duration> {
    const IDLE: usize = 3;
    const WAITING: usize = 4;
    // User, nice, system, idle, waiting, interrupts, soft interrupts, stolen. Times of guests are parts of the first two.
    let ticks = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .take(8)
        .enumerate();
    let busy = ticks.filter(|(index, _)| ![IDLE, WAITING].contains(index));
    Some(in_ticks(
        busy.map(|(_, ticks)| ticks.parse::<u64>())
            .sum::<Result<_, _>>()
            .ok()?,
    ))
}

fn in_ticks(ticks: u64) -> Duration {
    Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND)
}

/// User and system time of the threads of a process with this name.
pub(crate) fn cpu_of_thread(pid: u32, name: &str) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .filter_map(Result::ok);
    threads
        .filter_map(|thread| Stat::read(thread.path().join("stat").to_str()?))
        .filter(|stat| stat.name == name)
        .map(|stat| stat.cpu.total())
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
        Some(Self {
            resident: kibibytes(status, "VmRSS:")?,
            peak: kibibytes(status, "VmHWM:")?,
        })
    }
}

/// Proportional set size of a process in bytes: pages shared with other processes count in proportion.
pub(crate) fn proportional_memory(pid: u32) -> Result<u64, Failure> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).map_err(|error| Failure::during(&path, error))?;
    kibibytes(&text, "Pss:").ok_or_else(|| Failure::new(format!("{path}: no Pss")))
}

/// Value of the line `key`, which is in KiB, in bytes.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(value.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Kernel memory of all TCP sockets of the machine, in bytes.
pub(crate) fn tcp_memory() -> Result<u64, Failure> {
    const PATH: &str = "/proc/net/sockstat";
    let text = fs::read_to_string(PATH).map_err(|error| Failure::during(PATH, error))?;
    let pages = text.lines().find_map(|line| {
        line.strip_prefix("TCP:")?
            .rsplit_once("mem ")?
            .1
            .trim()
            .parse::<u64>()
            .ok()
    });
    let pages = pages.ok_or_else(|| Failure::new(format!("{PATH}: no memory of TCP")))?;
    Ok(pages * rustix::param::page_size() as u64)
}

struct Stat {
    name: String,
    state: char,
    parent: u32,
    cpu: Cpu,
    /// CPU time of children that have ended.
    ended_children: Duration,
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
        let time = |index| Some(in_ticks(number(index)?));
        Some(Self {
            name: before.split_once('(')?.1.to_owned(),
            state: fields.first()?.chars().next()?,
            parent: u32::try_from(number(1)?).ok()?,
            cpu: Cpu {
                user: time(11)?,
                kernel: time(12)?,
            },
            ended_children: time(13)? + time(14)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_of_a_process_with_spaces_in_its_name_is_parsed() {
        let text = "42 (a) (b c)) S 7 42 42 0 -1 4194560 1 2 3 4 150 25 1 2 20 0 9 0 100 1 1";
        let stat = Stat::parse(text).unwrap();
        let cpu = Cpu {
            user: Duration::from_millis(1500),
            kernel: Duration::from_millis(250),
        };
        assert_eq!(
            (stat.name.as_str(), stat.parent, stat.cpu),
            ("a) (b c)", 7, cpu)
        );
        assert_eq!(stat.ended_children, Duration::from_millis(30));
        assert!(Stat::parse("42 (cut").is_none());
    }

    #[test]
    fn cpu_times_add_up_and_never_run_backwards() {
        let time = |user, kernel| Cpu {
            user: Duration::from_millis(user),
            kernel: Duration::from_millis(kernel),
        };
        let sum: Cpu = [time(1, 2), time(10, 20)].into_iter().sum();
        assert_eq!(
            (sum, sum.total()),
            (time(11, 22), Duration::from_millis(33))
        );
        // A process that ended between two measurements.
        assert_eq!(time(5, 30).since(sum), time(0, 8));
    }

    #[test]
    fn idle_cores_and_guests_are_not_busy() {
        let stat = "cpu  1 20 300 9000 9000 4000 50000 600000 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(busy(stat), Some(Duration::from_millis(6_543_210)));
        assert_eq!(busy("intr 1"), None);
        assert!(cpu_of_others().is_ok());
    }

    #[test]
    fn memory_is_converted_to_bytes() {
        let memory = Memory::parse("Name:\tx\nVmHWM:\t    20 kB\nVmRSS:\t    10 kB\n").unwrap();
        assert_eq!(
            memory,
            Memory {
                resident: 10_240,
                peak: 20_480
            }
        );
    }

    #[test]
    fn this_process_is_the_root_of_its_own_tree() {
        let pid = std::process::id();
        assert_eq!(tree(pid)[0], pid);
        assert!(Memory::of(pid).unwrap().resident > 0);
        assert!(proportional_memory(pid).unwrap() > 0);
    }
}
