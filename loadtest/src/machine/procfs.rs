//! CPU time, memory and children of processes from `/proc`.

use std::fs;
use std::iter::Sum;
use std::time::Duration;

use ::procfs::process::{FDTarget, Process, Stat, all_processes};
use ::procfs::{CurrentSI, KernelStats, ProcError, ticks_per_second};
use rustix::process::{Pid, Signal, kill_process};

use crate::failure::Failure;

/// `pid` and its running descendants.
pub(crate) fn tree(pid: u32) -> Vec<u32> {
    let running = all_processes().into_iter().flatten();
    let parents: Vec<(u32, u32)> = running
        .filter_map(|process| process.ok()?.stat().ok())
        .filter_map(|stat| Some((stat.pid.try_into().ok()?, stat.ppid.try_into().ok()?)))
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

/// Sends a signal to processes. Those that have ended are left out.
pub(crate) fn signal_all(pids: &[u32], signal: Signal) {
    let pids = pids.iter().filter_map(|pid| i32::try_from(*pid).ok());
    for pid in pids.filter_map(Pid::from_raw) {
        // Fails if it has ended already.
        let _ = kill_process(pid, signal);
    }
}

fn process(pid: u32) -> Result<Process, ProcError> {
    Process::new(i32::try_from(pid).unwrap_or_default())
}

fn stat(pid: u32) -> Option<Stat> {
    process(pid).and_then(|process| process.stat()).ok()
}

/// Whether a process runs. One that has ended and was not waited for does not.
pub(crate) fn runs(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| stat.state != 'Z')
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
        stat(pid).as_ref().map(Self::from).unwrap_or_default()
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

impl From<&Stat> for Cpu {
    fn from(stat: &Stat) -> Self {
        Self {
            user: in_ticks(stat.utime),
            kernel: in_ticks(stat.stime),
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

/// User and system time of all threads of a process, including ended ones; zero if the process has
/// ended.
pub(crate) fn cpu(pid: u32) -> Duration {
    Cpu::of(pid).total()
}

/// CPU time of the running threads of a process whose names begin with `prefix`. The scheduler
/// counts it in nanoseconds.
pub(crate) fn cpu_of_threads(pid: u32, prefix: &str) -> Duration {
    let tasks = process(pid).and_then(|process| process.tasks());
    let named = tasks.into_iter().flatten().flatten();
    let named = named.filter(|task| task.stat().is_ok_and(|it| it.comm.starts_with(prefix)));
    named
        .filter_map(|task| task.schedstat().ok())
        .map(|stat| Duration::from_nanos(stat.sum_exec_runtime))
        .sum()
}

/// CPU time of all programs of the machine but this one and its children, with the time that the
/// hypervisor gave to other machines.
pub(crate) fn cpu_of_others() -> Result<Duration, Failure> {
    let all = KernelStats::current()?.total;
    // Neither idle nor waiting for a disk. Times of guests are parts of the first two.
    let busy = all.user + all.nice + all.system;
    let interrupts = all.irq.unwrap_or(0) + all.softirq.unwrap_or(0);
    let all = in_ticks(busy + interrupts + all.steal.unwrap_or(0));
    let own = tree(std::process::id()).into_iter().filter_map(stat);
    let own = own.map(|stat| {
        let ended_children = stat.cutime + stat.cstime;
        Cpu::from(&stat).total() + in_ticks(ended_children.try_into().unwrap_or_default())
    });
    Ok(all.saturating_sub(own.sum()))
}

fn in_ticks(ticks: u64) -> Duration {
    Duration::from_millis(ticks * 1000 / ticks_per_second())
}

/// The threads of a process and their names.
pub(crate) fn threads(pid: u32) -> Result<Vec<(Pid, String)>, Failure> {
    let named = process(pid)?.tasks()?.filter_map(|thread| {
        let thread = thread.ok()?;
        Some((Pid::from_raw(thread.tid)?, thread.stat().ok()?.comm))
    });
    Ok(named.collect())
}

/// Times that the running threads of a process have waited: its voluntary context switches.
pub(crate) fn sleeps(pid: u32) -> Result<u64, Failure> {
    let mut sleeps = 0;
    for task in process(pid)?.tasks()? {
        sleeps += task?.status()?.voluntary_ctxt_switches.unwrap_or(0);
    }
    Ok(sleeps)
}

/// Events of the kernel that a process counts, as descriptors (`perf_event_open`).
pub(crate) fn perf_events(pid: u32) -> usize {
    let descriptors = process(pid).and_then(|process| process.fd());
    let is_event =
        |target: &FDTarget| matches!(target, FDTarget::AnonInode(name) if name == "[perf_event]");
    descriptors
        .into_iter()
        .flatten()
        .filter(|found| found.as_ref().is_ok_and(|found| is_event(&found.target)))
        .count()
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
        let status = process(pid)?.status()?;
        let memory = status.vmrss.zip(status.vmhwm);
        let (resident, peak) =
            memory.ok_or_else(|| Failure::new(format!("process {pid} has no memory")))?;
        Ok(Self {
            resident: resident * 1024,
            peak: peak * 1024,
        })
    }
}

/// Proportional set size of a process in bytes: pages shared with other processes count in
/// proportion.
pub(crate) fn proportional_memory(pid: u32) -> Result<u64, Failure> {
    let rollup = process(pid)?.smaps_rollup()?.memory_map_rollup;
    let map = rollup.0.first().map(|map| &map.extension.map);
    let size = map.and_then(|map| map.get("Pss")).copied();
    size.ok_or_else(|| Failure::new(format!("process {pid} has no proportional memory")))
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn this_process_is_the_root_of_its_own_tree() {
        let pid = std::process::id();
        assert_eq!(tree(pid)[0], pid);
        assert!(Memory::of(pid).unwrap().resident > 0);
        assert!(proportional_memory(pid).unwrap() > 0);
        assert!(cpu_of_others().is_ok() && !threads(pid).unwrap().is_empty());
    }
}
